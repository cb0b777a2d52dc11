# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Split-context decode over heads of unlike width: one program per piece of work, then a merge.

Reading the cache is all that a decoding step has to wait for, so everything here is about loads:
widths are compile-time constants with a branch per kind of head, chunks are planes of their own
(`kvprof.kernels.planes`), a program is one warp with several tiles on their way, and pieces cost
the same (`kvprof.kernels.decode.cuts`).
"""

import triton
import triton.language as tl

__all__ = ["decode_pieces", "merge_pieces"]

# tl.dot wants at least 16 rows; query heads of a group fill some of them.
_ROWS = tl.constexpr(16)


@triton.jit
def _plane(plane, tokens, stop, WIDTH: tl.constexpr, CHECK: tl.constexpr):
    """Load rows of a plane, ``[tokens, WIDTH]``; zeros behind `stop`."""
    at = plane + tokens[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if CHECK:
        return tl.load(at, mask=(tokens < stop)[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def _tile(
    a0, a1, a2, a3, top, total, q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, start, stop,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, K3: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, V3: tl.constexpr,
    HEIGHT: tl.constexpr, CHECK: tl.constexpr,
):  # fmt: skip
    """Go on with one tile of tokens: scores, online softmax in base 2, weighted values."""
    tokens = start + tl.arange(0, HEIGHT)
    scores = tl.dot(q0, tl.trans(_plane(k0, tokens, stop, K0, CHECK)), input_precision="ieee")
    if K1 > 0:
        more = _plane(k1, tokens, stop, K1, CHECK)
        scores = tl.dot(q1, tl.trans(more), scores, input_precision="ieee")
    if K2 > 0:
        more = _plane(k2, tokens, stop, K2, CHECK)
        scores = tl.dot(q2, tl.trans(more), scores, input_precision="ieee")
    if K3 > 0:
        more = _plane(k3, tokens, stop, K3, CHECK)
        scores = tl.dot(q3, tl.trans(more), scores, input_precision="ieee")
    if CHECK:
        scores = tl.where((tokens < stop)[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    fade = tl.exp2(top - higher)
    weights = tl.exp2(scores - higher[:, None])
    total = total * fade + tl.sum(weights, 1)
    weights = weights.to(q0.dtype)
    value = _plane(v0, tokens, stop, V0, CHECK)
    a0 = tl.dot(weights, value, a0 * fade[:, None], input_precision="ieee")
    if V1 > 0:
        value = _plane(v1, tokens, stop, V1, CHECK)
        a1 = tl.dot(weights, value, a1 * fade[:, None], input_precision="ieee")
    if V2 > 0:
        value = _plane(v2, tokens, stop, V2, CHECK)
        a2 = tl.dot(weights, value, a2 * fade[:, None], input_precision="ieee")
    if V3 > 0:
        value = _plane(v3, tokens, stop, V3, CHECK)
        a3 = tl.dot(weights, value, a3 * fade[:, None], input_precision="ieee")
    return a0, a1, a2, a3, higher, total


@triton.jit
def _query(query, heads, scale, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """Load one chunk of a group's queries, ``[16, WIDTH]``, scaled for scores in base 2."""
    loaded = tl.load(query + tl.arange(0, WIDTH)[None, :], mask=(heads < GROUP)[:, None], other=0.0)
    return (loaded.to(tl.float32) * scale).to(loaded.dtype)


@triton.jit
def _piece(
    queries, cache, partial, logs, item, row, query_at, key_at, value_at, start, stop,
    capacity, batch, scale,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr, K3: tl.constexpr,
    V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, V3: tl.constexpr,
    HEIGHT: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, WIDEST: tl.constexpr,
):  # fmt: skip
    """Attend to the tokens of one piece and leave its part of the result."""
    heads = tl.arange(0, _ROWS)
    plane = batch.to(tl.int64) * capacity
    own = row.to(tl.int64) * capacity
    # Every offset is a multiple of 16 values: said, so that loads are as wide as they can be.
    k0 = tl.multiple_of(cache + key_at + own * K0, 16)
    k1 = tl.multiple_of(cache + key_at + plane * K0 + own * K1, 16)
    k2 = tl.multiple_of(cache + key_at + plane * (K0 + K1) + own * K2, 16)
    k3 = tl.multiple_of(cache + key_at + plane * (K0 + K1 + K2) + own * K3, 16)
    v0 = tl.multiple_of(cache + value_at + own * V0, 16)
    v1 = tl.multiple_of(cache + value_at + plane * V0 + own * V1, 16)
    v2 = tl.multiple_of(cache + value_at + plane * (V0 + V1) + own * V2, 16)
    v3 = tl.multiple_of(cache + value_at + plane * (V0 + V1 + V2) + own * V3, 16)
    query = queries + query_at + heads[:, None] * (K0 + K1 + K2 + K3)
    q0 = _query(query, heads, scale, K0, GROUP)
    q1 = q0
    q2 = q0
    q3 = q0
    if K1 > 0:
        q1 = _query(query + K0, heads, scale, K1, GROUP)
    if K2 > 0:
        q2 = _query(query + K0 + K1, heads, scale, K2, GROUP)
    if K3 > 0:
        q3 = _query(query + K0 + K1 + K2, heads, scale, K3, GROUP)
    a0 = tl.zeros([_ROWS, V0], tl.float32)
    a1 = tl.zeros([_ROWS, V1 if V1 > 0 else 1], tl.float32)
    a2 = tl.zeros([_ROWS, V2 if V2 > 0 else 1], tl.float32)
    a3 = tl.zeros([_ROWS, V3 if V3 > 0 else 1], tl.float32)
    # Finite, so that the first tile's fade is exp2 of something and not of inf - inf.
    top = tl.full([_ROWS], -1e30, tl.float32)
    total = tl.zeros([_ROWS], tl.float32)
    whole = start + (stop - start) // HEIGHT * HEIGHT
    for at in tl.range(start, whole, HEIGHT, num_stages=STAGES):
        a0, a1, a2, a3, top, total = _tile(
            a0, a1, a2, a3, top, total, q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, at, stop,
            K0, K1, K2, K3, V0, V1, V2, V3, HEIGHT, False,
        )  # fmt: skip
    if whole < stop:
        a0, a1, a2, a3, top, total = _tile(
            a0, a1, a2, a3, top, total, q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, whole, stop,
            K0, K1, K2, K3, V0, V1, V2, V3, HEIGHT, True,
        )  # fmt: skip
    real = heads < GROUP
    result = partial + (item * GROUP + heads[:, None]) * WIDEST
    share = 1.0 / total[:, None]
    tl.store(result + tl.arange(0, V0)[None, :], a0 * share, mask=real[:, None])
    if V1 > 0:
        tl.store(result + V0 + tl.arange(0, V1)[None, :], a1 * share, mask=real[:, None])
    if V2 > 0:
        tl.store(result + V0 + V1 + tl.arange(0, V2)[None, :], a2 * share, mask=real[:, None])
    if V3 > 0:
        tl.store(result + V0 + V1 + V2 + tl.arange(0, V3)[None, :], a3 * share, mask=real[:, None])
    tl.store(logs + item * GROUP + heads, top + tl.log2(total), mask=real)


