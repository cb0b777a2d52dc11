"""A request run without marks and with them, in turns, until what its parts are told as stays."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvprof.benchmark.jct.narrator import Narrator
from kvprof.benchmark.jct.passes import Pass, apart, run_pass, step_seconds
from kvprof.benchmark.jct.sampling import Sampling
from kvprof.benchmark.jct.steps import Runner, Step
from kvprof.benchmark.timing import median_interval

__all__ = ["Turns"]

_SETTLED = 0.02  # half the width of an interval of the share of the time that is in parts
_SILENCE = 1.0  # seconds of a long run of the request between two words on how far it is
_LONG_SECONDS = 60.0  # after which no more turns are made than were asked for


class Turns:
    """Runs of one request.

    Parameters
    ----------
    runner : Runner
        Warm.
    narrator : Narrator
    sampling : Sampling
        Which layers to time in which step.
    should_stop, now : callable

    Attributes
    ----------
    plain, marked : list of Pass
        Without marks, and with them.
    timed : list of Pass
        Those whose parts are told: on a GPU the ones that were held back.
    """

    def __init__(
        self, runner: Runner, narrator: Narrator, sampling: Sampling,
        should_stop: Callable[[], bool], now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._runner, self._narrator, self._sampling = runner, narrator, sampling
        self._should_stop, self._now = should_stop, now
        self._turn, self._last = 0, False
        self._done = self._least = self._most = 0  # runs of the request
        self._said = 0.0
        self.plain: list[Pass] = []
        self.marked: list[Pass] = []
        self.timed: list[Pass] = [] if runner.on_gpu else self.marked

    def run(self, repeats: int, most: int) -> None:
        """Take turns, and tell each step and its parts.

        Parameters
        ----------
        repeats, most : int
            At least and at most so many turns; between them only as many as change the share of
            the time that is in parts.

        Raises
        ------
        Interrupted
            When `should_stop` says so; what was measured so far is told.
        """
        ways = [self._without, self._with, *([self._held] if self._runner.on_gpu else [])]
        begun = time.perf_counter()
        try:
            while not self._last:
                late = time.perf_counter() - begun > _LONG_SECONDS
                enough = self._turn + 1 >= repeats
                self._last = enough and (self._turn + 1 >= most or late or self._settled())
                fewest, highest = (self._turn + 1,) * 2 if self._last else (repeats, most)
                self._least = max(fewest, self._turn + 1) * len(ways)
                self._most = max(highest, self._turn + 1) * len(ways)
                # Each way goes first as often as the other: a machine that warms up hits both.
                for way in ways[::-1] if self._turn % 2 else ways:
                    self._tell_progress(0)
                    way()
                    self._done += 1
                self._turn += 1
        finally:
            # Also when memory runs out: nothing that was measured is lost.
            self._narrator.rest(self.plain, self.timed)

    def whole(self) -> tuple[list[Pass], list[Pass], list[Pass]]:
        """Return `plain`, `marked` and `timed` as far as they ran to their end."""
        plain, marked, timed = (
            [one for one in passes if one.ended is not None]
            for passes in (self.plain, self.marked, self.timed)
        )
        return plain, marked, timed

    def named(self) -> list[float]:
        """Return the share of a request's time that is in parts, of each pair of runs."""
        plain, _, timed = self.whole()
        return [
            self._narrator.named(other) / one.seconds
            for one, other in zip(plain, timed, strict=False)
        ]

    def alike(self) -> list[object]:
        """Return per decoding step what it times, as `doubts` takes it."""
        sampling = self._sampling
        steps = range(1, sampling.steps + 1)
        return [(len(sampling.at(step)), sampling.outside(step)) for step in steps]

    def energy(self, joules: Callable[[float, float], float | None]) -> float | None:
        """Return the median energy of the runs without marks; None where none is known."""
        found = [
            known
            for one in self.plain
            if one.ended is not None and (known := joules(one.started, one.ended)) is not None
        ]
        return statistics.median(found) if found else None

    def seconds(self, passes: Sequence[Pass]) -> tuple[float, float]:
        """Return the seconds of prefill, and of all decoding steps."""
        prefill, *decode = step_seconds(passes)
        return prefill, sum(decode)

    def intervals(self, passes: Sequence[Pass]) -> tuple[list[float] | None, list[float] | None]:
        """Return 95 % intervals of what `seconds` returns; None for a single run."""
        found: list[list[float] | None] = []
        for middle, own in zip(self.seconds(passes), (slice(0, 1), slice(1, None)), strict=True):
            runs = [sum(step.seconds for step in one.steps[own]) for one in passes]
            ends = median_interval(runs)
            # Sums of every step's median may lie outside what whole runs took.
            found.append(None if ends is None else [min(ends[0], middle), max(ends[1], middle)])
        return found[0], found[1]

    def _settled(self) -> bool:
        named = self.named()
        if len(named) < 2:
            return False
        low, high = apart(named)
        return (high - low) / 2 <= _SETTLED

    def _go(
        self, into: list[Pass], *, marks: bool = True, after: list[float] | None = None,
        on_step: Callable[[int, Step], None] | None = None,
    ) -> None:  # fmt: skip
        run_pass(
            self._runner, self._sampling.steps, self._should_stop, self._now, into,
            sampling=self._sampling if marks else None, after=after,
            on_step=partial(self._stepped, on_step),
        )  # fmt: skip

    def _stepped(
        self, on_step: Callable[[int, Step], None] | None, number: int, step: Step
    ) -> None:
        if on_step is not None:
            on_step(number, step)
        if time.perf_counter() - self._said > _SILENCE:
            self._tell_progress(number + 1)

    def _tell_progress(self, step: int) -> None:
        self._said = time.perf_counter()
        steps = self._sampling.steps + 1
        self._narrator.progress(self._done, self._least, self._most, step, steps)

    def _without(self) -> None:
        self._go(self.plain, marks=False, on_step=None if self._turn else self._narrator.step)

    def _with(self) -> None:
        self._go(self.marked, on_step=None if self._runner.on_gpu else self._tell)

    def _held(self) -> None:
        queued = [step.queued for step in self.whole()[1][-1].steps]
        self._go(self.timed, after=queued, on_step=self._tell)

    def _tell(self, number: int, _: Step) -> None:
        if self._turn == 0:
            self._narrator.memory(number, self._runner)
        if self._last:
            self._narrator.parts(number, self.timed)
