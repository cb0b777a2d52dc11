# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Decode over rows of codes of the same bits, or at full precision.

Quantised keys and values are so few bytes that arithmetic per element counts. So tokens or columns
are the rows of every product and the (few) query heads its eight or more columns; bytes become
operands of the tensor cores without a conversion or a shuffle (`kvprof.kernels.quantized.unpack`,
`kvprof.kernels.quantized.layout`); and a code's offset, scale and shift stay outside of the
elements. With ``x = middle + scale · code``:

- scores, per token and group of columns: ``scale · (code · q) + middle · Σq``;
- values, per group: ``Σ w · code + Σ p · middle`` with ``w = p · scale``, rounded. The last, and
  ``Σ p``, are rows of one more product.
"""

import triton
import triton.language as tl

from kvprof.kernels.quantized.codes import FP8, FULL
from kvprof.kernels.quantized.operand_layout import PLACES
from kvprof.kernels.quantized.tables import EYE_ONE, PlaneColumns
from kvprof.kernels.quantized.unpack import codes, halves, rounded
from kvprof.kernels.split_kv import empty, store_columns
from kvprof.kernels.tables import column

__all__ = ["row_piece"]

# --- One tile of tokens: scores, online softmax, weighted values.
#
# A tile is one block or two neighbouring ones, which `kvprof.kernels.quantized.layout` draws.
# Addresses are one pointer, what a lane adds to it, and constants.


_PLANE = tl.constexpr(len(PlaneColumns._fields))
_START = tl.constexpr(column(PlaneColumns, "start"))
_WIDTH = tl.constexpr(column(PlaneColumns, "width"))
_DEPTH = tl.constexpr(column(PlaneColumns, "depth"))
_GROUP = tl.constexpr(column(PlaneColumns, "group"))
_FIRST = tl.constexpr(column(PlaneColumns, "first"))
_LAST = tl.constexpr(column(PlaneColumns, "last"))
_AT = tl.constexpr(column(PlaneColumns, "at"))
_FULL = tl.constexpr(FULL)
_BLOCK = tl.constexpr(PLACES)
_EYE_ONE = tl.constexpr(EYE_ONE)
_FP8 = tl.constexpr(FP8)


@triton.jit
def _key_plane(
    raws, query, tile_at, places, left, AT: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    SLOTS: tl.constexpr, PARTS: tl.constexpr, FORMAT: tl.constexpr, WIDTH: tl.constexpr,
    DEPTH: tl.constexpr, FIRST: tl.constexpr, CHECK: tl.constexpr, FAST: tl.constexpr,
):
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
    sums, weights, tile_at, places, left, AT: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    SLOTS: tl.constexpr, PARTS: tl.constexpr, FORMAT: tl.constexpr, WIDTH: tl.constexpr,
    CHECK: tl.constexpr, FAST: tl.constexpr,
):
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
    queries, totals, keys, halfs, places, left, rate, cap, KINDS: tl.constexpr,
    KEYS: tl.constexpr, PLANES: tl.constexpr, FORMAT: tl.constexpr,
    PARTS: tl.constexpr, GROUPS: tl.constexpr,
    SCALES_AT: tl.constexpr, MIDDLES_AT: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    BLOCK_HALFS: tl.constexpr, SLOTS: tl.constexpr, CAPPED: tl.constexpr, CHECK: tl.constexpr,
    FAST: tl.constexpr,
):
    """Return the products of a tile, ``[places, heads]`` per slot; capped ones in base 2."""
    scores = ()
    raws = ()
    for number in tl.static_range(PLANES):
        raws = _key_plane(
            raws, queries[number], keys, places, left, KINDS[KEYS + number * _PLANE + _AT],
            BLOCK_BYTES, SLOTS, PARTS, FORMAT, KINDS[KEYS + number * _PLANE + _WIDTH],
            KINDS[KEYS + number * _PLANE + _DEPTH], KINDS[KEYS + number * _PLANE + _FIRST],
            CHECK, FAST,
        )
        if (GROUPS > 0) and (KINDS[KEYS + number * _PLANE + _LAST] == 1):
            beyond = KINDS[KEYS + number * _PLANE + _GROUP] * (_BLOCK * SLOTS)
            scales = halves(halfs, places, SCALES_AT + beyond, BLOCK_HALFS, SLOTS, FAST)
            middles = halves(halfs, places, MIDDLES_AT + beyond, BLOCK_HALFS, SLOTS, FAST)
            scores = _scaled(
                scores,
                raws,
                scales,
                middles,
                totals[KINDS[KEYS + number * _PLANE + _GROUP]],
                SLOTS,
                KINDS[KEYS + number * _PLANE + _GROUP] == 0,
            )
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
def _tile(
    sums, fixes, top, queries, totals, ones, keys, values, halfs, pages, stride, at, stop, scale,
    cap, KINDS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, K_FORMAT: tl.constexpr,
    K_FACTOR: tl.constexpr, K_PARTS: tl.constexpr, K_GROUPS: tl.constexpr, K_PLANES: tl.constexpr,
    K_SCALES: tl.constexpr, K_MIDDLES: tl.constexpr, K_BLOCK: tl.constexpr, V_FORMAT: tl.constexpr,
    V_PARTS: tl.constexpr, V_GROUPS: tl.constexpr, V_PLANES: tl.constexpr, V_SCALES: tl.constexpr,
    V_MIDDLES: tl.constexpr, V_BLOCK: tl.constexpr, BLOCK_HALFS: tl.constexpr, SLOTS: tl.constexpr,
    PLACES: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr, V_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr, CHECK: tl.constexpr,
    FAST: tl.constexpr,
):
    """Go on with one tile: scores, online softmax in base 2, weighted values.

    `keys`, `values` and `halfs` point to the head's first block in the row, or in any page: in
    bytes or, at full precision, values; `halfs` in float16.
    """
    places = tl.arange(0, PLACES)
    left = stop - at - places * SLOTS
    if PAGE > 0:
        far = tl.load(pages + at // PAGE).to(tl.int64) * stride
        block = tl.full([], at % PAGE // (_BLOCK * SLOTS), tl.int64)
        keys += far // (keys.dtype.element_ty.primitive_bitwidth // 8)
        values += far // (values.dtype.element_ty.primitive_bitwidth // 8)
        halfs += far // 2
    else:
        block = tl.full([], at // (_BLOCK * SLOTS), tl.int64)
    keys = tl.multiple_of(keys + block * K_BLOCK, 16)
    values = tl.multiple_of(values + block * V_BLOCK, 16)
    halfs = tl.multiple_of(halfs + block * BLOCK_HALFS, 16)
    # Queries enter products as they are: rounded after scaling they would move large scores. The
    # scale goes into the exponent instead, where it costs nothing.
    rate = scale * K_FACTOR
    scores = _scores(
        queries, totals, keys, halfs, places, left, rate, cap, KINDS, KEYS, K_PLANES,
        K_FORMAT, K_PARTS, K_GROUPS, K_SCALES, K_MIDDLES, K_BLOCK, BLOCK_HALFS, SLOTS, CAPPED,
        CHECK, FAST,
    )
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
        if (V_GROUPS > 0) and (KINDS[VALUES + number * _PLANE + _FIRST] == 1):
            beyond = KINDS[VALUES + number * _PLANE + _GROUP] * (_BLOCK * SLOTS)
            scales = halves(halfs, places, V_SCALES + beyond, BLOCK_HALFS, SLOTS, FAST)
            scaled = ()
            for slot in tl.static_range(SLOTS):
                scale = scales[slot]
                if CHECK:
                    scale = tl.where(left > slot, scale, 0.0)
                scaled += (rounded(weights[slot] * scale[:, None], V_DTYPE, FAST),)
        more = _value_plane(
            sums[number] * fade, scaled, values, places, left,
            KINDS[VALUES + number * _PLANE + _AT], V_BLOCK, SLOTS, V_PARTS, V_FORMAT,
            KINDS[VALUES + number * _PLANE + _WIDTH], CHECK, FAST,
        )
        found += (more,)
    return found, fixes, higher


@triton.jit
def _query(
    query,
    heads,
    width,
    there,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    BOOST: tl.constexpr,
):
    """Load columns of a group's queries, ``[DEPTH, heads]``; zeros from WIDTH on."""
    column = tl.arange(0, DEPTH)
    at = query + heads[None, :] * width + START + column[:, None]
    found = tl.load(at, mask=(column < WIDTH)[:, None] & there[None, :], other=0.0)
    if BOOST != 1.0:
        found = (found.to(tl.float32) * BOOST).to(found.dtype)
    return found


