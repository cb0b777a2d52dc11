"""A request from beginning to end, and what several runs of it say together."""

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kvprof.benchmark.jct.sampling import OVERHEAD, Sampling
from kvprof.benchmark.jct.steps import Runner, Step
from kvprof.benchmark.timing import Interrupted, median_interval
from kvprof.runtime.clock import Stretch

__all__ = ["Parts", "Pass", "apart", "doubts", "run_pass", "step_seconds"]

#: Seconds by part and layer.
Parts = dict[tuple[str, int | None], float]

_UNSTEADY = 0.2  # between runs of one request
_UNCERTAIN = 0.05  # of a request's time: half the share without a name that is a warning itself


@dataclass
class Pass:
    """One run of the request.

    Attributes
    ----------
    started, ended : float
        Of the run's clock; `ended` is None until it has run to its end.
    steps : list of Step
        Prefill first.
    parts : dict of Parts
        By step, of those that were marked and are told.
    timed, doubtful : float
        Seconds of these parts, and of those that are not exact.
    """

    started: float
    ended: float | None = None
    steps: list[Step] = field(default_factory=list)
    parts: dict[int, Parts] = field(default_factory=dict)
    timed: float = 0.0
    doubtful: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return sum(step.seconds for step in self.steps)

    def tell(self, number: int, stretches: Sequence[Stretch]) -> None:
        """Keep a step's parts."""
        found: Parts = {}
        for stretch in stretches:
            key = stretch.part, stretch.layer
            found[key] = found.get(key, 0.0) + stretch.seconds
            self.timed += stretch.seconds
            self.doubtful += 0.0 if stretch.exact else stretch.seconds
        self.parts[number] = found


def run_pass(
    runner: Runner,
    steps: int,
    should_stop: Callable[[], bool],
    now: Callable[[], float],
    into: list[Pass],
    *,
    sampling: Sampling | None = None,
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
    into : list of Pass
        Where the run is kept, from its beginning on.
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
        into.append(done)
        for number in range(steps + 1):
            layers = None if sampling is None else sampling.at(number)
            step = runner.step(
                layers,
                after=None if after is None else after[number],
                outside=sampling is None or sampling.outside(number),
            )
            if sampling is not None and sampling.told(number):
                done.tell(number, step.stretches)
            done.steps.append(replace(step, stretches=[]))  # they would only take memory
            if on_step is not None:
                on_step(number, step)
            if should_stop():
                raise Interrupted
        done.ended = now()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python's garbage collector out: it stops a step for longer than the step takes."""
    gc.collect(1)  # what the last run left is young; going through all there is takes far longer
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def step_seconds(passes: Sequence[Pass]) -> list[float]:
    """Return each step's median over whole runs: a neighbour that wakes up hits few of them."""
    columns = zip(*([step.seconds for step in one.steps] for one in passes), strict=True)
    return [statistics.median(column) for column in columns]


def apart(values: Sequence[float]) -> tuple[float, float]:
    """Return the 2.5–97.5 % interval of the median of a few figures; all of them for one."""
    return median_interval(values) or (min(values), max(values))


def doubts(
    plain: Sequence[Pass],
    marked: Sequence[Pass],
    named: Sequence[float] = (),
    alike: Sequence[object] = (),
) -> list[str]:
    """Return why a request's times may be off, one sentence each.

    Parameters
    ----------
    plain, marked : sequence of Pass
        Whole runs without marks and with them.
    named : sequence of float
        Per pair of runs, the time in its parts over that of the run without marks.
    alike : sequence of object
        Per decoding step something equal for steps with about as many marks; without it all are.
    """
    for runs in (plain, marked):
        walls = [run.seconds for run in runs]
        if max(walls) - min(walls) > _UNSTEADY * statistics.median(walls):
            # What timing the parts costs cannot be told then.
            return [
                f"the same request took {min(walls):.3g} s once and {max(walls):.3g} s another "
                "time: something else uses the machine, and shares of parts are as uncertain"
            ]
    low, high = apart(named) if named else (1.0, 1.0)
    if (high - low) / 2 > _UNCERTAIN:
        return [
            f"its parts are between {low:.0%} and {high:.0%} of its time (95 % interval of "
            f"{len(named)} pairs of runs): shares are as uncertain"
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
