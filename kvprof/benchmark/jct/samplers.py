"""Times of a layer's calls, together and alone, and of calls that wait for the host.

None settles: parts take turns with the layer that they are of, at the clocks that this mixture of
work leaves, which are those of a model's pass.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvprof.benchmark.capture import Pool
from kvprof.benchmark.jct.units import Runs, Unit
from kvprof.benchmark.timing import Sampler, sampler

__all__ = ["layer_sampler", "unit_sampler"]


class _Waiting:
    """A clock around a call and all that it left running on the device."""

    note: str | None = None

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._next = 0
        for run in runs:  # compiles, and fills the libraries' plans
            self._first = run()

    def output(self) -> Tensor:
        return self._first

    def sample(self) -> float:
        run = self._runs[self._next % len(self._runs)]
        self._next += 1
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - start


class _Sum:
    """Several calls timed one after the other."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self._samplers = samplers
        self.note = next((one.note for one in samplers if one.note is not None), None)

    def output(self) -> Tensor:
        return self._samplers[-1].output()

    def sample(self) -> float:
        return sum(one.sample() for one in self._samplers)


def unit_sampler(unit: Unit, device: torch.device, pool: Pool = None) -> Sampler:
    """Return what times a unit where it runs; graphs with one pool share their memory."""
    if unit.timed is not None:
        return unit.timed
    if unit.waits and device.type == "cuda":
        return _Waiting(unit.runs)
    place = torch.device("cpu") if unit.on_host else device
    return sampler(unit.runs, place, settle=False, pool=pool)


def layer_sampler(units: Sequence[Unit], device: torch.device, pool: Pool = None) -> Sampler:
    """Return what times a whole layer: its calls one after the other, in one graph on a GPU.

    Calls that wait for the host stand beside the graph of all others. Graphs with one pool share
    their memory.
    """
    apart = [unit for unit in units if unit.waits and device.type == "cuda"]
    others = [unit for unit in units if unit not in apart]
    together = sampler(_sequence(others), device, settle=False, pool=pool)
    if not apart:
        return together
    return _Sum([together, *(_Waiting(unit.runs) for unit in apart)])


def _sequence(units: Sequence[Unit]) -> list[Callable[[], Tensor]]:
    """Return a layer's calls one after the other, on each copy of their inputs in turn."""
    count = max(len(unit.runs) for unit in units)

    def layer(number: int) -> Callable[[], Tensor]:
        calls = [unit.runs[number % len(unit.runs)] for unit in units]

        def run() -> Tensor:
            for call in calls[:-1]:
                call()
            return calls[-1]()

        return run

    return [layer(number) for number in range(count)]
