"""The forms of the decode kernels that are compiled for every architecture."""

from kvprof.kernels.decode.cuts import Head, built_for, rows_of, tuning_for
from kvprof.kernels.decode.kernel import decode_pieces
from kvprof.kernels.decode.launch import cut_equal, kind_table, share_equal
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.split_kv import CUT_ALONE, combine_splits, partition_options
from kvprof.kernels.variants import Variant

__all__ = ["VARIANTS", "decode_form"]


def decode_form(
    name: str,
    dtype: str,
    widths: tuple[tuple[int, int], ...],
    *,
    group: int = 4,
    page: int = 0,
    capped: bool = False,
) -> Variant:
    """Return the kernel over planes for heads of these widths, each a kind."""
    keys, values = zip(*widths, strict=True)
    layout = RaggedLayout(keys, values, group, 1, 1)
    size = 4 if dtype == "fp32" else 2
    tuning = built_for(tuning_for(layout), size, page)
    types = {
        "queries": f"*{dtype}",
        "cache": f"*{dtype}",
        "partial": "*fp32",
        "logs": "*fp32",
        "items": "*i32",
        "heads": "*i64",
        "table": "*i32" if page else "*i64",  # without pages the heads stand for it
        "scale": "fp32",
        "cap": "fp32",
    }
    constants = {
        "KINDS": kind_table(tuple(widths), tuning.tile, page),
        "COUNT": len(widths),
        "STAGES": tuning.stages,
        "GROUP": group,
        "ROWS": rows_of(layout),
        "PAGE": page,
        "CAPPED": capped,
        "DEPENDENT": True,
    }
    return Variant(f"decode {name} {dtype}", decode_pieces, types, constants, tuning.warps)


def _combine(width: int, most: int, *, beside: bool) -> Variant:
    types = {
        "partial": "*fp32",
        "logs": "*fp32",
        "parts": "*i32",
        "output": "*bf16",
        "heads": "*i64",
        "sinks": "*fp32",
        "counters": "*i32",
        "beside": "*bf16",
        "beside_logs": "*fp32",
    }
    constants = {
        "GROUP": 4,
        "WIDEST": 128,
        "WIDTH": width,
        "MOST": most,
        "HEADS": 8,
        "COLUMNS": len(Head._fields),
        "SINKS": True,
        "COUNTERS": 133,
        "BESIDE": beside,
        "DEPENDENT": True,
    }
    name = "decode combine, beside others" if beside else "decode combine"
    return Variant(name, combine_splits, types, constants, 4)


_TASKS = {"lengths": "*i32", "starts": "*i32", "heads": "*i64", "firsts": "*i32"}
_CUT = {"HEADS": 8, "STARTS": True, "DEPENDENT": True}


def _cut(name: str, tasks: int) -> Variant:
    types = {**_TASKS, "items": "*i32", "parts": "*i32"}
    cut = partition_options(tasks)
    warps = cut.pop("num_warps")
    return Variant(name, cut_equal, types, {**_CUT, **cut}, warps)


_RAGGED = ((112, 32), (96, 48), (80, 64), (64, 64), (48, 112), (48, 80), (32, 64), (32, 48))

#: Uncompressed, a ragged layer, the odd widths at both ends, pages, what options and groups add.
VARIANTS = (
    decode_form("full", "bf16", ((128, 128),)),
    decode_form("ragged", "bf16", _RAGGED),
    decode_form("ends", "bf16", ((16, 256), (240, 16))),
    decode_form("ragged, pages of 64", "bf16", _RAGGED, page=64),
    decode_form("small pages, capped", "fp16", _RAGGED[:3], page=16, capped=True),
    decode_form("latents", "bf16", ((512, 480), (128, 512)), group=16),
    decode_form("latents, large group", "bf16", ((256, 256), (240, 128)), group=32),
    decode_form("ragged", "fp32", _RAGGED[:3]),
    _combine(32, 256, beside=False),
    _combine(128, 16, beside=True),
    Variant("decode share", share_equal, _TASKS, {**_CUT, "BLOCK": 1024}, 8),
    _cut("decode cut", CUT_ALONE + 1),
    _cut("decode share and cut", CUT_ALONE),
)
