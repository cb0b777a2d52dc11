"""Timing one call after another without the mistakes that public benchmarks make.

On a GPU a CUDA graph is replayed between two events, so that launches cost what they cost in a
serving step; on a CPU a clock is read around the call. Calls that are compared take turns sample by
sample, so that a clock that drifts or a neighbour that wakes up hits all of them. Inputs rotate
through copies where one copy would stay in the cache. Outputs are poisoned before they are checked.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvprof.errors import Interrupted
from kvprof.runtime.tensors import Pool, capturing

__all__ = [
    "DeviceLost",
    "Sampler",
    "interleaved",
    "sampler",
    "spread",
]


Runs = Sequence[Callable[[], Tensor]]

# Of one replay: launching a graph takes some microseconds, which must not count.
_GRAPH_SECONDS = 2e-3
_MOST_CALLS = 32
_LEAST = 3  # samples, unless they take far longer than the time that there is
_FAR = 3
_SLOW_SECONDS = 3.0  # of a call on a CPU
_LONG_SECONDS = 1e-3  # of a call on a GPU
_SETTLE_SECONDS = 0.05
_FULL = 0.5  # of the GPU's memory


class DeviceLost(Exception):
    """The GPU stopped under a kernel, and nothing more can run in this process."""


class Sampler(Protocol):
    """Something that can be timed."""

    note: str | None  # what the reader of its times should know

    def output(self) -> Tensor:
        """Return what one call gives for the first copy of the inputs; poisoned before."""

    def sample(self) -> float:
        """Return the seconds of one call."""


class _CpuSampler:
    note: str | None = None

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._next = 0
        start = time.perf_counter()
        self._first = runs[0]()  # warm-up, and what `output` checks
        self._slow = time.perf_counter() - start > _SLOW_SECONDS

    def output(self) -> Tensor:
        if self._slow:  # a second one would cost more than poison tells
            return self._first
        # Freed blocks are handed out again: what a kernel forgot to write is then NaN.
        self._first.fill_(float("nan"))
        del self._first
        self._first = self._runs[0]()
        return self._first

    def sample(self) -> float:
        run = self._runs[self._next % len(self._runs)]
        self._next += 1
        start = time.perf_counter()
        run()
        return time.perf_counter() - start


class _GpuSampler:
    def __init__(self, runs: Runs, settle: bool, pool: Pool) -> None:
        self.note: str | None = None
        self._runs = runs
        self._graph: torch.cuda.CUDAGraph | None = None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and fills the libraries' plans
            for run in (*runs, *runs[:1]):
                run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        once = self._timed(lambda: runs[0](), 1)
        calls = min(_MOST_CALLS, max(1, round(_GRAPH_SECONDS / max(once, 1e-6))))
        self._calls = -(-calls // len(runs)) * len(runs)  # every copy as often as the others
        # A long call may draw all the power that the GPU has, which lowers the clocks of who comes
        # next: it runs at its own before it is timed, as the layers of a model do.
        long = settle and once >= _LONG_SECONDS
        alone = _SETTLE_SECONDS / (once * self._calls) if long else 0.0
        self._settling = math.ceil(alone)
        # A capture cannot give memory back that warming up has left.
        if torch.cuda.memory_reserved() > _FULL * torch.cuda.mem_get_info()[1]:
            torch.cuda.empty_cache()
        try:
            self._capture(pool)
        except RuntimeError as problem:
            # Nothing that was captured halfway may be replayed.
            self._graph = None
            torch.cuda.synchronize()
            self._output = runs[0]()
            self.note = (
                "timed without a CUDA graph; capture failed "
                f"({' '.join(str(problem).split())[:120]})"
            )
        for _ in range(2):
            self._go()
        torch.cuda.synchronize()

    def _capture(self, pool: Pool) -> None:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, pool):
            for number in range(self._calls):
                result = self._runs[number % len(self._runs)]()
                if number == 0:
                    self._output = result  # kept, so that no later call takes its memory
                del result
        self._graph = graph

    def _go(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for number in range(self._calls):
            result = self._runs[number % len(self._runs)]()
            if number == 0:
                self._output = result

    @staticmethod
    def _timed(call: Callable[[], object], calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls

    def output(self) -> Tensor:
        self._output.fill_(float("nan"))
        self._go()
        torch.cuda.synchronize()
        return self._output

    def sample(self) -> float:
        for _ in range(self._settling):
            self._go()
        return self._timed(self._go, self._calls)


def sampler(runs: Runs, device: torch.device, *, settle: bool = True, pool: Pool = None) -> Sampler:
    """Warm a call up and prepare it for timing."""
    return _GpuSampler(runs, settle, pool) if device.type == "cuda" else _CpuSampler(runs)


def interleaved(
    samplers: Sequence[Sampler],
    repeats: int,
    *,
    seconds: float,
    should_stop: Callable[[], bool],
) -> list[list[float]]:
    """Take turns: one sample of each per round, every second round in reverse."""
    found: list[list[float]] = [[] for _ in samplers]
    order = list(range(len(samplers)))
    begin = time.perf_counter()
    for done in range(repeats):
        if should_stop():
            raise Interrupted
        spent = time.perf_counter() - begin
        if spent > seconds and (done >= _LEAST or (done and spent > _FAR * seconds)):
            break
        for index in order:
            found[index].append(samplers[index].sample())
        order.reverse()
    return found


def spread(samples: Sequence[float]) -> float:
    """Return how far the middle half of the samples lies apart, relative to their median."""
    low, middle, high = np.percentile(np.asarray(samples), [25, 50, 75])
    return float((high - low) / middle) if middle > 0 else 0.0
