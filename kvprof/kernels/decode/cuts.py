"""Partition a decoding step's work by its cost, stated on the host (methods: load balance)."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from kvprof.errors import UsageError
from kvprof.kernels.checks import check_contexts
from kvprof.kernels.planes import STEP, RaggedLayout
from kvprof.kernels.tables import Part

__all__ = [
    "COST_PER_TOKEN",
    "LARGEST_TILE",
    "Cut",
    "Head",
    "Item",
    "Tuning",
    "at_once",
    "built_for",
    "checked_lengths",
    "configs",
    "equal_shares",
    "most_pieces",
    "of_configs",
    "page_tile",
    "pieces_for",
    "predicted_makespan_over_mean",
    "rows_of",
    "tile_height",
    "tuning_for",
]

# --- What is chosen for a GPU and a layer's widths, and not for a model.


#: Most tokens of a tile.
LARGEST_TILE = 512

#: Tokens of a page from which tiles lie in single ones.
_LEAST_PAGE = 64

#: Most values of a block of queries, or of its results: more would spill registers.
_MOST_VALUES = 8192

#: Fewest tiles of a piece: it waits for its numbers and its queries before the first comes.
LEAST_TILES = 2

#: Tiles of a piece from which pieces may follow one another on a multiprocessor. Shorter ones all
#: run at once: a round is mostly waiting then, and a last one of a few pieces takes as long.
DEEP_TILES = 8

# Of a multiprocessor from Hopper on, bytes: what programs share, and what one takes beside tiles.
_SHARED, _BESIDE = 227 * 1024, 2048
# Warps on a multiprocessor where each thread takes as many registers as it may.
_WARPS = 8


@dataclass(frozen=True)
class Tuning:
    """How the decode kernel is built and how finely its work is cut."""

    pieces: int = 8  # pieces of work per multiprocessor, at most (`pieces_for`)
    tile: int = 8192  # values of K and V in a tile
    stages: int = 4  # tiles on their way at once
    warps: int = 1  # of a program


def rows_of(layout: RaggedLayout) -> int:
    """Return how many query heads of a group one program takes: 16, 32 or 64, padded."""
    width = max(layout.key_widths + layout.value_widths)
    rows = STEP
    while rows < layout.group and 2 * rows * width <= _MOST_VALUES:
        rows *= 2
    return rows


def tuning_for(layout: RaggedLayout) -> Tuning:
    """Return what a layer's widths and group ask for."""
    widest = max(map(sum, zip(layout.key_widths, layout.value_widths, strict=True)))
    if widest > _MOST_VALUES // STEP:
        return Tuning(tile=32768, stages=2, warps=4)
    if rows_of(layout) > STEP:
        return Tuning(tile=16384, stages=3, warps=4)
    if widest > _MOST_VALUES // (2 * STEP):
        return Tuning(tile=16384, stages=3, warps=2)
    if {*layout.key_widths, *layout.value_widths} == {64}:
        # 1.93 times as fast as uncompressed (a prototype, H200, batch 8); with one warp 1.86.
        return Tuning(warps=2)
    # Four warps, or taller tiles, would spill: a program has the branches of all kinds in its loop.
    return Tuning()


