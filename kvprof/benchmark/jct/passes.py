"""A request from beginning to end, and the events that tell of it."""

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from kvprof.benchmark.jct.case_facts import memory_sample, peak_bytes
from kvprof.benchmark.jct.instrument import OTHERS
from kvprof.benchmark.jct.sampling import OVERHEAD, Sampling
from kvprof.benchmark.jct.steps import Runner, Step
from kvprof.benchmark.timing import Interrupted
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.records.events import Event, PartSample, StepFinished
from kvprof.runtime.clock import REST

__all__ = ["Narrator", "Pass", "doubts", "run_pass"]

_MEMORY_SAMPLES = 9
_DOUBTFUL = 0.1  # of the GPU's time
_UNSTEADY = 0.2  # between runs of one request


@dataclass
class Pass:
    """One run of the request: its steps, prefill first, and when it ran (of the run's clock)."""

    started: float
    ended: float = 0.0
    steps: list[Step] = field(default_factory=list)

    @property
    def prefill(self) -> float:
        """Seconds of prefill."""
        return self.steps[0].seconds

    @property
    def decode(self) -> float:
        """Seconds of all decoding steps."""
        return sum(step.seconds for step in self.steps[1:])


def run_pass(
    runner: Runner,
    steps: int,
    should_stop: Callable[[], bool],
    now: Callable[[], float],
    *,
    sampling: Sampling | None = None,
    after: list[float] | None = None,
    on_step: Callable[[int, Step], None] | None = None,
) -> Pass:
    """Run a request once.

    Parameters
    ----------
    runner : Runner
    steps : int
        Of decoding.
    should_stop, now : callable
    sampling : Sampling, optional
        Which layers to time in which step; without it nothing is marked.
    after : list of float, optional
        Per step, for `Runner.step`.
    on_step : callable, optional
        Told each step, while no step runs.

    Raises
    ------
    Interrupted
        When `should_stop` says so.
    """
    runner.begin()
    with _uncollected():
        done = Pass(now())
        for number in range(steps + 1):
            layers = None if sampling is None else sampling.at(number)
            step = runner.step(layers, after=None if after is None else after[number])
            if on_step is not None:
                on_step(number, step)
            done.steps.append(replace(step, stretches=[]))  # told; they would only take memory
            if should_stop():
                raise Interrupted
        done.ended = now()
    return done


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python's garbage collector out: it stops a step for longer than the step takes."""
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def doubts(plain: Sequence[Pass], marked: Sequence[Pass]) -> list[str]:
    """Return why a request's times may be off, one sentence each.

    Parameters
    ----------
    plain, marked : sequence of Pass
        Whole runs without marks and with them.
    """
    for runs in (plain, marked):
        walls = [run.prefill + run.decode for run in runs]
        if max(walls) - min(walls) > _UNSTEADY * statistics.median(walls):
            # What timing the parts costs cannot be told then.
            return [
                f"the same request took {min(walls):.3g} s once and {max(walls):.3g} s another "
                "time: something else uses the machine, and shares of parts are as uncertain"
            ]
    # Step by step: a neighbour that wakes up for some steps does not count.
    ratios = [
        slow.seconds / fast.seconds
        for one, other in zip(marked, plain, strict=False)
        for slow, fast in zip(one.steps[1:], other.steps[1:], strict=True)
    ]
    overhead = statistics.median(ratios) - 1.0 if ratios else 0.0
    if overhead <= OVERHEAD:
        return []
    return [
        f"timing its parts made decoding {overhead:.1%} slower; shares may lean towards parts of "
        "many small pieces"
    ]


class Narrator:
    """Makes events of steps.

    Parameters
    ----------
    loaded : LoadedModel
    plan : Plan
    case : str
    ids : Tensor
        ``[batch, input_len]``.
    sampling : Sampling
    emit, now : callable
    """

    def __init__(
        self, loaded: LoadedModel, plan: Plan, case: str, ids: Tensor, sampling: Sampling,
        emit: Callable[[Event], None], now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._loaded, self._plan, self._case = loaded, plan, case
        self._batch, self._input_len = ids.shape
        self._sampling, self._emit, self._now = sampling, emit, now
        self._peak = 0
        self._busy = self._doubtful = 0.0
        places = np.linspace(0, sampling.steps, min(_MEMORY_SAMPLES, sampling.steps + 1))
        self._memory_at = {round(place) for place in places}

    def step(self, number: int, step: Step) -> None:
        """Tell a step that ran without marks."""
        context = self._input_len + number
        event = StepFinished(self._now(), self._case, _phase(number), number, context, step.seconds)
        self._emit(event)

    def parts_of(self, plain: Pass, runner: Runner) -> Callable[[int, Step], None]:
        """Return what tells the parts of steps that ran with marks, and the cache's bytes.

        Parameters
        ----------
        plain : Pass
            The same request without marks.
        runner : Runner
        """

        def tell(number: int, step: Step) -> None:
            whole = plain.steps[number].seconds if runner.on_gpu else None
            self._parts(number, step, whole)
            if number in self._memory_at:
                self._memory(number, runner)

        return tell

    def _parts(self, number: int, step: Step, whole: float | None) -> None:
        stands_for = self._sampling.told(number)
        if not stands_for:
            return
        found: dict[tuple[str, int | None], float] = {}
        for stretch in step.stretches:
            key = stretch.part, stretch.layer
            found[key] = found.get(key, 0.0) + stretch.seconds
            self._busy += stretch.seconds
            self._doubtful += 0.0 if stretch.exact else stretch.seconds
        if whole is not None:
            busy = sum(found.values())
            found = {key: seconds for key, seconds in found.items() if key[0] != REST}
            found[REST, None] = max(0.0, whole - busy)
        for (part, layer), seconds in found.items():
            if part == OTHERS:
                continue
            weight = float(stands_for)
            if layer is not None:
                weight *= self._sampling.weight(number)
            event = PartSample(
                self._now(), self._case, _phase(number), part, seconds, number,
                self._input_len + number, layer, weight,
            )  # fmt: skip
            self._emit(event)

    def _memory(self, number: int, runner: Runner) -> None:
        assert runner.cache is not None
        self._peak = max(self._peak, peak_bytes(self._loaded.device))
        event = memory_sample(
            self._now(), self._case, self._plan, runner.cache, self._input_len + number,
            batch=self._batch, itemsize=self._loaded.dtype.itemsize, peak=self._peak,
        )  # fmt: skip
        self._emit(event)

    def doubt(self) -> str | None:
        """Return why parts timed on a GPU may be too long; None where nothing speaks for it."""
        if self._doubtful <= _DOUBTFUL * self._busy:
            return None
        return (
            f"{self._doubtful / self._busy:.0%} of the time of its parts was measured while the "
            "GPU may have waited for the host, which asks it for values within a step: waiting "
            "that should be in host is in these parts"
        )


def _phase(number: int) -> str:
    return "decode" if number else "prefill"
