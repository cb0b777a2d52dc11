"""A request run without marks and with them, in turns, until its parts' share stays the same.

What several runs of one request say together, and the events that tell of it.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from torch import Tensor

from kvprof.benchmark.jct.held import memory_sample, peak_bytes
from kvprof.benchmark.jct.marks import OTHER_LAYERS
from kvprof.benchmark.jct.steps import Runner, Step
from kvprof.benchmark.jct.timed_layers import OVERHEAD, TimedLayers
from kvprof.benchmark.timing import median_interval
from kvprof.errors import Interrupted
from kvprof.methods.plan import Plan
from kvprof.models.load import LoadedModel
from kvprof.records.events import Event, PartSample, Progress, StepFinished
from kvprof.runtime.clock import REST, Stretch

__all__ = [
    "CaseEvents",
    "InterleavedRuns",
    "RequestRun",
    "interval",
    "is_part",
    "run_warnings",
    "step_seconds",
]

# --- One run of the request, and what several say together.


#: Seconds by part and layer.
LayerPartSeconds = dict[tuple[str, int | None], float]

_UNSTEADY = 0.2  # between runs of one request
_UNCERTAIN = 0.05  # of a request's time: half the share without a name that is a warning itself


@dataclass
class RequestRun:
    """One run of the request.

    Attributes
    ----------
    started, ended : float
        Of the run's clock; `ended` is None until it has run to its end.
    steps : list of Step
        Prefill first.
    parts : dict of LayerPartSeconds
        By step, of those that were marked and are emitted.
    timed, inexact : float
        Seconds of these parts, and of those that are not exact.
    """

    started: float
    ended: float | None = None
    steps: list[Step] = field(default_factory=list)
    parts: dict[int, LayerPartSeconds] = field(default_factory=dict)
    timed: float = 0.0
    inexact: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return sum(step.seconds for step in self.steps)

    def tell(self, number: int, stretches: Sequence[Stretch]) -> None:
        """Keep a step's parts."""
        found: LayerPartSeconds = {}
        for stretch in stretches:
            key = stretch.part, stretch.layer
            found[key] = found.get(key, 0.0) + stretch.seconds
            self.timed += stretch.seconds
            self.inexact += 0.0 if stretch.exact else stretch.seconds
        self.parts[number] = found


