"""Decode over segments of quantised storage: one program per piece of work, a branch per kind.

Quantised keys and values are so few bytes that arithmetic per element counts. So tokens or columns
are the rows of every product and the (few) query heads its eight or more columns; bytes become
operands of the tensor cores without a conversion or a shuffle (`kvprof.kernels.segments.unpack`,
`kvprof.kernels.segments.layout`); and what a code is offset, scaled and shifted by stays outside of
the elements. With ``x = middle + scale · code``:

- scores, per token and group of columns: ``scale · (code · q) + middle · Σq``;
- values, per group: ``Σ w · code + Σ p · middle`` with ``w = p · scale``, rounded. The last, and
  ``Σ p``, are rows of one more product.

Where columns have bits of their own, all is done in whole numbers
(`kvprof.kernels.segments.column_kernel`).
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from kvprof.kernels.segments.codes import COLUMNS, FP8, FULL
from kvprof.kernels.segments.column_kernel import column_piece
from kvprof.kernels.segments.side import PLACES
from kvprof.kernels.segments.tables import EYE_ONE, Counter, Item, Kind, PlaneColumns, Unit
from kvprof.kernels.segments.unpack import codes, halves, rounded
from kvprof.kernels.tables import Part, column

__all__ = ["segment_pieces", "tile"]

# --- One tile of tokens: scores, online softmax, weighted values.
#
# A tile is one block or two neighbouring ones, which `kvprof.kernels.segments.layout` draws.
# Addresses are one pointer, what a lane adds to it, and constants.


# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.


_PLANE = tl.constexpr(len(PlaneColumns._fields))
_START = tl.constexpr(column(PlaneColumns, "start"))
_WIDTH = tl.constexpr(column(PlaneColumns, "width"))
_DEPTH = tl.constexpr(column(PlaneColumns, "depth"))
_GROUP = tl.constexpr(column(PlaneColumns, "group"))
_FIRST = tl.constexpr(column(PlaneColumns, "first"))
_LAST = tl.constexpr(column(PlaneColumns, "last"))
_AT = tl.constexpr(column(PlaneColumns, "at"))
_FULL = tl.constexpr(FULL)
_COLUMNS = tl.constexpr(COLUMNS)
_BLOCK = tl.constexpr(PLACES)


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
def tile(
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


_HEADER = tl.constexpr(len(Kind._fields))
_K_FORMAT = tl.constexpr(column(Kind, "key_format"))
_K_FACTOR = tl.constexpr(column(Kind, "key_factor"))
_K_BOOST = tl.constexpr(column(Kind, "key_boost"))
_K_PARTS = tl.constexpr(column(Kind, "key_parts"))
_K_GROUPS = tl.constexpr(column(Kind, "key_groups"))
_K_PLANES = tl.constexpr(column(Kind, "key_planes"))
_K_SCALES = tl.constexpr(column(Kind, "key_scales"))
_K_MIDDLES = tl.constexpr(column(Kind, "key_middles"))
_K_BLOCK = tl.constexpr(column(Kind, "key_block"))
_V_FORMAT = tl.constexpr(column(Kind, "value_format"))
_V_FACTOR = tl.constexpr(column(Kind, "value_factor"))
_SHIFT = tl.constexpr(column(Kind, "shift"))
_V_PARTS = tl.constexpr(column(Kind, "value_parts"))
_V_GROUPS = tl.constexpr(column(Kind, "value_groups"))
_V_PLANES = tl.constexpr(column(Kind, "value_planes"))
_V_SCALES = tl.constexpr(column(Kind, "value_scales"))
_V_MIDDLES = tl.constexpr(column(Kind, "value_middles"))
_V_BLOCK = tl.constexpr(column(Kind, "value_block"))
_V_WIDTH = tl.constexpr(column(Kind, "value_width"))
_BLOCK_HALFS = tl.constexpr(column(Kind, "block_halfs"))
_SLOTS = tl.constexpr(column(Kind, "slots"))
_PLACES = tl.constexpr(column(Kind, "places"))
_STAGES = tl.constexpr(column(Kind, "stages"))
_ROWS = tl.constexpr(column(Kind, "rows"))
_ITEM = tl.constexpr(len(Item._fields))
_ITEM_ROW = tl.constexpr(column(Item, "row"))
_ITEM_HEAD = tl.constexpr(column(Item, "head"))
_ITEM_SEGMENT = tl.constexpr(column(Item, "segment"))
_ITEM_START = tl.constexpr(column(Item, "start"))
_ITEM_STOP = tl.constexpr(column(Item, "stop"))
_PART = tl.constexpr(len(Part._fields))
_PART_FIRST = tl.constexpr(column(Part, "first"))
_PART_COUNT = tl.constexpr(column(Part, "items"))
_UNIT = tl.constexpr(len(Unit._fields))
_QUERIES = tl.constexpr(column(Unit, "queries"))
_QUERY_WIDTH = tl.constexpr(column(Unit, "query_width"))
_OUTPUT_WIDTH = tl.constexpr(column(Unit, "output_width"))
_BEGIN = tl.constexpr(column(Unit, "begin"))
_KIND = tl.constexpr(column(Unit, "kind"))
_COUNTER = tl.constexpr(len(Counter._fields))
_SHARED = tl.constexpr(column(Counter, "shared"))
_TAKEN = tl.constexpr(column(Counter, "taken"))
_EYE_ONE = tl.constexpr(EYE_ONE)
_FP8 = tl.constexpr(FP8)


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
def _empty(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def _store(result, found, real, START: tl.constexpr, WIDTH: tl.constexpr):
    """Store ``[WIDTH, heads]`` at the columns from START on."""
    column = START + tl.arange(0, WIDTH)
    tl.store(result + column[:, None], found, mask=tl.broadcast_to(real[None, :], found.shape))


@triton.jit
def _piece(
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
    FAST: tl.constexpr,
):
    """Attend to the tokens of one piece and leave its part of the result."""
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
        sums += (_empty(KINDS[VALUES + number * _PLANE + _WIDTH], HEADS),)
    fixes = tl.zeros([ROWS, HEADS], tl.float32)
    # Finite, so that the first tile's fade is exp2 of something and not of inf - inf.
    top = tl.full([HEADS], -1e30, tl.float32)
    whole = start + (stop - start) // (PLACES * SLOTS) * (PLACES * SLOTS)
    for at in tl.range(start, whole, PLACES * SLOTS, num_stages=STAGES):
        sums, fixes, top = tile(
            sums, fixes, top, wanted, totals, ones, keys, values, halfs, pages, stride, at, stop,
            scale, cap, KINDS, KEYS, VALUES, K_FORMAT, K_FACTOR, K_PARTS, K_GROUPS, K_PLANES,
            K_SCALES, K_MIDDLES, K_BLOCK, V_FORMAT, V_PARTS, V_GROUPS, V_PLANES, V_SCALES,
            V_MIDDLES, V_BLOCK, BLOCK_HALFS, SLOTS, PLACES, SHIFT, ROWS, V_DTYPE, M_DTYPE, PAGE,
            CAPPED, False, FAST,
        )
    # The end of a row: behind it lies room for a whole tile, but perhaps no number.
    for at in tl.range(whole, stop, PLACES * SLOTS, num_stages=2):
        sums, fixes, top = tile(
            sums, fixes, top, wanted, totals, ones, keys, values, halfs, pages, stride, at, stop,
            scale, cap, KINDS, KEYS, VALUES, K_FORMAT, K_FACTOR, K_PARTS, K_GROUPS, K_PLANES,
            K_SCALES, K_MIDDLES, K_BLOCK, V_FORMAT, V_PARTS, V_GROUPS, V_PLANES, V_SCALES,
            V_MIDDLES, V_BLOCK, BLOCK_HALFS, SLOTS, PLACES, SHIFT, ROWS, V_DTYPE, M_DTYPE, PAGE,
            CAPPED, True, FAST,
        )
    weight = tl.sum(tl.where((row == V_GROUPS)[:, None], fixes, 0.0), 0)
    share = 1.0 / weight
    result = partial + (item * GROUP + heads)[None, :].to(tl.int64) * WIDEST
    for number in tl.static_range(V_PLANES):
        found = sums[number]
        if V_GROUPS > 0:
            own_group = KINDS[VALUES + number * _PLANE + _GROUP]
            found += tl.sum(tl.where((row == own_group)[:, None], fixes, 0.0), 0)[None, :]
        _store(
            result,
            found * V_FACTOR * share[None, :],
            real,
            KINDS[VALUES + number * _PLANE + _START],
            KINDS[VALUES + number * _PLANE + _WIDTH],
        )
    # A narrower segment adds nothing to the columns behind its own.
    for begin in range(V_WIDTH, output_width, 16):
        _store(result + begin, _empty(16, HEADS), real, 0, 16)
    tl.store(logs + item * GROUP + heads, top + tl.log2(weight) - SHIFT, mask=real)


@triton.jit
def _taken(counters, total, processors, FAST: tl.constexpr):
    """Take what is to be done next: in order, or from this multiprocessor's share where that pays.

    Neighbouring work is of one kind of head mostly. A multiprocessor that has all kinds at once,
    which is what the order of programs would give it, reads their code again and again: it does not
    fit the instruction cache. Long pieces pay for the way to the share of another multiprocessor,
    which programs that find their own one empty go step by step; a hundred of short ones would
    walk for longer than they work. Who comes when there is none left gets `total` or more.
    """
    found = tl.program_id(0)
    if tl.load(counters + _SHARED) > 0:
        found = tl.atomic_add(counters + _TAKEN, 1)
        if found < total:
            own = (cuda.smid() if FAST else tl.program_id(0)) % processors
            found = total
            while found == total:
                begin = own * total // processors
                number = begin + tl.atomic_add(counters + _COUNTER + own, 1)
                own = (own + 1) % processors
                if number < (own * total // processors if own > 0 else total):
                    found = number
    return found


@triton.jit(do_not_specialize=["tasks"])
def segment_pieces(
    queries, octets, full, halfs, eye, partial, logs, counters, items, parts, units, table, tasks,
    processors, blocks, table_row, stride, query_row, scale, cap, KINDS: tl.constexpr,
    COUNT: tl.constexpr, STRIDE: tl.constexpr, PLANES: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, WIDEST: tl.constexpr, PAGE: tl.constexpr,
    CAPPED: tl.constexpr, CODE: tl.constexpr, MIDDLE: tl.constexpr, FAST: tl.constexpr,
    NEAR: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Run one item and block of query heads per program.

    Parameters
    ----------
    queries
        ``[rows, query_row]``.
    octets, full, halfs
        The buffer as uint8, as the run's dtype and as float16.
    eye
        uint8, 1 at `EYE_ONE` and 0 elsewhere.
    partial, logs
        ``[items, GROUP, WIDEST]`` and ``[items, GROUP]`` float32: results and log2 of the sums.
    items
        Rows of `kvprof.kernels.segments.tables.Item`, int32.
    parts, tasks
        ``[tasks]`` rows of `kvprof.kernels.tables.Part`, int32: a row's head each.
    counters
        A `kvprof.kernels.segments.tables.Counter`, then what was taken from each multiprocessor's
        share, int32: 0 but for `shared`.
    processors
        Multiprocessors of the GPU.
    blocks
        Of query heads.
    units
        ``[segments * heads]`` rows of `kvprof.kernels.segments.tables.Unit`, int64.
    table
        ``[rows, table_row]`` int32 pages, read when PAGE (tokens of a page) is not 0.
    stride
        Bytes from one row of the cache to the next.
    scale
        The model's scaling times log2(e).
    cap
        Times log2(e).
    KINDS
        STRIDE numbers per kind of head: a row of `kvprof.kernels.segments.tables.Kind`, then PLANES
        rows of `PlaneColumns` of K, then of V.
    HEADS
        Query heads of a program, a power of two from 8 on.
    CODE, MIDDLE
        Types in which the codes of V, and its middles, are multiplied.
    FAST
        Whether inline assembly can be used.
    NEAR
        `Tuning.near`; only then the counters are read.
    DEPENDENT
        Whether what joins the parts may be launched meanwhile (`kvprof.kernels.decode.launch`).
    """
    if DEPENDENT:
        cuda.gdc_launch_dependents()
    # The last task is the last head of the last row.
    behind = parts + _PART * tasks
    first = tl.load(behind + (_PART_FIRST - _PART))
    total = (first + tl.load(behind + (_PART_COUNT - _PART))) * blocks
    taken = _taken(counters, total, processors, FAST) if NEAR else tl.program_id(0)
    if taken < total:
        item = taken // blocks
        row = tl.load(items + item * _ITEM + _ITEM_ROW)
        head = tl.load(items + item * _ITEM + _ITEM_HEAD)
        segment = tl.load(items + item * _ITEM + _ITEM_SEGMENT)
        start = tl.load(items + item * _ITEM + _ITEM_START)
        stop = tl.load(items + item * _ITEM + _ITEM_STOP)
        unit = units + (segment * KV_HEADS + head) * _UNIT
        query = queries + row.to(tl.int64) * query_row + tl.load(unit + _QUERIES)
        width = tl.multiple_of(tl.load(unit + _QUERY_WIDTH).to(tl.int32), 16)
        at = tl.load(unit + _BEGIN)
        pages = table
        if PAGE > 0:
            pages = table + row.to(tl.int64) * table_row
            stop = tl.maximum(tl.minimum(stop, table_row * PAGE), start)
        else:
            at += row.to(tl.int64) * stride
        output_width = tl.load(unit + _OUTPUT_WIDTH).to(tl.int32)
        kind = tl.load(unit + _KIND)
        for number in tl.static_range(COUNT):
            if kind == number:
                keys = octets + at
                values = octets + at
                if KINDS[number * STRIDE + _K_FORMAT] == _FULL:
                    keys = full + at // (full.dtype.element_ty.primitive_bitwidth // 8)
                if KINDS[number * STRIDE + _V_FORMAT] == _FULL:
                    values = full + at // (full.dtype.element_ty.primitive_bitwidth // 8)
                if KINDS[number * STRIDE + _K_FORMAT] == _COLUMNS:
                    column_piece(
                        keys, pages, stride, partial, logs, item, query, width, start, stop,
                        output_width, scale, cap, taken % blocks * HEADS, KINDS,
                        number * STRIDE + _HEADER,
                        number * STRIDE + _HEADER + PLANES * _PLANE,
                        KINDS[number * STRIDE + _K_PLANES], KINDS[number * STRIDE + _K_SCALES],
                        KINDS[number * STRIDE + _V_PLANES], KINDS[number * STRIDE + _V_SCALES],
                        KINDS[number * STRIDE + _K_BLOCK], KINDS[number * STRIDE + _V_WIDTH],
                        KINDS[number * STRIDE + _PLACES], KINDS[number * STRIDE + _STAGES], GROUP,
                        4 if GROUP <= 4 else HEADS, WIDEST, PAGE, CAPPED, FAST,
                    )
                else:
                    _piece(
                        keys,
                        values,
                        halfs + at // 2,
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
                        taken % blocks * HEADS,
                        KINDS,
                        number * STRIDE + _HEADER,
                        number * STRIDE + _HEADER + PLANES * _PLANE,
                        KINDS[number * STRIDE + _K_FORMAT],
                        KINDS[number * STRIDE + _K_FACTOR],
                        KINDS[number * STRIDE + _K_BOOST],
                        KINDS[number * STRIDE + _K_PARTS],
                        KINDS[number * STRIDE + _K_GROUPS],
                        KINDS[number * STRIDE + _K_PLANES],
                        KINDS[number * STRIDE + _K_SCALES],
                        KINDS[number * STRIDE + _K_MIDDLES],
                        KINDS[number * STRIDE + _K_BLOCK],
                        KINDS[number * STRIDE + _V_FORMAT],
                        KINDS[number * STRIDE + _V_FACTOR],
                        KINDS[number * STRIDE + _SHIFT],
                        KINDS[number * STRIDE + _V_PARTS],
                        KINDS[number * STRIDE + _V_GROUPS],
                        KINDS[number * STRIDE + _V_PLANES],
                        KINDS[number * STRIDE + _V_SCALES],
                        KINDS[number * STRIDE + _V_MIDDLES],
                        KINDS[number * STRIDE + _V_BLOCK],
                        KINDS[number * STRIDE + _V_WIDTH],
                        KINDS[number * STRIDE + _BLOCK_HALFS],
                        KINDS[number * STRIDE + _SLOTS],
                        KINDS[number * STRIDE + _PLACES],
                        KINDS[number * STRIDE + _STAGES],
                        KINDS[number * STRIDE + _ROWS],
                        GROUP,
                        HEADS,
                        WIDEST,
                        PAGE,
                        CAPPED,
                        queries.dtype.element_ty
                        if KINDS[number * STRIDE + _V_FORMAT] == _FULL
                        else CODE,
                        MIDDLE,
                        FAST,
                    )
