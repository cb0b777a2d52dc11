"""Split-KV decode over heads of different widths: one program per split, or a list per worker.

Loads bound it, so widths are compile-time constants and narrow heads have one warp.
"""

import triton
import triton.language as tl

from kvprof.kernels.decode.cuts import Head, Item
from kvprof.kernels.dispatch import wait_for_earlier
from kvprof.kernels.tables import Kind, column, columns

__all__ = ["decode_pieces"]

# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.


_ITEM = tl.constexpr(len(Item._fields))
_ROW = tl.constexpr(column(Item, "row"))
_HEAD = tl.constexpr(column(Item, "head"))
_START = tl.constexpr(column(Item, "start"))
_STOP = tl.constexpr(column(Item, "stop"))
_ITEM_KIND = tl.constexpr(column(Item, "kind"))
_COLUMNS = tl.constexpr(len(Head._fields))
_QUERIES = tl.constexpr(column(Head, "queries"))
_KEYS = tl.constexpr(column(Head, "keys"))
_VALUES = tl.constexpr(column(Head, "values"))
_KIND = tl.constexpr(len(columns(Kind)))
_K0 = tl.constexpr(column(Kind, "k0"))
_K1 = tl.constexpr(column(Kind, "k1"))
_K2 = tl.constexpr(column(Kind, "k2"))
_K3 = tl.constexpr(column(Kind, "k3"))
_V0 = tl.constexpr(column(Kind, "v0"))
_V1 = tl.constexpr(column(Kind, "v1"))
_V2 = tl.constexpr(column(Kind, "v2"))
_V3 = tl.constexpr(column(Kind, "v3"))
_HEIGHT = tl.constexpr(column(Kind, "height"))


@triton.jit
def _planes(first, plane, W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr):
    """Return the offsets of a head's planes; each is a multiple of 16 values, for wide loads."""
    second = tl.multiple_of(first + plane * W0, 16)
    third = tl.multiple_of(first + plane * (W0 + W1), 16)
    fourth = tl.multiple_of(first + plane * (W0 + W1 + W2), 16)
    return first, second, third, fourth


