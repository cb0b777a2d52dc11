# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""A step over segments is cut on the device, so that a CUDA graph may hold it.

`kvprof.kernels.levels.cuts` states the same on the host in plain Python.
"""

import triton
import triton.language as tl

__all__ = ["cut_units"]


@triton.jit
def _unit(
    number, lengths, units, count, batch,
    HEADS: tl.constexpr, SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return tokens, tiles, cost and tile height of units; one is a segment of a head's row."""
    there = number < count
    segment = number % SEGMENTS
    task = number // SEGMENTS
    own = units + (segment * HEADS + task // batch) * COLUMNS
    length = tl.load(lengths + segment * batch + task % batch, mask=there, other=0).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), tl.load(own + 9, mask=there, other=0))
    height = tl.load(own + 6, mask=there, other=1)
    tiles = (length + height - 1) // height
    return length, tiles, length * tl.load(own + 5, mask=there, other=0), height


@triton.jit
def _share(before, cost, tiles, pieces, total):
    """Return how many items a unit becomes: those that end in its stretch of the whole cost."""
    share = (before + cost) * pieces // total - before * pieces // total
    return tl.minimum(tl.maximum(share, 1), tiles).to(tl.int32)


@triton.jit
def cut_units(
    lengths, units, items, parts, counters, count, batch, pieces, room, counted,
    HEADS: tl.constexpr, SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cut all units into `pieces` items of equal cost; a program per head and row.

    Every program adds up all costs and the items before its own: with a few hundred units that is
    cheaper than a second launch.

    Parameters
    ----------
    lengths
        ``[SEGMENTS, batch]`` int32; clamped to what there is room for.
    units
        ``[SEGMENTS * HEADS, COLUMNS]`` int64: in columns 5, 6 and 9 a token's cost, the tile's
        height in tokens, the capacity.
    items
        ``[room, 5]`` int32, written whole: row, head, segment, start, stop; -1 as segment behind
        the last.
    parts
        ``[batch * HEADS, 2]`` int32, written: first item and number of items of each row and head.
    counters
        ``[counted]`` int32, set to 0.
    count
        Units: HEADS times batch times SEGMENTS, in that order.
    """
    task = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([], tl.int64)
    for at in range(0, count, BLOCK):
        length, tiles, costs, height = _unit(
            at + lane, lengths, units, count, batch, HEADS, SEGMENTS, COLUMNS
        )
        total += tl.sum(costs, 0)
    total = tl.maximum(total, 1)
    first = tl.zeros([], tl.int32)
    last = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int64)
    ended = tl.zeros([], tl.int64)
    for at in range(0, count, BLOCK):
        number = at + lane
        length, tiles, costs, height = _unit(
            number, lengths, units, count, batch, HEADS, SEGMENTS, COLUMNS
        )
        shares = _share(ended + tl.cumsum(costs, 0) - costs, costs, tiles, pieces, total)
        earlier = number < task * SEGMENTS
        first += tl.sum(tl.where(earlier, shares, 0), 0)
        before += tl.sum(tl.where(earlier, costs, 0), 0)
        last += tl.sum(shares, 0)
        ended += tl.sum(costs, 0)
    row = task % batch
    head = task // batch
    begin = first
    for segment in range(SEGMENTS):
        length, tiles, cost, height = _unit(
            task * SEGMENTS + segment, lengths, units, count, batch, HEADS, SEGMENTS, COLUMNS
        )
        share = _share(before, cost, tiles, pieces, total)
        for at in range(0, share, BLOCK):
            part = at + lane
            item = items + (begin + part) * 5
            mine = part < share
            tl.store(item, row + part * 0, mask=mine)
            tl.store(item + 1, head + part * 0, mask=mine)
            tl.store(item + 2, segment + part * 0, mask=mine)
            start = tl.minimum(tiles * part // share * height, length)
            stop = tl.minimum(tiles * (part + 1) // share * height, length)
            tl.store(item + 3, start.to(tl.int32), mask=mine)
            tl.store(item + 4, stop.to(tl.int32), mask=mine)
        begin += share
        before += cost
    for at in range(task * BLOCK, counted, tl.num_programs(0) * BLOCK):
        tl.store(counters + at + lane, lane * 0, mask=at + lane < counted)
    own = parts + (row * HEADS + head) * 2
    tl.store(own, first)
    tl.store(own + 1, begin - first)
    # Every program clears its share of the room behind the last item.
    behind = last + task
    step = tl.num_programs(0)
    for at in range(0, (room - last + step - 1) // step, BLOCK):
        item = behind + (at + lane) * step
        tl.store(items + item * 5 + 2, -1, mask=item < room)
