# mypy: ignore-errors
# Triton's functions are compiled from their source; types mean nothing to its compiler.
"""Partial results of a context that was cut are joined by their log sums."""

import triton
import triton.language as tl
from triton.language.extra import cuda

__all__ = ["merge_pieces"]

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def merge_pieces(
    partial, logs, parts, output, heads, sinks, counters,
    GROUP: tl.constexpr, WIDEST: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
    HEADS: tl.constexpr, OUTPUT_ROW: tl.constexpr, COLUMNS: tl.constexpr, SINKS: tl.constexpr,
    COUNTERS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Join parts; a program per row and KV head, query head of its group, and `WIDTH` columns.

    A row without tokens gets zeros.

    Parameters
    ----------
    partial, logs
        As `decode_pieces` left them.
    parts
        ``[rows * heads, 2]`` int32: first item and count.
    output
        ``[rows, OUTPUT_ROW]``.
    heads
        ``[heads, COLUMNS]`` int64: in columns 3 and 4, where a head's outputs begin, and dv.
    sinks
        ``[heads, GROUP]`` float32: a further logit of each query head, read with `SINKS`.
    counters
        ``[COUNTERS]`` int32, set to 0 for the next layer that shares the cut.
    MOST
        Power of two: parts that are read at once; more of them take more rounds.
    DEPENDENT
        Whether the launch did not wait for the parts (`kvprof.kernels.decode.join`).
    """
    number = tl.program_id(0)
    query = tl.program_id(1)
    head = number % HEADS
    first = tl.load(parts + number * 2)
    count = tl.load(parts + number * 2 + 1)
    at = tl.load(heads + head * COLUMNS + 3)
    width = tl.load(heads + head * COLUMNS + 4)
    columns = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    wanted = columns < width
    if DEPENDENT:
        # What was read so far was there before the kernel that leaves the parts was launched.
        cuda.gdc_wait()
    if COUNTERS > 0:
        LANES: tl.constexpr = 128
        if number + query + tl.program_id(2) == 0:
            for begin in tl.static_range(0, COUNTERS, LANES):
                lane = begin + tl.arange(0, LANES)
                tl.store(counters + lane, tl.zeros([LANES], tl.int32), mask=lane < COUNTERS)
    # Finite, so that a row without tokens gets no inf - inf.
    top = tl.full([], -1e30, tl.float32)
    total = tl.zeros([], tl.float32)
    result = tl.zeros([WIDTH], tl.float32)
    for begin in range(0, count, MOST):
        part = begin + tl.arange(0, MOST)
        there = part < count
        item = (first + part) * GROUP + query
        here = tl.load(logs + item, mask=there, other=float("-inf"))
        rows = partial + item[:, None] * WIDEST + columns[None, :]
        values = tl.load(rows, mask=there[:, None] & wanted[None, :], other=0.0)
        higher = tl.maximum(top, tl.max(here, 0))
        fade = tl.exp2(top - higher)
        weights = tl.exp2(here - higher)
        total = total * fade + tl.sum(weights, 0)
        result = result * fade + tl.sum(values * weights[:, None], 0)
        top = higher
    if SINKS:
        total += tl.exp2(tl.load(sinks + head * GROUP + query) * _LOG2_E - top)
    result = result * tl.where(total > 0.0, 1.0 / total, 0.0)
    target = output + (number // HEADS).to(tl.int64) * OUTPUT_ROW + at + query * width + columns
    tl.store(target, result.to(output.dtype.element_ty), mask=wanted)
