"""The forms of the kernels over segments that are compiled for every architecture."""

from typing import Any

import torch

from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.quantized.codes import ROW_FORMATS, Bits
from kvprof.kernels.quantized.cuts import cut_units, share_units
from kvprof.kernels.quantized.kernel import move_tokens, restore_tokens, segment_pieces
from kvprof.kernels.quantized.launch import constants, tuning_for
from kvprof.kernels.quantized.layout import Segment, SegmentsLayout, of_configs, segment_of
from kvprof.kernels.quantized.layout_registry import OPERAND_LAYOUTS
from kvprof.kernels.quantized.moving import RESTORE_WARPS, restore_constants
from kvprof.kernels.quantized.moving import constants as move_constants
from kvprof.kernels.quantized.operand_layout import OperandLayout, SideKind
from kvprof.kernels.split_kv import CUT_ALONE, partition_options
from kvprof.kernels.variants import Variant

__all__ = ["VARIANTS", "segments_form"]

_Spec = tuple[tuple[tuple[SideKind, SideKind], ...], Bits, Bits]


def segments_form(
    name: str,
    dtype: torch.dtype,
    group: int,
    specs: tuple[_Spec, ...],
    columns: int | None = 32,
    *,
    page: int = 0,
) -> Variant:
    """Return the kernel over segments, each with its heads, each a kind, and its formats."""
    segments = tuple(
        segment_of(pairs, group, 1, page or 64, key_bits, value_bits, columns, paged=page > 0)
        for pairs, key_bits, value_bits in specs
    )
    layout = SegmentsLayout(segments, dtype)
    family = of_configs(layout, layout.configs)
    tuning = tuning_for(family)
    run = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    types = {
        "queries": f"*{run}",
        "octets": "*u8",
        "full": f"*{run}",
        "halfs": "*fp16",
        "eye": "*u8",
        "partial": "*fp32",
        "logs": "*fp32",
        "counters": "*i32",
        "items": "*i32",
        "parts": "*i32",
        "units": "*i64",
        "table": "*i32",
        "scale": "fp32",
        "cap": "fp32",
    }
    fixed = constants(layout.heads, family, tuning, softcap=False, fast=True) | {"DEPENDENT": True}
    return Variant(
        f"segments {name} {run}", segment_pieces, types, fixed, tuning.warps, tuning.stages
    )


def _move(name: str, keys: Bits, values: Bits) -> Variant:
    segment = Segment(RaggedLayout((64,), (64,), 4, 1, 64), keys, values)
    types = {
        "source": "*bf16",
        "octets": "*u8",
        "full": "*bf16",
        "halfs": "*fp16",
        "stretches": "*i64",
        "columns": "*i64",
        "origins": "*i32",
        "targets": "*i32",
        "low": "*i1",
    }
    fixed: dict[str, Any] = {**move_constants(SegmentsLayout((segment,)), 0), "LOW": True}
    fixed |= {"POOLED": True, "DEPENDENT": True}
    return Variant(f"segments move {name} bf16", move_tokens, types, fixed, 1)


def _restore(name: str, segment: Segment) -> Variant:
    types = {
        "planes": "*bf16",
        "octets": "*u8",
        "full": "*bf16",
        "halfs": "*fp16",
        "stretches": "*i64",
        "columns": "*i64",
        "slots": "*i64",
        "targets": "*i64",
    }
    fixed = restore_constants(SegmentsLayout((segment,)), 0)
    return Variant(f"segments restore {name} bf16", restore_tokens, types, fixed, RESTORE_WARPS)


_RAGGED = ((112, 48), (32, 80))
_FULL = ((128, 128),)
_WIDE = ((128, 512),)
#: Formats of rows that are more than a number of bits.
_NAMED = tuple(name for name in ROW_FORMATS if isinstance(name, str))


def _own(operand_layout: type[OperandLayout]) -> list[Variant]:
    """Return what an operand layout has compiled: heads read, behind exact tokens, and in pages."""
    if not operand_layout.compiled:
        return []
    bits = next(iter(operand_layout.forms))
    own, name = (operand_layout.compiled, bits, bits), operand_layout.words
    stored = segment_of(operand_layout.compiled, 4, 1, 128, bits, bits, None, paged=True)
    return [
        _restore(name, stored),
        segments_form(
            name, torch.bfloat16, 4, ((_FULL * len(operand_layout.compiled), None, None), own), None
        ),
        segments_form(f"{name}, pages of 128", torch.float16, 4, (own,), None, page=128),
    ]


_UNITS = {"lengths": "*i32", "units": "*i64", "firsts": "*i32", "counters": "*i32"}
_CUT = {"HEADS": 8, "SEGMENTS": 3, "DEPENDENT": True}


def _cut(name: str, tasks: int) -> Variant:
    types = {**_UNITS, "items": "*i32", "parts": "*i32"}
    cut = partition_options(tasks)
    warps = cut.pop("num_warps")
    return Variant(name, cut_units, types, {**_CUT, **cut}, warps)


#: Quantised ragged heads, in pages too, each named format of rows, what other layouts have,
#: TALE's three segments, Palu's grouped latents; the cut; a token that is stored, with every way to
#: round it, and read.
VARIANTS = (
    segments_form("4-bit ragged", torch.bfloat16, 4, ((_RAGGED, 4, 4),)),
    segments_form("4-bit ragged, pages of 64", torch.bfloat16, 4, ((_RAGGED, 4, 4),), page=64),
    *(segments_form(name, torch.bfloat16, 4, ((_FULL, name, name),)) for name in _NAMED),
    *(form for operand_layout in OPERAND_LAYOUTS for form in _own(operand_layout)),
    segments_form(
        "tale", torch.bfloat16, 4, ((_FULL, None, None), (((128, 64),), 2, 2), (_FULL, 4, 4))
    ),
    segments_form("grouped 4-bit", torch.float16, 16, ((_WIDE, 4, 4),), None),
    Variant("segments share", share_units, _UNITS, {**_CUT, "BLOCK": 1024}, 8),
    _cut("segments cut", CUT_ALONE + 1),
    _cut("segments share and cut", CUT_ALONE),
    *(_move(f"4-bit, {name}", 4, name) for name in _NAMED),
    *(
        _restore(f"4-bit, {name}", Segment(RaggedLayout((64,), (64,), 4, 1, 64), 4, name))
        for name in _NAMED
    ),
)
