# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Decode over tokens whose columns have bits of their own, in whole numbers.

Codes are whole numbers, so they are multiplied as such: queries and weights enter the products of
tensor cores as 15 bits, an upper digit and a lower one in adjacent columns, which come back side by
side in a lane. Four codes of a word are one or two operations away from an operand.

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
    joined,
    query_digits,
    single,
    summed,
    without_end,
)
from kvprof.kernels.segments.side import PLACES
from kvprof.kernels.segments.tables import PlaneColumns
from kvprof.kernels.tables import column

__all__ = ["column_piece"]

_PLANE = tl.constexpr(len(PlaneColumns._fields))
_START = tl.constexpr(column(PlaneColumns, "start"))
_WIDTH = tl.constexpr(column(PlaneColumns, "width"))
_DEPTH = tl.constexpr(column(PlaneColumns, "depth"))
_GROUP = tl.constexpr(column(PlaneColumns, "group"))
_FIRST = tl.constexpr(column(PlaneColumns, "first"))
_LAST = tl.constexpr(column(PlaneColumns, "last"))
_AT = tl.constexpr(column(PlaneColumns, "at"))
_BITS = tl.constexpr(column(PlaneColumns, "bits"))
_BELOW = tl.constexpr(column(PlaneColumns, "shift"))
_STEP = tl.constexpr(column(PlaneColumns, "step"))
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
#: Where a slot's code of 2, 4 and 8 bits lies in an operand: where it lies in a byte, but below the
#: sign, and of 2 bits below the highest of 3.
_TO = {2: (0, 2, 4, 4), 4: (0, 2, 0, 2), 8: (0, 0, 0, 0)}
#: Twice the middle of a plane's codes, in codes of its run, by its bits; those of 8 are less 128.
_TWICE_MIDDLE = {1: 4, 2: 3, 4: 15, 8: -1}


@triton.constexpr_function
def _twice_middle(*bits):
    """Return it of the planes of a run."""
    return sum(_TWICE_MIDDLE[own] for own in bits)


@triton.constexpr_function
def _to(bits, slot):
    """Return behind how many bits of an operand of K a slot's code lies."""
    return _TO[2][slot] + 2 if bits == 1 else _TO[bits][slot]


@triton.constexpr_function
def _worth(bits, slot):
    """Return what 1 of an operand of K is worth in codes of its run."""
    return 2.0 ** -_TO[max(2, bits)][slot]


@triton.constexpr_function
def _rise(before, bits, slot):
    """Return what one run's products are shifted by before those of the next are added."""
    return _TO[max(2, bits)][slot] - _TO[max(2, before)][slot]


@triton.constexpr_function
def _value_to(bits, below, slot):
    """Return behind how many bits of an operand of V a slot's code lies."""
    return below + _TO[2][slot] if bits < 3 else 0


@triton.constexpr_function
def _farther(bits, slot):
    """Return how much farther a slot's code lies than the one's before in an operand of V."""
    return _TO[2][slot] - _TO[2][max(0, slot - 1)] if bits < 3 else 0


@triton.constexpr_function
def _value_worth(bits, below):
    """Return what 1 of a plane's sums of V is worth in codes."""
    return 2.0 ** -(below + _TO[2][-1]) if bits < 3 else 1.0


@triton.constexpr_function
def _assembly(at, bits, to):
    """Return assembly for four bytes: a code of each, from behind `at` bits to behind `to`."""
    if bits == 8:
        return "xor.b32 $0, $1, 0x80808080;"
    mask = f"{((1 << bits) - 1 << to) * 0x01010101:#010x}"
    if at == to:
        return f"and.b32 $0, $1, {mask};"
    shift = f"shr.b32 x, $1, {at - to}" if at > to else f"shl.b32 x, $1, {to - at}"
    return f"{{ .reg .b32 x; {shift}; and.b32 $0, x, {mask}; }}"


@triton.jit
def _codes(octets, AT: tl.constexpr, BITS: tl.constexpr, TO: tl.constexpr, FAST: tl.constexpr):
    """Return the codes behind AT bits of bytes as int8, times 2^TO; of 8 bits less 128."""
    if FAST:
        TEXT: tl.constexpr = _assembly(AT, BITS, TO)
        found = tl.inline_asm_elementwise(
            TEXT, "=r,r", [octets], dtype=tl.int8, is_pure=True, pack=4
        )
    elif BITS == 8:
        found = (octets ^ 128).to(tl.int8, bitcast=True)
    else:
        found = (((octets >> AT) & ((1 << BITS) - 1)) << TO).to(tl.int8)
    return found


