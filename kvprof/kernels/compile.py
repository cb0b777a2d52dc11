"""Compile all kernels for all architectures without a GPU: ``python -m kvprof.kernels.compile``."""

import re
import subprocess
import sys
from argparse import ArgumentParser
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from kvprof.environment import usable_threads
from kvprof.errors import FailedError
from kvprof.kernels.variants import DEPENDENT_FROM, Variant

__all__ = ["ARCHITECTURES", "MOST", "OPERATIONS", "compile_variant", "variants"]

#: Compute capability times ten: A100, H100 and H200, B200.
ARCHITECTURES = (80, 90, 100)

#: The operations whose variants are compiled: each package lists its own in ``variants.py``.
OPERATIONS = tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/variants.py")))

#: No more than this many variants: a kernel that needs more has too many compile-time parameters.
MOST = 50


def variants() -> list[Variant]:
    """Return what is compiled, operation after operation."""
    found = [
        variant
        for operation in OPERATIONS
        for variant in import_module(f"kvprof.kernels.{operation}.variants").VARIANTS
    ]
    if len(found) > MOST:
        raise FailedError(f"{len(found)} kernel variants are listed (limit {MOST})")
    return found


def compile_variant(variant: Variant, architecture: int) -> dict[str, int]:
    """Compile for one architecture."""
    constants = dict(variant.constants)
    if architecture < DEPENDENT_FROM and "DEPENDENT" in constants:
        constants["DEPENDENT"] = False
    source = ASTSource(
        variant.kernel,
        {**variant.signature, **dict.fromkeys(constants, "constexpr")},
        constants,
    )
    binary = compile_source(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": variant.warps, "num_stages": variant.stages},
    )
    return {"shared": binary.metadata.shared, **_assembled(binary.asm["ptx"], architecture)}


def _assembled(ptx: str, architecture: int) -> dict[str, int]:
    """Ask the assembler that Triton brings what a thread needs."""
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    if target is None:
        raise FailedError("the compiler's PTX names no target")
    assembler = get_ptxas(architecture)
    with TemporaryDirectory(prefix="kvprof-compile-") as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        said = subprocess.run(
            [assembler.path, "-v", f"--gpu-name={target[1]}", str(source), "-o", f"{source}.cubin"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    if registers is None or not spilled:
        raise FailedError(f"cannot parse the assembler's report: {said.strip()!r}")
    return {"registers": int(registers[1]), "spilled": sum(map(int, spilled))}


def _compiled(number: int, architecture: int) -> dict[str, int]:
    """Compile a variant by its number: a kernel itself does not travel between processes."""
    return compile_variant(variants()[number], architecture)


def main() -> None:
    """Compile all of it, on every core; decode kernels may spill nothing."""
    ArgumentParser("python -m kvprof.kernels.compile", description=__doc__).parse_args()
    jobs = [(number, each) for number in range(len(variants())) for each in ARCHITECTURES]
    spilling = []
    context = get_context("spawn")
    with ProcessPoolExecutor(usable_threads(), mp_context=context) as pool:
        for (number, architecture), found in zip(
            jobs, pool.map(_compiled, *zip(*jobs, strict=True)), strict=True
        ):
            name = f"{variants()[number].name}, sm_{architecture}"
            sys.stdout.write(
                f"{name}: {found['registers']} registers, {found['shared']:,} B shared, "
                f"{found['spilled']} B spilled\n"
            )
            sys.stdout.flush()
            if found["spilled"] and name.startswith("decode "):
                spilling.append(name)
    if spilling:
        sys.stderr.write(f"kernels.compile: register spills in {'; '.join(spilling)}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