@triton.jit
def _plane(
    plane, far, first, places, there, WIDTH: tl.constexpr, SPREAD: tl.constexpr, CHECK: tl.constexpr
):
    """Load rows of a plane, ``[places, WIDTH]``; zeros where there is no token.

    Places count from row `first`, which belongs to the base: the differences between a thread's
    addresses are then constants, without which a kernel of many head configs spills. With SPREAD
    tokens lie in several pages that are `far`, one for each.
    """
    offsets = places[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if SPREAD:
        at = plane + far[:, None] + offsets
    else:
        at = tl.multiple_of(plane + first * WIDTH, 16) + offsets
    if CHECK:
        return tl.load(at, mask=there[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def _tile(
    a0, a1, a2, a3, top, total, q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, start, first, low,
    stop, pages, stride, scale, cap, K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    K3: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, V3: tl.constexpr,
    HEIGHT: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr, CHECK: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Process one tile of tokens: scores, online softmax in base 2, weighted values."""
    places = tl.arange(0, HEIGHT)
    tokens = start + places
    there = tokens < stop
    if CHECK and PAGE > 0:
        there = there & (tokens >= low)
    far = first
    if SPREAD:
        if CHECK:
            page = tl.load(pages + tokens // PAGE, mask=there, other=0)
        else:
            page = tl.load(pages + tokens // PAGE)
        far = tl.multiple_of(page.to(tl.int64) * stride, 16)
        places = tokens % PAGE
    more = _plane(k0, far, first, places, there, K0, SPREAD, CHECK)
    scores = tl.dot(q0, tl.trans(more), input_precision="ieee")
    if K1 > 0:
        more = _plane(k1, far, first, places, there, K1, SPREAD, CHECK)
        scores = tl.dot(q1, tl.trans(more), scores, input_precision="ieee")
    if K2 > 0:
        more = _plane(k2, far, first, places, there, K2, SPREAD, CHECK)
        scores = tl.dot(q2, tl.trans(more), scores, input_precision="ieee")
    if K3 > 0:
        more = _plane(k3, far, first, places, there, K3, SPREAD, CHECK)
        scores = tl.dot(q3, tl.trans(more), scores, input_precision="ieee")
    if CAPPED:
        # cap · tanh(s / cap) with tanh(x) = 1 - 2 / (e^2x + 1), which has no overflow to mind.
        scores = cap - 2.0 * cap / (tl.exp2(scores * scale) + 1.0)
    if CHECK:
        scores = tl.where(there[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    fade = tl.exp2(top - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * fade + tl.sum(weights, 1)
    weights = weights.to(q0.dtype)
    value = _plane(v0, far, first, places, there, V0, SPREAD, CHECK)
    a0 = tl.dot(weights, value, a0 * fade[:, None], input_precision="ieee")
    if V1 > 0:
        value = _plane(v1, far, first, places, there, V1, SPREAD, CHECK)
        a1 = tl.dot(weights, value, a1 * fade[:, None], input_precision="ieee")
    if V2 > 0:
        value = _plane(v2, far, first, places, there, V2, SPREAD, CHECK)
        a2 = tl.dot(weights, value, a2 * fade[:, None], input_precision="ieee")
    if V3 > 0:
        value = _plane(v3, far, first, places, there, V3, SPREAD, CHECK)
        a3 = tl.dot(weights, value, a3 * fade[:, None], input_precision="ieee")
    return a0, a1, a2, a3, higher, total


@triton.jit
def _query(query, heads, scale, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Load one chunk of a group's queries, ``[ROWS, WIDTH]``, scaled for scores in base 2."""
    loaded = tl.load(query + tl.arange(0, WIDTH)[None, :], mask=(heads < GROUP)[:, None], other=0.0)
    return (loaded.to(tl.float32) * scale).to(loaded.dtype)


@triton.jit
def _piece(
    queries, keys, values, partial, logs, item, block, query_at, start, stop, pages, capacity,
    stride, widest, scale, cap, K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    K3: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, V3: tl.constexpr,
    HEIGHT: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PAGE: tl.constexpr, CAPPED: tl.constexpr,
):
    """Attend to the tokens of one piece and leave its part of the result."""
    LOWER: tl.constexpr = HEIGHT // 2 if HEIGHT > 16 else 16
    heads = block * ROWS + tl.arange(0, ROWS)
    query = queries + query_at + heads[:, None] * (K0 + K1 + K2 + K3)
    # A capped score is scaled after the product: `scale` / cap in the queries would underflow fp16.
    before = 1.0 if CAPPED else scale
    q0 = _query(query, heads, before, K0, GROUP)
    q1 = q0
    q2 = q0
    q3 = q0
    if K1 > 0:
        q1 = _query(query + K0, heads, before, K1, GROUP)
    if K2 > 0:
        q2 = _query(query + K0 + K1, heads, before, K2, GROUP)
    if K3 > 0:
        q3 = _query(query + K0 + K1 + K2, heads, before, K3, GROUP)
    a0 = tl.zeros([ROWS, V0], tl.float32)
    a1 = tl.zeros([ROWS, V1 if V1 > 0 else 1], tl.float32)
    a2 = tl.zeros([ROWS, V2 if V2 > 0 else 1], tl.float32)
    a3 = tl.zeros([ROWS, V3 if V3 > 0 else 1], tl.float32)
    # Finite, so that the first tile's fade is exp2 of something and not of inf - inf.
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if (PAGE > 0) and (PAGE % HEIGHT == 0):
        # Tiles begin at multiples of their height, so that each lies in one page.
        begin = tl.minimum((start + HEIGHT - 1) // HEIGHT * HEIGHT, stop)
        whole = begin + tl.maximum(stop - begin, 0) // HEIGHT * HEIGHT
        for at in tl.range(begin, whole, HEIGHT, num_stages=STAGES):
            far = tl.load(pages + at // PAGE).to(tl.int64) * stride
            k0, k1, k2, k3 = _planes(tl.multiple_of(keys + far, 16), PAGE, K0, K1, K2)
            v0, v1, v2, v3 = _planes(tl.multiple_of(values + far, 16), PAGE, V0, V1, V2)
            a0, a1, a2, a3, top, total = _tile(
                a0, a1, a2, a3, top, total, q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, at,
                0 if PAGE == HEIGHT else at % PAGE, start, stop, pages, stride, scale, cap, K0, K1,
                K2, K3, V0, V1, V2, V3, HEIGHT, PAGE, CAPPED, False, False,
            )
        # What is left of a row's ends, with a mask: lower tiles, because masked loads go through
        # registers, and a tall one would have the whole kernel spill.
        low = start // LOWER * LOWER
        early = tl.cdiv(begin - low, LOWER)
        for number in tl.range(0, early + tl.cdiv(stop - whole, LOWER), num_stages=1):
            at = tl.where(number < early, low, whole - early * LOWER) + number * LOWER
            far = tl.load(pages + at // PAGE).to(tl.int64) * stride
            k0, k1, k2, k3 = _planes(tl.multiple_of(keys + far, 16), PAGE, K0, K1, K2)
            v0, v1, v2, v3 = _planes(tl.multiple_of(values + far, 16), PAGE, V0, V1, V2)
            a0, a1, a2, a3, top, total = _tile(
                a0, a1, a2, a3, top, total, q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, at,
                at % PAGE, start, stop, pages, stride, scale, cap, K0, K1, K2, K3, V0, V1, V2, V3,
                LOWER, PAGE, CAPPED, True, False,
            )
    else:
        k0, k1, k2, k3 = _planes(keys, tl.full([], capacity, tl.int64), K0, K1, K2)
        v0, v1, v2, v3 = _planes(values, tl.full([], capacity, tl.int64), V0, V1, V2)
        whole = start + (stop - start) // HEIGHT * HEIGHT
        for at in tl.range(start, whole, HEIGHT, num_stages=STAGES):
            a0, a1, a2, a3, top, total = _tile(
                a0, a1, a2, a3, top, total, q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, at,
                tl.full([], at, tl.int64), start, stop, pages, stride, scale, cap, K0, K1, K2, K3,
                V0, V1, V2, V3, HEIGHT, PAGE, CAPPED, False, PAGE > 0,
            )
        for at in tl.range(whole, stop, LOWER, num_stages=1):
            a0, a1, a2, a3, top, total = _tile(
                a0, a1, a2, a3, top, total, q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, at,
                tl.full([], at, tl.int64), start, stop, pages, stride, scale, cap, K0, K1, K2, K3,
                V0, V1, V2, V3, LOWER, PAGE, CAPPED, True, PAGE > 0,
            )
    real = heads < GROUP
    result = partial + (item * GROUP + heads[:, None]) * widest
    # A piece without tokens leaves zeros of weight exp2(-inf).
    share = tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
    tl.store(result + tl.arange(0, V0)[None, :], a0 * share, mask=real[:, None])
    if V1 > 0:
        tl.store(result + V0 + tl.arange(0, V1)[None, :], a1 * share, mask=real[:, None])
    if V2 > 0:
        tl.store(result + V0 + V1 + tl.arange(0, V2)[None, :], a2 * share, mask=real[:, None])
    if V3 > 0:
        tl.store(result + V0 + V1 + V2 + tl.arange(0, V3)[None, :], a3 * share, mask=real[:, None])
    tl.store(logs + item * GROUP + heads, top + tl.log2(total), mask=real)


@triton.jit
def _item(
    item, block, queries, cache, partial, logs, items, heads, table, table_row, capacity,
    stride, query_row, widest, scale, cap, KINDS: tl.constexpr, COUNT: tl.constexpr,
    STAGES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Run the branch of an item's head configuration."""
    row = tl.load(items + item * _ITEM + _ROW)
    head = tl.load(items + item * _ITEM + _HEAD)
    start = tl.load(items + item * _ITEM + _START)
    stop = tl.load(items + item * _ITEM + _STOP)
    kind = tl.load(items + item * _ITEM + _ITEM_KIND)
    if kind >= 0:
        query_at = tl.load(heads + head * _COLUMNS + _QUERIES) + row.to(tl.int64) * query_row
        own = row.to(tl.int64) * stride
        pages = table
        if PAGE > 0:
            own = row.to(tl.int64) * 0
            pages = table + row.to(tl.int64) * table_row
            stop = tl.maximum(tl.minimum(stop, table_row * PAGE), start)
        key_at = tl.load(heads + head * _COLUMNS + _KEYS) + own
        value_at = tl.load(heads + head * _COLUMNS + _VALUES) + own
        keys = tl.multiple_of(cache + key_at, 16)
        values = tl.multiple_of(cache + value_at, 16)
        for number in tl.static_range(COUNT):
            if kind == number:
                _piece(
                    queries, keys, values, partial, logs, item, block, query_at, start, stop, pages,
                    capacity, stride, widest, scale, cap,
                    KINDS[number * _KIND + _K0], KINDS[number * _KIND + _K1],
                    KINDS[number * _KIND + _K2], KINDS[number * _KIND + _K3],
                    KINDS[number * _KIND + _V0], KINDS[number * _KIND + _V1],
                    KINDS[number * _KIND + _V2], KINDS[number * _KIND + _V3],
                    KINDS[number * _KIND + _HEIGHT], STAGES, GROUP, ROWS, PAGE, CAPPED,
                )


# Items of a layer begin where the layer before ends, at 16 bytes or not.
@triton.jit(do_not_specialize_on_alignment=["items"])
def decode_pieces(
    queries, cache, partial, logs, items, heads, table, table_row, capacity, stride,
    query_row, widest, scale, cap, KINDS: tl.constexpr, COUNT: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, CAPPED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Run one item per program (per block of its query heads); an item of kind -1 is none.

    Parameters
    ----------
    queries, cache
        As `kvprof.kernels.planes` lays them out.
    partial, logs
        ``[items, GROUP, widest]`` and ``[items, GROUP]`` float32: results and log2 of the sums.
    items
        Rows of `kvprof.kernels.decode.cuts.Item`, int32.
    heads
        Rows of `kvprof.kernels.decode.cuts.Head`, int64.
    table
        ``[rows, table_row]`` int32 pages, read when `PAGE` (tokens of a page) is not 0.
    capacity, stride
        Tokens of a plane, and values from one row of the cache to the next.
    query_row, widest
        Values in a row of queries, and in a query head's place in `partial`.
    scale
        The model's scaling times log2(e); with a cap, 2·log2(e)·scaling / cap.
    cap
        Times log2(e).
    KINDS
        A row of `kvprof.kernels.tables.Kind` per head configuration.
    ROWS
        Query heads that a program takes, 16, 32 or 64; where a group has more, as many programs
        follow one another for each item.
    DEPENDENT
        Whether the launch did not wait for what comes before, nor what joins the parts for this one
        (`kvprof.kernels.dispatch.early_launch`).
    """
    wait_for_earlier(DEPENDENT)
    BLOCKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    program = tl.program_id(0)
    _item(
        program // BLOCKS,
        program % BLOCKS,
        queries,
        cache,
        partial,
        logs,
        items,
        heads,
        table,
        table_row,
        capacity,
        stride,
        query_row,
        widest,
        scale,
        cap,
        KINDS,
        COUNT,
        STAGES,
        GROUP,
        ROWS,
        PAGE,
        CAPPED,
    )
