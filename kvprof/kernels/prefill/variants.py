"""The forms of the prefill kernel that are compiled for every architecture."""

from kvprof.kernels.prefill.kernel import prefill_blocks
from kvprof.kernels.prefill.launch import kind_columns
from kvprof.kernels.prefill.rows import cut_rows, stages_of
from kvprof.kernels.prefill.tuning import HOPPER_WIDEST, TiledWidths, Tuning
from kvprof.kernels.variants import Variant

__all__ = ["VARIANTS"]

#: Bytes that a program may have on each GPU that is compiled for, A100 being the least.
_SHARED = 163 * 1024


def _prefill(
    name: str,
    dtype: str,
    key_width: int,
    value_width: int,
    *,
    options: bool = False,
    page: int = 0,
    logs: bool = False,
    tuning: Tuning | None = None,
) -> Variant:
    tile = (tuning or Tuning()).tile(key_width, value_width, 2, _SHARED)
    types = {
        "queries": f"*{dtype}",
        "cache": f"*{dtype}",
        "output": f"*{dtype}",
        "logs": "*fp32",
        "lengths": "*i32",
        "starts": "*i32",
        "sinks": "*fp32",
        "blocks": "*i32",
        "heads": "*i64",
        "order": "*i32",
        "table": "*i32",
        "scale": "fp32",
        "softcap": "fp32",
    }
    constants = {
        "KIND": kind_columns(TiledWidths(key_width, value_width, tile)),
        "STAGES": stages_of(tile, page),
        "GROUP": 4,
        "PAGE": page,
        "UNLIKE": page > 0,
        "SOFTCAP": options,
        "SINKS": options,
        "WINDOW": options,
        "LOGS": 32 if logs else 0,
    }
    return Variant(
        f"prefill {name} {dtype}", prefill_blocks, types, constants, tile.warps, tile.stages
    )


def _cut() -> Variant:
    types = {"starts": "*i32", "lengths": "*i32", "blocks": "*i32"}
    constants = {"GROUP": 4, "ROWS": 128, "LANES": 256}
    return Variant("prefill cut", cut_rows, types, constants, 1)


#: Uncompressed, the uniform half, the most chunks, everything that models add, a wide latent, wide
#: heads and pages.
VARIANTS = (
    _prefill("full", "bf16", 128, 128),
    _prefill("uniform", "fp16", 64, 64),
    _prefill("ragged", "bf16", 112, 48),
    _prefill("options", "bf16", 48, 80, options=True),
    _prefill("latent", "bf16", 512, 512),
    _prefill("wide as on Hopper", "bf16", 128, 256, page=64, tuning=Tuning(widest=HOPPER_WIDEST)),
    _prefill("pages of 64, sums", "bf16", 80, 64, page=64, logs=True),
    _prefill("small pages", "bf16", 128, 128, page=16),
    _cut(),
)
