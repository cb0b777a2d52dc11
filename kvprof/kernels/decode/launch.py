"""Launches the Triton kernels of a decoding step; nothing here waits for the device."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvprof.kernels.decode.cuts import (
    COST_PER_TOKEN,
    DEEP_TILES,
    LEAST_TILES,
    Head,
    Item,
    Tuning,
    built_for,
    configs,
    page_tile,
    rows_of,
    tile_height,
)
from kvprof.kernels.decode.kernel import decode_pieces
from kvprof.kernels.dispatch import early_launch, launching, wait_for_earlier
from kvprof.kernels.planes import RaggedLayout, row_stride
from kvprof.kernels.split_kv import (
    assign_options,
    empty_parts,
    launch_combine,
    partition_options,
    split_range,
    work_item,
)
from kvprof.kernels.tables import Kind, Part, chunk_columns, column, joined_rows

__all__ = [
    "cut_equal",
    "head_table",
    "kind_table",
    "launch_cut",
    "launch_decode",
    "share_equal",
]

# --- A decoding step's work is cut on the device, so that a CUDA graph may hold it.
#
# `kvprof.kernels.decode.cuts` states the same on the host in plain Python.


# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton's functions are compiled from their source; types mean nothing to its compiler.


_ITEM = tl.constexpr(len(Item._fields))
_ROW = tl.constexpr(column(Item, "row"))
_HEAD = tl.constexpr(column(Item, "head"))
_START = tl.constexpr(column(Item, "start"))
_STOP = tl.constexpr(column(Item, "stop"))
_ITEM_KIND = tl.constexpr(column(Item, "kind"))
_PART = tl.constexpr(len(Part._fields))
_FIRST = tl.constexpr(column(Part, "first"))
_COUNT = tl.constexpr(column(Part, "items"))
_COLUMNS = tl.constexpr(len(Head._fields))
_COST = tl.constexpr(column(Head, "cost"))
_HEIGHT = tl.constexpr(column(Head, "height"))
_KIND = tl.constexpr(column(Head, "kind"))
_DEEP = tl.constexpr(DEEP_TILES)
_LEAST = tl.constexpr(LEAST_TILES)


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
    STARTS: tl.constexpr,
):
    """Return tiles and cost of tasks; a task is a KV head of a row."""
    there = number < count
    start, stop = _tokens(lengths, starts, number // HEADS, there, capacity, STARTS)
    of_head = heads + (number % HEADS) * _COLUMNS
    cost = tl.load(of_head + _COST, mask=there, other=0)
    height = tl.load(of_head + _HEIGHT, mask=there, other=1).to(tl.int32)
    return (stop - start + height - 1) // height, (stop - start) * cost


@triton.jit
def _pieces(tiles, count, most, whole, workers):
    """Return how many pieces to aim at: `kvprof.kernels.decode.cuts.pieces_for`."""
    short = tl.minimum(tl.minimum(most, whole), tl.maximum(tiles // _LEAST, 1))
    short -= tl.where(short > workers, short % workers, 0)
    pieces = tl.where(tiles < _DEEP * most, short, tl.full([], most, tl.int64))
    left = tl.maximum(pieces - tl.minimum(count, workers) // 2, 1)
    fewer = (pieces == whole) | ((pieces > whole) & (count <= workers))
    return tl.where(fewer, left, pieces)


@triton.jit
def _share_out(
    lengths,
    starts,
    heads,
    firsts,
    count,
    capacity,
    most,
    whole,
    workers,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    STARTS: tl.constexpr,
):
    """Share items of equal cost out to all tasks of a layer: `share_equal`, of one layer."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([], tl.int64)
    all_tiles = tl.zeros([], tl.int64)
    busy = tl.zeros([], tl.int32)
    for at in range(0, count, BLOCK):
        tiles, costs = _costs(at + lane, lengths, starts, heads, count, capacity, HEADS, STARTS)
        tiles = tl.where(at + lane < count, tiles, 0)
        total += tl.sum(costs, 0)
        all_tiles += tl.sum(tiles.to(tl.int64), 0)
        busy += tl.sum(tl.where(tiles > 0, 1, 0), 0)
    total = tl.maximum(total, 1)
    pieces = _pieces(all_tiles, busy, most, whole, workers)
    first = tl.zeros([], tl.int32)
    for at in range(0, count, BLOCK):
        number = at + lane
        tiles, costs = _costs(number, lengths, starts, heads, count, capacity, HEADS, STARTS)
        # cost / (total / pieces), rounded half up in whole numbers as on the host.
        shares = (2 * costs * pieces + total) // (2 * total)
        shares = tl.minimum(tl.maximum(shares, 1), tiles).to(tl.int32)
        shares = tl.where(number < count, shares, 0)
        tl.store(firsts + number, first + tl.cumsum(shares, 0) - shares, mask=number < count)
        first += tl.sum(shares, 0)
    tl.store(firsts + count, first)


