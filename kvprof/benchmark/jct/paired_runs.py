"""Run a request alternately with and without marks until its parts' shares are stable."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from kvprof.analysis.stats import median_ends
from kvprof.benchmark.jct.cache_memory import memory_sample, peak_bytes
from kvprof.benchmark.jct.steps import Runner, Step
from kvprof.errors import Interrupted
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.records.events import Event, PartSample, Phase, Progress, StepFinished
from kvprof.runtime.clock import REST, Stretch

__all__ = [
    "CaseEvents",
    "PairedRuns",
    "RequestRun",
    "interval",
    "reported_steps",
    "run_warnings",
    "step_seconds",
]

# --- One run of the request, and what several say together.


#: By part and layer: seconds, and in how many stretches.
LayerParts = dict[tuple[str, int | None], tuple[float, int]]

#: Decoding steps whose parts are emitted. Each stands for its neighbours where there are more: a
#: run of 100,000 tokens would be tens of millions of lines.
_MOST_STEPS = 256

_UNSTEADY = 0.2  # between runs of one request
_UNCERTAIN = 0.05  # of a request's time: half the share without a name that is a warning itself


@dataclass
class RequestRun:
    """One run of the request."""

    started: float  # of the run's clock; `ended` is None until it has run to its end
    ended: float | None = None
    steps: list[Step] = field(default_factory=list)  # prefill first
    parts: dict[int, LayerParts] = field(default_factory=dict)  # by step, of those that were marked
    timed: float = 0.0  # seconds of these parts, and of those that are not exact
    inexact: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return sum(step.seconds for step in self.steps)

    def tell(self, number: int, stretches: Sequence[Stretch]) -> None:
        """Keep a step's parts."""
        found: LayerParts = {}
        for stretch in stretches:
            key = stretch.part, stretch.layer
            seconds, count = found.get(key, (0.0, 0))
            found[key] = seconds + stretch.seconds, count + 1
            self.timed += stretch.seconds
            self.inexact += 0.0 if stretch.exact else stretch.seconds
        self.parts[number] = found


