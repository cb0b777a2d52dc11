# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""A decoding step's work is cut and assigned on the device, so that a CUDA graph may hold it.

`kvprof.kernels.decode.cuts` states the same on the host in plain Python.
"""

import triton
import triton.language as tl

from kvprof.kernels.decode.kernel import ITEM

__all__ = ["assign_longest", "cut_equal", "rank_tasks"]

_ITEM = tl.constexpr(ITEM)


@triton.jit
def _tokens(lengths, starts, row, there, capacity, STARTS: tl.constexpr):
    """Return the first visible token of rows and the token behind their last."""
    stop = tl.load(lengths + row, mask=there, other=0).to(tl.int32)
    stop = tl.minimum(tl.maximum(stop, 0), capacity)
    start = stop * 0
    if STARTS:
        start = tl.load(starts + row, mask=there, other=0).to(tl.int32)
        start = tl.minimum(tl.maximum(start, 0), stop)
    return start, stop


@triton.jit
def _costs(
    number, lengths, starts, heads, count, capacity,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Return tokens and cost of tasks; a task is a KV head of a row."""
    there = number < count
    start, stop = _tokens(lengths, starts, number // HEADS, there, capacity, STARTS)
    of_head = heads + (number % HEADS) * COLUMNS
    cost = tl.load(of_head + 5, mask=there, other=0)
    height = tl.load(of_head + 6, mask=there, other=1)
    tiles = tl.maximum((stop - start + height - 1) // height, 1)
    return tiles, (stop - start) * cost


@triton.jit
def cut_equal(
    lengths, starts, heads, items, parts, count, capacity, pieces, room,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Cut all tasks into about `pieces` items of equal cost; a program per task.

    Every program adds up the costs of all tasks and the items of those before its own: with a few
    hundred tasks that is cheaper than a second launch.

    Parameters
    ----------
    lengths, starts
        ``[rows]`` int32: tokens, clamped to 0 … `capacity`, and the first that is visible.
    heads
        ``[HEADS, COLUMNS]`` int64: in columns 5 to 7 a token's cost, the tile's height, the kind.
    items
        ``[room, 5]`` int32, written whole; -1 as kind behind the last.
    parts
        ``[count, 2]`` int32, written: first item and number of items of each task.
    count
        Tasks: rows times heads.
    """
    task = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([], tl.int64)
    for at in range(0, count, BLOCK):
        tiles, costs = _costs(
            at + lane, lengths, starts, heads, count, capacity, HEADS, COLUMNS, STARTS
        )
        total += tl.sum(costs, 0)
    total = tl.maximum(total, 1)
    first = tl.zeros([], tl.int32)
    own = tl.zeros([], tl.int32)
    last = tl.zeros([], tl.int32)
    for at in range(0, count, BLOCK):
        number = at + lane
        tiles, costs = _costs(
            number, lengths, starts, heads, count, capacity, HEADS, COLUMNS, STARTS
        )
        # cost / (total / pieces), rounded half up in whole numbers as on the host.
        shares = (2 * costs * pieces + total) // (2 * total)
        shares = tl.minimum(tl.maximum(shares, 1), tiles).to(tl.int32)
        shares = tl.where(number < count, shares, 0)
        first += tl.sum(tl.where(number < task, shares, 0), 0)
        own += tl.sum(tl.where(number == task, shares, 0), 0)
        last += tl.sum(shares, 0)
    row = task // HEADS
    head = task % HEADS
    start, stop = _tokens(lengths, starts, row, True, capacity, STARTS)
    height = tl.load(heads + head * COLUMNS + 6).to(tl.int32)
    kind = tl.load(heads + head * COLUMNS + 7).to(tl.int32)
    tiles = tl.maximum((stop - start + height - 1) // height, 1)
    tl.store(parts + task * 2, first)
    tl.store(parts + task * 2 + 1, own)
    for at in range(0, own, BLOCK):
        part = at + lane
        begin = tl.minimum(start + (tiles * part // own) * height, stop)
        end = tl.minimum(start + (tiles * (part + 1) // own) * height, stop)
        item = items + (first + part) * _ITEM
        mine = part < own
        tl.store(item, row + part * 0, mask=mine)
        tl.store(item + 1, head + part * 0, mask=mine)
        tl.store(item + 2, begin, mask=mine)
        tl.store(item + 3, end, mask=mine)
        tl.store(item + 4, kind + part * 0, mask=mine)
    for at in range(last + task * BLOCK, room, count * BLOCK):
        tl.store(items + (at + lane) * _ITEM + 4, lane * 0 - 1, mask=at + lane < room)


@triton.jit
def rank_tasks(
    lengths, starts, heads, items, parts, order, costs_in_order, count, capacity,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Make one item of every task and sort the tasks by cost, longest first; a program per task.

    Parameters
    ----------
    order, costs_in_order
        ``[count]`` int32 and int64, written.
    lengths, starts, heads, items, parts, count, capacity
        As for `cut_equal`, with room for exactly `count` items.
    """
    task = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    _unused, own = _costs(task, lengths, starts, heads, count, capacity, HEADS, COLUMNS, STARTS)
    rank = tl.zeros([], tl.int32)
    for at in range(0, count, BLOCK):
        number = at + lane
        _tiles, costs = _costs(
            number, lengths, starts, heads, count, capacity, HEADS, COLUMNS, STARTS
        )
        before = (costs > own) | ((costs == own) & (number < task))
        rank += tl.sum(tl.where(before & (number < count), 1, 0), 0)
    tl.store(order + rank, task)
    tl.store(costs_in_order + rank, own)
    row = task // HEADS
    head = task % HEADS
    start, stop = _tokens(lengths, starts, row, True, capacity, STARTS)
    tl.store(items + task * _ITEM, row)
    tl.store(items + task * _ITEM + 1, head)
    tl.store(items + task * _ITEM + 2, start)
    tl.store(items + task * _ITEM + 3, stop)
    tl.store(items + task * _ITEM + 4, tl.load(heads + head * COLUMNS + 7).to(tl.int32))
    tl.store(parts + task * 2, task)
    tl.store(parts + task * 2 + 1, 1)


@triton.jit
def assign_longest(
    order, costs_in_order, lists, counts, count,
    WORKERS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Give each task, longest first, to the worker with the least to do; a single program.

    Parameters
    ----------
    order, costs_in_order
        From `rank_tasks`.
    lists, counts
        ``[WORKERS, count]`` and ``[WORKERS]`` int32, written: each worker's items.
    ROUNDED
        `WORKERS` rounded up to a power of two.
    """
    worker = tl.arange(0, ROUNDED)
    # Load and worker in one number: the least is the least loaded, and the first among equals.
    keys = tl.where(worker < WORKERS, worker.to(tl.int64), 1 << 62)
    filled = tl.zeros([ROUNDED], tl.int32)
    for place in range(count):
        least = tl.min(keys, 0)
        chosen = keys == least
        at = tl.sum(tl.where(chosen, filled, 0), 0)
        tl.store(lists + (least % ROUNDED) * count + at, tl.load(order + place))
        keys = tl.where(chosen, keys + tl.load(costs_in_order + place) * ROUNDED, keys)
        filled = tl.where(chosen, filled + 1, filled)
    tl.store(counts + worker, filled, mask=worker < WORKERS)