def built_for(tuning: Tuning, element_size: int, page: int) -> Tuning:
    """Return the build of a kernel for values of `element_size` bytes, pages of `page` tokens."""
    if element_size > 2:
        tuning = replace(tuning, tile=tuning.tile // 2, warps=min(8, 4 * tuning.warps))
    return replace(tuning, stages=2 * tuning.stages - 1) if page else tuning


def at_once(tuning: Tuning) -> int:
    """Return how many splits fit on a multiprocessor, by its shared memory and registers."""
    shared = _SHARED // (2 * (tuning.stages - 1) * tuning.tile + _BESIDE)
    return max(1, min(shared, _WARPS // tuning.warps))


#: Columns that a token costs beside its own: softmax does not shrink with the width.
COST_PER_TOKEN = 32


class Head(NamedTuple):
    """What the kernels look up of a KV head; the first columns are `kvprof.kernels.tables.Output`.

    Attributes
    ----------
    outputs, output_width : int
    queries : int
        Where its queries begin in a row of them.
    keys, values : int
        Where its first plane begins in a row of the cache.
    cost : int
        Of a token.
    height : int
        Tokens of a tile.
    kind : int
        Its pair of widths among `configs`.
    """

    outputs: int
    output_width: int
    queries: int  # where its queries begin in a row of them
    keys: int  # where its first plane begins in a row of the cache
    values: int
    cost: int  # of a token
    height: int  # tokens of a tile
    kind: int  # its pair of widths among `configs`


class Item(NamedTuple):
    """A piece of work: tokens ``start … stop - 1`` of one KV head of one row."""

    row: int
    head: int
    start: int
    stop: int
    kind: int  # of the head, -1 where there is no item


@dataclass(frozen=True)
class Cut:
    """Pieces of work."""

    items: tuple[Item, ...]
    parts: tuple[Part, ...]  # for every row and KV head, row after row


def page_tile(page: int) -> int:
    """Return the most tokens of a tile over pages of `page` tokens; 0 is no pages."""
    whole = page & -page
    return whole if whole >= _LEAST_PAGE else LARGEST_TILE


def tile_height(key_width: int, value_width: int, tile: int, most: int = LARGEST_TILE) -> int:
    """Return how many tokens a tile has, a power of two from 16 on, so that all move as much."""
    height = 16
    while 2 * height * (key_width + value_width) <= tile and height < most:
        height *= 2
    return height


def configs(layout: RaggedLayout) -> tuple[tuple[int, int], ...]:
    """Return the distinct pairs of widths of a layer, sorted, so that layers share a kernel."""
    return tuple(sorted(set(zip(layout.key_widths, layout.value_widths, strict=True))))


def of_configs(layout: RaggedLayout, pairs: Sequence[tuple[int, int]]) -> RaggedLayout:
    """Return a layout with one head of every kind, by which a kernel for all of them is built."""
    if missing := set(configs(layout)) - set(pairs):
        raise UsageError(
            f"heads of widths {sorted(missing)[0]} are not among the head groups "
            f"{sorted(set(pairs))}"
        )
    keys, values = zip(*sorted(set(pairs)), strict=True)
    return RaggedLayout(keys, values, layout.group, 1, 1)


def checked_lengths(
    lengths: Sequence[int], starts: Sequence[int] | None, rows: int, capacity: int
) -> None:
    """Refuse lengths and first visible tokens that make no sense."""
    check_contexts(lengths, rows, capacity)
    if starts is None:
        return
    if len(starts) != rows:
        raise UsageError(f"{len(starts)} first tokens for {rows} sequences")
    for start, length in zip(starts, lengths, strict=True):
        if not 0 <= start < length:
            raise UsageError(
                f"the first token of a row of {length} must be from 0 to {length - 1}, not {start}"
            )


def _tasks(
    layout: RaggedLayout, lengths: Sequence[int], starts: Sequence[int] | None
) -> list[tuple[int, int]]:
    """Return first and last token of every row's every head."""
    begins = starts if starts is not None else [0] * len(lengths)
    return [pair for pair in zip(begins, lengths, strict=True) for _ in range(layout.heads)]


def _cost(layout: RaggedLayout, head: int, tokens: int) -> int:
    return tokens * (layout.key_widths[head] + layout.value_widths[head] + COST_PER_TOKEN)


def equal_shares(
    layout: RaggedLayout,
    lengths: Sequence[int],
    pieces: int,
    tile: int,
    starts: Sequence[int] | None = None,
) -> Cut:
    """Cut all heads of all rows into about `pieces` pieces of equal cost."""
    pairs = configs(layout)
    tasks = _tasks(layout, lengths, starts)
    costs = [
        _cost(layout, number % layout.heads, stop - start)
        for number, (start, stop) in enumerate(tasks)
    ]
    total = max(1, sum(costs))
    items: list[Item] = []
    parts: list[Part] = []
    for number, (start, stop) in enumerate(tasks):
        row, head = divmod(number, layout.heads)
        widths = (layout.key_widths[head], layout.value_widths[head])
        height = tile_height(*widths, tile)
        tiles = -(-(stop - start) // height)
        count = min(tiles, max(1, (2 * costs[number] * pieces + total) // (2 * total)))
        parts.append(Part(len(items), count) if count else Part(0, 0))
        if not count:
            continue
        bounds = [min(stop, start + tiles * part // count * height) for part in range(count + 1)]
        kind = pairs.index(widths)
        items += [Item(row, head, begin, end, kind) for begin, end in pairwise(bounds)]
    return Cut(tuple(items), tuple(parts))


def most_pieces(tiles: int, tuning: Tuning, multiprocessors: int) -> int:
    """Return the largest number of splits, so that each has `LEAST_TILES` in a single wave."""
    pieces = tuning.pieces * multiprocessors
    if tiles < DEEP_TILES * pieces:
        pieces = min(pieces, at_once(tuning) * multiprocessors, max(1, tiles // LEAST_TILES))
        if pieces > multiprocessors:
            pieces -= pieces % multiprocessors
    return pieces


def pieces_for(
    layout: RaggedLayout,
    lengths: Sequence[int],
    tuning: Tuning,
    multiprocessors: int,
    starts: Sequence[int] | None = None,
) -> int:
    """Return how many splits of equal cost to aim at: full waves, as a partial one costs one."""
    heights = [
        tile_height(*widths, tuning.tile)
        for widths in zip(layout.key_widths, layout.value_widths, strict=True)
    ]
    tiles = [
        -(-(stop - start) // heights[number % layout.heads])
        for number, (start, stop) in enumerate(_tasks(layout, lengths, starts))
    ]
    tasks = sum(count > 0 for count in tiles)
    pieces = most_pieces(sum(tiles), tuning, multiprocessors)
    whole = at_once(tuning) * multiprocessors
    if pieces == whole or (pieces > whole and tasks <= multiprocessors):
        pieces = max(1, pieces - min(tasks, multiprocessors) // 2)
    return pieces


def predicted_makespan_over_mean(
    layout: RaggedLayout,
    lengths: Sequence[int],
    multiprocessors: int,
    *,
    tuning: Tuning | None = None,
    starts: Sequence[int] | None = None,
) -> float:
    """Return the busiest multiprocessor's work over the mean of all, 1 at best."""
    tuning = tuning or tuning_for(layout)
    pieces = pieces_for(layout, lengths, tuning, multiprocessors, starts)
    cut = equal_shares(layout, lengths, pieces, tuning.tile, starts)
    loads = [0] * multiprocessors
    for item in cut.items:
        cost = _cost(layout, item.head, item.stop - item.start)
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads) * multiprocessors / max(1, sum(loads))
