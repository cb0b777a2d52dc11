"""When each item of a decoding step ran, and where."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Trace", "busy_seconds", "measured_makespan_over_mean"]


class Trace(NamedTuple):
    """What each item did, ``[items]`` int64 each, without the unused room for items.

    Attributes
    ----------
    row, head : Tensor
    multiprocessor : Tensor
    begin, end : Tensor
        The GPU's clock in nanoseconds.
    output : Tensor
        What `DecodeStep.run` returns.
    """

    row: Tensor
    head: Tensor
    multiprocessor: Tensor
    begin: Tensor
    end: Tensor
    output: Tensor


def busy_seconds(trace: Trace, multiprocessors: int) -> list[float]:
    """Return for how long each multiprocessor had at least one item, in seconds."""
    begin, order = trace.begin.cpu().sort(stable=True)
    end, where = trace.end.cpu()[order], trace.multiprocessor.cpu()[order]
    found = []
    for number in range(multiprocessors):
        own = where == number
        begins, ends = begin[own], end[own]
        if len(ends) == 0:
            found.append(0.0)
            continue
        # What ran until the items before had all ended is idle time no longer.
        reached = torch.cat([begins[:1], ends.cummax(0).values[:-1]])
        busy = (ends - torch.maximum(begins, reached)).clamp(min=0).sum()
        found.append(int(busy) * 1e-9)
    return found


def measured_makespan_over_mean(trace: Trace, multiprocessors: int) -> float:
    """Return the time from the first item's begin to the last one's end over the mean busy time."""
    mean = sum(busy_seconds(trace, multiprocessors)) / multiprocessors
    return int(trace.end.max() - trace.begin.min()) * 1e-9 / mean
