"""Launches the Triton kernels of a decoding step; nothing here waits for the device."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvprof.kernels.decode.cuts import (
    COST_PER_TOKEN,
    Tuning,
    built_for,
    kinds,
    rows_of,
    tile_height,
)
from kvprof.kernels.decode.kernel import ITEM, decode_lists, decode_pieces, merge_pieces
from kvprof.kernels.dispatch import interpreted
from kvprof.kernels.planes import MOST_CHUNKS, RaggedLayout, chunks
from kvprof.kernels.variants import DEPENDENT_FROM

__all__ = [
    "HEAD_COLUMNS",
    "assign_longest",
    "cut_equal",
    "dependent",
    "head_table",
    "kind_numbers",
    "launch_cut",
    "launch_decode",
    "launch_merge",
    "merge_sizes",
    "rank_tasks",
]

# --- A decoding step's work is cut and assigned on the device, so that a CUDA graph may hold
# it.


# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.


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
    number,
    lengths,
    starts,
    heads,
    count,
    capacity,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STARTS: tl.constexpr,
):
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
    lengths,
    starts,
    heads,
    items,
    parts,
    count,
    capacity,
    pieces,
    room,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STARTS: tl.constexpr,
):
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
    lengths,
    starts,
    heads,
    items,
    parts,
    order,
    costs_in_order,
    count,
    capacity,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STARTS: tl.constexpr,
):
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
    order,
    costs_in_order,
    lists,
    counts,
    count,
    WORKERS: tl.constexpr,
    ROUNDED: tl.constexpr,
):
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


# --- Launches what joins partial results, which need not wait for the last part to end.


#: Columns that a merging program joins: few, so that there are programs enough at batch 1.
_COLUMNS = 32


@cache
def dependent(device: torch.device) -> bool:
    """Tell whether a kernel can be launched before the one that it depends on has ended.

    Its programs take their places meanwhile and wait there, which saves most of the time between
    two kernels.
    """
    if interpreted():
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= DEPENDENT_FROM


def merge_sizes(widest: int, items: int, tasks: int) -> tuple[int, int]:
    """Return the columns of a merging program and the parts that it reads at once."""
    # The widest of ragged heads has about twice the mean's parts.
    parts = triton.next_power_of_2(max(1, 2 * items // tasks))
    return min(_COLUMNS, triton.next_power_of_2(widest)), min(256, max(16, parts))


def launch_merge(
    partial: Tensor,
    logs: Tensor,
    parts: Tensor,
    output: Tensor,
    table: Tensor,
    heads: int,
    *,
    sinks: Tensor | None = None,
    counters: Tensor | None = None,
) -> None:
    """Join the parts that the kernel launched before has left, or still leaves.

    Parameters
    ----------
    partial, logs : Tensor
        ``[items, G, widest]`` and ``[items, G]`` float32.
    parts : Tensor
        ``[rows * heads, 2]`` int32: first item and count.
    output : Tensor
        ``[rows, Σ_g G·dv_g]``, written.
    table : Tensor
        ``[heads, columns]`` int64; columns 3 and 4 say where a head's outputs begin, and dv.
    heads : int
    sinks : Tensor, optional
        ``[heads, G]`` float32.
    counters : Tensor, optional
        int32, set to 0 on the way.
    """
    items, group, widest = partial.shape
    width, most = merge_sizes(widest, items, len(parts))
    early = dependent(output.device)
    merge_pieces[(len(parts), group, triton.cdiv(widest, width))](
        partial,
        logs,
        parts,
        output,
        table,
        logs if sinks is None else sinks,
        parts if counters is None else counters,
        GROUP=group,
        WIDEST=widest,
        WIDTH=width,
        MOST=most,
        HEADS=heads,
        OUTPUT_ROW=output.shape[1],
        COLUMNS=table.shape[1],
        SINKS=sinks is not None,
        COUNTERS=0 if counters is None else len(counters),
        DEPENDENT=early,
        num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )


#: Columns of `head_table`.
HEAD_COLUMNS = 8
#: Tasks that a scheduling program looks at at once.
_BLOCK = 256


def head_table(layout: RaggedLayout, tile: int, device: torch.device) -> Tensor:
    """Return what the kernels look up per head, ``[heads, 8]`` int64.

    The columns: where a head's queries, K, V and outputs begin, dv, a token's cost, the tile's
    height, the kind.
    """
    pairs = kinds(layout)
    rows = []
    for head, widths in enumerate(zip(layout.key_widths, layout.value_widths, strict=True)):
        places = (layout.query_offsets[head], *layout.offsets[head], layout.output_offsets[head])
        cost = sum(widths) + COST_PER_TOKEN
        rows.append([*places, widths[1], cost, tile_height(*widths, tile), pairs.index(widths)])
    return torch.tensor(rows, dtype=torch.int64, device=device)


def kind_numbers(pairs: Sequence[tuple[int, int]], tile: int) -> tuple[int, ...]:
    """Return the kinds of heads as the kernels take them, nine numbers each.

    Parameters
    ----------
    pairs : sequence of (key width, value width)
    tile : int
        Values of K and V in a tile.
    """
    numbers: list[int] = []
    for pair in pairs:
        for width in pair:
            own = chunks(width)
            numbers += [*own, *(0,) * (MOST_CHUNKS - len(own))]
        numbers.append(tile_height(*pair, tile))
    return tuple(numbers)


def launch_cut(
    lengths: Tensor, starts: Tensor | None, heads: Tensor, capacity: int, pieces: int, workers: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut a step's work into items, or assign whole heads to workers.

    Parameters
    ----------
    lengths, starts : Tensor
        ``[rows]`` int32.
    heads : Tensor
        From `head_table`.
    capacity : int
        Tokens to which lengths are clamped.
    pieces : int
        Items to aim at; 0 for one per row and head, assigned longest first to `workers`.
    workers : int

    Returns
    -------
    tuple of Tensor
        Items, parts, and lists and counts (empty when cut into pieces), as the kernels have them.
    """
    tasks = len(lengths) * len(heads)
    room = pieces + tasks
    items = lengths.new_empty(room, ITEM)
    parts = lengths.new_empty(tasks, 2)
    shared: dict[str, Any] = {
        "HEADS": len(heads),
        "COLUMNS": HEAD_COLUMNS,
        "STARTS": starts is not None,
        "BLOCK": min(_BLOCK, max(32, triton.next_power_of_2(tasks))),
        "num_warps": 1,
    }
    first = lengths if starts is None else starts
    if pieces:
        cut_equal[(tasks,)](
            lengths, first, heads, items, parts, tasks, capacity, pieces, room, **shared
        )
        return items, parts, lengths.new_empty(0), lengths.new_empty(0)
    order = lengths.new_empty(tasks)
    costs = lengths.new_empty(tasks, dtype=torch.int64)
    lists, counts = lengths.new_empty(workers, tasks), lengths.new_empty(workers)
    rank_tasks[(tasks,)](
        lengths, first, heads, items, parts, order, costs, tasks, capacity, **shared
    )
    assign_longest[(1,)](
        order,
        costs,
        lists,
        counts,
        tasks,
        WORKERS=workers,
        ROUNDED=triton.next_power_of_2(workers),
        num_warps=1,
    )
    return items, parts, lists, counts