def reported_steps(steps: int) -> dict[int, int]:
    """Return the passes whose parts are told, prefill first, and how many each stands for."""
    block = max(1, math.ceil(steps / _MOST_STEPS))
    found = {0: 1}
    for first in range(1, steps + 1, block):
        count = min(block, steps - first + 1)
        found[first + count // 2] = count
    return found


def run_request(
    runner: Runner,
    steps: int,
    should_stop: Callable[[], bool],
    now: Callable[[], float],
    into: list[RequestRun],
    *,
    marked: Collection[int] = (),
    after: list[float] | None = None,
    on_step: Callable[[int, Step], None] | None = None,
) -> None:
    """Run a request once."""
    runner.begin()
    with _no_collection():
        done = RequestRun(now())
        into.append(done)
        for number in range(steps + 1):
            timed = number in marked
            step = runner.step(timed, after=after[number] if timed and after is not None else None)
            if timed:
                done.tell(number, step.stretches)
            done.steps.append(replace(step, stretches=[]))  # they would only take memory
            if on_step is not None:
                on_step(number, step)
            if should_stop():
                raise Interrupted
        done.ended = now()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collector out: it stops a step for longer than the step takes."""
    gc.collect(1)  # what the last run left is young; going through all there is takes far longer
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def step_seconds(runs: Sequence[RequestRun]) -> list[float]:
    """Return each step's median over whole runs: a neighbour that wakes up hits few of them."""
    columns = zip(*([step.seconds for step in one.steps] for one in runs), strict=True)
    return [statistics.median(column) for column in columns]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the median of a few figures; all of them for one."""
    return median_ends(values) or (min(values), max(values))


def run_warnings(
    plain: Sequence[RequestRun],
    marked: Sequence[RequestRun],
    shares: Sequence[float] = (),
) -> list[str]:
    """Return why a request's times may be off, one sentence each."""
    for runs in (plain, marked):
        walls = [run.seconds for run in runs]
        if max(walls) - min(walls) > _UNSTEADY * statistics.median(walls):
            return [
                f"the same request took {min(walls):.3g} to {max(walls):.3g} s; another program "
                "may be running, so shares are uncertain"
            ]
    low, high = interval(shares) if shares else (1.0, 1.0)
    if (high - low) / 2 > _UNCERTAIN:
        return [
            f"its parts sum to {low:.0%} to {high:.0%} of its time in {len(shares)} pairs of "
            "runs, so shares are uncertain"
        ]
    return []


# --- Steps, their parts and the cache, as events.


_MEMORY_SAMPLES = 9
_MOST_INEXACT = 0.1  # of the GPU's time


class CaseEvents:
    """Makes events of steps."""

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        case: str,
        ids: Tensor,  # `[batch, input_len]`
        steps: int,  # of decoding
        on_gpu: bool,  # what no mark names is then nobody's, and `host` what the GPU waited
        emit: Callable[[Event], None],
        now: Callable[[], float],
    ) -> None:
        self._loaded, self._plan, self._case = loaded, plan, case
        self._batch, self._input_len = ids.shape
        self.told, self._on_gpu = reported_steps(steps), on_gpu
        self._emit, self._now = emit, now
        self._peak = 0
        self._memory_at = {
            round(step) for step in np.linspace(0, steps, min(_MEMORY_SAMPLES, steps + 1))
        }

    def progress(self, done: int, least: int, most: int, step: int, steps: int) -> None:
        """Emit how many runs of the request there were, and how far the next one is."""
        self._emit(Progress(self._now(), self._case, "pass", done, least, most, step, steps))

    def step(self, number: int, step: Step) -> None:
        """Emit a step of the first run without marks."""
        self._step(number, step.seconds)

    def _step(self, number: int, seconds: float, runs: int = 1) -> None:
        context = self._input_len + number
        self._emit(
            StepFinished(
                self._now(), self._case, _phase(number), number, context, seconds, runs=runs
            )
        )

    def finish(self, plain: Sequence[RequestRun], timed: Sequence[RequestRun]) -> None:
        """Emit each step's parts, from its median run, and the request's time over all runs."""
        whole = [one for one in plain if one.ended is not None]
        walls = step_seconds(whole) if whole else []
        for number in self.told:
            known = [one.parts[number] for one in timed if number in one.parts]
            if known:
                middle = sorted(known, key=_seconds)[(len(known) - 1) // 2]
                self._parts(number, middle, walls[number] if walls else None)
        if len(whole) > 1:
            for number, seconds in enumerate(walls):
                self._step(number, seconds, len(whole))

    def _parts(self, number: int, parts: LayerParts, wall: float | None) -> None:
        for key, (seconds, _) in self._attributable(parts, wall).items():
            self._part(number, key, seconds)
        if self._on_gpu and wall is not None:
            self._part(number, (REST, None), max(0.0, wall - _seconds(parts)))

    def _attributable(self, parts: LayerParts, wall: float | None) -> LayerParts:
        """Return what belongs to a part; on a GPU without what the marks added, or was waited."""
        if not self._on_gpu:
            return parts
        excess = max(0.0, _seconds(parts) - wall) if wall is not None else 0.0
        each = excess / max(1, sum(count for _, count in parts.values()))
        return {
            key: (max(0.0, seconds - each * count), count)
            for key, (seconds, count) in parts.items()
            if key[0] != REST
        }

    def attributed_seconds(self, one: RequestRun, plain: RequestRun) -> float:
        """Return what the parts of one run cost the request; on a GPU without waiting."""
        return sum(
            self.told[number] * _seconds(self._attributable(parts, plain.steps[number].seconds))
            for number, parts in one.parts.items()
        )

    def _part(self, number: int, key: tuple[str, int | None], seconds: float) -> None:
        part, layer = key
        event = PartSample(
            self._now(),
            self._case,
            _phase(number),
            part,
            seconds,
            number,
            self._input_len + number,
            layer,
            float(self.told[number]),
        )
        self._emit(event)

    def memory(self, number: int, runner: Runner) -> None:
        """Emit the cache's bytes after some of the steps."""
        if number not in self._memory_at:
            return
        assert runner.cache is not None
        self._peak = max(self._peak, peak_bytes(self._loaded.device))
        event = memory_sample(
            self._now(),
            self._case,
            self._plan,
            runner.cache,
            self._input_len + number,
            batch=self._batch,
            itemsize=self._loaded.dtype.itemsize,
            peak=self._peak,
        )
        self._emit(event)

    @staticmethod
    def wait_warning(timed: Sequence[RequestRun]) -> str | None:
        """Return why parts timed on a GPU may be too long; None where nothing speaks for it."""
        busy, inexact = sum(one.timed for one in timed), sum(one.inexact for one in timed)
        if inexact <= _MOST_INEXACT * busy:
            return None
        return (
            f"{inexact / busy:.0%} of the parts' time was measured while the GPU may have waited "
            "for the host; this wait counts in these parts instead of host"
        )


def _phase(number: int) -> Phase:
    return "decode" if number else "prefill"


def _seconds(parts: LayerParts) -> float:
    return sum(seconds for seconds, _ in parts.values())


# --- Runs without marks and with them, in turns.


_SETTLED = 0.02  # half the width of the middle half of shares of the time that is in parts
_SILENCE = 1.0  # seconds of a long run of the request between two words on how far it is
_LONG_SECONDS = 60.0  # after which no more rounds are made than were asked for


class PairedRuns:
    """Runs of one request."""

    def __init__(
        self,
        runner: Runner,  # warm
        events: CaseEvents,
        steps: int,  # of decoding
        should_stop: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        self._runner, self._events, self._steps = runner, events, steps
        self._should_stop, self._now = should_stop, now
        self._round, self._last = 0, False
        self._done = self._least = self._most = 0  # runs of the request
        self._said = 0.0
        self.plain: list[RequestRun] = []  # without marks, and with them: on a GPU held back
        self.marked: list[RequestRun] = []

    def run(self, repeats: int, most: int) -> None:
        """Run the request in rounds, and emit each step and its parts."""
        ways = [self._without, self._with]
        begun = time.perf_counter()
        try:
            while not self._last:
                late = time.perf_counter() - begun > _LONG_SECONDS
                enough = self._round + 1 >= repeats
                self._last = enough and (self._round + 1 >= most or late or self._settled())
                fewest, highest = (self._round + 1,) * 2 if self._last else (repeats, most)
                self._least = max(fewest, self._round + 1) * len(ways)
                self._most = max(highest, self._round + 1) * len(ways)
                # Each way goes first as often as the other: a machine that warms up hits both.
                for way in ways[::-1] if self._round % 2 else ways:
                    self._tell_progress(0)
                    way()
                    self._done += 1
                self._round += 1
        finally:
            # Also when memory runs out: nothing that was measured is lost.
            self._events.finish(self.plain, self.marked)

    def whole(self) -> tuple[list[RequestRun], list[RequestRun]]:
        """Return `plain` and `marked` as far as they ran to their end."""
        plain, marked = (
            [one for one in runs if one.ended is not None] for runs in (self.plain, self.marked)
        )
        return plain, marked

    def attributed(self) -> list[float]:
        """Return the share of a request's time that is in parts, of each pair of runs."""
        plain, marked = self.whole()
        return [
            self._events.attributed_seconds(other, one) / one.seconds
            for one, other in zip(plain, marked, strict=False)
        ]

    def energy(self, joules: Callable[[float, float], float | None]) -> float | None:
        """Return the median energy of the runs without marks; None where none is known."""
        found = [
            known
            for one in self.plain
            if one.ended is not None and (known := joules(one.started, one.ended)) is not None
        ]
        return statistics.median(found) if found else None

    def seconds(self, runs: Sequence[RequestRun]) -> tuple[float, float]:
        """Return the seconds of prefill, and of all decoding steps."""
        prefill, *decode = step_seconds(runs)
        return prefill, sum(decode)

    def intervals(
        self, runs: Sequence[RequestRun]
    ) -> tuple[list[float] | None, list[float] | None]:
        """Return the ends of what `seconds` returns; None for a single run."""
        found: list[list[float] | None] = []
        for middle, own in zip(self.seconds(runs), (slice(0, 1), slice(1, None)), strict=True):
            sums = [sum(step.seconds for step in one.steps[own]) for one in runs]
            ends = median_ends(sums)
            # Sums of every step's median may lie outside what whole runs took.
            found.append(None if ends is None else [min(ends[0], middle), max(ends[1], middle)])
        return found[0], found[1]

    def _settled(self) -> bool:
        attributed = self.attributed()
        if len(attributed) < 2:
            return False
        low, high = np.quantile(attributed, (0.25, 0.75))
        return bool((high - low) / 2 <= _SETTLED)

    def _go(
        self,
        into: list[RequestRun],
        on_step: Callable[[int, Step], None] | None,
        *,
        marked: Collection[int] = (),
        after: list[float] | None = None,
    ) -> None:
        def stepped(number: int, step: Step) -> None:
            if on_step is not None and self._round == 0:
                on_step(number, step)
            if time.perf_counter() - self._said > _SILENCE:
                self._tell_progress(number + 1)

        run_request(
            self._runner,
            self._steps,
            self._should_stop,
            self._now,
            into,
            marked=marked,
            after=after,
            on_step=stepped,
        )

    def _tell_progress(self, step: int) -> None:
        self._said = time.perf_counter()
        steps = self._steps + 1
        self._events.progress(self._done, self._least, self._most, step, steps)

    def _without(self) -> None:
        self._go(self.plain, self._events.step)

    def _with(self) -> None:
        # Held back for as long as the host took to queue the same step before, on a GPU.
        last = self.plain[-1].steps if self._runner.on_gpu else None
        self._go(
            self.marked,
            lambda number, _: self._events.memory(number, self._runner),
            marked=self._events.told,
            after=None if last is None else [step.queued for step in last],
        )
