# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Decode over segments of quantised storage: one program per piece of work, a branch per kind.

Quantised keys and values are so few bytes that arithmetic per element counts. So tokens or columns
are the rows of every product and the (few) query heads its eight or more columns; bytes become
operands of the tensor cores without a conversion or a shuffle (`kvprof.kernels.levels.unpack`,
`kvprof.kernels.levels.layout`); and what a code is offset, scaled and shifted by stays outside of
the elements. With ``x = middle + scale · code``:

- scores, per token and group of columns: ``scale · (code · q) + middle · Σq``;
- values, per group: ``Σ w · code + Σ p · middle`` with ``w = p · scale``, rounded. The last, and
  ``Σ p``, are rows of one more product.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from kvprof.kernels.levels.tile import HEADER, PLANE, tile
from kvprof.kernels.levels.unpack import FP8, FULL

__all__ = ["level_pieces"]

_HEADER = tl.constexpr(HEADER)
_PLANE = tl.constexpr(PLANE)
_FULL = tl.constexpr(FULL)
_FP8 = tl.constexpr(FP8)


@triton.jit
def _query(
    query, heads, width, there,
    START: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, BOOST: tl.constexpr,
):  # fmt: skip
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
    one = tl.load(eye + 128 + row).to(DTYPE)
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
    keys, values, halfs, eye, partial, logs, item, query, width, start, stop, output_width, scale,
    cap, first_head,
    KINDS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    K_FORMAT: tl.constexpr, K_FACTOR: tl.constexpr, K_BOOST: tl.constexpr,
    K_PARTS: tl.constexpr, K_GROUPS: tl.constexpr, K_PLANES: tl.constexpr, K_SCALES: tl.constexpr,
    K_MIDDLES: tl.constexpr, K_BLOCK: tl.constexpr,
    V_FORMAT: tl.constexpr, V_FACTOR: tl.constexpr, SHIFT: tl.constexpr,
    V_PARTS: tl.constexpr, V_GROUPS: tl.constexpr, V_PLANES: tl.constexpr, V_SCALES: tl.constexpr,
    V_MIDDLES: tl.constexpr, V_BLOCK: tl.constexpr, V_WIDTH: tl.constexpr,
    BLOCK_HALFS: tl.constexpr, SLOTS: tl.constexpr, PLACES: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, WIDEST: tl.constexpr,
    CAPPED: tl.constexpr, V_DTYPE: tl.constexpr, M_DTYPE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Attend to the tokens of one piece and leave its part of the result."""
    heads = first_head + tl.arange(0, HEADS)
    real = heads < GROUP
    wanted = ()
    totals = ()
    total = tl.zeros([HEADS], tl.float32)
    for number in tl.static_range(K_PLANES):
        loaded = _query(
            query, heads, width, real, KINDS[KEYS + number * _PLANE],
            KINDS[KEYS + number * _PLANE + 1], KINDS[KEYS + number * _PLANE + 2], K_BOOST,
        )  # fmt: skip
        wanted += (loaded,)
        if K_GROUPS > 0:
            total += tl.sum(loaded.to(tl.float32), 0)
            if KINDS[KEYS + number * _PLANE + 5] == 1:
                totals += (total[None, :],)
                total = tl.zeros([HEADS], tl.float32)
    row = tl.arange(0, ROWS)
    if V_FORMAT == _FP8:
        ones = _first_row(eye, row, PLACES, V_DTYPE)
    else:
        here = tl.where(row == V_GROUPS, 1.0, 0.0).to(M_DTYPE if V_GROUPS > 0 else V_DTYPE)
        ones = tl.broadcast_to(here[:, None], [ROWS, PLACES])
    sums = ()
    for number in tl.static_range(V_PLANES):
        sums += (_empty(KINDS[VALUES + number * _PLANE + 1], HEADS),)
    fixes = tl.zeros([ROWS, HEADS], tl.float32)
    # Finite, so that the first tile's fade is exp2 of something and not of inf - inf.
    top = tl.full([HEADS], -1e30, tl.float32)
    whole = start + (stop - start) // (PLACES * SLOTS) * (PLACES * SLOTS)
    for at in tl.range(start, whole, PLACES * SLOTS, num_stages=STAGES):
        sums, fixes, top = tile(
            sums, fixes, top, wanted, totals, ones, keys, values, halfs, at, stop, scale, cap,
            KINDS, KEYS, VALUES, K_FORMAT, K_FACTOR, K_PARTS, K_GROUPS, K_PLANES, K_SCALES,
            K_MIDDLES, K_BLOCK, V_FORMAT, V_PARTS, V_GROUPS, V_PLANES, V_SCALES, V_MIDDLES, V_BLOCK,
            BLOCK_HALFS, SLOTS, PLACES, SHIFT, ROWS, V_DTYPE, M_DTYPE, CAPPED, False, FAST,
        )  # fmt: skip
    # The end of a row: behind it lies room for a whole tile, but perhaps no number.
    for at in tl.range(whole, stop, PLACES * SLOTS, num_stages=2):
        sums, fixes, top = tile(
            sums, fixes, top, wanted, totals, ones, keys, values, halfs, at, stop, scale, cap,
            KINDS, KEYS, VALUES, K_FORMAT, K_FACTOR, K_PARTS, K_GROUPS, K_PLANES, K_SCALES,
            K_MIDDLES, K_BLOCK, V_FORMAT, V_PARTS, V_GROUPS, V_PLANES, V_SCALES, V_MIDDLES, V_BLOCK,
            BLOCK_HALFS, SLOTS, PLACES, SHIFT, ROWS, V_DTYPE, M_DTYPE, CAPPED, True, FAST,
        )  # fmt: skip
    weight = tl.sum(tl.where((row == V_GROUPS)[:, None], fixes, 0.0), 0)
    share = 1.0 / weight
    result = partial + (item * GROUP + heads)[None, :].to(tl.int64) * WIDEST
    for number in tl.static_range(V_PLANES):
        found = sums[number]
        if V_GROUPS > 0:
            own_group = KINDS[VALUES + number * _PLANE + 3]
            found += tl.sum(tl.where((row == own_group)[:, None], fixes, 0.0), 0)[None, :]
        _store(
            result, found * V_FACTOR * share[None, :], real, KINDS[VALUES + number * _PLANE],
            KINDS[VALUES + number * _PLANE + 1],
        )  # fmt: skip
    # A narrower segment adds nothing to the columns behind its own.
    for begin in range(V_WIDTH, output_width, 16):
        _store(result + begin, _empty(16, HEADS), real, 0, 16)
    tl.store(logs + item * GROUP + heads, top + tl.log2(weight) - SHIFT, mask=real)


@triton.jit
def _taken(counters, total, processors, FAST: tl.constexpr):
    """Take what is to be done next from this multiprocessor's share, or else from another's.

    Neighbouring work is of one kind of head mostly. A multiprocessor that has all kinds at once,
    which is what the order of programs would give it, reads their code again and again: it does not
    fit the instruction cache. Who comes when there is none left gets `total` or more.
    """
    found = tl.atomic_add(counters + processors, 1)
    if found < total:
        own = (cuda.smid() if FAST else tl.program_id(0)) % processors
        found = total
        while found == total:
            begin = own * total // processors
            number = begin + tl.atomic_add(counters + own, 1)
            own = (own + 1) % processors
            if number < (own * total // processors if own > 0 else total):
                found = number
    return found


@triton.jit
def level_pieces(
    queries, octets, full, halfs, eye, partial, logs, counters, items, parts, units, tasks,
    processors, blocks, query_row, scale, cap,
    KINDS: tl.constexpr, COUNT: tl.constexpr, STRIDE: tl.constexpr, PLANES: tl.constexpr,
    COLUMNS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    WIDEST: tl.constexpr, CAPPED: tl.constexpr, CODE: tl.constexpr, MIDDLE: tl.constexpr,
    FAST: tl.constexpr, NEAR: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Run one item and block of query heads per program.

    Parameters
    ----------
    queries
        ``[rows, query_row]``.
    octets, full, halfs
        The buffer as uint8, as the run's dtype and as float16.
    eye
        256 bytes uint8, 1 at 128 and 0 elsewhere.
    partial, logs
        ``[items, GROUP, WIDEST]`` and ``[items, GROUP]`` float32: results and log2 of the sums.
    items
        ``[items, 5]`` int32: row, head, segment, start, stop.
    parts, tasks
        ``[tasks, 2]`` int32: the first item of a row's head, and how many it has.
    counters
        ``[processors + 1]`` int32, 0: what was taken from each multiprocessor's share, and of all.
    processors
        Multiprocessors of the GPU.
    blocks
        Of query heads.
    units
        ``[segments * heads, COLUMNS]`` int64, from `kvprof.kernels.levels.launch.unit_table`.
    scale
        The model's scaling times log2(e).
    cap
        Times log2(e).
    KINDS
        STRIDE numbers per kind of head: HEADER, then PLANES of K, then of V
        (`kvprof.kernels.levels.launch.kind_numbers`).
    HEADS
        Query heads of a program, a power of two from 8 on.
    CODE, MIDDLE
        Types in which the codes of V, and its middles, are multiplied.
    FAST
        Whether inline assembly can be used.
    NEAR
        `Tuning.near`; only then the counters are read.
    DEPENDENT
        Whether what joins the parts may be launched meanwhile (`kvprof.kernels.decode.join`).
    """
    if DEPENDENT:
        cuda.gdc_launch_dependents()
    # The last task is the last head of the last row.
    total = (tl.load(parts + 2 * tasks - 2) + tl.load(parts + 2 * tasks - 1)) * blocks
    taken = _taken(counters, total, processors, FAST) if NEAR else tl.program_id(0)
    if taken < total:
        item = taken // blocks
        row = tl.load(items + item * 5)
        head = tl.load(items + item * 5 + 1)
        segment = tl.load(items + item * 5 + 2)
        start = tl.load(items + item * 5 + 3)
        stop = tl.load(items + item * 5 + 4)
        unit = units + (segment * KV_HEADS + head) * COLUMNS
        query = queries + row.to(tl.int64) * query_row + tl.load(unit)
        width = tl.multiple_of(tl.load(unit + 1).to(tl.int32), 16)
        at = tl.load(unit + 2) + row.to(tl.int64) * tl.load(unit + 8)
        output_width = tl.load(unit + 4).to(tl.int32)
        kind = tl.load(unit + 7)
        for number in tl.static_range(COUNT):
            if kind == number:
                keys = octets + at
                values = octets + at
                if KINDS[number * STRIDE] == _FULL:
                    keys = full + at // (full.dtype.element_ty.primitive_bitwidth // 8)
                if KINDS[number * STRIDE + 9] == _FULL:
                    values = full + at // (full.dtype.element_ty.primitive_bitwidth // 8)
                _piece(
                    keys, values, halfs + at // 2, eye, partial, logs, item, query, width, start,
                    stop, output_width, scale, cap, taken % blocks * HEADS,
                    KINDS, number * STRIDE + _HEADER, number * STRIDE + _HEADER + PLANES * _PLANE,
                    KINDS[number * STRIDE], KINDS[number * STRIDE + 1],
                    KINDS[number * STRIDE + 2], KINDS[number * STRIDE + 3],
                    KINDS[number * STRIDE + 4], KINDS[number * STRIDE + 5],
                    KINDS[number * STRIDE + 6], KINDS[number * STRIDE + 7],
                    KINDS[number * STRIDE + 8], KINDS[number * STRIDE + 9],
                    KINDS[number * STRIDE + 10], KINDS[number * STRIDE + 11],
                    KINDS[number * STRIDE + 12], KINDS[number * STRIDE + 13],
                    KINDS[number * STRIDE + 14], KINDS[number * STRIDE + 15],
                    KINDS[number * STRIDE + 16], KINDS[number * STRIDE + 17],
                    KINDS[number * STRIDE + 18], KINDS[number * STRIDE + 19],
                    KINDS[number * STRIDE + 20], KINDS[number * STRIDE + 21],
                    KINDS[number * STRIDE + 22], KINDS[number * STRIDE + 23],
                    GROUP, HEADS, WIDEST, CAPPED,
                    queries.dtype.element_ty if KINDS[number * STRIDE + 9] == _FULL else CODE,
                    MIDDLE, FAST,
                )  # fmt: skip
