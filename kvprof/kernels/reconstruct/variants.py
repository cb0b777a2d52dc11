"""The forms of the reconstruction kernels that are compiled for every architecture."""

from dataclasses import replace

from kvprof.kernels.reconstruct.kernel import rebuild_pages, reconstruct_pieces
from kvprof.kernels.reconstruct.pages import WARPS, page_constants
from kvprof.kernels.reconstruct.rebuild_config import RebuildConfig, Target, Tuning
from kvprof.kernels.reconstruct.step import constants_of
from kvprof.kernels.variants import Variant

__all__ = ["VARIANTS"]


def _pieces(name: str, config: RebuildConfig, dtype: str, capped: bool = False) -> Variant:
    types = {
        "queries": f"*{dtype}",
        "cache": f"*{dtype}",
        "up": f"*{dtype}",
        "cos": f"*{dtype}",
        "sin": f"*{dtype}",
        "partial": "*fp32",
        "logs": "*fp32",
        "items": "*i32",
        "groups": "*i64",
        "table": "*i32",
        "scale": "fp32",
        "cap": "fp32",
    }
    constants = {
        **constants_of(config, capped=capped),
        "angle_batch": 0,
        "angle_rows": 64,
        "angle_columns": 1,
    }
    return Variant(
        f"reconstruct {name} {dtype}",
        reconstruct_pieces,
        types,
        constants,
        config.tuning.warps,
        config.tuning.stages,
    )


def _pages(name: str, config: RebuildConfig, dtype: str) -> Variant:
    types = {
        "cache": f"*{dtype}",
        "up": f"*{dtype}",
        "value_up": f"*{dtype}",
        "cos": "*fp32",
        "sin": "*fp32",
        "planes": f"*{dtype}",
        "seen": "*i32",
        "groups": "*i64",
        "heads": "*i64",
        "columns": "*i32",
    }
    constants = {**page_constants(config, values=True), "angle_rows": 64, "angle_columns": 1}
    return Variant(f"reconstruct {name} {dtype}", rebuild_pages, types, constants, WARPS)


def _form(
    key_widths: tuple[int, ...],
    value_widths: tuple[int, ...],
    heads: int,
    head_dim: int,
    rotary_dim: int,
    *,
    page: int = 0,
    target: Target | None = None,
) -> RebuildConfig:
    sizes = (key_widths, value_widths, 8, page or 102400)
    config = RebuildConfig(*sizes, heads, 4, head_dim, rotary_dim, False, 2, Tuning())
    if page:
        config = replace(config, sequences=8, longest=102400)
    return replace(config, tuning=config.tuned(target or Target()))


_GROUPED = ((256, 256), (256, 256), 4, 128, 128)

#: Llama-3.1-8B's heads at rate 0.5: four to a latent as it is tuned for every architecture, one to
#: a latent, ragged, both in pages too; a head that is no power of two, turned in part; and pages
#: that are rebuilt.
VARIANTS = (
    *(
        _pieces(f"group 4 as for sm_{target.capability}", _form(*_GROUPED, target=target), "bf16")
        for target in (Target(80, 166912), Target(90), Target(100))
    ),
    _pieces("group 1", _form((64, 64), (64, 64), 1, 128, 128), "bf16"),
    _pieces("group 4, pages of 64", _form(*_GROUPED, page=64), "bf16"),
    _pieces("group 1, pages of 64", _form((64, 64), (64, 64), 1, 128, 128, page=64), "bf16"),
    _pieces("partial", _form((288, 160), (96, 320), 2, 112, 56), "fp16", capped=True),
    _pages("whole pages of 64", _form((512, 96), (256, 96), 4, 128, 128, page=64), "bf16"),
)