def launch_decode(
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    tuning: Tuning,
    heads: Tensor,
    scheduled: Sequence[Tensor],
    scaling: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    table: Tensor | None = None,
    trace: Tensor | None = None,
) -> Tensor:
    """Run the items and join their parts.

    Parameters
    ----------
    query : Tensor
        ``[rows, Σ_g G·dk_g]``, contiguous.
    buffer : Tensor
    layout : RaggedLayout
    tuning : Tuning
    heads : Tensor
        From `head_table`, with the same tile.
    scheduled : sequence of Tensor
        From `launch_cut`.
    scaling, softcap : float
    sinks : Tensor, optional
        ``[heads, G]`` float32.
    table : Tensor, optional
        ``[rows, most pages]`` int32.
    trace : Tensor, optional
        ``[items, 3]`` int64 that gets each item's multiprocessor, begin and end (ns).

    Returns
    -------
    Tensor
        ``[rows, Σ_g G·dv_g]`` in the dtype of `query`.
    """
    items, parts, lists, counts = scheduled
    widest, rows, pairs = max(layout.value_widths), len(query), kinds(layout)
    partial = query.new_empty(len(items), layout.group, widest, dtype=torch.float32)
    logs = query.new_empty(len(items), layout.group, dtype=torch.float32)
    output = query.new_empty(rows, layout.output_offsets[-1])
    log2_e = math.log2(math.e)
    scale = scaling * log2_e if softcap == 0.0 else 2.0 * scaling * log2_e / softcap
    tensors = (
        query,
        buffer,
        partial,
        logs,
        items,
        heads,
        items if table is None else table,
        items if trace is None else trace,
    )
    numbers = (
        0 if table is None else table.shape[1],
        layout.batch * layout.capacity,
        layout.capacity,
        query.shape[1],
        widest,
        scale,
        softcap * log2_e,
    )
    built = built_for(tuning, query.element_size(), paged=table is not None)
    constants: dict[str, Any] = {
        "KINDS": kind_numbers(pairs, built.tile),
        "COUNT": len(pairs),
        "STAGES": built.stages,
        "GROUP": layout.group,
        "ROWS": rows_of(layout),
        "COLUMNS": HEAD_COLUMNS,
        "PAGE": 0 if table is None else layout.capacity,
        "CAPPED": softcap > 0.0,
        "TRACE": trace is not None,
        "DEPENDENT": dependent(query.device),
        "num_warps": built.warps,
    }
    blocks = triton.cdiv(layout.group, rows_of(layout))
    if lists.numel():
        decode_lists[(len(counts) * blocks,)](
            *tensors, lists, counts, *numbers, lists.shape[1], **constants
        )
    else:
        decode_pieces[(len(items) * blocks,)](*tensors, *numbers, **constants)
    launch_merge(partial, logs, parts, output, heads, layout.heads, sinks=sinks)
    return output
