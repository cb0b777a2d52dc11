# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Decode over tokens whose columns have bits of their own, in whole numbers.

Codes are whole numbers, so they are multiplied as such: queries and weights enter the products of
tensor cores as 15 bits, an upper digit and a lower one in adjacent columns, which come back side by
side in a lane. Four codes of a word are an operation away from an operand, of the highest of 3 bits
two, of 8 none.

With ``x = scale · step · (code - half)``, the step of a run of columns and half its largest code:

- scores: ``scale · (Σ code · q' - Σ half · Σq')`` with ``q' = step · q``, the last once per
  program;
- values, per run: ``step · (Σ w · code - half · Σ w)`` with ``w = p · scale``, in fifteen bits of
  what the largest p and the largest scale of a tile make together.

Operations on whole numbers are what takes the time, so a code stays where it lies in its byte where
it can, and the sums are moved instead.
"""

import triton
import triton.language as tl

from kvprof.kernels.parts import empty, store_columns
from kvprof.kernels.segments.columns import COLUMN_SLOTS
from kvprof.kernels.segments.digits import (
    MOST,
    ZERO,
    biased,
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
from kvprof.kernels.segments.side import PLACES
from kvprof.kernels.segments.tables import EYE_HALVES, EYE_THREE, PlaneColumns
from kvprof.kernels.tables import column

__all__ = ["column_piece"]

_PLANE = tl.constexpr(len(PlaneColumns._fields))
_START = tl.constexpr(column(PlaneColumns, "start"))
_WIDTH = tl.constexpr(column(PlaneColumns, "width"))
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
#: By what a number in e4m3 less its sign, as the upper bits of a float16, is less than it was.
_LACK = tl.constexpr(2.0**8)
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
#: of the first half's highest. In the highest bits of a byte it is less half of what it can be.
_TO = {2: (0, 2, 4, 6), 3: (0, 2, 4, 6), 4: (0, 0, 4, 4), 8: (0, 0, 0, 0)}


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
def _rise(before, bits, slot):
    """Return what one run's products are shifted by before those of the next are added."""
    return _TO[bits][slot] - _TO[before][slot]


@triton.constexpr_function
def _farther(bits, slot):
    """Return how much farther a slot's code lies than the one's before."""
    return _TO[bits][slot] - _TO[bits][max(0, slot - 1)]


@triton.constexpr_function
def _worth(bits, slot):
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
    if bits != 3:
        return _twice_middle(bits, slot)
    # The second half's lie one bit farther, and in the last slot are less what they can be.
    return (_twice_middle(2, slot), 1, -2 if slot == 3 else 2)[part]


@triton.constexpr_function
def _any_of_4(kinds, at, planes):
    """Return whether a kind's planes from `at` on have one of 4 bits."""
    return any(kinds[at + number * _PLANE.value + _BITS.value] == 4 for number in range(planes))


