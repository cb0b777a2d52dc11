"""Cost of a unit (a segment of a KV head of a row), and how a step is cut by it."""

from dataclasses import dataclass

import triton
import triton.language as tl

from kvprof.kernels.dispatch import wait_for_earlier
from kvprof.kernels.quantized.layout import SegmentsLayout
from kvprof.kernels.quantized.operand_layout import MOST_PLACES, PLACES, OperandLayout
from kvprof.kernels.quantized.tables import Counter, Item, Unit
from kvprof.kernels.split_kv import split_range, work_item
from kvprof.kernels.tables import Part, column

__all__ = [
    "cut_units",
    "share_units",
    "tile_places",
    "token_bytes",
    "token_cost",
]


#: Parts of a byte in which costs are counted.
_PARTS = 16


@dataclass(frozen=True)
class _Weights:
    """What a byte costs, by what it is."""

    keys: float = 1.0  # of K's codes
    values: float = 1.0  # of V's codes
    key_scales: float = 1.0  # of scales and middles
    value_scales: float = 1.0
    padding: float = 1.0  # by which a plane of 16 columns of K is padded in a product


_BYTES = _Weights()
#: Where codes of 4 bits are multiplied as numbers of two bytes: found by descent on an H200, where
#: a layer of eight unlike heads (benchmarks/kernel_speed.py: ragged, groups of 32 columns) ends
#: 3.5 % sooner than with bytes alone. Segments of unlike bits were not measured. As int8 they cost
#: bytes: weights by the loop's instructions made no recorded layer faster at all of its sizes.
_FOUR = _Weights(keys=0.75, value_scales=0.95, padding=1.45)


#: Where sides tell their products: what a token costs for each of them, for each byte, for each
#: piece of keys that is loaded by itself, and at least. Found with several head configs, each on
#: multiprocessors of its own (an H200, batch 8): of nine such sums these ended four layers soonest,
#: and predict a token's time in fourteen configs to 3 % in the mean and 7 at most.
_PRODUCT, _BYTE, _LOAD, _TOKEN = 0.6, 0.15, 3.0, 35


def token_bytes(layout: SegmentsLayout, segment: int, head: int) -> int:
    """Return the bytes that a token of a head moves, scales and middles included."""
    return layout.block_bytes(segment, head) // (PLACES * layout.segments[segment].slots)


def token_cost(
    layout: SegmentsLayout, segment: int, head: int, per_token: int, int8: bool = False
) -> int:
    """Return what a token of a head costs, in sixteenths of a byte."""
    keys, values = layout.sides(segment, head)
    if keys.products and values.products:
        computed = _PRODUCT * (keys.products + values.products)
        brought = _BYTE * token_bytes(layout, segment, head) + _LOAD * keys.loads
        return round(_PARTS * (computed + brought + _TOKEN))
    four = len(layout.segments) == 1 and keys.container == values.container == 4
    weights = _FOUR if four and not int8 else _BYTES
    cost = (
        weights.keys * _token(keys, keys.code_bytes)
        + weights.values * _token(values, values.code_bytes)
        + weights.key_scales * _token(keys, keys.kept_bytes)
        + weights.value_scales * _token(values, values.kept_bytes)
        + weights.padding * _padding(keys)
        + per_token
    )
    return round(_PARTS * cost)


