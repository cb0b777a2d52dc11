# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""One tile of tokens in `kvprof.kernels.levels.kernel`: scores, online softmax, weighted values.

A tile is one block or two neighbouring ones, which `kvprof.kernels.levels.layout` draws. Addresses
are one pointer, what a lane adds to it, and constants.
"""

import triton
import triton.language as tl

from kvprof.kernels.levels.unpack import FULL, codes, halves, rounded

__all__ = ["HEADER", "PLANE", "tile"]

#: Numbers of a kind of head before its planes, and per plane; `kvprof.kernels.levels.launch`.
HEADER = 24
PLANE = 7

_PLANE = tl.constexpr(PLANE)
_FULL = tl.constexpr(FULL)
# Places of a block: `kvprof.kernels.levels.side`.
_BLOCK = tl.constexpr(32)


@triton.jit
def _key_plane(
    raws, query, tile_at, places, left,
    AT: tl.constexpr, BLOCK_BYTES: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr,
    FORMAT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, FIRST: tl.constexpr,
    CHECK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Add a plane's columns to the products of a group, one per slot.

    `tile_at` counts bytes, or values at full precision, and so do AT and BLOCK_BYTES.
    """
    column = tl.arange(0, DEPTH)
    block = places // _BLOCK * BLOCK_BYTES
    found = ()
    for part in tl.static_range(PARTS):
        if FORMAT == _FULL:
            lane = block + places % _BLOCK * (SLOTS * WIDTH)
            pointer = tile_at + (lane[:, None] + column[None, :]) + (AT + part * WIDTH)
            if CHECK:
                octets = tl.load(pointer, mask=(left > part)[:, None], other=0.0)
            else:
                octets = tl.load(pointer)
        else:
            lane = block + places % _BLOCK * WIDTH
            pointer = tile_at + (lane[:, None] + column[None, :]) + (AT + part * (_BLOCK * WIDTH))
            if DEPTH > WIDTH:
                octets = tl.load(pointer, mask=(column < WIDTH)[None, :], other=0)
            else:
                octets = tl.load(pointer)
        for number in tl.static_range(SLOTS // PARTS):
            raw = codes(octets, number, FORMAT, query.dtype, FAST)
            if FIRST:
                product = tl.dot(raw, query, input_precision="ieee")
            else:
                before = raws[part * (SLOTS // PARTS) + number]
                product = tl.dot(raw, query, before, input_precision="ieee")
            found += (product,)
    return found


@triton.jit
def _scaled(scores, raws, scales, middles, total, SLOTS: tl.constexpr, FIRST: tl.constexpr):
    """Add a group's share to the scores of each slot."""
    found = ()
    for slot in tl.static_range(SLOTS):
        more = middles[slot][:, None] * total
        if not FIRST:
            more = scores[slot] + more
        found += (more + scales[slot][:, None] * raws[slot],)
    return found


@triton.jit
def _value_plane(
    sums, weights, tile_at, places, left,
    AT: tl.constexpr, BLOCK_BYTES: tl.constexpr, SLOTS: tl.constexpr, PARTS: tl.constexpr,
    FORMAT: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Add weighted values of a plane, ``[WIDTH, heads]``."""
    column = tl.arange(0, WIDTH)
    block = places // _BLOCK * BLOCK_BYTES
    for part in tl.static_range(PARTS):
        if FORMAT == _FULL:
            lane = block + places % _BLOCK * (SLOTS * WIDTH)
            pointer = tile_at + (column[:, None] + lane[None, :]) + (AT + part * WIDTH)
            if CHECK:
                octets = tl.load(pointer, mask=(left > part)[None, :], other=0.0)
            else:
                octets = tl.load(pointer)
        else:
            lane = block + places % _BLOCK
            pointer = tile_at + (column[:, None] * _BLOCK + lane[None, :])
            octets = tl.load(pointer + (AT + part * (_BLOCK * WIDTH)))
        for number in tl.static_range(SLOTS // PARTS):
            weight = weights[part * (SLOTS // PARTS) + number]
            raw = codes(octets, number, FORMAT, weight.dtype, FAST)
            sums = tl.dot(raw, weight, sums, input_precision="ieee")
    return sums


@triton.jit
def _scores(
    queries, totals, keys, halfs, places, left, rate, cap,
    KINDS: tl.constexpr, KEYS: tl.constexpr, PLANES: tl.constexpr, FORMAT: tl.constexpr,
    PARTS: tl.constexpr, GROUPS: tl.constexpr, SCALES_AT: tl.constexpr,
    MIDDLES_AT: tl.constexpr, BLOCK_BYTES: tl.constexpr, BLOCK_HALFS: tl.constexpr,
    SLOTS: tl.constexpr, CAPPED: tl.constexpr, CHECK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Return the products of a tile, ``[places, heads]`` per slot; capped ones in base 2."""
    scores = ()
    raws = ()
    for number in tl.static_range(PLANES):
        # Start, width, inner size, group, first and last of its group, place in the block.
        raws = _key_plane(
            raws, queries[number], keys, places, left,
            KINDS[KEYS + number * _PLANE + 6], BLOCK_BYTES, SLOTS, PARTS, FORMAT,
            KINDS[KEYS + number * _PLANE + 1], KINDS[KEYS + number * _PLANE + 2],
            KINDS[KEYS + number * _PLANE + 4], CHECK, FAST,
        )  # fmt: skip
        if (GROUPS > 0) and (KINDS[KEYS + number * _PLANE + 5] == 1):
            beyond = KINDS[KEYS + number * _PLANE + 3] * (_BLOCK * SLOTS)
            scales = halves(halfs, places, SCALES_AT + beyond, BLOCK_HALFS, SLOTS, FAST)
            middles = halves(halfs, places, MIDDLES_AT + beyond, BLOCK_HALFS, SLOTS, FAST)
            scores = _scaled(
                scores, raws, scales, middles, totals[KINDS[KEYS + number * _PLANE + 3]], SLOTS,
                KINDS[KEYS + number * _PLANE + 3] == 0,
            )  # fmt: skip
    if GROUPS == 0:
        scores = raws
    found = ()
    for slot in tl.static_range(SLOTS):
        score = scores[slot]
        if CAPPED:
            # cap · tanh(s / cap) with tanh(x) = 1 - 2 / (e^2x + 1); `cap` is times log2(e).
            twice = 2.0 * 1.4426950408889634 / cap * rate
            score = cap - 2.0 * cap / (tl.exp2(score * twice) + 1.0)
        if CHECK:
            score = tl.where((left > slot)[:, None], score, float("-inf"))
        found += (score,)
    return found


@triton.jit
def tile(
    sums, fixes, top, queries, totals, ones, keys, values, halfs, at, stop, scale, cap,
    KINDS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    K_FORMAT: tl.constexpr, K_FACTOR: tl.constexpr, K_PARTS: tl.constexpr, K_GROUPS: tl.constexpr,
    K_PLANES: tl.constexpr, K_SCALES: tl.constexpr, K_MIDDLES: tl.constexpr, K_BLOCK: tl.constexpr,
    V_FORMAT: tl.constexpr, V_PARTS: tl.constexpr, V_GROUPS: tl.constexpr, V_PLANES: tl.constexpr,
    V_SCALES: tl.constexpr, V_MIDDLES: tl.constexpr, V_BLOCK: tl.constexpr,
    BLOCK_HALFS: tl.constexpr, SLOTS: tl.constexpr, PLACES: tl.constexpr, SHIFT: tl.constexpr,
    ROWS: tl.constexpr, V_DTYPE: tl.constexpr, M_DTYPE: tl.constexpr, CAPPED: tl.constexpr,
    CHECK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Go on with one tile: scores, online softmax in base 2, weighted values.

    `keys`, `values` and `halfs` point to the first block of the sequence: in bytes or, at full
    precision, values; `halfs` in float16.
    """
    places = tl.arange(0, PLACES)
    left = stop - at - places * SLOTS
    block = tl.full([], at // (_BLOCK * SLOTS), tl.int64)
    keys = tl.multiple_of(keys + block * K_BLOCK, 16)
    values = tl.multiple_of(values + block * V_BLOCK, 16)
    halfs = tl.multiple_of(halfs + block * BLOCK_HALFS, 16)
    # Queries enter products as they are: rounded after scaling they would move large scores. The
    # scale goes into the exponent instead, where it costs nothing.
    rate = scale * K_FACTOR
    scores = _scores(
        queries, totals, keys, halfs, places, left, rate, cap,
        KINDS, KEYS, K_PLANES, K_FORMAT, K_PARTS, K_GROUPS, K_SCALES, K_MIDDLES, K_BLOCK,
        BLOCK_HALFS, SLOTS, CAPPED, CHECK, FAST,
    )  # fmt: skip
    highest = scores[0]
    for slot in tl.static_range(1, SLOTS):
        highest = tl.maximum(highest, scores[slot])
    if CAPPED:
        rate = 1.0
    higher = tl.maximum(top, tl.max(highest, 0) * rate)
    fade = tl.exp2(top - higher)[None, :]
    # Weights up to 2^SHIFT, so that small ones are not lost where they are rounded.
    base = (higher - SHIFT)[None, :]
    fixes = fixes * fade
    weights = ()
    for slot in tl.static_range(SLOTS):
        weights += (tl.exp2(scores[slot] * rate - base),)
    scaled = ()
    if V_GROUPS > 0:
        row = tl.arange(0, ROWS)
        lines = places // _BLOCK * BLOCK_HALFS + places % _BLOCK
        pointer = halfs + (row[:, None] * (_BLOCK * SLOTS) + lines[None, :])
        for slot in tl.static_range(SLOTS):
            small = rounded(weights[slot], M_DTYPE, FAST)
            wanted = (row < V_GROUPS)[:, None]
            middles = tl.load(pointer + (V_MIDDLES + slot * _BLOCK), mask=wanted, other=0.0)
            middles = middles.to(M_DTYPE)
            if CHECK:
                middles = tl.where((left > slot)[None, :], middles, 0.0)
            fixes = tl.dot(middles, small, fixes, input_precision="ieee")
            fixes = tl.dot(ones, small, fixes, input_precision="ieee")
    else:
        for slot in tl.static_range(SLOTS):
            scaled += (rounded(weights[slot], V_DTYPE, FAST),)
            fixes = tl.dot(ones, scaled[slot], fixes, input_precision="ieee")
    found = ()
    for number in tl.static_range(V_PLANES):
        if (V_GROUPS > 0) and (KINDS[VALUES + number * _PLANE + 4] == 1):
            beyond = KINDS[VALUES + number * _PLANE + 3] * (_BLOCK * SLOTS)
            scales = halves(halfs, places, V_SCALES + beyond, BLOCK_HALFS, SLOTS, FAST)
            scaled = ()
            for slot in tl.static_range(SLOTS):
                scale = scales[slot]
                if CHECK:
                    scale = tl.where(left > slot, scale, 0.0)
                scaled += (rounded(weights[slot] * scale[:, None], V_DTYPE, FAST),)
        more = _value_plane(
            sums[number] * fade, scaled, values, places, left,
            KINDS[VALUES + number * _PLANE + 6], V_BLOCK, SLOTS, V_PARTS, V_FORMAT,
            KINDS[VALUES + number * _PLANE + 1], CHECK, FAST,
        )  # fmt: skip
        found += (more,)
    return found, fixes, higher