@triton.jit
def _first_row(eye, row, LENGTH: tl.constexpr, DTYPE: tl.constexpr):
    """Return ``[rows, LENGTH]`` that is 1 in the first row and 0 elsewhere.

    From memory, as bytes: the compiler then lays the product out as it does those of the codes, and
    the weights need not be rearranged for it.
    """
    one = tl.load(eye + _EYE_ONE + row).to(DTYPE)
    return tl.broadcast_to(one[:, None], [row.shape[0], LENGTH])


@triton.jit
def row_piece(
    keys, values, halfs, pages, stride, eye, partial, logs, item, query, width, start, stop,
    output_width, scale, cap, first_head, KINDS: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, K_FORMAT: tl.constexpr, K_FACTOR: tl.constexpr, K_BOOST: tl.constexpr,
    K_PARTS: tl.constexpr, K_GROUPS: tl.constexpr, K_PLANES: tl.constexpr, K_SCALES: tl.constexpr,
    K_MIDDLES: tl.constexpr, K_BLOCK: tl.constexpr, V_FORMAT: tl.constexpr, V_FACTOR: tl.constexpr,
    SHIFT: tl.constexpr, V_PARTS: tl.constexpr, V_GROUPS: tl.constexpr, V_PLANES: tl.constexpr,
    V_SCALES: tl.constexpr, V_MIDDLES: tl.constexpr, V_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK_HALFS: tl.constexpr, SLOTS: tl.constexpr, PLACES: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, WIDEST: tl.constexpr,
    PAGE: tl.constexpr, CAPPED: tl.constexpr, V_DTYPE: tl.constexpr, M_DTYPE: tl.constexpr,
    END: tl.constexpr, FAST: tl.constexpr,
):
    """Attend to the tokens of one piece and leave its part of the result.

    END: a few exact tokens, of which every tile is taken for a row's last, so that there is one
    loop: they cost mostly the reading of their code.
    """
    heads = first_head + tl.arange(0, HEADS)
    real = heads < GROUP
    wanted = ()
    totals = ()
    total = tl.zeros([HEADS], tl.float32)
    for number in tl.static_range(K_PLANES):
        loaded = _query(
            query,
            heads,
            width,
            real,
            KINDS[KEYS + number * _PLANE + _START],
            KINDS[KEYS + number * _PLANE + _WIDTH],
            KINDS[KEYS + number * _PLANE + _DEPTH],
            K_BOOST,
        )
        wanted += (loaded,)
        if K_GROUPS > 0:
            total += tl.sum(loaded.to(tl.float32), 0)
            if KINDS[KEYS + number * _PLANE + _LAST] == 1:
                totals += (total[None, :],)
                total = tl.zeros([HEADS], tl.float32)
    row = tl.arange(0, ROWS)
    if V_FORMAT == _FP8:
        ones = _first_row(eye, row, PLACES, V_DTYPE)
    else:
        here = tl.where(row == V_GROUPS, 1.0, 0.0).to(
            M_DTYPE if V_GROUPS > 0 else V_DTYPE
        )
        ones = tl.broadcast_to(here[:, None], [ROWS, PLACES])
    sums = ()
    for number in tl.static_range(V_PLANES):
        sums += (empty(KINDS[VALUES + number * _PLANE + _WIDTH], HEADS),)
    fixes = tl.zeros([ROWS, HEADS], tl.float32)
    # Finite, so that the first tile's fade is exp2 of something and not of inf - inf.
    top = tl.full([HEADS], -1e30, tl.float32)
    whole = start
    if not END:
        whole += (stop - start) // (PLACES * SLOTS) * (PLACES * SLOTS)
    # The end of a row last: behind it lies room for a whole tile, but perhaps no number.
    for TAIL in tl.static_range(1 if END else 0, 2):
        for at in tl.range(
            whole if TAIL else start,
            stop if TAIL else whole,
            PLACES * SLOTS,
            num_stages=(1 if END else 2) if TAIL else STAGES,
        ):
            sums, fixes, top = _tile(
                sums, fixes, top, wanted, totals, ones, keys, values, halfs, pages, stride, at,
                stop, scale, cap, KINDS, KEYS, VALUES, K_FORMAT, K_FACTOR, K_PARTS, K_GROUPS,
                K_PLANES, K_SCALES, K_MIDDLES, K_BLOCK, V_FORMAT, V_PARTS, V_GROUPS, V_PLANES,
                V_SCALES, V_MIDDLES, V_BLOCK, BLOCK_HALFS, SLOTS, PLACES, SHIFT, ROWS, V_DTYPE,
                M_DTYPE, PAGE, CAPPED, TAIL == 1, FAST,
            )
    weight = tl.sum(tl.where((row == V_GROUPS)[:, None], fixes, 0.0), 0)
    share = 1.0 / weight
    result = partial + (item * GROUP + heads)[None, :].to(tl.int64) * WIDEST
    for number in tl.static_range(V_PLANES):
        found = sums[number]
        if V_GROUPS > 0:
            own_group = KINDS[VALUES + number * _PLANE + _GROUP]
            found += tl.sum(tl.where((row == own_group)[:, None], fixes, 0.0), 0)[None, :]
        store_columns(
            result,
            found * V_FACTOR * share[None, :],
            real,
            KINDS[VALUES + number * _PLANE + _START],
            KINDS[VALUES + number * _PLANE + _WIDTH],
        )
    # A narrower segment adds nothing to the columns behind its own.
    for begin in range(V_WIDTH, output_width, 16):
        store_columns(result + begin, empty(16, HEADS), real, 0, 16)
    tl.store(logs + item * GROUP + heads, top + tl.log2(weight) - SHIFT, mask=real)
