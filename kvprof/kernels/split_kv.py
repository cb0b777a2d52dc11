"""Split-KV work: its schedule, the splits that items leave, and the kernel that combines them."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from kvprof.kernels.dispatch import early_launch, launching, multiprocessors_of
from kvprof.kernels.tables import Output, Part, column

__all__ = [
    "Attended",
    "Schedule",
    "assign_options",
    "combine_sizes",
    "combine_splits",
    "empty",
    "empty_parts",
    "launch_combine",
    "partition_options",
    "split_range",
    "store_columns",
    "work_item",
]

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton's functions are compiled from their source; types mean nothing to its compiler.

#: Fewest columns that a combining program takes, two sectors of memory, and how many otherwise.
_FEWEST_COLUMNS, _COLUMNS = 16, 32
#: Programs of so many columns on a multiprocessor, beyond which each takes all columns.
_MANY_PROGRAMS = 16
#: Most values of parts that it reads at once.
_MOST_COMBINED = 8192

_LOG2E = tl.constexpr(1.4426950408889634)
_PART = tl.constexpr(len(Part._fields))
_FIRST = tl.constexpr(column(Part, "first"))
_COUNT = tl.constexpr(column(Part, "items"))
_OUTPUTS = tl.constexpr(column(Output, "outputs"))
_OUTPUT_WIDTH = tl.constexpr(column(Output, "output_width"))


class Schedule(NamedTuple):
    """A step's work as it was cut; layers of the same shape may share it, one after another."""

    lengths: Tensor  # int32, tokens of each row (of each segment and row)
    starts: Tensor | None  # `[rows]` int32, first visible token of each row
    #: Items, parts and what else the operation's kernel reads; empty where no Triton kernel runs.
    scheduled: list[Tensor]


class Attended(NamedTuple):
    """What queries see of other tokens, to be combined with what they see of these."""

    output: Tensor  # `[rows, Σ_g G·dv_g]`; of a query head that sees none it may be anything
    #: `[rows, heads * G]` float32, log2 of the sums of exponentiated scores; -inf where a query
    #: head sees none.
    logs: Tensor