@triton.jit
def _key_products(
    raws,
    query,
    tile_at,
    places,
    AT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    BELOW: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    FIRST: tl.constexpr,
    BEFORE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Add a plane of bits to the products of a run, one per slot."""
    octet = tl.arange(0, DEPTH)
    lane = places // _BLOCK * BLOCK_BYTES + places % _BLOCK * WIDTH
    APART: tl.constexpr = 2 if BITS == 1 else BITS
    found = ()
    for part in tl.static_range(APART // 2):
        pointer = tile_at + (lane[:, None] + octet[None, :]) + (AT + part * (_BLOCK * WIDTH))
        if DEPTH > WIDTH:
            octets = tl.load(pointer, mask=(octet < WIDTH)[None, :], other=0)
        else:
            octets = tl.load(pointer)
        for number in tl.static_range(8 // APART):
            raw = _codes(octets, BELOW + APART * number, BITS, _to(BITS, number), FAST)
            if FIRST:
                product = tl.dot(raw, query, out_dtype=tl.int32)
            else:
                before = raws[part * (8 // APART) + number]
                if _rise(BEFORE, BITS, part * (8 // APART) + number) > 0:
                    before = before << _rise(BEFORE, BITS, part * (8 // APART) + number)
                product = tl.dot(raw, query, before, out_dtype=tl.int32)
            found += (product,)
    return found


@triton.jit
def _value_products(
    weights,
    tile_at,
    places,
    AT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    BELOW: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    FAST: tl.constexpr,
):
    """Return weighted codes of a plane of bits, ``[DEPTH, heads]``; from WIDTH on columns again."""
    line = tl.arange(0, DEPTH) % WIDTH
    lane = places // _BLOCK * BLOCK_BYTES + places % _BLOCK
    APART: tl.constexpr = 2 if BITS == 1 else BITS
    for part in tl.static_range(APART // 2):
        pointer = tile_at + (line[:, None] * _BLOCK + lane[None, :])
        octets = tl.load(pointer + (AT + part * (_BLOCK * WIDTH)))
        for number in tl.static_range(8 // APART):
            raw = _codes(octets, BELOW + APART * number, BITS, _value_to(BITS, BELOW, number), FAST)
            weight = weights[part * (8 // APART) + number]
            if (part == 0) and (number == 0):
                sums = tl.dot(raw, weight, out_dtype=tl.int32)
            else:
                if _farther(BITS, number) > 0:
                    sums = sums << _farther(BITS, number)
                sums = tl.dot(raw, weight, sums, out_dtype=tl.int32)
    return joined(sums)


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
def _with_top(low, first, second, WIDTH: tl.constexpr):
    """Add the halves of a plane of highest bits, WIDTH columns each, to the lower ones."""
    if WIDTH < 16:
        row = tl.arange(0, 16)
        top = tl.where((row < WIDTH)[:, None], first, second)
    else:
        top = tl.permute(tl.join(first, second), (2, 0, 1))
        top = tl.reshape(top, (2 * WIDTH, first.shape[1]))
    return low + 4.0 * top


@triton.jit
def _column_tile(
    sums,
    whole,
    mass,
    top,
    queries,
    total,
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
            octets,
            places,
            KINDS[KEYS + number * _PLANE + _AT],
            BLOCK_BYTES,
            KINDS[KEYS + number * _PLANE + _BITS],
            KINDS[KEYS + number * _PLANE + _BELOW],
            KINDS[KEYS + number * _PLANE + _WIDTH],
            KINDS[KEYS + number * _PLANE + _DEPTH],
            KINDS[KEYS + number * _PLANE + _FIRST],
            KINDS[KEYS + (number - (number > 0)) * _PLANE + _BITS],
            FAST,
        )
        if KINDS[KEYS + number * _PLANE + _LAST] == 1:
            found = ()
            for slot in tl.static_range(_SLOTS):
                own = joined(raws[slot]) * (
                    rate * _worth(KINDS[KEYS + number * _PLANE + _BITS], slot)
                )
                if KINDS[KEYS + number * _PLANE + _GROUP] == 0:
                    found += (own - total,)
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
    if stop - at < PLACES * _SLOTS:
        scores = without_end(scores, left[:, None], float("-inf"), _SLOTS)
    highest = scores[0]
    for slot in tl.static_range(1, _SLOTS):
        highest = tl.maximum(highest, scores[slot])
    peak = tl.max(highest, 0)
    higher = tl.maximum(top, peak)
    fade = tl.exp2(top - higher)[None, :]
    scales = _row_scales(octets, places, V_SCALES, BLOCK_BYTES, FAST)
    if stop - at < PLACES * _SLOTS:
        scales = without_end(scales, left, 0.0, _SLOTS)
    most = scales[0]
    for slot in tl.static_range(1, _SLOTS):
        most = tl.maximum(most, scales[slot])
    # Weights such that none times a scale is more than two digits hold.
    up = headroom(tl.maximum(tl.max(most, 0), _LEAST))
    unit = tl.exp2(peak - higher - up)[None, :]
    base = (peak - up)[None, :]
    numbers = ()
    count = tl.full([PLACES, higher.shape[0]], -_SLOTS * ZERO & 0x7FFFFFFF, tl.int32)
    for slot in tl.static_range(_SLOTS):
        weight = tl.exp2(scores[slot] - base)
        if slot == 0:
            own = weight
        else:
            own += weight
        number = weight * scales[slot][:, None]
        count += biased(number)
        numbers += (by_place(digits(number, FAST)),)
    mass = mass * fade + own * unit
    whole = whole * fade + (count & 0x7FFFFFFF).to(tl.float32) * unit
    found = ()
    for number in tl.static_range(V_PLANES):
        own = _value_products(
            numbers,
            octets,
            tl.arange(0, PLACES),
            KINDS[VALUES + number * _PLANE + _AT],
            BLOCK_BYTES,
            KINDS[VALUES + number * _PLANE + _BITS],
            KINDS[VALUES + number * _PLANE + _BELOW],
            KINDS[VALUES + number * _PLANE + _WIDTH],
            KINDS[VALUES + number * _PLANE + _DEPTH],
            FAST,
        )
        worth = unit * _value_worth(
            KINDS[VALUES + number * _PLANE + _BITS], KINDS[VALUES + number * _PLANE + _BELOW]
        )
        found += (sums[number] * fade + own * worth,)
    return found, whole, mass, higher


@triton.jit
def column_piece(
    octets,
    pages,
    stride,
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
    queries, largest = query_digits(
        query, width, first_head, KINDS, KEYS, K_PLANES, GROUP, HEADS, FAST
    )
    total = tl.zeros([16, 2 * HEADS], tl.int32)
    for number in tl.static_range(K_PLANES):
        total = summed(queries[number], total, _twice_middle(KINDS[KEYS + number * _PLANE + _BITS]))
    rate = single(largest * (scale / MOST * _LACK))[None, :]
    total = tl.max(joined(total), 0)[None, :] * (0.5 * rate)
    sums = ()
    for number in tl.static_range(V_PLANES):
        sums += (empty(KINDS[VALUES + number * _PLANE + _DEPTH], HEADS),)
    whole = tl.zeros([PLACES, HEADS], tl.float32)
    mass = tl.zeros([PLACES, HEADS], tl.float32)
    # Finite, so that the first tile's fade is exp2 of something and not of inf - inf.
    top = tl.full([HEADS], -1e30, tl.float32)
    for at in tl.range(start, stop, PLACES * _SLOTS, num_stages=STAGES):
        sums, whole, mass, top = _column_tile(
            sums, whole, mass, top, queries, total, octets, pages, stride, at, stop, rate, cap,
            KINDS, KEYS, VALUES, K_PLANES, K_SCALES, V_PLANES, V_SCALES, BLOCK_BYTES, PLACES, PAGE,
            CAPPED, FAST,
        )  # fmt: skip
    weight = tl.sum(mass, 0)
    weighed = tl.sum(whole, 0)
    share = _LACK / weight
    result = partial + (item * GROUP + heads)[None, :].to(tl.int64) * WIDEST
    for number in tl.static_range(V_PLANES):
        if KINDS[VALUES + number * _PLANE + _BITS] > 1:
            found = sums[number]
            if (number + 2 < V_PLANES) and (KINDS[VALUES + number * _PLANE + _PLANE + _BITS] == 1):
                found = _with_top(
                    found,
                    sums[number + 1],
                    sums[number + 2],
                    KINDS[VALUES + number * _PLANE + _PLANE + _WIDTH],
                )
                half = 0.5 * _twice_middle(KINDS[VALUES + number * _PLANE + _BITS], 1)
            else:
                half = 0.5 * _twice_middle(KINDS[VALUES + number * _PLANE + _BITS])
            found = (found - (half * weighed)[None, :]) * (
                KINDS[VALUES + number * _PLANE + _STEP] * share
            )[None, :]
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
