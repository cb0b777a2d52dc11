"""Cuts a reconstruction step's work on the device into pieces of equal cost."""

import triton
import triton.language as tl

from kvprof.kernels.reconstruct.rebuild_config import Group, Item
from kvprof.kernels.tables import Part, column

__all__ = ["cut_pieces"]


# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton's functions are compiled from their source; types mean nothing to its compiler.


_ITEM = tl.constexpr(len(Item._fields))
_ROW = tl.constexpr(column(Item, "row"))
_ITEM_GROUP = tl.constexpr(column(Item, "group"))
_START = tl.constexpr(column(Item, "start"))
_STOP = tl.constexpr(column(Item, "stop"))
_PART = tl.constexpr(len(Part._fields))
_FIRST = tl.constexpr(column(Part, "first"))
_COUNT = tl.constexpr(column(Part, "items"))
_GROUP = tl.constexpr(len(Group._fields))
_COST = tl.constexpr(column(Group, "cost"))
_HEIGHT = tl.constexpr(column(Group, "height"))


@triton.jit(do_not_specialize=["capacity", "pieces", "numbers", "room"])
def cut_pieces(
    lengths,
    groups,
    items,
    parts,
    capacity,
    pieces,
    numbers,
    room,
    GROUPS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the pieces of one sequence's group; a program for each, that knows all lengths."""
    number = tl.program_id(0)
    index = tl.arange(0, MOST)
    there = index < numbers
    length = tl.load(lengths + index // GROUPS, mask=there, other=0)
    length = tl.minimum(tl.maximum(length, 0), capacity)
    own = groups + index % GROUPS * _GROUP
    height = tl.load(own + _HEIGHT, mask=there, other=1).to(tl.int32)
    work = length * tl.load(own + _COST, mask=there, other=1)
    total = tl.maximum(tl.sum(work, 0), 1)
    tiles = (length + height - 1) // height
    counts = tl.minimum(tiles, tl.maximum((work * pieces // total).to(tl.int32), 1))
    first = tl.sum(tl.where(index < number, counts, 0), 0)
    mine = index == number
    count = tl.sum(tl.where(mine, counts, 0), 0)
    own_length = tl.sum(tl.where(mine, length, 0), 0)
    own_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
    own_height = tl.sum(tl.where(mine, height, 0), 0)
    tl.store(parts + number * _PART + _FIRST, first)
    tl.store(parts + number * _PART + _COUNT, count)
    # The last one also empties the items that are left over.
    end = tl.where(number == numbers - 1, room - first, count)
    for at in tl.range(0, end, BLOCK):
        part = at + tl.arange(0, BLOCK)
        written = part < end
        used = part < count
        divisor = tl.maximum(count, 1)
        start = (own_tiles.to(tl.int64) * part // divisor).to(tl.int32) * own_height
        stop = (own_tiles.to(tl.int64) * (part + 1) // divisor).to(tl.int32) * own_height
        stop = tl.minimum(stop, own_length)
        item = items + (first + part) * _ITEM
        zero = part * 0
        tl.store(item + _ROW, zero + number // GROUPS, mask=written)
        tl.store(item + _ITEM_GROUP, zero + number % GROUPS, mask=written)
        tl.store(item + _START, tl.where(used, start, 0), mask=written)
        tl.store(item + _STOP, tl.where(used, stop, 0), mask=written)
