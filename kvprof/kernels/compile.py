"""Compile every kernel for every architecture without a GPU: ``python -m kvprof.kernels.compile``.

Tells registers, shared memory and spilled bytes of each; one that does not compile ends it.
"""

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from kvprof.errors import FailedError
from kvprof.kernels.cuts import Cut, tile_height
from kvprof.kernels.decode import Tuning, kinds_of
from kvprof.kernels.decode_kernel import decode_pieces, merge_pieces

__all__ = ["ARCHITECTURES", "VARIANTS", "Variant", "compile_variant"]

#: Compute capability times ten: A100, H100 and H200, B200.
ARCHITECTURES = (80, 90, 100)


@dataclass(frozen=True)
class Variant:
    """One kernel as it is compiled.

    Attributes
    ----------
    name : str
    kernel : JITFunction
    signature : dict
        Types of its arguments.
    constants : dict
        Compile-time arguments.
    warps : int
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int


def _decode(name: str, dtype: str, widths: tuple[tuple[int, int], ...]) -> Variant:
    tuning = Tuning()
    pairs = tuple((*pair, tile_height(*pair, tuning.tile)) for pair in widths)
    signature = {
        "queries": f"*{dtype}", "cache": f"*{dtype}", "partial": "*fp32", "logs": "*fp32",
        "items": "*i32", "heads": "*i64", "capacity": "i32", "batch": "i32", "scale": "fp32",
    }  # fmt: skip
    constants = {
        "KINDS": kinds_of(Cut((), (), pairs)), "COUNT": len(pairs), "STAGES": tuning.stages,
        "GROUP": 4, "WIDEST": max(value for _, value in widths), "QUERY_ROW": 2048,
    }  # fmt: skip
    return Variant(f"decode {name} {dtype}", decode_pieces, signature, constants, tuning.warps)


def _merge(columns: int) -> Variant:
    signature = {"partial": "*fp32", "logs": "*fp32", "parts": "*i32", "output": "*bf16",
                 "places": "*i32"}  # fmt: skip
    constants = {"GROUP": 4, "WIDEST": columns, "COLUMNS": columns, "MOST": 128, "HEADS": 8,
                 "OUTPUT_ROW": 2048}  # fmt: skip
    return Variant(f"merge {columns}", merge_pieces, signature, constants, 4)


_RAGGED = ((112, 32), (96, 48), (80, 64), (64, 64), (48, 112), (48, 80), (32, 64), (32, 48))

#: What is compiled: full width, uniform halves, a ragged layer, and the odd widths at both ends.
VARIANTS = (
    _decode("full", "bf16", ((128, 128),)),
    _decode("uniform", "fp16", ((64, 64),)),
    _decode("ragged", "bf16", _RAGGED),
    _decode("ends", "bf16", ((16, 256), (240, 16))),
    _merge(128),
)


def compile_variant(variant: Variant, architecture: int) -> dict[str, int]:
    """Compile for one architecture.

    Parameters
    ----------
    variant : Variant
    architecture : int
        One of `ARCHITECTURES`.

    Returns
    -------
    dict
        ``shared`` memory in bytes, ``registers`` of a thread, ``spilled`` bytes of a thread.
    """
    source = ASTSource(
        variant.kernel,
        {**variant.signature, **dict.fromkeys(variant.constants, "constexpr")},
        variant.constants,
    )
    binary = compile_source(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": variant.warps},
    )
    return {"shared": binary.metadata.shared, **_assembled(binary.asm["ptx"], architecture)}


def _assembled(ptx: str, architecture: int) -> dict[str, int]:
    """Ask the assembler that Triton brings what a thread needs."""
    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    if target is None:
        raise FailedError("the compiler's PTX names no target")
    assembler = get_ptxas(architecture)
    with tempfile.TemporaryDirectory(prefix="kvprof-") as folder:
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
        raise FailedError(f"the assembler's report cannot be read: {said.strip()!r}")
    return {"registers": int(registers[1]), "spilled": sum(map(int, spilled))}


def main() -> None:
    """Compile all of it."""
    for variant in VARIANTS:
        for architecture in ARCHITECTURES:
            found = compile_variant(variant, architecture)
            sys.stdout.write(
                f"{variant.name}, sm_{architecture}: {found['registers']} registers, "
                f"{found['shared']:,} B shared, {found['spilled']} B spilled\n"
            )


if __name__ == "__main__":
    main()