@triton.jit(do_not_specialize=["count", "capacity", "most", "whole", "workers"])
def share_equal(
    lengths,
    starts,
    heads,
    firsts,
    count,
    capacity,
    most,
    whole,
    workers,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    STARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Distribute items of equal cost over all tasks of a layer; a program per layer."""
    wait_for_earlier(DEPENDENT)
    layer = tl.program_id(0)
    heads += layer * HEADS * _COLUMNS
    firsts += layer * (count + 1)
    _share_out(
        lengths, starts, heads, firsts, count, capacity, most, whole, workers, HEADS, BLOCK, STARTS
    )


@triton.jit(do_not_specialize=["count", "capacity", "most", "whole", "workers", "room"])
def cut_equal(
    lengths,
    starts,
    heads,
    firsts,
    items,
    parts,
    count,
    capacity,
    most,
    whole,
    workers,
    room,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
    STARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Cut the tasks of each layer into as many items as each has as its share; ITEMS a program."""
    wait_for_earlier(DEPENDENT)
    layer = tl.program_id(1)
    heads += layer * HEADS * _COLUMNS
    firsts += layer * (count + 1)
    items += layer * room * _ITEM
    parts += layer * count * _PART
    if BLOCK > 0:
        _share_out(
            lengths,
            starts,
            heads,
            firsts,
            count,
            capacity,
            most,
            whole,
            workers,
            HEADS,
            BLOCK,
            STARTS,
        )
        tl.debug_barrier()  # what the program's other threads wrote is read
    at = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    # There is room for an item of every task, so that a program's items are tasks as well.
    first = tl.load(firsts + at, mask=at < count, other=0)
    behind = at + 1
    own = tl.load(firsts + behind, mask=at < count, other=0) - first
    tl.store(parts + at * _PART + _FIRST, tl.where(own > 0, first, 0), mask=at < count)
    tl.store(parts + at * _PART + _COUNT, own, mask=at < count)
    task, part, share = work_item(firsts, count, at)
    start, stop = _tokens(lengths, starts, task // HEADS, task < count, capacity, STARTS)
    of_head = heads + task % HEADS * _COLUMNS
    height = tl.load(of_head + _HEIGHT).to(tl.int32)
    begin, end = split_range((stop - start + height - 1) // height, part, share)
    there = part < share
    item = items + at * _ITEM
    tl.store(item + _ROW, task // HEADS, mask=there)
    tl.store(item + _HEAD, task % HEADS, mask=there)
    tl.store(item + _START, tl.minimum(start + begin * height, stop), mask=there)
    tl.store(item + _STOP, tl.minimum(start + end * height, stop), mask=there)
    kind = tl.load(of_head + _KIND).to(tl.int32)
    tl.store(item + _ITEM_KIND, tl.where(there, kind, -1), mask=at < room)


def head_table(
    layout: RaggedLayout, tile: int, device: torch.device, pairs: Sequence[tuple[int, int]]
) -> Tensor:
    """Return what the kernels look up per head, rows of `Head` in int64."""
    rows = [
        Head(
            outputs=layout.output_offsets[head],
            output_width=widths[1],
            queries=layout.query_offsets[head],
            keys=layout.offsets[head][0],
            values=layout.offsets[head][1],
            cost=sum(widths) + COST_PER_TOKEN,
            height=tile_height(*widths, tile),
            kind=pairs.index(widths),
        )
        for head, widths in enumerate(zip(layout.key_widths, layout.value_widths, strict=True))
    ]
    return torch.tensor(rows, dtype=torch.int64, device=device)


@lru_cache(maxsize=256)
def kind_table(pairs: tuple[tuple[int, int], ...], tile: int, page: int) -> tuple[int, ...]:
    """Return the head configurations as the kernels take them, rows of `Kind`."""
    most = page_tile(page)
    return joined_rows(
        [Kind(chunk_columns(*pair), tile_height(*pair, tile, most)) for pair in pairs]
    )


def launch_cut(
    lengths: Tensor,
    starts: Tensor | None,
    heads: Tensor,
    capacity: int,
    pieces: int,
    whole: int,
    workers: int,
    room: int,
) -> tuple[Tensor, Tensor]:
    """Cut the work of one or more layers into items."""
    layers = len(heads)
    tasks = len(lengths) * heads.shape[1]
    items = lengths.new_empty(layers, room, len(Item._fields))
    parts = lengths.new_empty(layers, tasks, len(Part._fields))
    shared: dict[str, Any] = {"HEADS": heads.shape[1], "STARTS": starts is not None}
    first = lengths if starts is None else starts
    firsts = lengths.new_empty(layers, tasks + 1)
    cut = partition_options(tasks)
    numbers = tasks, capacity, pieces, whole, workers
    early = early_launch(lengths.device, len(lengths))
    if not cut["BLOCK"]:
        launching(share_equal, (layers,))(
            lengths, first, heads, firsts, *numbers, **shared, **assign_options(tasks), **early
        )
    launching(cut_equal, (triton.cdiv(room, cut["ITEMS"]), layers))(
        lengths, first, heads, firsts, items, parts, *numbers, room, **shared, **cut, **early
    )
    return items, parts


def launch_decode(
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    family: RaggedLayout,
    tuning: Tuning,
    heads: Tensor,
    scheduled: Sequence[Tensor],
    scaling: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Run the items and combine their splits."""
    items, parts = scheduled
    widest, rows, pairs = max(family.value_widths), query.shape[0], configs(family)
    partial, logs = empty_parts(query, items.shape[0], layout.group, widest)
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
        heads if table is None else table,
    )
    numbers = (
        0 if table is None else table.shape[1],
        layout.capacity,
        row_stride(buffer, layout.batch),
        query.shape[1],
        widest,
        scale,
        softcap * log2_e,
    )
    page = 0 if table is None else layout.capacity
    built = built_for(tuning, query.element_size(), page)
    constants: dict[str, Any] = {
        "KINDS": kind_table(tuple(pairs), built.tile, page),
        "COUNT": len(pairs),
        "STAGES": built.stages,
        "GROUP": layout.group,
        "ROWS": rows_of(family),
        "PAGE": page,
        "CAPPED": softcap > 0.0,
        "num_warps": built.warps,
        **early_launch(query.device, rows),
    }
    blocks = -(-layout.group // rows_of(family))
    launching(decode_pieces, (items.shape[0] * blocks,))(*tensors, *numbers, **constants)
    launch_combine(partial, logs, parts, output, heads, layout.heads, sinks=sinks)
    return output
