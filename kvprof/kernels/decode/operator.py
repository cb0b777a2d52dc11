"""Decoding as operators of torch, ``kvprof::decode`` and ``kvprof::decode_cut``.

So that ``torch.compile`` and CUDA graphs go through: a call is one opaque operator with tensors and
numbers, and its workspace is allocated inside it, where nobody sees it.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvprof.kernels.decode.cpu import decode_cpu
from kvprof.kernels.decode.launch import launch_cut, launch_decode
from kvprof.kernels.decode.tuning import Tuning
from kvprof.kernels.dispatch import uses_triton
from kvprof.kernels.planes import RaggedLayout

__all__ = ["cut_operator", "decode_operator"]


@lru_cache(maxsize=1024)
def _layout(
    key_widths: tuple[int, ...], value_widths: tuple[int, ...], sizes: tuple[int, ...]
) -> RaggedLayout:
    return RaggedLayout(key_widths, value_widths, *sizes)


@torch.library.custom_op("kvprof::decode_cut", mutates_args=())
def cut_operator(
    lengths: Tensor, starts: Tensor | None, heads: Tensor, capacity: int, pieces: int, workers: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut a step's work: `kvprof.kernels.decode.launch.launch_cut`, which says what is what."""
    return launch_cut(lengths, starts, heads, capacity, pieces, workers)


@cut_operator.register_fake
def _(
    lengths: Tensor, starts: Tensor | None, heads: Tensor, capacity: int, pieces: int, workers: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tasks = lengths.shape[0] * heads.shape[0]
    lists = (0,) if pieces else (workers, tasks)
    counts = (0,) if pieces else (workers,)
    shapes: tuple[tuple[int, ...], ...] = ((pieces + tasks, 5), (tasks, 2), lists, counts)
    items, parts, own, each = (lengths.new_empty(shape) for shape in shapes)
    return items, parts, own, each


@torch.library.custom_op("kvprof::decode", mutates_args=())
def decode_operator(
    query: Tensor,
    buffer: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    heads: Tensor,
    scheduled: Sequence[Tensor],
    sinks: Tensor | None,
    table: Tensor | None,
    scaling: float,
    softcap: float,
    key_widths: Sequence[int],
    value_widths: Sequence[int],
    sizes: Sequence[int],
    tuning: Sequence[int],
) -> Tensor:
    """Run a step: Triton on a GPU (or interpreted), blocked torch on a CPU.

    Parameters
    ----------
    query, buffer, lengths, starts, sinks, table, scaling, softcap
        As for `DecodeStep.run` and `DecodeStep.cut`.
    heads, scheduled
        From `head_table` and ``kvprof::decode_cut``; unused on a CPU.
    key_widths, value_widths, sizes
        Of the layout; the sizes are its group, batch and capacity.
    tuning
        Pieces, tile, stages and warps.

    Returns
    -------
    Tensor
        ``[rows, Σ_g G·dv_g]``.
    """
    layout = _layout(tuple(key_widths), tuple(value_widths), tuple(sizes))
    if uses_triton(query.device):
        return launch_decode(
            query.contiguous(), buffer, layout, Tuning(*tuning), heads, scheduled, scaling,
            softcap=softcap, sinks=sinks, table=table,
        )  # fmt: skip
    return decode_cpu(
        query, buffer, layout, lengths, scaling,
        softcap=softcap, sinks=sinks, starts=starts, table=table,
    )  # fmt: skip


@decode_operator.register_fake
def _(
    query: Tensor,
    buffer: Tensor,
    lengths: Tensor,
    starts: Tensor | None,
    heads: Tensor,
    scheduled: Sequence[Tensor],
    sinks: Tensor | None,
    table: Tensor | None,
    scaling: float,
    softcap: float,
    key_widths: Sequence[int],
    value_widths: Sequence[int],
    sizes: Sequence[int],
    tuning: Sequence[int],
) -> Tensor:
    return query.new_empty(query.shape[0], sizes[0] * sum(value_widths))
