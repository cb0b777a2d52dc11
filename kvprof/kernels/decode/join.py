"""Launches what joins partial results, which need not wait for the last part to end."""

from functools import cache

import torch
import triton
from torch import Tensor

from kvprof.kernels.decode.merge import merge_pieces
from kvprof.kernels.dispatch import interpreted
from kvprof.kernels.variants import DEPENDENT_FROM

__all__ = ["dependent", "launch_merge", "merge_sizes"]

#: Columns that a merging program joins: few, so that there are programs enough at batch 1.
_COLUMNS = 32


@cache
def dependent(device: torch.device) -> bool:
    """Tell whether a kernel can be launched before the one that it depends on has ended.

    Its programs take their places meanwhile and wait there, which saves most of the time between
    two kernels.
    """
    if interpreted():
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor >= DEPENDENT_FROM


def merge_sizes(widest: int, items: int, tasks: int) -> tuple[int, int]:
    """Return the columns of a merging program and the parts that it reads at once."""
    # The widest of ragged heads has about twice the mean's parts.
    parts = triton.next_power_of_2(max(1, 2 * items // tasks))
    return min(_COLUMNS, triton.next_power_of_2(widest)), min(256, max(16, parts))


def launch_merge(
    partial: Tensor,
    logs: Tensor,
    parts: Tensor,
    output: Tensor,
    table: Tensor,
    heads: int,
    *,
    sinks: Tensor | None = None,
    counters: Tensor | None = None,
) -> None:
    """Join the parts that the kernel launched before has left, or still leaves.

    Parameters
    ----------
    partial, logs : Tensor
        ``[items, G, widest]`` and ``[items, G]`` float32.
    parts : Tensor
        ``[rows * heads, 2]`` int32: first item and count.
    output : Tensor
        ``[rows, Σ_g G·dv_g]``, written.
    table : Tensor
        ``[heads, columns]`` int64; columns 3 and 4 say where a head's outputs begin, and dv.
    heads : int
    sinks : Tensor, optional
        ``[heads, G]`` float32.
    counters : Tensor, optional
        int32, set to 0 on the way.
    """
    items, group, widest = partial.shape
    width, most = merge_sizes(widest, items, len(parts))
    early = dependent(output.device)
    merge_pieces[(len(parts), group, triton.cdiv(widest, width))](
        partial, logs, parts, output, table, logs if sinks is None else sinks,
        parts if counters is None else counters,
        GROUP=group, WIDEST=widest, WIDTH=width, MOST=most, HEADS=heads,
        OUTPUT_ROW=output.shape[1], COLUMNS=table.shape[1], SINKS=sinks is not None,
        COUNTERS=0 if counters is None else len(counters), DEPENDENT=early,
        num_warps=4, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