def _padding(side: OperandLayout) -> int:
    return sum(16 * side.container // 8 for plane in side.planes if plane.width == 16)


def _token(side: OperandLayout, nbytes: int) -> float:
    return nbytes / (PLACES * side.slots)


def tile_places(layout: SegmentsLayout, segment: int, head: int, tile: int) -> int:
    """Return the rows of a tile: about `tile` bytes, a power of two from 32, within a page."""
    slots = layout.segments[segment].slots
    scales = any(side.groups for side in layout.sides(segment, head))
    places = 2 * PLACES if scales and slots == 1 else PLACES
    own = token_bytes(layout, segment, head) * slots
    if layout.paged and layout.segments[segment].blocks % 2:
        return PLACES  # a tile lies in one page
    while places < MOST_PLACES and 2 * places * own <= tile:
        places *= 2
    return places


# --- A step over segments is cut into pieces of the same cost, so that a CUDA graph may hold it.
#
# All pieces run at once: with one that starts when the others are done a step takes 1.2 times as
# long on an H200. A unit smaller than a piece, as exact tokens at an end are, is one piece; the
# others share the rest, unless theirs would be longer by more than a seventh (a few long rows, many
# short ones). By head, then row, so that neighbours are of one config: a multiprocessor's code has
# to fit its instruction cache (`kvprof.kernels.quantized.kernel`). A test has the same in Python.


# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton's functions are compiled from their source; types mean nothing to its compiler.


_ITEM = tl.constexpr(len(Item._fields))
_ROW = tl.constexpr(column(Item, "row"))
_HEAD = tl.constexpr(column(Item, "head"))
_SEGMENT = tl.constexpr(column(Item, "segment"))
_START = tl.constexpr(column(Item, "start"))
_STOP = tl.constexpr(column(Item, "stop"))
_PART = tl.constexpr(len(Part._fields))
_FIRST = tl.constexpr(column(Part, "first"))
_COUNT = tl.constexpr(column(Part, "items"))
_UNIT = tl.constexpr(len(Unit._fields))
_COST = tl.constexpr(column(Unit, "cost"))
_HEIGHT = tl.constexpr(column(Unit, "height"))
_CAPACITY = tl.constexpr(column(Unit, "capacity"))
_SHARED = tl.constexpr(column(Counter, "shared"))


@triton.jit
def _unit(
    number,
    lengths,
    units,
    count,
    batch,
    HEADS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """Return tokens, tiles, cost and tile height of units; one is a segment of a head's row."""
    there = number < count
    segment = number % SEGMENTS
    task = number // SEGMENTS
    own = units + (segment * HEADS + task // batch) * _UNIT
    length = tl.load(lengths + segment * batch + task % batch, mask=there, other=0)
    capacity = tl.load(own + _CAPACITY, mask=there, other=0).to(tl.int32)
    length = tl.minimum(tl.maximum(length, 0), capacity)
    height = tl.load(own + _HEIGHT, mask=there, other=1).to(tl.int32)
    tiles = (length + height - 1) // height
    return length, tiles, length * tl.load(own + _COST, mask=there, other=0), height


@triton.jit
def _larger(cost, pieces, total):
    """Return the costs of units that are a piece or more, 0 for others."""
    return tl.where(cost * pieces >= total, cost, 0)


@triton.jit
def _share(before, cost, tiles, pieces, total):
    """Return how many items a unit becomes: those that end in its stretch of the shared cost."""
    share = (before + cost) * pieces // total - before * pieces // total
    return tl.minimum(tl.maximum(share, 1), tiles).to(tl.int32)


@triton.jit
def _share_out(
    lengths,
    units,
    firsts,
    counters,
    count,
    batch,
    pieces,
    counted,
    near,
    HEADS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Share items of equal cost out to all units of a layer: `share_units`, of one layer."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([], tl.int64)
    all_tiles = tl.zeros([], tl.int64)
    for at in range(0, count, BLOCK):
        _length, tiles, costs, _height = _unit(
            at + lane, lengths, units, count, batch, HEADS, SEGMENTS
        )
        total += tl.sum(costs, 0)
        all_tiles += tl.sum(tiles.to(tl.int64), 0)
    total = tl.maximum(total, 1)
    shared = tl.zeros([], tl.int64)
    left = tl.zeros([], tl.int32) + pieces
    for at in range(0, count, BLOCK):
        _length, tiles, costs, _height = _unit(
            at + lane, lengths, units, count, batch, HEADS, SEGMENTS
        )
        larger = _larger(costs, pieces, total)
        shared += tl.sum(larger, 0)
        left -= tl.sum(((larger == 0) & (tiles > 0)).to(tl.int32), 0)
    shared = tl.maximum(shared, 1)
    fair = tl.maximum(shared * pieces // total, 1)
    left = tl.where(left * 8 >= fair * 7, left.to(tl.int64), fair)
    first = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int64)
    for at in range(0, count, BLOCK):
        number = at + lane
        _length, tiles, costs, _height = _unit(
            number, lengths, units, count, batch, HEADS, SEGMENTS
        )
        costs = _larger(costs, pieces, total)
        shares = _share(before + tl.cumsum(costs, 0) - costs, costs, tiles, left, shared)
        tl.store(firsts + number, first + tl.cumsum(shares, 0) - shares, mask=number < count)
        first += tl.sum(shares, 0)
        before += tl.sum(costs, 0)
    tl.store(firsts + count, first)
    for at in range(0, counted, BLOCK):
        long = (at + lane == _SHARED) & (all_tiles >= pieces * near)
        tl.store(counters + at + lane, long.to(tl.int32), mask=at + lane < counted)


@triton.jit(do_not_specialize=["count", "batch", "pieces", "counted", "near"])
def share_units(
    lengths,
    units,
    firsts,
    counters,
    count,
    batch,
    pieces,
    counted,
    near,
    HEADS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Distribute about `pieces` items over all units of a layer; a program per layer."""
    wait_for_earlier(DEPENDENT)
    layer = tl.program_id(0)
    units += layer * SEGMENTS * HEADS * _UNIT
    firsts += layer * (count + 1)
    counters += layer * counted
    _share_out(
        lengths,
        units,
        firsts,
        counters,
        count,
        batch,
        pieces,
        counted,
        near,
        HEADS,
        SEGMENTS,
        BLOCK,
    )


@triton.jit(do_not_specialize=["count", "batch", "pieces", "counted", "near", "room"])
def cut_units(
    lengths,
    units,
    firsts,
    counters,
    items,
    parts,
    count,
    batch,
    pieces,
    counted,
    near,
    room,
    HEADS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Cut the units of each layer into as many items as each has as its share; ITEMS a program."""
    wait_for_earlier(DEPENDENT)
    layer = tl.program_id(1)
    units += layer * SEGMENTS * HEADS * _UNIT
    firsts += layer * (count + 1)
    counters += layer * counted
    items += layer * room * _ITEM
    parts += layer * batch * HEADS * _PART
    if BLOCK > 0:
        _share_out(
            lengths,
            units,
            firsts,
            counters,
            count,
            batch,
            pieces,
            counted,
            near,
            HEADS,
            SEGMENTS,
            BLOCK,
        )
        tl.debug_barrier()  # what the program's other threads wrote is read
    at = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    # There is room for an item of every unit, so that a program's items are tasks as well.
    leads = at < batch * HEADS
    begin = tl.load(firsts + at * SEGMENTS, mask=leads, other=0)
    behind = at + 1
    end = tl.load(firsts + behind * SEGMENTS, mask=leads, other=0)
    own = parts + (at % batch * HEADS + at // batch) * _PART
    tl.store(own + _FIRST, begin, mask=leads)
    tl.store(own + _COUNT, end - begin, mask=leads)
    unit, part, share = work_item(firsts, count, at)
    length, tiles, _cost, height = _unit(unit, lengths, units, count, batch, HEADS, SEGMENTS)
    start, stop = split_range(tiles, part, share)
    there = part < share
    task = unit // SEGMENTS
    own = items + at * _ITEM
    tl.store(own + _ROW, task % batch, mask=there)
    tl.store(own + _HEAD, task // batch, mask=there)
    tl.store(own + _START, tl.minimum(start * height, length), mask=there)
    tl.store(own + _STOP, tl.minimum(stop * height, length), mask=there)
    tl.store(own + _SEGMENT, tl.where(there, unit % SEGMENTS, -1), mask=at < room)
