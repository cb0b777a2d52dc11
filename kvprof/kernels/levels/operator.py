"""Attention over segments as operators of torch, ``kvprof::levels`` and ``kvprof::levels_cut``.

So that ``torch.compile`` and CUDA graphs go through: a call is one opaque operator with tensors and
numbers, and its workspace is allocated inside it, where nobody sees it.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvprof.kernels.dispatch import uses_triton
from kvprof.kernels.levels.codes import Bits
from kvprof.kernels.levels.cpu import levels_cpu
from kvprof.kernels.levels.launch import launch_cut, launch_levels
from kvprof.kernels.levels.layout import LevelsLayout, Segment
from kvprof.kernels.levels.tuning import Tuning
from kvprof.kernels.planes import RaggedLayout

__all__ = ["cut_operator", "layout_numbers", "levels_operator"]

#: Numbers of a segment before its widths.
_HEADER = 4


def _number(bits: Bits) -> int:
    return 0 if bits is None else -8 if bits == "fp8" else int(bits)


def _bits(number: int) -> Bits:
    return None if number == 0 else "fp8" if number == -8 else number


def layout_numbers(layout: LevelsLayout) -> list[int]:
    """Return a layout but for its dtype as whole numbers, which is what an operator takes.

    Heads, group and batch; per segment the bits of K and V, the columns of a scale (0: the row),
    the capacity, the widths of K and of V.
    """
    found = [layout.heads, layout.group, layout.batch]
    for segment in layout.segments:
        own = segment.layout
        found += [
            _number(segment.key_bits), _number(segment.value_bits), segment.columns or 0,
            own.capacity, *own.key_widths, *own.value_widths,
        ]  # fmt: skip
    return found


@lru_cache(maxsize=1024)
def _layout(numbers: tuple[int, ...], dtype: torch.dtype) -> LevelsLayout:
    heads, group, batch, *rest = numbers
    segments = []
    step = _HEADER + 2 * heads
    for at in range(0, len(rest), step):
        keys, values, columns, capacity, *widths = rest[at : at + step]
        ragged = RaggedLayout(tuple(widths[:heads]), tuple(widths[heads:]), group, batch, capacity)
        segments.append(Segment(ragged, _bits(keys), _bits(values), columns or None))
    return LevelsLayout(tuple(segments), dtype)


@torch.library.custom_op("kvprof::levels_cut", mutates_args=())
def cut_operator(
    lengths: Tensor, units: Tensor, heads: int, pieces: int, counted: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut a step's work: `kvprof.kernels.levels.launch.launch_cut`, which says what is what."""
    return launch_cut(lengths, units, heads, pieces, counted)


@cut_operator.register_fake
def _(
    lengths: Tensor, units: Tensor, heads: int, pieces: int, counted: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows = lengths.shape[1] * heads
    room = pieces + lengths.shape[0] * rows
    shapes: tuple[tuple[int, ...], ...] = ((room, 5), (rows, 2), (counted,))
    items, parts, counters = (lengths.new_empty(shape) for shape in shapes)
    return items, parts, counters


# The counters of a schedule are used and set to 0 again: who looks before or after sees no change,
# and one schedule must not be in use on two streams at once.
@torch.library.custom_op("kvprof::levels", mutates_args=())
def levels_operator(
    query: Tensor,
    buffer: Tensor,
    lengths: Tensor,
    units: Tensor,
    eye: Tensor,
    scheduled: Sequence[Tensor],
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
    layout: Sequence[int],
    tuning: Sequence[int],
    processors: int,
) -> Tensor:
    """Run a step: Triton on a GPU (or interpreted), blocked torch on a CPU.

    Parameters
    ----------
    query, buffer, lengths, sinks, scaling, softcap
        As for `LevelsStep.run` and `LevelsStep.cut`.
    units, eye, scheduled
        As `launch_levels` takes them; unused on a CPU.
    layout
        From `layout_numbers`; the dtype is that of `query`.
    tuning
        Pieces, tile, stages, warps, the cost per token, the most registers and
        whether neighbours go together.
    processors
        Multiprocessors of the GPU.

    Returns
    -------
    Tensor
        ``[batch, Σ_g G·dv_g]``.
    """
    restored = _layout(tuple(layout), query.dtype)
    if uses_triton(query.device):
        items, parts, counters = scheduled
        return launch_levels(
            query.contiguous(), buffer, restored, Tuning(*tuning), units, eye, items, parts,
            counters, processors, scaling, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    return levels_cpu(query, buffer, restored, lengths, scaling, softcap=softcap, sinks=sinks)


@levels_operator.register_fake
def _(
    query: Tensor,
    buffer: Tensor,
    lengths: Tensor,
    units: Tensor,
    eye: Tensor,
    scheduled: Sequence[Tensor],
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
    layout: Sequence[int],
    tuning: Sequence[int],
    processors: int,
) -> Tensor:
    # From the numbers alone: a layout's own checks mean nothing to a tracer.
    heads, group = layout[0], layout[1]
    step = _HEADER + 2 * heads
    ends = range(3 + step, len(layout) + 1, step)
    columns = sum(max(layout[end - heads + head] for end in ends) for head in range(heads))
    return query.new_empty(query.shape[0], group * columns)
