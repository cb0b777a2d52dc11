# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Cuts a step's work on the device into pieces of equal cost, and joins what they leave.

Lengths change at every step and live on the device, so the number of pieces that are launched is
fixed and the cut fills it: every sequence's group gets ``cost · pieces // total`` of them, at least
one and at most one per tile. The rest are empty.
"""

import triton
import triton.language as tl

from kvprof.kernels.reconstruct.kernel import COLUMNS

__all__ = ["cut_pieces", "merge_pieces"]

_COLUMNS = tl.constexpr(COLUMNS)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def cut_pieces(
    lengths, groups, items, parts, capacity, pieces,
    GROUPS: tl.constexpr, NUMBERS: tl.constexpr, MOST: tl.constexpr, ITEMS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the pieces of one sequence's group; a program for each, that knows all lengths.

    Parameters
    ----------
    lengths
        ``[batch]`` int32, cut to 0 … `capacity`.
    groups
        See `kvprof.kernels.reconstruct.kernel.COLUMNS`.
    items
        ``[ITEMS, 4]`` int32, to write; see `reconstruct_pieces`.
    parts
        ``[NUMBERS, 2]`` int32, to write: first item and count.
    pieces
        To aim at.
    MOST
        Power of two from NUMBERS = batch · GROUPS on.
    """
    number = tl.program_id(0)
    index = tl.arange(0, MOST)
    there = index < NUMBERS
    length = tl.load(lengths + index // GROUPS, mask=there, other=0)
    length = tl.minimum(tl.maximum(length, 0), capacity)
    own = groups + index % GROUPS * _COLUMNS
    height = tl.load(own + 8, mask=there, other=1).to(tl.int32)
    work = length * tl.load(own + 7, mask=there, other=1)
    total = tl.maximum(tl.sum(work, 0), 1)
    tiles = (length + height - 1) // height
    counts = tl.minimum(tiles, tl.maximum((work * pieces // total).to(tl.int32), 1))
    first = tl.sum(tl.where(index < number, counts, 0), 0)
    mine = index == number
    count = tl.sum(tl.where(mine, counts, 0), 0)
    own_length = tl.sum(tl.where(mine, length, 0), 0)
    own_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
    own_height = tl.sum(tl.where(mine, height, 0), 0)
    tl.store(parts + number * 2, first)
    tl.store(parts + number * 2 + 1, count)
    # The last one also empties the items that are left over.
    end = tl.where(number == NUMBERS - 1, ITEMS - first, count)
    for at in tl.range(0, end, BLOCK):
        part = at + tl.arange(0, BLOCK)
        written = part < end
        used = part < count
        divisor = tl.maximum(count, 1)
        start = (own_tiles.to(tl.int64) * part // divisor).to(tl.int32) * own_height
        stop = (own_tiles.to(tl.int64) * (part + 1) // divisor).to(tl.int32) * own_height
        stop = tl.minimum(stop, own_length)
        row = items + (first + part) * 4
        zero = part * 0
        tl.store(row, zero + number // GROUPS, mask=written)
        tl.store(row + 1, zero + number % GROUPS, mask=written)
        tl.store(row + 2, tl.where(used, start, 0), mask=written)
        tl.store(row + 3, tl.where(used, stop, 0), mask=written)


@triton.jit
def merge_pieces(
    partial, logs, parts, groups, sinks, output,
    GROUPS: tl.constexpr, QUERIES: tl.constexpr, WIDEST: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, OUTPUT_ROW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Join a query head's parts by their log sums; zeros where a sequence has no token.

    A program per sequence and group, query head, and WIDTH columns.

    Parameters
    ----------
    partial, logs
        From `reconstruct_pieces`.
    parts
        From `cut_pieces`.
    groups
        See `kvprof.kernels.reconstruct.kernel.COLUMNS`.
    sinks
        ``[GROUPS, QUERIES]`` float32 logits that take their share of the softmax, if SINKS.
    """
    number = tl.program_id(0)
    query = tl.program_id(1)
    first = tl.load(parts + number * 2)
    count = tl.load(parts + number * 2 + 1)
    group = number % GROUPS
    at = tl.load(groups + group * _COLUMNS + 5)
    width = tl.load(groups + group * _COLUMNS + 6)
    columns = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside = columns < width
    # Finite: a sequence without tokens must not give inf - inf.
    top = -1e30
    total = 0.0
    if SINKS:
        top = tl.load(sinks + group * QUERIES + query) * _LOG2E
        total = 1.0
    acc = tl.zeros([WIDTH], tl.float32)
    for start in tl.range(0, count, BLOCK):
        part = start + tl.arange(0, BLOCK)
        there = part < count
        place = (first + part).to(tl.int64) * QUERIES + query
        own = tl.load(logs + place, mask=there, other=float("-inf"))
        higher = tl.maximum(top, tl.max(own, 0))
        fade = tl.exp2(top - higher)
        weights = tl.exp2(own - higher)
        loaded = tl.load(
            partial + place[:, None] * WIDEST + columns[None, :],
            mask=there[:, None] & inside[None, :],
            other=0.0,
        )
        acc = acc * fade + tl.sum(loaded * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        top = higher
    result = acc / tl.where(total > 0, total, 1.0)
    row = (number // GROUPS).to(tl.int64) * OUTPUT_ROW
    target = output + row + at + query * width + columns
    tl.store(target, result.to(output.dtype.element_ty), mask=inside)