@triton.jit
def decode_pieces(
    queries, cache, partial, logs, items, heads, capacity, batch, scale,
    KINDS: tl.constexpr, COUNT: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    WIDEST: tl.constexpr, QUERY_ROW: tl.constexpr,
):  # fmt: skip
    """Run one piece per program.

    Parameters
    ----------
    queries, cache
        As `kvprof.kernels.planes` lays them out.
    partial, logs
        ``[items, GROUP, WIDEST]`` and ``[items, GROUP]`` float32: results and log2 of the sums.
    items
        ``[items, 5]`` int32: row, head, start, stop, kind.
    heads
        ``[heads, 3]`` int64: where a head's queries, K and V begin.
    scale
        The model's scaling times log2(e).
    KINDS
        Nine numbers per kind of head: the chunks of K and of V (0 where there is none), the tile's
        height.
    """
    item = tl.program_id(0)
    row = tl.load(items + item * 5)
    head = tl.load(items + item * 5 + 1)
    start = tl.load(items + item * 5 + 2)
    stop = tl.load(items + item * 5 + 3)
    kind = tl.load(items + item * 5 + 4)
    query_at = tl.load(heads + head * 3) + row.to(tl.int64) * QUERY_ROW
    key_at = tl.load(heads + head * 3 + 1)
    value_at = tl.load(heads + head * 3 + 2)
    for number in tl.static_range(COUNT):
        if kind == number:
            _piece(
                queries, cache, partial, logs, item, row, query_at, key_at, value_at, start, stop,
                capacity, batch, scale,
                KINDS[number * 9], KINDS[number * 9 + 1], KINDS[number * 9 + 2],
                KINDS[number * 9 + 3], KINDS[number * 9 + 4], KINDS[number * 9 + 5],
                KINDS[number * 9 + 6], KINDS[number * 9 + 7], KINDS[number * 9 + 8],
                STAGES, GROUP, WIDEST,
            )  # fmt: skip


@triton.jit
def merge_pieces(
    partial, logs, parts, output, places,
    GROUP: tl.constexpr, WIDEST: tl.constexpr, COLUMNS: tl.constexpr, MOST: tl.constexpr,
    HEADS: tl.constexpr, OUTPUT_ROW: tl.constexpr,
):  # fmt: skip
    """Join a query head's parts by their log sums; a program per sequence, KV head, query head.

    Parameters
    ----------
    parts
        ``[batch * heads, 2]`` int32: first item and count.
    places
        ``[heads, 2]`` int32: where a head's outputs begin in a row, and dv.
    MOST
        Power of two from the largest count on.
    """
    number = tl.program_id(0)
    query = tl.program_id(1)
    first = tl.load(parts + number * 2)
    count = tl.load(parts + number * 2 + 1)
    head = number % HEADS
    at = tl.load(places + head * 2)
    width = tl.load(places + head * 2 + 1)
    part = tl.arange(0, MOST)
    there = part < count
    logs_here = tl.load(logs + (first + part) * GROUP + query, mask=there, other=float("-inf"))
    weights = tl.exp2(logs_here - tl.max(logs_here, 0))
    weights = weights / tl.sum(weights, 0)
    columns = tl.arange(0, COLUMNS)
    wanted = there[:, None] & (columns < width)[None, :]
    rows = partial + ((first + part)[:, None] * GROUP + query) * WIDEST + columns[None, :]
    result = tl.sum(tl.load(rows, mask=wanted, other=0.0) * weights[:, None], 0)
    row = (number // HEADS).to(tl.int64) * OUTPUT_ROW
    target = output + row + at + query * width + columns
    tl.store(target, result.to(output.dtype.element_ty), mask=columns < width)