@triton.constexpr_function
def _whole(kinds, at, planes):
    """Return whether no sum of keys is more than an int32, whatever the codes.

    A column's largest, beside queries that are as large as two digits can be: 128 where codes lie
    in the highest bits, of 3 bits 64 of the lower, whose queries are half of the highest's, and
    128 of these; and four times as much of 4 bits before those of fewer, by which they are shifted.
    """
    largest, later = 0, False
    for number in reversed(range(planes)):
        plane = at + number * _PLANE.value
        bits, width = kinds[plane + _BITS.value], kinds[plane + _WIDTH.value]
        largest += width * (192 if bits == 3 else 512 if bits == 4 and later else 128)
        later = later or bits < 4
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
def _key_codes(
    octets, top, SLOT: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, FAST: tl.constexpr
):
    """Return a slot's factors of a plane's products, ``[places, 32 or more]`` each: one or two.

    Where 16 columns of 2 bits are all they are there twice, and meet nothing the second time.

    Parameters
    ----------
    octets
    top
        Of 3 bits the first slot's masks, and where these are not for all that is in the octets,
        the bytes of the highest bits before them; else empty.
    """
    if len(top) == 1:
        masks = tl.broadcast_to(top[0][None, :], octets.shape)
        found = (_masked(octets, masks, SLOT, FAST),)
    else:
        own = _bits(octets, _to(BITS, SLOT), 2 if BITS == 3 else BITS, FAST)
        if WIDTH == 16:
            twice = tl.broadcast_to(own[:, None, :], (own.shape[0], 2, 16))
            own = tl.reshape(twice, (own.shape[0], 32))
        found = (own,)
        if len(top) == 2:
            shape: tl.constexpr = (own.shape[0], 2, WIDTH // 2)
            twice = tl.broadcast_to(top[0][:, None, :], shape)
            highest = _masked(twice, tl.broadcast_to(top[1][None, :, None], shape), SLOT, FAST)
            found += (tl.reshape(highest, (own.shape[0], WIDTH)),)
    return found


@triton.jit
def _key_products(
    raws,
    query,
    eye,
    tile_at,
    places,
    AT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    BEFORE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Add a plane to the products of a run, one per slot."""
    block = (tile_at + places // _BLOCK * BLOCK_BYTES)[:, None] + AT
    lane = (places % _BLOCK)[:, None]
    octets = ()
    top = ()
    if BITS == 3 and WIDTH == 16:
        # The lower bits, and behind them the highest ones twice.
        own = tl.arange(0, 32)[None, :]
        at = tl.where(own < 16, lane * 16 + own, _BLOCK * 16 + lane * 8 + own % 8)
        octets += (tl.load(block + tl.max_contiguous(tl.multiple_of(at, (1, 8)), (1, 8))),)
        top += (tl.load(eye + _EYE_THREE + tl.arange(0, 32)),)
    elif _paired(BITS, WIDTH):
        # Two bytes of a place side by side, as those of 32 columns.
        own = tl.arange(0, 32)[None, :]
        at = own // 16 * (_BLOCK * 16) + lane * 16 + own % 16
        at = tl.max_contiguous(tl.multiple_of(at, (1, 16)), (1, 16))
        for part in tl.static_range(_bytes(BITS) // 2):
            octets += (tl.load(block + at + part * (_BLOCK * own.shape[1])),)
    else:
        own = lane * WIDTH + tl.arange(0, WIDTH)[None, :]
        for part in tl.static_range(_bytes(BITS)):
            octets += (tl.load(block + own + part * (_BLOCK * WIDTH)),)
        if BITS == 3:
            own = lane * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
            top += (tl.load(block + own + _BLOCK * WIDTH),)
            top += (tl.load(eye + _EYE_HALVES + tl.arange(0, 2)),)
    found = ()
    for slot in tl.static_range(_SLOTS):
        if _paired(BITS, WIDTH):
            octet = octets[slot % _bytes(BITS) // 2]
            codes = (_bits(octet, _to(BITS, slot), BITS, FAST),)
            # What meets the other byte is 0.
            factors = (query[slot % 2],)
        else:
            octet = octets[slot % _bytes(BITS)]
            codes = _key_codes(octet, top, slot, BITS, WIDTH, FAST)
            factors = query
        if FIRST:
            product = tl.dot(codes[0], factors[0], out_dtype=tl.int32)
        else:
            before = raws[slot]
            if _rise(BEFORE, BITS, slot) > 0:
                before = before << _rise(BEFORE, BITS, slot)
            product = tl.dot(codes[0], factors[0], before, out_dtype=tl.int32)
        for part in tl.static_range(1, len(codes)):
            product = tl.dot(codes[part], factors[part], product, out_dtype=tl.int32)
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
    """Return weighted codes of a plane, ``[WIDTH, heads]``, 2^`_to` of the last slot as large."""
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
            if slot > 0:
                sums = sums << 2
            top = tl.reshape(_masked(tops, masks, slot, FAST), (WIDTH, lane.shape[1]))
            sums = tl.dot(top, weights[slot], sums, out_dtype=tl.int32)
        # Four times as much in what the lower bits begin with, 2^6 and of the second half 2^7 here.
        sums = sums >> tl.where(row < WIDTH // 2, 4, 5)[:, None]
    octets = ()
    for part in tl.static_range(_bytes(BITS)):
        octets += (tl.load(lane + row[:, None] * _BLOCK + (AT + part * (_BLOCK * WIDTH))),)
    for slot in tl.static_range(_SLOTS):
        raw = _bits(octets[slot % _bytes(BITS)], _to(BITS, slot), 2 if BITS == 3 else BITS, FAST)
        if _farther(BITS, slot) > 0:
            sums = sums << _farther(BITS, slot)
        sums = tl.dot(raw, weights[slot], sums, out_dtype=tl.int32)
    # A column that is 7 throughout has 13 · 2^7 at a place, of the largest weights: of 64 places
    # that is more than 2^31.
    return joined(sums, BITS != 3 or lane.shape[1] <= 32)


@triton.jit
def _row_scales(pointer, places, AT: tl.constexpr, BLOCK_BYTES: tl.constexpr, FAST: tl.constexpr):
    """Load the scales of four tokens of some places, over `_LACK`; a tuple of float32 vectors."""
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
    """Go on with one tile: scores, online softmax in base 2, weighted values.

    Behind a row's end lies room for a whole tile, whose bytes are numbers whatever they are, and
    are left out here: a loop of its own for the last tile would be the code once more, and code is
    what several kinds of head wait for.
    """
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
            KINDS[KEYS + number * _PLANE + _FIRST],
            KINDS[KEYS + (number - (number > 0)) * _PLANE + _BITS],
            FAST,
        )
        if KINDS[KEYS + number * _PLANE + _LAST] == 1:
            found = ()
            for slot in tl.static_range(_SLOTS):
                own = joined(raws[slot], _whole(KINDS, KEYS, K_PLANES)) * (
                    rate * _worth(KINDS[KEYS + number * _PLANE + _BITS], slot)
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
        count = biased(number) - ZERO
        if slot == 1:
            counts = (counts[0] + count,)
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
        worth = unit * _worth(KINDS[VALUES + number * _PLANE + _BITS], 3)
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
    rate = single(largest * (scale / MOST * _LACK))[None, :]
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
    share = _LACK / weight
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
