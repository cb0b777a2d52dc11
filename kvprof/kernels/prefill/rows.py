"""Attention of different numbers of new tokens per sequence, also over pages: chunked prefill.

The device cuts the work into tiles of rows, the costly ones first.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import starmap
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.checks import (
    check_cache,
    check_device,
    check_pages,
    check_pool,
    check_queries,
    check_scaling,
    check_softcap,
    checked_sinks,
    whole_numbers,
)
from kvprof.kernels.dispatch import check_interpreter, launching, layout_of, placed, uses_triton
from kvprof.kernels.operators import direct
from kvprof.kernels.planes import MOST_TOKENS, RaggedLayout, row_stride
from kvprof.kernels.prefill.cpu import prefill_rows_cpu
from kvprof.kernels.prefill.kernel import prefill_blocks
from kvprof.kernels.prefill.launch import head_table, kind_columns, side_by_side, tiles_on
from kvprof.kernels.prefill.schedules import COST_PER_SCORE, BlockRow
from kvprof.kernels.prefill.tuning import Tile, TiledWidths, Tuning
from kvprof.kernels.tables import column

__all__ = ["RowsCut", "RowsStep", "cut_rows", "rows_operator", "rows_step"]

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton's functions are compiled from their source; types mean nothing to its compiler.

_BLOCK = tl.constexpr(len(BlockRow._fields))
_SEQUENCE = tl.constexpr(column(BlockRow, "sequence"))
_FIRST = tl.constexpr(column(BlockRow, "first"))
_ROWS = tl.constexpr(column(BlockRow, "rows"))


@triton.jit
def _sequences(number, starts, lengths, count, capacity, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return sequences' new tokens, the tokens before them, and their tiles."""
    there = number < count
    following = number + 1
    first = tl.load(starts + number, mask=there, other=0)
    new = tl.maximum(tl.load(starts + following, mask=there, other=0) - first, 0)
    past = tl.minimum(tl.load(lengths + number, mask=there, other=0), capacity) - new
    return new, past, (new * GROUP + ROWS - 1) // ROWS


