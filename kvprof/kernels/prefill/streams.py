"""Runs pieces of work side by side on a GPU's streams, so that a CUDA graph may hold them."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

__all__ = ["side_by_side"]


@lru_cache(maxsize=64)
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def side_by_side(jobs: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Start all jobs after what the current stream holds, and let it go on when all are done.

    The first runs on the current stream, the others on streams of their own; elsewhere than on a
    GPU one after the other. A job may keep nothing that another stream allocated beyond its end.

    Parameters
    ----------
    jobs : sequence of callable
        Each starts work on the current stream.
    device : torch.device
    """
    if device.type != "cuda" or len(jobs) < 2:
        for job in jobs:
            job()
        return
    current = torch.cuda.current_stream(device)
    begun = current.record_event()
    done = []
    for number, job in enumerate(jobs[1:]):
        stream = _stream(device, number)
        stream.wait_event(begun)
        with torch.cuda.stream(stream):
            job()
            done.append(stream.record_event())
    # Last, so that waiting for the host to launch the others does not hold it up.
    jobs[0]()
    for event in done:
        current.wait_event(event)
