"""What recording a CUDA event adds between two kernels."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kvprof.benchmark.capture import capturing

__all__ = ["CYCLES", "mark_seconds"]

#: More cycles in a second than any GPU's clock has: `torch.cuda._sleep` then lasts at least as long
#: as asked.
CYCLES = 2.5e9

_KERNELS = 200  # with their events fewer than a stream queues before it blocks the host
_SAMPLES = 9


def mark_seconds(device: torch.device, *, captured: bool) -> float:
    """Return the seconds that an event adds to a chain of small kernels, between two of them.

    Measured as the difference of the same chain with events and without, nothing else being
    different; never below 0.

    Parameters
    ----------
    device : torch.device
        A GPU.
    captured : bool
        In a CUDA graph; otherwise in a stream, all queued before the first kernel begins.
    """
    with torch.cuda.device(device):
        values = torch.zeros(32, device=device)
        events: list[Any] = [
            # torch leaves it without types.
            torch.cuda.Event(enable_timing=True, external=captured)  # type: ignore[no-untyped-call]
            for _ in range(_KERNELS)
        ]

        def bare() -> None:
            for _ in events:
                values.add_(1)

        def marked() -> None:
            stream = torch.cuda.current_stream()
            for event in events:
                values.add_(1)
                event.record(stream)

        chains: list[Callable[[], None]] = [bare, marked]
        for chain in chains:
            chain() if not captured else bare()  # loads the kernel
        torch.cuda.synchronize()
        if captured:
            chains = [_captured(chain) for chain in chains]
        samples = [[_seconds(chain) for chain in chains] for _ in range(_SAMPLES + 1)][1:]
        return max(0.0, statistics.median(b - a for a, b in samples) / _KERNELS)


def _captured(chain: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        chain()

    def replay() -> None:
        graph.replay()

    return replay


def _seconds(chain: Callable[[], None]) -> float:
    """Return the GPU's time for a chain that it takes up when it is queued whole."""
    # torch leaves it without types.
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    chain()
    queued = time.perf_counter() - begin
    torch.cuda.synchronize()
    # torch leaves it without types.
    torch.cuda._sleep(int((2 * queued + 5e-4) * CYCLES))  # type: ignore[no-untyped-call]
    start.record()
    chain()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
