# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Decode over tokens whose columns have bits of their own, in whole numbers.

Codes are whole numbers, so they are multiplied as such: queries and weights enter the products of
tensor cores as an upper digit and a lower one in adjacent columns, which come back side by side in
a lane. Four codes of a word are an operation away from an operand, of the highest of 3 bits two, of
8 none.

With ``x = scale · step · (code - half)``, the step of a run of columns and half its largest code:

- scores: ``scale · (Σ code · q' - Σ half · Σq')`` with ``q' = step · q`` in fifteen bits, the last
  once per program;
- values, per run: ``step · (Σ w · code - half · Σ w)`` with ``w = p · scale``, in fifteen bits of
  what the largest p and the largest scale of a tile make together, of the second token of a place
  and the fourth in thirteen.

Operations on whole numbers are what takes the time, so a code stays where it lies in its byte where
it can, and the sums are moved instead.
"""

import triton
import triton.language as tl

from kvprof.kernels.quantized.columns import COLUMN_SLOTS
from kvprof.kernels.quantized.int8_hi_lo import (
    MOST,
    ZERO,
    biased,
    bits_of,
    by_place,
    by_row,
    digits,
    headroom,
    in_lanes,
    joined,
    query_digits,
    single,
    summed,
    without_end,
)
from kvprof.kernels.quantized.operand_layout import PLACES
from kvprof.kernels.quantized.tables import EYE_HALVES, EYE_THREE, PlaneColumns
from kvprof.kernels.split_kv import empty, store_columns
from kvprof.kernels.tables import column

__all__ = ["column_piece", "sums_are_whole"]

_PLANE = tl.constexpr(len(PlaneColumns._fields))
_START = tl.constexpr(column(PlaneColumns, "start"))
_WIDTH = tl.constexpr(column(PlaneColumns, "width"))
_DEPTH = tl.constexpr(column(PlaneColumns, "depth"))
_GROUP = tl.constexpr(column(PlaneColumns, "group"))
_FIRST = tl.constexpr(column(PlaneColumns, "first"))
_LAST = tl.constexpr(column(PlaneColumns, "last"))
_AT = tl.constexpr(column(PlaneColumns, "at"))
_BITS = tl.constexpr(column(PlaneColumns, "bits"))
_STEP = tl.constexpr(column(PlaneColumns, "step"))
_EYE_HALVES = tl.constexpr(EYE_HALVES)
_EYE_THREE = tl.constexpr(EYE_THREE)
_BLOCK = tl.constexpr(PLACES)
_SLOTS = tl.constexpr(COLUMN_SLOTS)
#: Scale of the exponent bias from e4m3 to float16: e4m3 bits without the sign, read as float16.
_E4M3_TO_F16_BIAS = tl.constexpr(2.0**8)
#: No scale over that is smaller.
_LEAST = tl.constexpr(2.0**-14)
#: Four such numbers of a word, as float32.
_SCALES = tl.constexpr(
    "{ .reg .b32 x, y; .reg .b16 a, b; "
    "and.b32 x, $4, 0x007F007F; shl.b32 x, x, 7; and.b32 y, $4, 0x7F007F00; shr.b32 y, y, 1; "
    "mov.b32 {a, b}, x; cvt.f32.f16 $0, a; cvt.f32.f16 $2, b; "
    "mov.b32 {a, b}, y; cvt.f32.f16 $1, a; cvt.f32.f16 $3, b; }"
)
#: Behind how many bits of its byte a token's code lies, by its bits; of 3 the lower two, and those
#: of the first half's highest (1). In the highest bits of a byte it is less half of what it can be.
_TO = dict.fromkeys((1, 2, 3), (0, 2, 4, 6)) | {4: (0, 0, 4, 4), 8: (0, 0, 0, 0)}


@triton.constexpr_function
def _to(bits, slot):
    """Return behind how many bits of its byte a slot's code lies."""
    return _TO[bits][slot]


