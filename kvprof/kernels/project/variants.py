"""The forms of the projection kernel that are compiled for every architecture."""

from typing import Any

import torch

from kvprof.kernels.project.args import KEYS, QUERY, VALUES
from kvprof.kernels.project.kernel import project_rows
from kvprof.kernels.project.launch import Tuning, block_of, tuning_for
from kvprof.kernels.variants import Variant

__all__ = ["VARIANTS"]

_STATES = (("query", "query_bases"), ("keys", "key_bases"), ("values", "value_bases"))
_DESTINATION = ("start", "valid", "slots")


def _project(
    name: str,
    dtype: str,
    tuning: Tuning,
    cases: tuple[tuple[int, int], ...],
    *,
    depth: int,
    value_depth: int = 0,
    dim: int = 0,
    offset: int = 0,
    interleaved: bool = False,
    full: bool = False,
    absent: tuple[str, ...] = (),
) -> Variant:
    """Describe one form; `absent` names the optional tensors that it runs without."""
    operands = {operand for operand, _ in cases}
    missing = {
        *absent,
        *(() if dim else ("cos", "sin")),
        *(() if QUERY in operands else ("output",)),
    }
    for operand, (states, bases) in enumerate(_STATES):
        missing |= set() if operand in operands else {states, bases}
    missing |= set() if value_depth else {"value_bases"}
    types = {
        **{tensor: f"*{dtype}" for pair in _STATES for tensor in pair},
        **dict.fromkeys(("cos", "sin", "output", "buffer"), f"*{dtype}"),
        **dict.fromkeys(_DESTINATION, "*i32"),
        "slots": "*i64",
        "units": "*i64",
    }
    constants: dict[str, Any] = {
        **dict.fromkeys(sorted(missing)),
        "CASES": tuple(number for case in cases for number in case),
        "COUNT": len(cases),
        "ALIGNED": True,
        "DEPTH": depth,
        "VALUE_DEPTH": value_depth,
        "DIM": dim,
        "OFFSET": offset,
        "INTERLEAVED": interleaved,
        "FULL": full,
        "ROWS": tuning.rows,
        "PAIRS": block_of(dim // 2, tuning),
        "BLOCK": block_of(depth - dim, tuning),
        "VALUE_BLOCK": block_of(value_depth, tuning),
        "STAGES": tuning.stages,
        "DEPENDENT": True,
    }
    return Variant(f"project {name} {dtype}", project_rows, types, constants, tuning.warps)


def _cases(*widths: int, operands: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((operand, width) for operand in operands for width in widths)


_ALL = (QUERY, KEYS, VALUES)
_STEP = tuning_for(8, torch.bfloat16)
_PROMPT = tuning_for(4096, torch.bfloat16)
_FP32 = tuning_for(4096, torch.float32)

#: A decoding step with V folded; one with V through its basis, partial RoPE and pages; a prompt
#: with neighbours as pairs; a prompt's queries in fp32.
VARIANTS = (
    _project(
        "step",
        "bf16",
        _STEP,
        _cases(16, 32, 64, operands=_ALL),
        depth=128,
        dim=128,
        full=True,
        absent=("valid", "slots"),
    ),
    _project(
        "step, paged",
        "fp16",
        _STEP,
        _cases(16, 32, 64, operands=_ALL),
        depth=80,
        value_depth=80,
        dim=32,
        full=True,
        absent=("start", "valid"),
    ),
    _project(
        "prompt",
        "bf16",
        _PROMPT,
        _cases(16, 32, 64, 128, operands=_ALL),
        depth=128,
        dim=128,
        interleaved=True,
        absent=("slots",),
    ),
    _project(
        "prompt",
        "fp32",
        _FP32,
        _cases(16, 32, 64, operands=(QUERY,)),
        depth=256,
        absent=("buffer", *_DESTINATION),
    ),
)