@triton.jit
def empty(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a part's sums before the first tile."""
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def store_columns(result, found, real, START: tl.constexpr, WIDTH: tl.constexpr):
    """Leave ``[WIDTH, heads]`` of a part at the columns from START on."""
    column = START + tl.arange(0, WIDTH)
    tl.store(result + column[:, None], found, mask=tl.broadcast_to(real[None, :], found.shape))


# Those of a layer begin where the layer before ends, at 16 bytes or not.
@triton.jit(do_not_specialize_on_alignment=["parts", "counters"])
def combine_splits(
    partial,
    logs,
    parts,
    output,
    heads,
    sinks,
    counters,
    beside,
    beside_logs,
    output_row,
    GROUP: tl.constexpr,
    WIDEST: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SINKS: tl.constexpr,
    COUNTERS: tl.constexpr,
    BESIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Combine splits; a program per row, KV head, query head and `WIDTH` columns."""
    number = tl.program_id(0)
    query = tl.program_id(1)
    head = number % HEADS
    first = tl.load(parts + number * _PART + _FIRST)
    count = tl.load(parts + number * _PART + _COUNT)
    at = tl.load(heads + head * COLUMNS + _OUTPUTS)
    width = tl.load(heads + head * COLUMNS + _OUTPUT_WIDTH)
    columns = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    wanted = columns < width
    if DEPENDENT:
        # What was read so far was there before the kernel that leaves the parts, which waits first,
        # let this one be launched.
        cuda.gdc_wait()
    if COUNTERS > 0:
        LANES: tl.constexpr = 128
        if number + query + tl.program_id(2) == 0:
            for begin in tl.static_range(0, COUNTERS, LANES):
                lane = begin + tl.arange(0, LANES)
                tl.store(counters + lane, tl.zeros([LANES], tl.int32), mask=lane < COUNTERS)
    # int64: the items of large batches have more than 2^31 values between them.
    logs += first.to(tl.int64) * GROUP
    partial += first.to(tl.int64) * (GROUP * WIDEST)
    # Finite, so that a row without tokens gets no inf - inf.
    top = tl.full([], -1e30, tl.float32)
    total = tl.zeros([], tl.float32)
    result = tl.zeros([WIDTH], tl.float32)
    for begin in range(0, count, MOST):
        part = begin + tl.arange(0, MOST)
        there = part < count
        item = part * GROUP + query
        here = tl.load(logs + item, mask=there, other=float("-inf"))
        rows = partial + item[:, None] * WIDEST + columns[None, :]
        values = tl.load(rows, mask=there[:, None] & wanted[None, :], other=0.0)
        higher = tl.maximum(top, tl.max(here, 0))
        fade = tl.exp2(top - higher)
        weights = tl.exp2(here - higher)
        total = total * fade + tl.sum(weights, 0)
        result = result * fade + tl.sum(values * weights[:, None], 0)
        top = higher
    place = (number // HEADS).to(tl.int64) * output_row + at + query * width + columns
    if BESIDE:
        own = tl.load(beside_logs + number.to(tl.int64) * GROUP + query)
        values = tl.load(beside + place, mask=wanted, other=0.0).to(tl.float32)
        # What lies there where nothing was seen may be no number.
        values = tl.where(own > float("-inf"), values, 0.0)
        higher = tl.maximum(top, own)
        fade = tl.exp2(top - higher)
        weight = tl.exp2(own - higher)
        total = total * fade + weight
        result = result * fade + values * weight
        top = higher
    if SINKS:
        total += tl.exp2(tl.load(sinks + head * GROUP + query) * _LOG2E - top)
    result = result * tl.where(total > 0.0, 1.0 / total, 0.0)
    tl.store(output + place, result.to(output.dtype.element_ty), mask=wanted)


#: Items that a program cuts, and tasks (or units) up to which it shares them out by itself.
CUT_ITEMS, CUT_ALONE = 128, 256
_CUT_WARPS = 4


def assign_options(count: int) -> dict[str, int]:
    """Return how a program that shares items out to `count` tasks is launched: BLOCK and warps."""
    block = min(1024, max(32, triton.next_power_of_2(count)))
    return {"BLOCK": block, "num_warps": max(1, block // 128)}


def partition_options(count: int) -> dict[str, int]:
    """Return BLOCK, ITEMS and warps to cut `count` tasks; BLOCK is 0 after `assign_options`."""
    alone = assign_options(count)["BLOCK"] if count <= CUT_ALONE else 0
    return {"BLOCK": alone, "ITEMS": CUT_ITEMS, "num_warps": _CUT_WARPS}


@triton.jit
def work_item(firsts, count, item):
    """Return the tasks that items are of, which of its items each is, and how many those are."""
    task = item * 0
    behind = task + count
    left = count
    while left > 1:
        middle = (task + behind) // 2
        later = tl.load(firsts + middle) <= item
        task = tl.where(later, middle, task)
        behind = tl.where(later, behind, middle)
        left = (left + 1) // 2
    first = tl.load(firsts + task)
    behind = task + 1
    return task, item - first, tl.load(firsts + behind) - first


@triton.jit
def split_range(tiles, part, parts):
    """Return the first tile of a task's equal part and the tile behind its last, in 32 bits."""
    parts = tl.maximum(parts, 1)
    each = tiles // parts
    rest = tiles % parts
    start = each * part + rest * part // parts
    return start, each * (part + 1) + rest * (part + 1) // parts


def empty_parts(query: Tensor, items: int, group: int, widest: int) -> tuple[Tensor, Tensor]:
    """Return room for what items leave, ``[items, G, widest]`` and ``[items, G]`` float32."""
    return (
        query.new_empty(items, group, widest, dtype=torch.float32),
        query.new_empty(items, group, dtype=torch.float32),
    )


# For every layer of a step: Triton's functions of whole numbers are slow on the host.
@lru_cache(maxsize=4096)
def combine_sizes(
    widest: int, items: int, tasks: int, group: int, multiprocessors: int
) -> tuple[int, int, int]:
    """Return columns of a combining program, splits read at once, and warps."""
    most = triton.next_power_of_2(widest)

    narrowest, next_to_it = (
        tasks * group * triton.cdiv(widest, columns) for columns in (_FEWEST_COLUMNS, _COLUMNS)
    )
    if narrowest <= 2 * multiprocessors:
        width = min(_FEWEST_COLUMNS, most)
    else:
        width = most if next_to_it > _MANY_PROGRAMS * multiprocessors else min(_COLUMNS, most)
    # The widest of ragged heads has about one and a half times the mean's parts.
    parts = triton.next_power_of_2(max(1, 3 * items // (2 * tasks)))
    parts = min(_MOST_COMBINED // width, max(16, parts))
    return width, parts, 4 if width == _COLUMNS else min(4, max(1, width * parts // 1024))


def launch_combine(
    partial: Tensor,
    logs: Tensor,
    parts: Tensor,
    output: Tensor,
    table: Tensor,
    heads: int,
    *,
    sinks: Tensor | None = None,
    counters: Tensor | None = None,
    beside: Attended | None = None,
) -> None:
    """Combine the splits that the kernel launched before has left, or still leaves."""
    items, group, widest = partial.shape
    workers = multiprocessors_of(output.device)
    width, most, warps = combine_sizes(widest, items, parts.shape[0], group, workers)
    launching(combine_splits, (parts.shape[0], group, -(-widest // width)))(
        partial,
        logs,
        parts,
        output,
        table,
        logs if sinks is None else sinks,
        parts if counters is None else counters,
        output if beside is None else beside.output,
        logs if beside is None else beside.logs,
        output.shape[1],
        GROUP=group,
        WIDEST=widest,
        WIDTH=width,
        MOST=most,
        HEADS=heads,
        COLUMNS=table.shape[1],
        SINKS=sinks is not None,
        COUNTERS=0 if counters is None else len(counters),
        BESIDE=beside is not None,
        num_warps=warps,
        **early_launch(output.device, len(output)),
    )