@triton.constexpr_function
def _bytes(bits):
    """Return of how many bytes a place is, of codes or of the lower bits of 3."""
    return max(1, bits // 2)


@triton.constexpr_function
def _paired(bits, width):
    """Return whether two bytes of a place of K are read as if they were of twice the columns."""
    return width == 16 and bits in (4, 8)


@triton.constexpr_function
def _shift_between_runs(before, bits, slot):
    """Return what one run's products are shifted by before those of the next are added."""
    return _TO[bits][slot] - _TO[before][slot]


@triton.constexpr_function
def _slot_order(bits, number):
    """Return which slot's products with weights come next, so that 2-bit codes need no shift."""
    return number if bits < 4 else (1, 0, 3, 2)[number] if bits == 4 else (1, 3, 0, 2)[number]


@triton.constexpr_function
def _accumulator_shift(bits, number):
    """Return by how much the sums are shifted before the next slot's products are added."""
    return ((0, 0, 4, 0) if bits < 4 else (0, 2, 2, 2) if bits == 4 else (0, 0, 2, 0))[number]


@triton.constexpr_function
def _slot_scale(bits, slot):
    """Return what 1 of a slot's products is worth in codes of its run."""
    return 2.0 ** -_TO[bits][slot]


@triton.constexpr_function
def _signed(bits, slot):
    """Return whether a slot's code lies in the highest bits of its byte."""
    return bits + _TO[bits][slot] == 8


@triton.constexpr_function
def _twice_middle(bits, slot):
    """Return twice the middle of a slot's codes of some bits as they are multiplied."""
    return -1 if _signed(bits, slot) else (1 << bits) - 1


@triton.constexpr_function
def _part_middle(bits, part, slot):
    """Return it of codes of K; of 3 bits of the lower two, and of the highest by halves."""
    if bits in (2, 4, 8):
        return _twice_middle(bits, slot)
    # The second half's lie one bit farther, and in the last slot are less what they can be.
    found = (1, -2 if slot == 3 else 2)
    return (_twice_middle(2, slot), *found)[part] if bits == 3 else found[part]


@triton.constexpr_function
def _any_of_4(kinds, at, planes):
    """Return whether a kind's planes from `at` on have one of 4 bits."""
    return any(kinds[at + number * _PLANE.value + _BITS.value] == 4 for number in range(planes))


@triton.constexpr_function
def sums_are_whole(kinds, at, planes):
    """Return whether no sum of keys is more than an int32, whatever the codes.

    A column's largest, beside queries that are as large as two digits can be: 128 where codes lie
    in the highest bits, but 64 of the lower of 3, whose queries are half of the highest's, and both
    where they are together; and four times as much of 4 bits before those of fewer, by which they
    are shifted.
    """
    bits = [kinds[at + number * _PLANE.value + _BITS.value] for number in range(planes)]
    largest = 0
    for number in range(planes):
        for begin in range(0, kinds[at + number * _PLANE.value + _WIDTH.value], 16):
            start = kinds[at + number * _PLANE.value + _START.value] + begin
            if bits[number] == 3:
                own = 192
            elif bits[number] == 4 and min(bits) < 4:
                own = 512
            else:
                own = 64 if bits[number] == 2 and bits_of(kinds, at, planes, start) == 3 else 128
            largest += 16 * own
    return largest * MOST.value < 2**31


@triton.constexpr_function
def _assembly(bits, at):
    """Return assembly for four bytes that leaves the bits of each behind `at`."""
    if bits == 8:
        return "mov.b32 $0, $1;"
    return f"and.b32 $0, $1, {((1 << bits) - 1 << at) * 0x01010101:#010x};"


@triton.jit
def _bits(octets, AT: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr):
    """Return bytes of which only the bits behind AT are left, as int8."""
    if FAST:
        TEXT: tl.constexpr = _assembly(BITS, AT)
        found = tl.inline_asm_elementwise(
            TEXT, "=r,r", [octets], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        found = (octets & (((1 << BITS) - 1) << AT)).to(tl.int8, bitcast=True)
    return found


@triton.constexpr_function
def _masked_assembly(slot):
    """Return assembly for four bytes that leaves a slot's bits, of masks of the first slot's."""
    return f"{{ .reg .b32 x; shl.b32 x, $2, {2 * slot}; and.b32 $0, $1, x; }}"


@triton.jit
def _masked(octets, masks, SLOT: tl.constexpr, FAST: tl.constexpr):
    """Return bytes of which only a slot's bits are left, as int8.

    Parameters
    ----------
    octets
        uint8.
    masks
        uint8, in the same shape: the bits of the first slot.
    """
    if FAST:
        TEXT: tl.constexpr = _masked_assembly(SLOT)
        found = tl.inline_asm_elementwise(
            TEXT, "=r,r,r", [octets, masks], tl.int8, is_pure=True, pack=4
        )
    else:
        found = (octets & (masks << 2 * SLOT)).to(tl.int8, bitcast=True)
    return found


@triton.jit
def _key_products(
    raws,
    #: int8 `[DEPTH, 2 · heads]`; where two bytes of a place lie side by side two of them, which
    #: meet the first and the second.
    query,
    eye,
    tile_at,
    places,
    AT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    FIRST: tl.constexpr,
    BEFORE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Add a plane to the products of a run, one per slot."""
    block = (tile_at + places // _BLOCK * BLOCK_BYTES)[:, None] + AT
    lane = (places % _BLOCK)[:, None]
    octets = ()
    masks = ()
    if BITS == 1:
        # Each byte for two columns.
        own = lane * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
        shape: tl.constexpr = (own.shape[0], 2, WIDTH // 2)
        octets += (tl.broadcast_to(tl.load(block + own)[:, None, :], shape),)
        mask = tl.load(eye + _EYE_HALVES + tl.arange(0, 2))
        masks += (tl.broadcast_to(mask[None, :, None], shape),)
    elif BITS == 3:
        # 16 columns: the lower bits, and behind them the highest ones twice.
        own = tl.arange(0, 32)[None, :]
        at = tl.where(own < 16, lane * 16 + own, _BLOCK * 16 + lane * 8 + own % 8)
        octets += (tl.load(block + tl.max_contiguous(tl.multiple_of(at, (1, 8)), (1, 8))),)
        mask = tl.load(eye + _EYE_THREE + tl.arange(0, 32))
        masks += (tl.broadcast_to(mask[None, :], octets[0].shape),)
    elif _paired(BITS, WIDTH):
        # Two bytes of a place side by side, as those of 32 columns.
        own = tl.arange(0, 32)[None, :]
        at = own // 16 * (_BLOCK * 16) + lane * 16 + own % 16
        at = tl.max_contiguous(tl.multiple_of(at, (1, 16)), (1, 16))
        for part in tl.static_range(_bytes(BITS) // 2):
            octets += (tl.load(block + at + part * (_BLOCK * own.shape[1])),)
    else:
        column = tl.arange(0, DEPTH)[None, :]
        own = lane * WIDTH + column
        for part in tl.static_range(_bytes(BITS)):
            if DEPTH == WIDTH:
                octets += (tl.load(block + own + part * (_BLOCK * WIDTH)),)
            else:
                there = tl.broadcast_to(column < WIDTH, own.shape)
                octets += (tl.load(block + own + part * (_BLOCK * WIDTH), mask=there),)
    found = ()
    for slot in tl.static_range(_SLOTS):
        if len(masks) == 1:
            codes = _masked(octets[0], masks[0], slot, FAST)
            codes = tl.reshape(codes, (codes.shape[0], DEPTH))
            factor = query[0]
        elif _paired(BITS, WIDTH):
            codes = _bits(octets[slot % _bytes(BITS) // 2], _to(BITS, slot), BITS, FAST)
            # What meets the other byte is 0.
            factor = query[slot % 2]
        else:
            codes = _bits(octets[slot % _bytes(BITS)], _to(BITS, slot), BITS, FAST)
            factor = query[0]
        if FIRST:
            product = tl.dot(codes, factor, out_dtype=tl.int32)
        else:
            before = raws[slot]
            if _shift_between_runs(BEFORE, BITS, slot) > 0:
                before = before << _shift_between_runs(BEFORE, BITS, slot)
            product = tl.dot(codes, factor, before, out_dtype=tl.int32)
        found += (product,)
    return found


@triton.jit
def _value_products(
    weights,
    eye,
    tile_at,
    places,
    AT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    FAST: tl.constexpr,
):
    """Return weighted codes of a plane, ``[WIDTH, heads]``, 2^`_to` of the third slot as large."""
    lane = tile_at + (places // _BLOCK * BLOCK_BYTES + places % _BLOCK)[None, :]
    row = tl.arange(0, WIDTH)
    sums = tl.zeros([WIDTH, weights[0].shape[1]], tl.int32)
    if BITS == 3:
        shape: tl.constexpr = (2, WIDTH // 2, lane.shape[1])
        line = tl.arange(0, WIDTH // 2)[:, None] * _BLOCK
        tops = tl.broadcast_to(tl.load(lane + line + (AT + _BLOCK * WIDTH))[None, :, :], shape)
        masks = tl.load(eye + _EYE_HALVES + tl.arange(0, 2))[:, None, None]
        masks = tl.broadcast_to(masks, shape)
        for slot in tl.static_range(_SLOTS):
            if _accumulator_shift(2, slot) > 0:
                sums = sums << _accumulator_shift(2, slot)
            top = tl.reshape(_masked(tops, masks, slot, FAST), (WIDTH, lane.shape[1]))
            sums = tl.dot(top, weights[slot], sums, out_dtype=tl.int32)
        # Four times as much in what the lower bits begin with, 2^4 and of the second half 2^5 here.
        sums = sums >> tl.where(row < WIDTH // 2, 2, 3)[:, None]
    octets = ()
    for part in tl.static_range(_bytes(BITS)):
        octets += (tl.load(lane + row[:, None] * _BLOCK + (AT + part * (_BLOCK * WIDTH))),)
    for number in tl.static_range(_SLOTS):
        if _accumulator_shift(BITS, number) > 0:
            sums = sums << _accumulator_shift(BITS, number)
        raw = _bits(
            octets[_slot_order(BITS, number) % _bytes(BITS)],
            _to(BITS, _slot_order(BITS, number)),
            2 if BITS == 3 else BITS,
            FAST,
        )
        sums = tl.dot(raw, weights[_slot_order(BITS, number)], sums, out_dtype=tl.int32)
    # Of 64 places and 4 bits at most 1.5 · 10^9, of others less.
    return joined(sums)


@triton.jit
def _row_scales(pointer, places, AT: tl.constexpr, BLOCK_BYTES: tl.constexpr, FAST: tl.constexpr):
    """Load four tokens' scales of some places, over `_E4M3_TO_F16_BIAS`, as float32 vectors."""
    words = pointer.to(tl.pointer_type(tl.uint32), bitcast=True)
    at = words + (places // _BLOCK * (BLOCK_BYTES // 4) + places % _BLOCK)
    word = tl.load(at + AT // 4)
    if FAST:
        found = tl.inline_asm_elementwise(
            _SCALES, "=f,=f,=f,=f,r", [word], dtype=(tl.float32,) * 4, is_pure=True, pack=1
        )
    else:
        found = ()
        for slot in tl.static_range(_SLOTS):
            own = ((word >> (8 * slot)) & 0x7F) << 7
            found += (own.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32),)
    return found


@triton.jit
def _over_rows(sums, ROWS: tl.constexpr):
    """Return the first of rows that are alike, ``[ROWS, heads]``, of what a lane has."""
    apart = tl.reshape(sums, (2, 8, sums.shape[1]))
    row = tl.max(apart, 0)[None, :, :]
    return tl.reshape(tl.broadcast_to(row, (ROWS // 8, 8, sums.shape[1])), (ROWS, sums.shape[1]))


@triton.jit
def _value_middle(weighed, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the middles of a plane's columns, times the weights of each: ``[WIDTH, heads]``."""
    low: tl.constexpr = 2 if BITS == 3 else BITS
    found = tl.zeros(weighed[0].shape, tl.float32)
    for part in tl.static_range(3):
        found += weighed[part] * (0.5 * _twice_middle(low, part + 1))
    found = tl.broadcast_to(found[None, :], (WIDTH, found.shape[0]))
    if BITS == 3:
        # 4 · 1/2, and of the second half's last slot, which is less 1, 4 · (1/2 - 1).
        row = tl.arange(0, WIDTH)[:, None]
        last = tl.where(row < WIDTH // 2, weighed[2], -weighed[2])
        found += 2.0 * (weighed[0] + weighed[1] + last)
    return found


@triton.jit
def _offsets(places: tl.constexpr, SLOT: tl.constexpr):
    """Return by what a slot's weights are changed before they are rounded: eighths, by turns.

    Where one token has nearly all weight, many have less than half of what is told apart. To the
    nearest all of them would be 0; so as many are 1 as they are worth, and none that is 0.
    """
    turn = tl.arange(0, places) % _BLOCK // 8
    return (2 * turn + SLOT // 2).to(tl.float32) * 0.125 - 0.4375


@triton.jit
def _column_tile(
    sums,
    whole,
    mass,
    top,
    queries,
    totals,
    eye,
    octets,
    pages,
    stride,
    at,
    stop,
    rate,
    cap,
    KINDS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    K_PLANES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_PLANES: tl.constexpr,
    V_SCALES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    PLACES: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    FAST: tl.constexpr,
):
    """Process one tile; bytes behind a row's end are masked, since a second loop costs more."""
    places = by_row(PLACES)
    left = stop - at - places * _SLOTS
    if PAGE > 0:
        octets += tl.load(pages + at // PAGE).to(tl.int64) * stride
        block = tl.full([], at % PAGE // (_BLOCK * _SLOTS), tl.int64)
    else:
        block = tl.full([], at // (_BLOCK * _SLOTS), tl.int64)
    octets = tl.multiple_of(octets + block * BLOCK_BYTES, 16)
    scores = ()
    raws = ()
    for number in tl.static_range(K_PLANES):
        raws = _key_products(
            raws,
            queries[number],
            eye,
            octets,
            places,
            KINDS[KEYS + number * _PLANE + _AT],
            BLOCK_BYTES,
            KINDS[KEYS + number * _PLANE + _BITS],
            KINDS[KEYS + number * _PLANE + _WIDTH],
            KINDS[KEYS + number * _PLANE + _DEPTH],
            KINDS[KEYS + number * _PLANE + _FIRST],
            KINDS[KEYS + (number - (number > 0)) * _PLANE + _BITS],
            FAST,
        )
        if KINDS[KEYS + number * _PLANE + _LAST] == 1:
            found = ()
            for slot in tl.static_range(_SLOTS):
                own = joined(raws[slot], sums_are_whole(KINDS, KEYS, K_PLANES)) * (
                    rate * _slot_scale(KINDS[KEYS + number * _PLANE + _BITS], slot)
                )
                if KINDS[KEYS + number * _PLANE + _GROUP] == 0:
                    found += (own - totals[max(0, slot - 1)],)
                else:
                    found += (own + scores[slot],)
            scores = found
    scales = _row_scales(octets, places, K_SCALES, BLOCK_BYTES, FAST)
    found = ()
    for slot in tl.static_range(_SLOTS):
        score = scores[slot] * scales[slot][:, None]
        if CAPPED:
            # cap · tanh(s / cap) with tanh(x) = 1 - 2 / (e^2x + 1); `cap` is times log2(e).
            score = cap - 2.0 * cap / (tl.exp2(score * (2.0 * 1.4426950408889634 / cap)) + 1.0)
        found += (score,)
    scores = found
    scales = _row_scales(octets, places, V_SCALES, BLOCK_BYTES, FAST)
    if stop - at < PLACES * _SLOTS:
        scores = without_end(scores, left[:, None], float("-inf"), _SLOTS)
        scales = without_end(scales, left, 0.0, _SLOTS)
    highest = scores[0]
    for slot in tl.static_range(1, _SLOTS):
        highest = tl.maximum(highest, scores[slot])
    peak = tl.max(highest, 0)
    higher = tl.maximum(top, peak)
    fade = tl.exp2(top - higher)[None, :]
    most = scales[0]
    for slot in tl.static_range(1, _SLOTS):
        most = tl.maximum(most, scales[slot])
    # Weights such that none times a scale is more than two digits hold.
    up = headroom(tl.maximum(tl.max(most, 0), _LEAST))
    unit = tl.exp2(peak - higher - up)[None, :]
    base = (peak - up)[None, :]
    numbers = ()
    counts = ()
    for slot in tl.static_range(_SLOTS):
        weight = tl.exp2(scores[slot] - base)
        if slot == 0:
            own = weight
        else:
            own += weight
        number = weight * scales[slot][:, None]
        if slot % 2 == 1:
            number = number * 0.25
        number += _offsets(PLACES, slot)[:, None]
        count = biased(number) - ZERO
        if slot == 1:
            counts = (counts[0] + (count << 2),)
        elif slot == 3:
            counts += (count << 2,)
        else:
            counts += (count,)
        numbers += (by_place(digits(number, FAST)),)
    mass = mass * fade + in_lanes(own) * unit
    weighed = ()
    for part in tl.static_range(3):
        weighed += (whole[part] * fade + in_lanes(counts[part]).to(tl.float32) * unit,)
    found = ()
    for number in tl.static_range(V_PLANES):
        own = _value_products(
            numbers,
            eye,
            octets,
            tl.arange(0, PLACES),
            KINDS[VALUES + number * _PLANE + _AT],
            BLOCK_BYTES,
            KINDS[VALUES + number * _PLANE + _BITS],
            KINDS[VALUES + number * _PLANE + _WIDTH],
            FAST,
        )
        worth = unit * _slot_scale(KINDS[VALUES + number * _PLANE + _BITS], 2)
        found += (sums[number] * fade + own * worth,)
    return found, weighed, mass, higher


@triton.jit
def column_piece(
    octets,
    pages,
    stride,
    eye,
    partial,
    logs,
    item,
    query,
    width,
    start,
    stop,
    output_width,
    scale,
    cap,
    first_head,
    KINDS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    K_PLANES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_PLANES: tl.constexpr,
    V_SCALES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    V_WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    WIDEST: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    FAST: tl.constexpr,
):
    """Attend to the tokens of one piece and leave its part of the result."""
    heads = first_head + tl.arange(0, HEADS)
    real = heads < GROUP
    queries, parts, largest = query_digits(
        query, width, first_head, KINDS, KEYS, K_PLANES, GROUP, HEADS, FAST
    )
    rate = single(largest * (scale / MOST * _E4M3_TO_F16_BIAS))[None, :]
    totals = ()
    for part in tl.static_range(3):
        # Only codes of 4 bits lie in another way in the third slot than in those before.
        if part == 1 and not _any_of_4(KINDS, KEYS, K_PLANES):
            totals += (totals[0],)
        else:
            total = tl.zeros([16, 2 * HEADS], tl.int32)
            for number in tl.static_range(K_PLANES):
                for own in tl.static_range(len(parts[number])):
                    middles = tl.full(
                        [16, parts[number][own].shape[0]],
                        _part_middle(KINDS[KEYS + number * _PLANE + _BITS], own, part + 1),
                        tl.int8,
                    )
                    total = summed(parts[number][own], total, middles)
            totals += (_over_rows(joined(total) * (0.5 * rate), PLACES),)
    sums = ()
    for number in tl.static_range(V_PLANES):
        sums += (empty(KINDS[VALUES + number * _PLANE + _WIDTH], HEADS),)
    mass = tl.zeros([8, HEADS], tl.float32)
    # Of the first two slots, whose codes lie alike in their bytes whatever their bits, of the third
    # and of the fourth.
    whole = (mass, mass, mass)
    # Finite, so that the first tile's fade is exp2 of something and not of inf - inf.
    top = tl.full([HEADS], -1e30, tl.float32)
    for at in tl.range(start, stop, PLACES * _SLOTS, num_stages=STAGES):
        sums, whole, mass, top = _column_tile(
            sums, whole, mass, top, queries, totals, eye, octets, pages, stride, at, stop, rate,
            cap, KINDS, KEYS, VALUES, K_PLANES, K_SCALES, V_PLANES, V_SCALES, BLOCK_BYTES, PLACES,
            PAGE, CAPPED, FAST,
        )  # fmt: skip
    weight = tl.sum(mass, 0)
    weighed = ()
    for part in tl.static_range(3):
        weighed += (tl.sum(whole[part], 0),)
    share = _E4M3_TO_F16_BIAS / weight
    result = partial + (item * GROUP + heads)[None, :].to(tl.int64) * WIDEST
    for number in tl.static_range(V_PLANES):
        middle = _value_middle(
            weighed,
            KINDS[VALUES + number * _PLANE + _BITS],
            KINDS[VALUES + number * _PLANE + _WIDTH],
        )
        found = (sums[number] - middle) * (KINDS[VALUES + number * _PLANE + _STEP] * share)[None, :]
        store_columns(
            result,
            found,
            real,
            KINDS[VALUES + number * _PLANE + _START],
            KINDS[VALUES + number * _PLANE + _WIDTH],
        )
    # A narrower segment adds nothing to the columns behind its own.
    for begin in range(V_WIDTH, output_width, 16):
        store_columns(result + begin, empty(16, HEADS), real, 0, 16)
    tl.store(logs + item * GROUP + heads, top + tl.log2(weight), mask=real)
