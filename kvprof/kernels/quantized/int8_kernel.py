# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Decode over rows of codes of the same bits, in whole numbers.

Codes are whole numbers, so they are multiplied as such: queries and weights enter the products of
tensor cores as two int8 in adjacent columns (`kvprof.kernels.quantized.int8_hi_lo`), codes as the
highest bits of an int8. Scales stay outside of the elements. With ``x = middle + scale · code``:

- scores, per token and group of columns: ``scale · (code · q) + middle · Σq``;
- values, per group: ``Σ w · code + Σ p · middle`` with ``w = p · scale``, in fifteen bits of the
  largest that a tile can have.
"""

import triton
import triton.language as tl

from kvprof.kernels.quantized.int8_hi_lo import (
    MOST,
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
from kvprof.kernels.quantized.tables import PlaneColumns
from kvprof.kernels.quantized.unpack import top_codes
from kvprof.kernels.split_kv import empty, store_columns
from kvprof.kernels.tables import column

__all__ = ["int8_piece"]

_PLANE = tl.constexpr(len(PlaneColumns._fields))
_START = tl.constexpr(column(PlaneColumns, "start"))
_WIDTH = tl.constexpr(column(PlaneColumns, "width"))
_DEPTH = tl.constexpr(column(PlaneColumns, "depth"))
_GROUP = tl.constexpr(column(PlaneColumns, "group"))
_FIRST = tl.constexpr(column(PlaneColumns, "first"))
_LAST = tl.constexpr(column(PlaneColumns, "last"))
_AT = tl.constexpr(column(PlaneColumns, "at"))
_BLOCK = tl.constexpr(PLACES)
#: No scale that is not 0 is smaller in float16.
_LEAST = tl.constexpr(2.0**-24)


@triton.jit
def _key_products(
    raws,
    query,
    tile_at,
    places,
    AT: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    FIRST: tl.constexpr,
    FAST: tl.constexpr,
):
    """Add a plane's columns to the products of a group, one per slot."""
    column = tl.arange(0, DEPTH)
    lane = places // _BLOCK * BLOCK_BYTES + places % _BLOCK * WIDTH
    found = ()
    for part in tl.static_range(PARTS):
        pointer = tile_at + (lane[:, None] + column[None, :]) + (AT + part * (_BLOCK * WIDTH))
        if DEPTH > WIDTH:
            octets = tl.load(pointer, mask=(column < WIDTH)[None, :], other=0)
        else:
            octets = tl.load(pointer)
        for number in tl.static_range(SLOTS // PARTS):
            raw = top_codes(octets, number, BITS, FAST)
            if FIRST:
                product = tl.dot(raw, query, out_dtype=tl.int32)
            else:
                before = raws[part * (SLOTS // PARTS) + number]
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
    SLOTS: tl.constexpr,
    PARTS: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    FAST: tl.constexpr,
):
    """Return weighted codes of a plane, ``[WIDTH, heads]``."""
    column = tl.arange(0, WIDTH)
    lane = places // _BLOCK * BLOCK_BYTES + places % _BLOCK
    for part in tl.static_range(PARTS):
        pointer = tile_at + (column[:, None] * _BLOCK + lane[None, :])
        octets = tl.load(pointer + (AT + part * (_BLOCK * WIDTH)))
        for number in tl.static_range(SLOTS // PARTS):
            raw = top_codes(octets, number, BITS, FAST)
            weight = weights[part * (SLOTS // PARTS) + number]
            if (part == 0) and (number == 0):
                sums = tl.dot(raw, weight, out_dtype=tl.int32)
            else:
                sums = tl.dot(raw, weight, sums, out_dtype=tl.int32)
    return joined(sums)


@triton.constexpr_function
def _power(number):
    """Return the power of two from a number on."""
    return 1 << (number - 1).bit_length()


@triton.constexpr_function
def _turned(index, count):
    """Return where `_parts` leaves a column: behind as many splits as there are bits."""
    found = 0
    while count > 1:
        found, index, count = 2 * found + index % 2, index // 2, count // 2
    return found


@triton.jit
def _parts(numbers, COUNT: tl.constexpr):
    """Return the columns of ``[n, COUNT]`` as a tuple, where `_turned` says."""
    found = (numbers,)
    LEVELS: tl.constexpr = COUNT.bit_length() - 1
    for level in tl.static_range(LEVELS):
        halved = ()
        for number in tl.static_range(1 << level):
            own = tl.reshape(found[number], (numbers.shape[0], COUNT >> (level + 1), 2))
            even, odd = tl.split(own)
            halved += (even, odd)
        found = halved
    flat = ()
    for number in tl.static_range(COUNT):
        flat += (tl.reshape(found[number], (numbers.shape[0],)),)
    return flat


@triton.jit
def _kept(
    halfs,
    AT: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    PLACES: tl.constexpr,
    SLOTS_FIRST: tl.constexpr,
):
    """Load what `COUNT` groups keep, from AT on: float32 per group and slot by row, as `_parts`."""
    ALL: tl.constexpr = _power(COUNT)
    TOKENS: tl.constexpr = _BLOCK * SLOTS
    number = tl.arange(0, PLACES // _BLOCK * ALL * TOKENS)
    own = number % (ALL * TOKENS)
    pointer = halfs + (number // (ALL * TOKENS) * BLOCK + own + AT)
    if ALL > COUNT:
        loaded = tl.load(pointer, mask=own < COUNT * TOKENS, other=0.0)
    else:
        loaded = tl.load(pointer)
    if SLOTS_FIRST:
        apart = tl.reshape(loaded, (PLACES // _BLOCK, ALL, SLOTS, 8, 4))
        apart = tl.permute(apart, (0, 4, 3, 1, 2))
    else:
        apart = tl.reshape(loaded, (PLACES // _BLOCK, ALL, 8, 4, SLOTS))
        apart = tl.permute(apart, (0, 3, 2, 1, 4))
    rows = tl.reshape(apart, (PLACES, ALL * SLOTS))
    return _parts(rows.to(tl.float32), ALL * SLOTS)


@triton.jit
def _without_end(kept, left, COUNT: tl.constexpr, SLOTS: tl.constexpr):
    """Return what `_kept` loaded with zeros where a row has ended, `left` tokens from there on."""
    found = ()
    for number in tl.static_range(COUNT * SLOTS):
        # Turning twice gives the same again, so that this is the slot.
        here = left > _turned(number, COUNT * SLOTS) % SLOTS
        found += (tl.where(here, kept[number], 0.0),)
    return found


@triton.jit
def _weighed(
    weights,
    scales,
    middles,
    GROUP: tl.constexpr,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Return a group's weights as digits by place, per slot, and its weighted middles."""
    numbers = ()
    for slot in tl.static_range(SLOTS):
        scale = scales[_turned(GROUP * SLOTS + slot, COUNT * SLOTS)]
        middle = middles[_turned(GROUP * SLOTS + slot, COUNT * SLOTS)]
        numbers += (by_place(digits(weights[slot] * scale[:, None], FAST)),)
        if slot == 0:
            own = weights[slot] * middle[:, None]
        else:
            own += weights[slot] * middle[:, None]
    return numbers, in_lanes(own)


@triton.jit
def _int8_tile(
    sums,
    fixes,
    mass,
    top,
    queries,
    totals,
    octets,
    halfs,
    pages,
    stride,
    at,
    stop,
    rate,
    cap,
    KINDS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    K_BITS: tl.constexpr,
    K_PARTS: tl.constexpr,
    K_GROUPS: tl.constexpr,
    K_PLANES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_BITS: tl.constexpr,
    V_PARTS: tl.constexpr,
    V_GROUPS: tl.constexpr,
    V_PLANES: tl.constexpr,
    V_SCALES: tl.constexpr,
    V_MIDDLES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    SLOTS: tl.constexpr,
    PLACES: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    FAST: tl.constexpr,
):
    """Process one tile of tokens; what lies behind a row's end is left out."""
    places = by_row(PLACES)
    left = stop - at - places * SLOTS
    if PAGE > 0:
        far = tl.load(pages + at // PAGE).to(tl.int64) * stride
        block = tl.full([], at % PAGE // (_BLOCK * SLOTS), tl.int64)
        octets += far
        halfs += far // 2
    else:
        block = tl.full([], at // (_BLOCK * SLOTS), tl.int64)
    octets = tl.multiple_of(octets + block * BLOCK_BYTES, 16)
    halfs = tl.multiple_of(halfs + block * (BLOCK_BYTES // 2), 16)
    # Middles lie behind scales.
    kept = _kept(halfs, K_SCALES, 2 * K_GROUPS, BLOCK_BYTES // 2, SLOTS, PLACES, False)
    scores = ()
    raws = ()
    for number in tl.static_range(K_PLANES):
        raws = _key_products(
            raws,
            queries[number][0],
            octets,
            places,
            KINDS[KEYS + number * _PLANE + _AT],
            BLOCK_BYTES,
            SLOTS,
            K_PARTS,
            K_BITS,
            KINDS[KEYS + number * _PLANE + _WIDTH],
            KINDS[KEYS + number * _PLANE + _DEPTH],
            KINDS[KEYS + number * _PLANE + _FIRST],
            FAST,
        )
        if KINDS[KEYS + number * _PLANE + _LAST] == 1:
            found = ()
            for slot in tl.static_range(SLOTS):
                middle = kept[
                    _turned(
                        (K_GROUPS + KINDS[KEYS + number * _PLANE + _GROUP]) * SLOTS + slot,
                        _power(2 * K_GROUPS) * SLOTS,
                    )
                ]
                scale = kept[
                    _turned(
                        KINDS[KEYS + number * _PLANE + _GROUP] * SLOTS + slot,
                        _power(2 * K_GROUPS) * SLOTS,
                    )
                ]
                own = middle[:, None] * totals[KINDS[KEYS + number * _PLANE + _GROUP]]
                if KINDS[KEYS + number * _PLANE + _GROUP] > 0:
                    own += scores[slot]
                found += (own + scale[:, None] * joined(raws[slot]),)
            scores = found
    found = ()
    for slot in tl.static_range(SLOTS):
        score = scores[slot]
        if CAPPED:
            # cap · tanh(s / cap) with tanh(x) = 1 - 2 / (e^2x + 1); `cap` is times log2(e).
            twice = 2.0 * 1.4426950408889634 / cap * rate
            score = cap - 2.0 * cap / (tl.exp2(score * twice) + 1.0)
        found += (score,)
    scores = found
    if stop - at < PLACES * SLOTS:
        scores = without_end(scores, left[:, None], float("-inf"), SLOTS)
    if CAPPED:
        rate = tl.full(rate.shape, 1.0, tl.float32)
    highest = scores[0]
    for slot in tl.static_range(1, SLOTS):
        highest = tl.maximum(highest, scores[slot])
    peak = tl.max(highest, 0)[None, :] * rate
    higher = tl.maximum(top, peak)
    fade = tl.exp2(top - higher)
    V_ALL: tl.constexpr = _power(V_GROUPS)
    scales = _kept(halfs, V_SCALES, V_GROUPS, BLOCK_BYTES // 2, SLOTS, PLACES, False)
    middles = _kept(halfs, V_MIDDLES, V_GROUPS, BLOCK_BYTES // 2, SLOTS, PLACES, True)
    if stop - at < PLACES * SLOTS:
        scales = _without_end(scales, left, V_ALL, SLOTS)
        middles = _without_end(middles, left, V_ALL, SLOTS)
    most = tl.full([PLACES], _LEAST, tl.float32)
    for number in tl.static_range(V_ALL * SLOTS):
        most = tl.maximum(most, scales[number])
    # Weights such that none times a scale is more than two digits hold.
    up = headroom(tl.max(most, 0))
    unit = tl.exp2(peak - higher - up)
    base = peak - up
    weights = ()
    for slot in tl.static_range(SLOTS):
        weight = tl.exp2(scores[slot] * rate - base)
        weights += (weight,)
        if slot == 0:
            own = weight
        else:
            own += weight
    mass = mass * fade + in_lanes(own) * unit
    found = ()
    corrected = ()
    numbers = ()
    for number in tl.static_range(V_PLANES):
        if KINDS[VALUES + number * _PLANE + _FIRST] == 1:
            numbers, own = _weighed(
                weights,
                scales,
                middles,
                KINDS[VALUES + number * _PLANE + _GROUP],
                V_ALL,
                SLOTS,
                FAST,
            )
            before = fixes[KINDS[VALUES + number * _PLANE + _GROUP]]
            corrected += (before * fade + own * unit,)
        products = _value_products(
            numbers,
            octets,
            tl.arange(0, PLACES),
            KINDS[VALUES + number * _PLANE + _AT],
            BLOCK_BYTES,
            SLOTS,
            V_PARTS,
            V_BITS,
            KINDS[VALUES + number * _PLANE + _WIDTH],
            FAST,
        )
        found += (sums[number] * fade + products * unit,)
    return found, corrected, mass, higher


@triton.jit
def int8_piece(
    octets,
    halfs,
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
    K_BITS: tl.constexpr,
    K_PARTS: tl.constexpr,
    K_GROUPS: tl.constexpr,
    K_PLANES: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_BITS: tl.constexpr,
    V_PARTS: tl.constexpr,
    V_GROUPS: tl.constexpr,
    V_PLANES: tl.constexpr,
    V_SCALES: tl.constexpr,
    V_MIDDLES: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    V_WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
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
    queries, _, largest = query_digits(
        query, width, first_head, KINDS, KEYS, K_PLANES, GROUP, HEADS, FAST
    )
    totals = ()
    total = tl.zeros([16, 2 * HEADS], tl.int32)
    # Codes are the highest bits of an int8.
    worth: tl.constexpr = 2.0 ** (8 - K_BITS)
    for number in tl.static_range(K_PLANES):
        ones = tl.full([16, queries[number][0].shape[0]], 1, tl.int8)
        total = summed(queries[number][0], total, ones)
        if KINDS[KEYS + number * _PLANE + _LAST] == 1:
            totals += (tl.max(joined(total), 0)[None, :] * worth,)
            total = tl.zeros([16, 2 * HEADS], tl.int32)
    rate = single(largest * (scale / MOST / worth))[None, :]
    sums = ()
    for number in tl.static_range(V_PLANES):
        sums += (empty(KINDS[VALUES + number * _PLANE + _WIDTH], HEADS),)
    fixes = ()
    for _number in tl.static_range(V_GROUPS):
        fixes += (tl.zeros([8, HEADS], tl.float32),)
    mass = tl.zeros([8, HEADS], tl.float32)
    # Finite, so that the first tile's fade is exp2 of something and not of inf - inf.
    top = tl.full([1, HEADS], -1e30, tl.float32)
    for at in tl.range(start, stop, PLACES * SLOTS, num_stages=STAGES):
        sums, fixes, mass, top = _int8_tile(
            sums, fixes, mass, top, queries, totals, octets, halfs, pages, stride, at, stop, rate,
            cap, KINDS, KEYS, VALUES, K_BITS, K_PARTS, K_GROUPS, K_PLANES, K_SCALES, V_BITS,
            V_PARTS, V_GROUPS, V_PLANES, V_SCALES, V_MIDDLES, BLOCK_BYTES, SLOTS, PLACES, PAGE,
            CAPPED, FAST,
        )  # fmt: skip
    weight = tl.sum(mass, 0)[None, :]
    share = 1.0 / weight
    result = partial + (item * GROUP + heads)[None, :].to(tl.int64) * WIDEST
    for number in tl.static_range(V_PLANES):
        found = sums[number] * 2.0 ** (V_BITS - 8)
        found += tl.sum(fixes[KINDS[VALUES + number * _PLANE + _GROUP]], 0)[None, :]
        store_columns(
            result,
            found * share,
            real,
            KINDS[VALUES + number * _PLANE + _START],
            KINDS[VALUES + number * _PLANE + _WIDTH],
        )
    # A narrower segment adds nothing to the columns behind its own.
    for begin in range(V_WIDTH, output_width, 16):
        store_columns(result + begin, empty(16, HEADS), real, 0, 16)
    logged = tl.reshape(top + tl.log2(weight), (HEADS,))
    tl.store(logs + item * GROUP + heads, logged, mask=real)
