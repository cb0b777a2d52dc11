import subprocess
import sys

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from kvprof.kernels.reconstruct import variants


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("--architecture", 2)])
def test_what_is_asked_of_it_is_answered_before_anything_is_compiled(word: str, code: int) -> None:
    command = [sys.executable, "-m", "kvprof.kernels.compile", word]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == code
    said = " ".join((done.stdout + done.stderr).split())
    assert "usage: python -m kvprof.kernels.compile" in said
    assert "B spilled" not in said


def test_products_outside_of_loops_take_no_operands_from_constant_places() -> None:
    """Of tiles of 64 rows they would, on Hopper, and CUDA 12.8's assembler gets that wrong."""
    form = variants._form((16, 64, 208), (64, 48, 208), 2, 64, 32, page=64)
    own = variants._pages("narrow", form, "bf16")
    types = {**own.signature, **dict.fromkeys(own.constants, "constexpr")}
    binary = compile_source(
        ASTSource(own.kernel, types, dict(own.constants)),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": own.warps},
    )
    assert "mma.sync" in binary.asm["ptx"]
    assert "wgmma" not in binary.asm["ptx"]