def run_request(
    runner: Runner,
    steps: int,
    should_stop: Callable[[], bool],
    now: Callable[[], float],
    into: list[RequestRun],
    *,
    choice: TimedLayers | None = None,
    after: list[float] | None = None,
    on_step: Callable[[int, Step], None] | None = None,
) -> None:
    """Run a request once.

    Parameters
    ----------
    runner : Runner
    steps : int
        Of decoding.
    should_stop, now : callable
    into : list of RequestRun
        Where the run is kept, from its beginning on.
    choice : TimedLayers, optional
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
    with _no_collection():
        done = RequestRun(now())
        into.append(done)
        for number in range(steps + 1):
            layers = None if choice is None else choice.at(number)
            step = runner.step(
                layers,
                after=None if after is None else after[number],
                outside=choice is None or choice.outside(number),
            )
            if choice is not None and choice.stands_for(number):
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
    """Return the 2.5–97.5 % interval of the median of a few figures; all of them for one."""
    return median_interval(values) or (min(values), max(values))


def run_warnings(
    plain: Sequence[RequestRun],
    marked: Sequence[RequestRun],
    shares: Sequence[float] = (),
    alike: Sequence[object] = (),
) -> list[str]:
    """Return why a request's times may be off, one sentence each.

    Parameters
    ----------
    plain, marked : sequence of RequestRun
        Whole runs without marks and with them.
    shares : sequence of float
        Per pair of runs, the time in its parts over that of the run without marks.
    alike : sequence of object
        Per decoding step something equal for steps with about as many marks; without it all are.
    """
    for runs in (plain, marked):
        walls = [run.seconds for run in runs]
        if max(walls) - min(walls) > _UNSTEADY * statistics.median(walls):
            # What timing the parts costs cannot be known then.
            return [
                f"the same request took {min(walls):.3g} s once and {max(walls):.3g} s another "
                "time: something else uses the machine, and shares of parts are as uncertain"
            ]
    low, high = interval(shares) if shares else (1.0, 1.0)
    if (high - low) / 2 > _UNCERTAIN:
        return [
            f"its parts are between {low:.0%} and {high:.0%} of its time (95 % interval of "
            f"{len(shares)} pairs of runs): shares are as uncertain"
        ]
    # Step by step: a neighbour that wakes up for some steps does not count.
    decode = list(zip(step_seconds(marked)[1:], step_seconds(plain)[1:], strict=True))
    ratios: dict[object, list[float]] = {}
    for like, (slow, fast) in zip(alike or [None] * len(decode), decode, strict=True):
        ratios.setdefault(like, []).append(slow / fast)
    typical = sum(len(some) * statistics.median(some) for some in ratios.values())
    overhead = typical / len(decode) - 1.0 if decode else 0.0
    if overhead <= OVERHEAD:
        return []
    return [
        f"timing its parts made decoding {overhead:.1%} slower; shares may lean towards parts of "
        "many small pieces"
    ]


# --- Steps, their parts and the cache, as events.


_MEMORY_SAMPLES = 9
_MOST_INEXACT = 0.1  # of the GPU's time


class CaseEvents:
    """Makes events of steps.

    Parameters
    ----------
    loaded : LoadedModel
    plan : Plan
    case : str
    ids : Tensor
        ``[batch, input_len]``.
    choice : TimedLayers
    on_gpu : bool
        What no mark names is then nobody's, and `host` what the GPU waited.
    emit, now : callable
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: Plan,
        case: str,
        ids: Tensor,
        choice: TimedLayers,
        on_gpu: bool,
        emit: Callable[[Event], None],
        now: Callable[[], float],
    ) -> None:
        self._loaded, self._plan, self._case = loaded, plan, case
        self._batch, self._input_len = ids.shape
        self._choice, self._on_gpu = choice, on_gpu
        self._emit, self._now = emit, now
        self._peak = 0
        self._emitted: dict[int, float] = {}  # by step, seconds of its parts
        steps = np.linspace(0, choice.steps, min(_MEMORY_SAMPLES, choice.steps + 1))
        self._memory_at = {round(step) for step in steps}

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

    def parts(self, number: int, runs: Sequence[RequestRun]) -> None:
        """Emit the parts of a step, unless they are emitted already: those of its median run.

        Every part's own median would add up to less than any run took, because noise hits one part
        here and another one there.
        """
        known = [one.parts[number] for one in runs if number in one.parts]
        if not known or number in self._emitted:
            return
        middle = sorted(known, key=lambda parts: sum(parts.values()))[(len(known) - 1) // 2]
        self._emitted[number] = sum(middle.values())
        for key, seconds in middle.items():
            if is_part(key, self._on_gpu):
                self._part(number, key, seconds)

    def finish(self, plain: Sequence[RequestRun], timed: Sequence[RequestRun]) -> None:
        """Emit all parts that are not emitted yet, and steps as all runs have them.

        The time between tokens is then of the same runs as the request's, of which the first may
        be far off. On a GPU what it waited is emitted as well.

        A step's wait is its time without marks less the GPU's time with them. Where noise makes
        that negative the phase's other steps give way: cut off at 0 each, waits would add up to
        more than the phase has.
        """
        for number in sorted({number for one in timed for number in one.parts}):
            self.parts(number, timed)
        whole = [one for one in plain if one.ended is not None]
        walls = step_seconds(whole) if whole else []
        if len(whole) > 1:
            for number, seconds in enumerate(walls):
                self._step(number, seconds, len(whole))
        if not self._on_gpu or not whole:
            return
        gaps = {number: walls[number] - busy for number, busy in sorted(self._emitted.items())}
        for phase in ("prefill", "decode"):
            own = {number: gap for number, gap in gaps.items() if _phase(number) == phase}
            total = sum(gap * self._choice.stands_for(number) for number, gap in own.items())
            positive = sum(max(0.0, gap) * self._choice.stands_for(n) for n, gap in own.items())
            share = max(0.0, total) / positive if positive else 0.0
            for number, gap in own.items():
                self._part(number, (REST, None), share * max(0.0, gap))

    def attributed_seconds(self, one: RequestRun) -> float:
        """Return what the parts of one run cost the request; on a GPU without waiting."""
        return sum(
            seconds * self._weight(number, key)
            for number, parts in one.parts.items()
            for key, seconds in parts.items()
            if is_part(key, self._on_gpu)
        )

    def _weight(self, number: int, key: tuple[str, int | None]) -> float:
        choice = self._choice
        if key == (REST, None):  # known of every step
            return float(choice.stands_for(number))
        each = choice.weight if key[1] is not None else choice.outside_weight
        return choice.stands_for(number) * each(number)

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
            self._weight(number, key),
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
            f"{inexact / busy:.0%} of the time of its parts was measured while the GPU may have "
            "waited for the host, which asks it for values within a step: waiting that should be "
            "in host is in these parts"
        )


def _phase(number: int) -> str:
    return "decode" if number else "prefill"


def is_part(key: tuple[str, int | None], on_gpu: bool) -> bool:
    """Whether a stretch is a part: not the layers that others stand for, nor a GPU's waiting."""
    return key[0] != OTHER_LAYERS and not (on_gpu and key[0] == REST)


