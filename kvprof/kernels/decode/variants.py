"""The forms of the decode kernels that are compiled for every architecture."""

from kvprof.kernels.decode.cuts import Cut, tile_height
from kvprof.kernels.decode.kernel import decode_pieces, merge_pieces
from kvprof.kernels.decode.step import Tuning, kinds_of
from kvprof.kernels.variants import Variant

__all__ = ["VARIANTS"]


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

#: Full width, uniform halves, a ragged layer, and the odd widths at both ends.
VARIANTS = (
    _decode("full", "bf16", ((128, 128),)),
    _decode("uniform", "fp16", ((64, 64),)),
    _decode("ragged", "bf16", _RAGGED),
    _decode("ends", "bf16", ((16, 256), (240, 16))),
    _merge(128),
)