@triton.jit
def _no_longer(length, new, past, tiles, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return how many of a sequence's tiles see no more than `length` tokens."""
    inside = length - past
    few = tl.minimum(tl.maximum(inside, 0), new) * GROUP // ROWS
    return tl.where(inside >= new, tiles, tl.minimum(few, tiles))


@triton.jit(do_not_specialize=["count", "capacity"])
def cut_rows(
    starts,
    lengths,
    blocks,
    count,
    capacity,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Make a block of every tile of rows, those that see most first; a program per tile."""
    tile = tl.program_id(0)
    lane = tl.arange(0, LANES)
    total = tl.zeros([], tl.int32)
    own = tl.zeros([], tl.int32)
    index = tl.zeros([], tl.int32)
    own_new = tl.zeros([], tl.int32)
    own_past = tl.zeros([], tl.int32)
    for at in range(0, count, LANES):
        new, past, tiles = _sequences(at + lane, starts, lengths, count, capacity, GROUP, ROWS)
        before = total + tl.cumsum(tiles, 0) - tiles
        mine = (before <= tile) & (tile < before + tiles)
        own += tl.sum(tl.where(mine, at + lane, 0), 0)
        index += tl.sum(tl.where(mine, tile - before, 0), 0)
        own_new += tl.sum(tl.where(mine, new, 0), 0)
        own_past += tl.sum(tl.where(mine, past, 0), 0)
        total += tl.sum(tiles, 0)
    place = tile
    if tile < total:
        last = tl.minimum((index + 1) * ROWS, own_new * GROUP)
        seen = own_past + (last + GROUP - 1) // GROUP
        place = index
        for at in range(0, count, LANES):
            number = at + lane
            new, past, tiles = _sequences(number, starts, lengths, count, capacity, GROUP, ROWS)
            most = _no_longer(seen, new, past, tiles, GROUP, ROWS)
            fewer = _no_longer(seen - 1, new, past, tiles, GROUP, ROWS)
            place += tl.sum(tiles - most + tl.where(number < own, most - fewer, 0), 0)
            place -= tl.sum(tl.where(number == own, fewer, 0), 0)
    block = blocks + place * _BLOCK
    tl.store(block + _SEQUENCE, tl.where(tile < total, own, -1))
    tl.store(block + _FIRST, index * ROWS)
    tl.store(block + _ROWS, tl.minimum(own_new * GROUP - index * ROWS, ROWS))


class RowsCut(NamedTuple):
    """A step's work as it was cut; layers with tiles as high may share it."""

    starts: Tensor  # `[rows + 1]` and `[rows]` int32
    lengths: Tensor
    tokens: int  # new tokens of all sequences, with what room there is behind them
    heights: tuple[int, ...]  # rows of a tile
    blocks: list[Tensor]  # for each height; empty where no Triton kernel runs


@torch.library.custom_op("kvprof::prefill_rows_cut", mutates_args=())
def cut_operator(
    starts: Tensor, lengths: Tensor, tokens: int, capacity: int, group: int, heights: Sequence[int]
) -> list[Tensor]:
    """Return the blocks of a step for tiles of each height, as `cut_rows` writes them."""
    found = []
    for height in heights:
        blocks = lengths.new_empty(
            _room(tokens, len(lengths), group, height), len(BlockRow._fields)
        )
        launching(cut_rows, (len(blocks),))(
            starts,
            lengths,
            blocks,
            len(lengths),
            capacity,
            GROUP=group,
            ROWS=height,
            LANES=min(256, max(32, triton.next_power_of_2(len(lengths)))),
            num_warps=1,
        )
        found.append(blocks)
    return found


@cut_operator.register_fake
def _(
    starts: Tensor, lengths: Tensor, tokens: int, capacity: int, group: int, heights: Sequence[int]
) -> list[Tensor]:
    rows = lengths.shape[0]
    return [
        lengths.new_empty(_room(tokens, rows, group, height), len(BlockRow._fields))
        for height in heights
    ]


def _room(tokens: int, rows: int, group: int, height: int) -> int:
    """Return the most tiles that `tokens` new tokens of `rows` sequences can have."""
    return tokens * group // height + min(rows, tokens)


@torch.library.custom_op("kvprof::prefill_rows", mutates_args=("logs",))
def rows_operator(
    query: Tensor,
    buffer: Tensor,
    starts: Tensor,
    lengths: Tensor,
    blocks: Sequence[Tensor],
    heads: Tensor,
    order: Tensor,
    sinks: Tensor | None,
    table: Tensor | None,
    logs: Tensor | None,
    scaling: float,
    softcap: float,
    window: int,
    heights: Sequence[int],
    key_widths: Sequence[int],
    value_widths: Sequence[int],
    sizes: Sequence[int],
    tuning: Sequence[int],
) -> Tensor:
    """Attend: see `RowsStep.run`, which checks what is given."""
    layout = layout_of(tuple(key_widths), tuple(value_widths), tuple(sizes))
    if not uses_triton(query.device):
        return prefill_rows_cpu(
            query,
            buffer,
            layout,
            starts,
            lengths,
            scaling,
            table,
            softcap=softcap,
            sinks=sinks,
            window=window,
            logs=logs,
        )
    output = query.new_empty(query.shape[0], layout.output_offsets[-1])
    page = 0 if table is None else layout.capacity
    tensors = (
        query.contiguous(),
        buffer,
        output,
        output if logs is None else logs,
        lengths,
        starts,
        lengths if sinks is None else sinks,
    )
    room = layout.capacity if table is None else min(table.shape[1] * page, MOST_TOKENS)
    numbers = (
        0,
        room,
        row_stride(buffer, layout.batch),
        0 if table is None else table.shape[1],
        query.shape[1],
        output.shape[1],
        scaling if softcap else scaling * math.log2(math.e),
        softcap,
        window,
    )

    def job(kind: TiledWidths, own: list[int], first: int) -> Callable[[], None]:
        tile = kind.tile
        items = blocks[list(heights).index(tile.rows)]
        options: dict[str, Any] = {"num_warps": tile.warps}
        if tile.registers:
            options["maxnreg"] = tile.registers
        return lambda: launching(prefill_blocks, (items.shape[0] * len(own),))(
            *tensors,
            items,
            heads,
            order,
            lengths if table is None else table,
            first,
            len(own),
            *numbers,
            KIND=kind_columns(kind),
            STAGES=stages_of(tile, page),
            GROUP=layout.group,
            PAGE=page,
            UNLIKE=True,
            SOFTCAP=softcap > 0,
            SINKS=sinks is not None,
            WINDOW=window > 0,
            LOGS=0 if logs is None else logs.shape[1],
            **options,
        )

    jobs, first = [], 0
    settings = Tuning.of(tuple(tuning))
    for kind, own in _kinds(layout, settings, query.element_size(), query.device).items():
        jobs.append(job(kind, own, first))
        first += len(own)
    side_by_side(jobs, query.device)
    return output


@rows_operator.register_fake
def _(
    query: Tensor,
    buffer: Tensor,
    starts: Tensor,
    lengths: Tensor,
    blocks: Sequence[Tensor],
    heads: Tensor,
    order: Tensor,
    sinks: Tensor | None,
    table: Tensor | None,
    logs: Tensor | None,
    scaling: float,
    softcap: float,
    window: int,
    heights: Sequence[int],
    key_widths: Sequence[int],
    value_widths: Sequence[int],
    sizes: Sequence[int],
    tuning: Sequence[int],
) -> Tensor:
    return query.new_empty(query.shape[0], sizes[0] * sum(value_widths))


def stages_of(tile: Tile, page: int) -> int:
    """Return the stages of the compiler's pipeline: loads wait for the numbers of their pages."""
    return 2 * tile.stages - 1 if page else tile.stages


@lru_cache(maxsize=256)
def _kinds(
    layout: RaggedLayout, tuning: Tuning, element_size: int, device: torch.device
) -> dict[TiledWidths, list[int]]:
    """Return heads by key width, value width and tile; those that take longest come first."""
    tiles = tiles_on(device, layout, tuning, element_size)
    found: dict[TiledWidths, list[int]] = {}
    widths = zip(layout.key_widths, layout.value_widths, tiles, strict=True)
    for head, kind in enumerate(starmap(TiledWidths, widths)):
        found.setdefault(kind, []).append(head)

    def work(kind: TiledWidths) -> int:
        return (kind.key_width + kind.value_width + COST_PER_SCORE) * len(found[kind])

    return {kind: found[kind] for kind in sorted(found, key=work, reverse=True)}


@dataclass(frozen=True, eq=False)
class RowsStep:
    """Attention of a layer's new tokens; `cut` the work once, `run` it for every layer."""

    layout: RaggedLayout
    dtype: torch.dtype
    rows: int  # sequences
    paged: bool
    tuning: Tuning
    heights: tuple[int, ...]  # rows of a tile, of every head configuration that shares the cut
    heads: Tensor  # from `kvprof.kernels.prefill.launch.head_table`
    order: Tensor  # `[heads]` int32, kind after kind

    def cut(
        self, starts: Tensor | Sequence[int], lengths: Tensor | Sequence[int], tokens: int
    ) -> RowsCut:
        """Cut the step's work on the device; nothing waits for it, and a CUDA graph may hold it."""
        device = self.heads.device
        starts = whole_numbers("starts", starts, (self.rows + 1,), device)
        lengths = whole_numbers("lengths", lengths, (self.rows,), device)
        if tokens < 0:
            raise UsageError(f"new tokens must be 0 or more, not {tokens}")
        if not uses_triton(device) or not tokens:
            return RowsCut(starts, lengths, tokens, self.heights, [])
        room = MOST_TOKENS if self.paged else self.layout.capacity
        cut = direct(cut_operator)
        found = cut(starts, lengths, tokens, room, self.layout.group, self.heights)
        return RowsCut(starts, lengths, tokens, self.heights, found)

    def run(
        self,
        query: Tensor,
        buffer: Tensor,
        cut: RowsCut,
        scaling: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        window: int = 0,
        table: Tensor | None = None,
        logs: Tensor | None = None,
    ) -> Tensor:
        """Return causal attention of the new tokens, ``[tokens, Σ_g G·dv_g]``.

        Query ``i`` of sequence ``b`` is row ``starts[b] + i`` and stands at position ``lengths[b] -
        new + i``; its keys and values, and those of all before it, are in the cache. A query at a
        negative position gets zeros, and a row behind the last sequence's anything.
        """
        layout = self.layout
        check_queries(query, (cut.tokens, layout.query_offsets[-1]), self.dtype)
        check_cache(buffer, layout.batch, layout.row, self.dtype)
        check_device(self.heads.device, queries=query, cache=buffer, table=table)
        check_scaling(scaling)
        check_softcap(softcap)
        check_interpreter(self.dtype)
        sinks = checked_sinks(sinks, layout.heads, layout.group)
        if window < 0:
            raise UsageError(f"window must be 0 (none) or more, not {window}")
        check_pages(table, self.rows, paged=self.paged)
        sums = (cut.tokens, layout.heads * layout.group)
        if logs is not None and (logs.shape != sums or logs.dtype != torch.float32):
            raise UsageError(
                f"logs have shape {tuple(logs.shape)} and dtype {logs.dtype}; required "
                f"are {sums} and float32"
            )
        if not set(self.heights) <= set(cut.heights):
            raise UsageError(
                f"the work was partitioned for tiles of {cut.heights} rows, but this layer has "
                f"{self.heights}; give both steps all head groups (pairs)"
            )
        if not cut.tokens:
            return query.new_empty(0, layout.output_offsets[-1])
        found: Tensor = direct(rows_operator)(
            query,
            buffer,
            cut.starts,
            cut.lengths,
            cut.blocks,
            self.heads,
            self.order,
            sinks,
            table,
            logs,
            float(scaling),
            float(softcap),
            window,
            cut.heights,
            layout.key_widths,
            layout.value_widths,
            (layout.group, layout.batch, layout.capacity),
            self.tuning.numbers,
        )
        return found


def rows_step(
    layout: RaggedLayout,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    tuning: Tuning | None = None,
    page_tokens: int | None = None,
    rows: int | None = None,
    pairs: Sequence[tuple[int, int]] | None = None,
) -> RowsStep:
    """Prepare attention of unlike numbers of new tokens."""
    device = placed(device)
    rows = check_pool(layout, page_tokens, rows)
    own = [*zip(layout.key_widths, layout.value_widths, strict=True), *(pairs or ())]
    keys, values = zip(*own, strict=True)
    tuning = tuning or Tuning()
    family = RaggedLayout(keys, values, layout.group, 1, 1)
    heights = {tile.rows for tile in tiles_on(device, family, tuning, dtype.itemsize)}
    order = [
        head for own in _kinds(layout, tuning, dtype.itemsize, device).values() for head in own
    ]
    return RowsStep(
        layout,
        dtype,
        rows,
        page_tokens is not None,
        tuning,
        tuple(sorted(heights)),
        head_table(layout, device),
        torch.tensor(order, dtype=torch.int32, device=device),
    )
