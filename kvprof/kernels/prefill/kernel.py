# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Causal attention of many new tokens over heads of unlike width (FDC §5.3, prefill).

A program takes one block of a schedule (`kvprof.kernels.prefill.schedules`): neighbouring rows of
one KV head, a row being one of the head's ``G`` query heads at one position, so that tiles are full
whatever ``G`` is and the query heads share every tile of K and V. It goes through its rows a tile
at a time. Prefill is bound by arithmetic: widths are compile-time constants, so that each kind of
head has a launch of its own, tiles behind the diagonal are never visited, and only those on it are
masked.

Every loop with a product is pipelined, those of one tile too: the assembler of CUDA 12.8, which
Triton 3.6 brings, computes the address of an operand that lies at a constant place in shared memory
from a register that it never set.
"""

import triton
import triton.language as tl

from kvprof.kernels.prefill.schedules import BlockRow
from kvprof.kernels.prefill.tuning import Head, Kind
from kvprof.kernels.tables import column

__all__ = ["prefill_blocks"]

# log2(e): scores are exponentiated in base 2.
_LOG2E = tl.constexpr(1.4426950408889634)
_BLOCK = tl.constexpr(len(BlockRow._fields))
_SEQUENCE = tl.constexpr(column(BlockRow, "sequence"))
_BLOCK_HEAD = tl.constexpr(column(BlockRow, "head"))
_FIRST = tl.constexpr(column(BlockRow, "first"))
_BLOCK_ROWS = tl.constexpr(column(BlockRow, "rows"))
_HEAD = tl.constexpr(len(Head._fields))
_QUERIES = tl.constexpr(column(Head, "queries"))
_OUTPUTS = tl.constexpr(column(Head, "outputs"))
_K0_AT = tl.constexpr(column(Head, "k0"))
_K1_AT = tl.constexpr(column(Head, "k1"))
_K2_AT = tl.constexpr(column(Head, "k2"))
_K3_AT = tl.constexpr(column(Head, "k3"))
_V0_AT = tl.constexpr(column(Head, "v0"))
_V1_AT = tl.constexpr(column(Head, "v1"))
_V2_AT = tl.constexpr(column(Head, "v2"))
_V3_AT = tl.constexpr(column(Head, "v3"))
_K0 = tl.constexpr(column(Kind, "k0"))
_K1 = tl.constexpr(column(Kind, "k1"))
_K2 = tl.constexpr(column(Kind, "k2"))
_K3 = tl.constexpr(column(Kind, "k3"))
_V0 = tl.constexpr(column(Kind, "v0"))
_V1 = tl.constexpr(column(Kind, "v1"))
_V2 = tl.constexpr(column(Kind, "v2"))
_V3 = tl.constexpr(column(Kind, "v3"))
_ROWS = tl.constexpr(column(Kind, "rows"))
_KEYS = tl.constexpr(column(Kind, "keys"))


@triton.jit
def _plane(
    plane, far, first, places, there, WIDTH: tl.constexpr, SPREAD: tl.constexpr, CHECK: tl.constexpr
):
    """Load rows of a plane, ``[places, WIDTH]``, from row `first` on; zeros where absent."""
    offsets = places[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if SPREAD:
        at = plane + far[:, None] + offsets
    else:
        at = tl.multiple_of(plane + (far + first * WIDTH), 16) + offsets
    if CHECK:
        # What lies there may be anything, and 0 * NaN is NaN.
        return tl.load(at, mask=there[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def _tile(
    a0, a1, a2, a3, top, total, q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, start, low, stop,
    positions, pages, stride, scale, softcap, window, K0: tl.constexpr, K1: tl.constexpr,
    K2: tl.constexpr, K3: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    V3: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, CHECK: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):
    """Go on with one tile of keys: scores, online softmax in base 2, weighted values."""
    SPREAD: tl.constexpr = PAGE > 0 and PAGE % KEYS != 0
    places = tl.arange(0, KEYS)
    tokens = start + places
    there = (tokens >= low) & (tokens < stop)
    first = tl.full([], start, tl.int64)
    far = first * 0
    if SPREAD:
        if CHECK:
            page = tl.load(pages + tokens // PAGE, mask=there, other=0)
        else:
            page = tl.load(pages + tokens // PAGE)
        far = tl.multiple_of(page.to(tl.int64) * stride, 16)
        places = tokens % PAGE
    elif PAGE > 0:
        # Tiles begin at multiples of their height: each lies in one page.
        far = tl.load(pages + start // PAGE).to(tl.int64) * stride
        first = first % PAGE
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
    factor = scale
    if SOFTCAP:
        # softcap * tanh(x / softcap), tanh as 2 sigmoid(2 x) - 1, which overflows nowhere.
        scores = (softcap * _LOG2E) * (2.0 * tl.sigmoid(scores * (2.0 * scale / softcap)) - 1.0)
        factor = 1.0
    if CHECK:
        seen = tokens[None, :] <= positions[:, None]
        if WINDOW:
            seen = seen & (tokens[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    # The factor is applied after the maximum: one multiply-add per score, and no rounded queries.
    higher = tl.maximum(top, tl.max(scores, 1) * factor)
    fade = tl.exp2(top - higher)
    weights = tl.exp2(scores * factor - higher[:, None])
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
def _rows(
    queries, cache, output, logs, sinks, at_head, head, first, end, past, own, pages, stride,
    query_row, output_row, scale, softcap, window, K0: tl.constexpr, K1: tl.constexpr,
    K2: tl.constexpr, K3: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr,
    V3: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    WINDOW: tl.constexpr, LOGS: tl.constexpr,
):
    """Attend for one tile of rows, ``first … end - 1``, of one KV head of one sequence."""
    rows = first + tl.arange(0, ROWS)
    real = rows < end
    tokens = rows // GROUP
    heads = rows % GROUP
    positions = past + tokens
    # Every offset is a multiple of 16 values: said, so that loads are as wide as they can be.
    k0 = tl.multiple_of(cache + (tl.load(at_head + _K0_AT) + own), 16)
    k1 = tl.multiple_of(cache + (tl.load(at_head + _K1_AT) + own), 16)
    k2 = tl.multiple_of(cache + (tl.load(at_head + _K2_AT) + own), 16)
    k3 = tl.multiple_of(cache + (tl.load(at_head + _K3_AT) + own), 16)
    v0 = tl.multiple_of(cache + (tl.load(at_head + _V0_AT) + own), 16)
    v1 = tl.multiple_of(cache + (tl.load(at_head + _V1_AT) + own), 16)
    v2 = tl.multiple_of(cache + (tl.load(at_head + _V2_AT) + own), 16)
    v3 = tl.multiple_of(cache + (tl.load(at_head + _V3_AT) + own), 16)
    at = tokens.to(tl.int64) * query_row + heads * (K0 + K1 + K2 + K3)
    query = tl.multiple_of(queries + tl.load(at_head + _QUERIES) + at, 16)[:, None]
    q0 = tl.load(query + tl.arange(0, K0)[None, :], mask=real[:, None], other=0.0)
    q1 = q0
    q2 = q0
    q3 = q0
    if K1 > 0:
        q1 = tl.load(query + K0 + tl.arange(0, K1)[None, :], mask=real[:, None], other=0.0)
    if K2 > 0:
        q2 = tl.load(query + K0 + K1 + tl.arange(0, K2)[None, :], mask=real[:, None], other=0.0)
    if K3 > 0:
        more = query + K0 + K1 + K2 + tl.arange(0, K3)[None, :]
        q3 = tl.load(more, mask=real[:, None], other=0.0)
    a0 = tl.zeros([ROWS, V0], tl.float32)
    a1 = tl.zeros([ROWS, V1 if V1 > 0 else 1], tl.float32)
    a2 = tl.zeros([ROWS, V2 if V2 > 0 else 1], tl.float32)
    a3 = tl.zeros([ROWS, V3 if V3 > 0 else 1], tl.float32)
    # Finite, so that a tile in which a row sees nothing fades by exp2 of something.
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        top = tl.maximum(tl.load(sinks + head * GROUP + heads).to(tl.float32) * _LOG2E, top)
        total = tl.full([ROWS], 1.0, tl.float32)
    lowest = past + first // GROUP
    highest = past + (tl.minimum(first + ROWS, end) - 1) // GROUP
    stop = tl.maximum(highest + 1, 0)
    whole = tl.maximum(lowest + 1, 0) // KEYS * KEYS
    low = 0
    begin = 0
    if WINDOW:
        low = tl.maximum(lowest - window + 1, 0)
        begin = tl.minimum(tl.cdiv(tl.maximum(highest - window + 1, 0), KEYS) * KEYS, whole)
        for at in tl.range(low // KEYS * KEYS, begin, KEYS, num_stages=STAGES):
            a0, a1, a2, a3, top, total = _tile(
                a0, a1, a2, a3, top, total, q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, at, low,
                stop, positions, pages, stride, scale, softcap, window, K0, K1, K2, K3, V0, V1, V2,
                V3, KEYS, PAGE, True, SOFTCAP, WINDOW,
            )
    for at in tl.range(begin, whole, KEYS, num_stages=STAGES):
        a0, a1, a2, a3, top, total = _tile(
            a0, a1, a2, a3, top, total, q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, at, low,
            stop, positions, pages, stride, scale, softcap, window, K0, K1, K2, K3, V0, V1, V2, V3,
            KEYS, PAGE, False, SOFTCAP, WINDOW,
        )
    for at in tl.range(whole, stop, KEYS, num_stages=STAGES):
        a0, a1, a2, a3, top, total = _tile(
            a0, a1, a2, a3, top, total, q0, q1, q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, at, low,
            stop, positions, pages, stride, scale, softcap, window, K0, K1, K2, K3, V0, V1, V2, V3,
            KEYS, PAGE, True, SOFTCAP, WINDOW,
        )
    # A row before the sequence's first token sees nothing and is zero.
    share = 1.0 / tl.where(total > 0.0, total, 1.0)[:, None]
    if LOGS > 0:
        # What a sink adds is no sum of a row that sees nothing.
        there = (total > 0.0) & (positions >= 0)
        sums = tl.where(there, top + tl.log2(total), float("-inf"))
        place = tokens.to(tl.int64) * LOGS + head * GROUP + heads
        tl.store(logs + place, sums, mask=real)
    at = tokens.to(tl.int64) * output_row + heads * (V0 + V1 + V2 + V3)
    target = tl.multiple_of(output + tl.load(at_head + _OUTPUTS) + at, 16)[:, None]
    kind = output.dtype.element_ty
    tl.store(target + tl.arange(0, V0)[None, :], (a0 * share).to(kind), mask=real[:, None])
    if V1 > 0:
        place = target + V0 + tl.arange(0, V1)[None, :]
        tl.store(place, (a1 * share).to(kind), mask=real[:, None])
    if V2 > 0:
        place = target + V0 + V1 + tl.arange(0, V2)[None, :]
        tl.store(place, (a2 * share).to(kind), mask=real[:, None])
    if V3 > 0:
        place = target + V0 + V1 + V2 + tl.arange(0, V3)[None, :]
        tl.store(place, (a3 * share).to(kind), mask=real[:, None])


@triton.jit(do_not_specialize=["first_block", "own_heads", "tokens", "capacity", "window"])
def prefill_blocks(
    queries, cache, output, logs, lengths, starts, sinks, blocks, heads, order, table,
    first_block, own_heads, tokens, capacity, stride, table_row, query_row, output_row, scale,
    softcap, window,
    KIND: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    PAGE: tl.constexpr, UNLIKE: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    WINDOW: tl.constexpr, LOGS: tl.constexpr,
):
    """Run one block per program.

    Parameters
    ----------
    queries, output
        ``[batch, tokens, query_row]`` and ``[batch, tokens, output_row]``; with UNLIKE
        ``[all tokens, query_row]`` and ``[all tokens, output_row]``.
    cache
        As `kvprof.kernels.planes` lays it out.
    logs
        ``[all tokens, LOGS]`` float32, written where LOGS, the query heads, is not 0: log2 of the
        sums of exponentiated scores.
    lengths
        ``[batch]`` int32: tokens of each sequence, the new ones included; beyond the capacity none
        are read.
    starts
        ``[batch + 1]`` int32, where each sequence's new tokens begin among all; read when UNLIKE.
    sinks
        ``[heads, GROUP]`` logits, read when SINKS.
    blocks
        Rows of `kvprof.kernels.prefill.schedules.BlockRow`, int32; with UNLIKE those of
        `kvprof.kernels.prefill.rows`, of which every head of `order` has each.
    heads
        Rows of `kvprof.kernels.prefill.tuning.Head`, int64.
    order
        int32, the heads of this launch `own_heads` from `first_block` on; read when UNLIKE.
    table
        ``[batch, table_row]`` int32 pages, read when PAGE (tokens of a page) is not 0.
    first_block
        Of the table, for this launch; with UNLIKE of `order`.
    capacity, stride
        Tokens that a sequence has room for, and values from one row of the cache to the next.
    scale, softcap, window
        The model's scaling times log2(e); the cap of scores when SOFTCAP (then scale is the
        scaling itself); tokens that a token sees, itself included, when WINDOW.
    KIND
        The columns of `kvprof.kernels.prefill.tuning.Kind`: that of all heads of the launch.
    """
    program = tl.program_id(0)
    block = program + first_block
    if UNLIKE:
        block = program // own_heads
    row = tl.load(blocks + block * _BLOCK + _SEQUENCE)
    head = tl.load(blocks + block * _BLOCK + _BLOCK_HEAD)
    first = tl.load(blocks + block * _BLOCK + _FIRST)
    end = first + tl.load(blocks + block * _BLOCK + _BLOCK_ROWS)
    if row >= 0:
        far = row.to(tl.int64)
        length = tl.minimum(tl.load(lengths + row), capacity)
        new = length * 0 + tokens
        before = far * tokens
        if UNLIKE:
            head = tl.load(order + first_block + program % own_heads)
            own_start = tl.load(starts + row)
            next_row = row + 1
            new = tl.load(starts + next_row) - own_start
            before = own_start.to(tl.int64)
        own = far * stride
        pages = table
        if PAGE > 0:
            own = far * 0
            pages = table + far * table_row
        for at in tl.range(first, end, KIND[_ROWS], num_stages=1):
            _rows(
                queries + before * query_row, cache, output + before * output_row,
                logs + before * LOGS, sinks, heads + head * _HEAD, head, at, end,
                length - new, own, pages, stride, query_row, output_row, scale, softcap,
                window, KIND[_K0], KIND[_K1], KIND[_K2], KIND[_K3], KIND[_V0], KIND[_V1],
                KIND[_V2], KIND[_V3], KIND[_ROWS], KIND[_KEYS], STAGES, GROUP, PAGE, SOFTCAP,
                SINKS, WINDOW, LOGS,
            )