# --- Runs without marks and with them, in turns.


_SETTLED = 0.02  # half the width of an interval of the share of the time that is in parts
_SILENCE = 1.0  # seconds of a long run of the request between two words on how far it is
_LONG_SECONDS = 60.0  # after which no more rounds are made than were asked for


class InterleavedRuns:
    """Runs of one request.

    Parameters
    ----------
    runner : Runner
        Warm.
    events : CaseEvents
    choice : TimedLayers
        Which layers to time in which step.
    should_stop, now : callable

    Attributes
    ----------
    plain, marked : list of RequestRun
        Without marks, and with them.
    timed : list of RequestRun
        Those whose parts are emitted: on a GPU the ones that were held back.
    """

    def __init__(
        self,
        runner: Runner,
        events: CaseEvents,
        choice: TimedLayers,
        should_stop: Callable[[], bool],
        now: Callable[[], float],
    ) -> None:
        self._runner, self._events, self._choice = runner, events, choice
        self._should_stop, self._now = should_stop, now
        self._round, self._last = 0, False
        self._done = self._least = self._most = 0  # runs of the request
        self._said = 0.0
        self.plain: list[RequestRun] = []
        self.marked: list[RequestRun] = []
        self.timed: list[RequestRun] = [] if runner.on_gpu else self.marked

    def run(self, repeats: int, most: int) -> None:
        """Run the request in rounds, and emit each step and its parts.

        Parameters
        ----------
        repeats, most : int
            At least and at most so many rounds; between them only as many as change the share of
            the time that is in parts.

        Raises
        ------
        Interrupted
            When `should_stop` says so; what was measured so far is emitted.
        """
        ways = [self._without, self._with, *([self._held] if self._runner.on_gpu else [])]
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
            self._events.finish(self.plain, self.timed)

    def whole(self) -> tuple[list[RequestRun], list[RequestRun], list[RequestRun]]:
        """Return `plain`, `marked` and `timed` as far as they ran to their end."""
        plain, marked, timed = (
            [one for one in runs if one.ended is not None]
            for runs in (self.plain, self.marked, self.timed)
        )
        return plain, marked, timed

    def attributed(self) -> list[float]:
        """Return the share of a request's time that is in parts, of each pair of runs."""
        plain, _, timed = self.whole()
        return [
            self._events.attributed_seconds(other) / one.seconds
            for one, other in zip(plain, timed, strict=False)
        ]

    def alike(self) -> list[object]:
        """Return per decoding step what it times, as `run_warnings` takes it."""
        choice = self._choice
        steps = range(1, choice.steps + 1)
        return [(len(choice.at(step)), choice.outside(step)) for step in steps]

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
        """Return 95 % intervals of what `seconds` returns; None for a single run."""
        found: list[list[float] | None] = []
        for middle, own in zip(self.seconds(runs), (slice(0, 1), slice(1, None)), strict=True):
            sums = [sum(step.seconds for step in one.steps[own]) for one in runs]
            ends = median_interval(sums)
            # Sums of every step's median may lie outside what whole runs took.
            found.append(None if ends is None else [min(ends[0], middle), max(ends[1], middle)])
        return found[0], found[1]

    def _settled(self) -> bool:
        attributed = self.attributed()
        if len(attributed) < 2:
            return False
        low, high = interval(attributed)
        return (high - low) / 2 <= _SETTLED

    def _go(
        self,
        into: list[RequestRun],
        *,
        marks: bool = True,
        after: list[float] | None = None,
        on_step: Callable[[int, Step], None] | None = None,
    ) -> None:
        run_request(
            self._runner,
            self._choice.steps,
            self._should_stop,
            self._now,
            into,
            choice=self._choice if marks else None,
            after=after,
            on_step=partial(self._stepped, on_step),
        )

    def _stepped(
        self, on_step: Callable[[int, Step], None] | None, number: int, step: Step
    ) -> None:
        if on_step is not None:
            on_step(number, step)
        if time.perf_counter() - self._said > _SILENCE:
            self._tell_progress(number + 1)

    def _tell_progress(self, step: int) -> None:
        self._said = time.perf_counter()
        steps = self._choice.steps + 1
        self._events.progress(self._done, self._least, self._most, step, steps)

    def _without(self) -> None:
        self._go(self.plain, marks=False, on_step=None if self._round else self._events.step)

    def _with(self) -> None:
        self._go(self.marked, on_step=None if self._runner.on_gpu else self._tell)

    def _held(self) -> None:
        queued = [step.queued for step in self.whole()[1][-1].steps]
        self._go(self.timed, after=queued, on_step=self._tell)

    def _tell(self, number: int, _: Step) -> None:
        if self._round == 0:
            self._events.memory(number, self._runner)
        if self._last:
            self._events.parts(number, self.timed)
