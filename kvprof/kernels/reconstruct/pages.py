"""Rebuild whole pages from latents before RoPE in one launch, for chunks of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.checks import check_cache
from kvprof.kernels.dispatch import check_interpreter, launching
from kvprof.kernels.operators import direct
from kvprof.kernels.planes import RaggedLayout, chunks, row_stride
from kvprof.kernels.reconstruct.kernel import rebuild_pages
from kvprof.kernels.reconstruct.rebuild_config import (
    RebuildConfig,
    RebuiltColumn,
    RebuiltHead,
    arranged_values,
)
from kvprof.kernels.reconstruct.step import ReconstructStep, constants_of

__all__ = ["WARPS", "PageRebuild", "page_constants", "page_rebuild", "rebuild_operator"]

WARPS = 8
#: Most tokens of a tile, and where a latent has more columns than so many: there registers spill.
#: Not 64: products would then take their operands from constant places in shared memory, which the
#: assembler of CUDA 12.8 gets wrong (`kvprof.kernels.prefill.kernel`).
_TILE, _WIDE, _WIDE_TILE = 32, 256, 16

#: What the kernel takes of `constants_of`.
_SHARED = (
    *("KINDS", "KIND_COUNT", "BLOCKS", "PAIRED", "COUNT", "HEADS", "HEAD_DIM", "HALF"),
    *("INTERLEAVED", "PADDED", "PAGE"),
)


def page_constants(config: RebuildConfig, *, values: bool) -> dict[str, Any]:
    """Return the compile-time arguments of `rebuild_pages`."""
    found = constants_of(config, capped=False)
    widest = max(config.key_widths + (config.value_widths if values else ()))
    # The largest power of two that divides a page.
    tile = min(_TILE if widest <= _WIDE else _WIDE_TILE, config.capacity & -config.capacity)
    blocks = config.value_blocks if values else ()
    own = {"VALUE_BLOCKS": blocks or (0,), "VALUE_COUNT": len(blocks), "TILE": tile}
    return {**{name: found[name] for name in _SHARED}, **own}


@torch.library.custom_op("kvprof::rebuild_pages", mutates_args={"planes"})
def rebuild_operator(
    planes: Tensor,
    buffer: Tensor,
    up: Tensor,
    value_up: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    seen: Tensor,
    tables: Sequence[Tensor],
    row: int,
    config: Sequence[int],
) -> None:
    """Launch `rebuild_pages`."""
    made = RebuildConfig.decoded(config)
    fixed = page_constants(made, values=value_up is not None)
    tiles = made.capacity // fixed["TILE"]
    launching(rebuild_pages, (len(seen) * tiles, len(made.key_widths) * made.heads))(
        buffer,
        up,
        up if value_up is None else value_up,
        cos,
        sin,
        planes,
        seen,
        *tables,
        row_stride(buffer, made.batch),
        row,
        len(cos),
        *cos.stride(),
        **fixed,
        num_warps=WARPS,
    )


@rebuild_operator.register_fake
def _(planes: Tensor, *rest: object) -> None:
    return None


@dataclass(frozen=True, eq=False)
class PageRebuild:
    """What rebuilds a layer's keys page by page."""

    step: ReconstructStep  # paged; whose latents and matrices these are
    whole: RaggedLayout  # of one page: keys of every KV head, and its own values or its group's
    #: What rebuilds values, as the kernel reads it; None where they are copied.
    value_up: Tensor | None
    heads: Tensor  # rows of `RebuiltHead`, int64, and of `RebuiltColumn`, int32
    columns: Tensor

    def run(self, planes: Tensor, buffer: Tensor, seen: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Write pages of rotated keys and of values; nothing waits for the device."""
        step, config = self.step, self.step.config
        check_cache(buffer, config.batch, config.layout.row, step.dtype)
        check_interpreter(step.dtype)
        if planes.shape != (len(seen) * self.whole.row,) or planes.dtype != step.dtype:
            raise UsageError(
                f"planes have shape {tuple(planes.shape)} and dtype {planes.dtype}; required are "
                f"{len(seen)} pages of {self.whole.row} values in {step.dtype}"
            )
        step.check_tables(cos, sin)
        if cos.dim() != 2:
            raise UsageError("paged rebuilding requires RoPE tables shared by all sequences")
        if len(seen):
            direct(rebuild_operator)(
                planes,
                buffer,
                step.up,
                self.value_up,
                cos,
                sin,
                seen,
                (step.groups, self.heads, self.columns),
                self.whole.row,
                config.encoded(),
            )


def page_rebuild(
    step: ReconstructStep, whole: RaggedLayout, value_ups: Sequence[Tensor] = ()
) -> PageRebuild:
    """Prepare what rebuilds a layer's keys page by page, on a GPU or interpreted."""
    config = step.config
    own = [config.head_dim] * len(config.value_widths) if value_ups else config.value_widths
    values = tuple(width for width in own for _ in range(config.heads))
    wanted = ((config.head_dim,) * len(values), values, config.capacity)
    if not config.paged or (whole.key_widths, whole.value_widths, whole.capacity) != wanted:
        raise UsageError(
            f"the pages ({whole.capacity} tokens, keys {whole.key_widths}, values "
            f"{whole.value_widths}) do not match rebuilt {config.key_widths}"
        )
    if any(matrix.dtype != step.dtype for matrix in value_ups):
        raise UsageError(f"matrices are {value_ups[0].dtype}, the step {step.dtype}")
    rows = sum(config.value_blocks) if value_ups else 0
    sizes = (rows * width for width in config.value_widths for _ in range(config.heads))
    begins = accumulate(sizes, initial=0)
    heads = [RebuiltHead(*pair, begin) for pair, begin in zip(whole.offsets, begins, strict=False)]
    columns: list[RebuiltColumn] = []
    for width in chunks(config.head_dim):
        columns += [RebuiltColumn(len(columns), width)] * width
    device = step.groups.device
    return PageRebuild(
        step,
        whole,
        arranged_values(value_ups, config).to(device) if value_ups else None,
        torch.tensor(heads, dtype=torch.int64, device=device),
        torch.tensor(columns, dtype=torch.int32, device=device),
    )
