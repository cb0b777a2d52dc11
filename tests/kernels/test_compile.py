import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from kvprof.kernels.quantized.layout import SegmentsLayout, segment_of
from kvprof.kernels.quantized.operand_layout import Runs
from kvprof.kernels.quantized.variants import segments_form
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


def test_each_head_config_is_compiled_by_itself() -> None:
    """Together, they would take the compiler time that grows with the square of their number."""
    own = segments_form("own", torch.bfloat16, 4, ((((16, 16), (32, 16)), 4, 4),))
    types = {**own.signature, **dict.fromkeys(own.constants, "constexpr")}
    binary = compile_source(
        ASTSource(own.kernel, types, dict(own.constants)),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": own.warps, "num_stages": own.stages},
    )
    assert binary.asm["ttgir"].count("private") == 2


#: Twice the middles of what meets the first two slots' codes, the third's and the last's, by bits;
#: of the highest of 3 (1) in a plane's halves, of 16 columns (3) behind those of the lower bits.
MIDDLES = {
    8: [(-1, -1, -1)],
    4: [(15, -1, -1)],
    3: [(3, 3, -1), (1, 1, 1), (2, 2, -2)],
    2: [(3, 3, -1)],
    1: [(1, 1, 1), (2, 2, -2)],
}


def sums_of_queries(planes: list[tuple[int, int]]) -> int:
    """Return the products before the loop: of 32 columns each, those once that begin alike."""
    found = set()
    for slot in range(3):
        done: tuple[int, ...] = ()
        for depth, bits in planes:
            for middles in MIDDLES[bits]:
                columns = depth // 2 if bits == 1 else depth
                for _ in range(max(1, columns // 32)):
                    done += (middles[slot],)
                    found.add(done)
    return len(found)


@pytest.mark.parametrize(
    "kind",
    [
        (((16, 8), (16, 4), (48, 3), (32, 2)), ((32, 8), (16, 3), (64, 2))),
        (((112, 3),), ((16, 8), (80, 4))),
    ],
)
def test_what_a_token_costs_is_in_the_loop(kind: tuple[Runs, Runs]) -> None:
    own = segments_form("own", torch.bfloat16, 4, (((kind,), "uniform-rms", "uniform-rms"),), None)
    types = {**own.signature, **dict.fromkeys(own.constants, "constexpr")}
    binary = compile_source(
        ASTSource(own.kernel, types, dict(own.constants)),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": own.warps, "num_stages": own.stages},
    )
    layout = SegmentsLayout((segment_of((kind,), 4, 1, 64, "uniform-rms", "uniform-rms", None),))
    keys, values = layout.sides(0, 0)
    ptx = binary.asm["ptx"]
    before = sums_of_queries([(plane.depth, plane.bits) for plane in keys.table(0)])
    assert ptx.count("mma.sync") == keys.products + values.products + before
    # Asked for before the loop and in it, and scales of both sides too.
    assert ptx.count("cp.async.commit_group") == 2 * (keys.loads + values.loads + 2)
