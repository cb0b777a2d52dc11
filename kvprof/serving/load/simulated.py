"""The simulator in the place of a server: the same requests, the same events, no GPU."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvprof.errors import UsageError
from kvprof.serving.load.marks import Marks
from kvprof.serving.load.replica import EngineSettings
from kvprof.serving.load.requests import Outcome, Request
from kvprof.serving.load.simulator import (
    Moment,
    Simulated,
    SimulationStoppedError,
    simulate,
)
from kvprof.serving.load.step_records import MethodSteps, ModelSteps
from kvprof.serving.load.target import Opened, Ran, Watch
from kvprof.sizes import format_bytes

__all__ = ["SimulatedTarget", "engine_settings"]

_SAMPLES = 200  # of a rate
#: Below so many bytes of a device's memory vLLM's server takes fewer sequences and tokens at once.
_LARGE = 70 * 2**30
_SMALL: dict[str, object] = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
_DOUBTFUL = 0.1  # relative difference of a fitted step that is told


def engine_settings(
    steps: ModelSteps, method: str, cache_bytes: int | None, **settings: object
) -> EngineSettings:
    """Return an engine whose cache has as many pages as fit.

    Parameters
    ----------
    steps : ModelSteps
    method : str
    cache_bytes : int or None
        Of one device's cache; None takes what the record says.
    **settings
        As `EngineSettings` has them, but for `pages`.

    Raises
    ------
    UsageError
        When the record does not tell the memory, not a page fits, or the settings fit no engine.
    """
    room = steps.cache_bytes if cache_bytes is None else cache_bytes
    if room is None:
        raise UsageError(
            f"--memory: {steps.source} does not say how much memory a cache may have; "
            "name it, such as --memory 100GiB"
        )
    if steps.memory_bytes is None or steps.memory_bytes < _LARGE:
        settings = {**_SMALL, **settings}
    # Integers by the names of its fields, which mypy cannot know.
    engine = EngineSettings(1, **settings)  # type: ignore[arg-type]
    page = steps.method(method).token_bytes * engine.block_size
    if room < page:
        raise UsageError(
            f"--memory {format_bytes(room)}: not one page of {method} fits ({format_bytes(page)})"
        )
    return replace(engine, pages=int(room // page))


class SimulatedTarget:
    """A method whose steps take the times that a record tells.

    Parameters
    ----------
    method : str
    steps : ModelSteps
    settings : EngineSettings
    """

    waits_for = "simulated, no server is started"

    def __init__(self, method: str, steps: ModelSteps, settings: EngineSettings) -> None:
        self.method = method
        self._own = steps.method(method)
        self._steps = steps
        self._settings = settings

    def open(self, stop: Callable[[], bool]) -> Opened:
        """Say what is simulated."""
        engine, own = self._settings, self._own
        warnings = list(own.notes)
        if (off := own.times.residual) is not None and off > _DOUBTFUL:
            warnings.append(
                "steps that were measured differ from the line through them by "
                f"{_up_to(own)}{100 * off:.1f} %"
            )
        tokens = engine.pages * engine.block_size
        positions = self._steps.positions
        longest, bound = tokens, f"{self.method}'s cache holds {tokens:,}"
        if positions is not None and positions < tokens:
            longest, bound = positions, f"{self._steps.model} has {positions:,} positions"
        return Opened(
            servers=engine.replicas,
            engine="kvprof's simulator of vLLM's scheduler",
            cache_tokens=engine.replicas * tokens,
            cache_bytes=round(engine.replicas * tokens * own.token_bytes),
            settings={
                "simulated": "nothing was served",
                "step times": f"{self._steps.source} ({self._steps.device}), "
                f"{own.times.samples} steps",
                "block size": str(engine.block_size),
                "max num seqs": str(engine.max_num_seqs),
                "max num batched tokens": str(engine.max_num_batched_tokens),
                "prefix caching": "on" if engine.prefix_caching else "off",
            },
            warnings=[f"{self.method}: {one}" for one in warnings],
            longest=longest,
            bound=bound,
        )

    def alone(self, request: Request) -> float | None:
        """Return the seconds of one request by itself; None where it fits into no cache."""
        simulated = simulate([replace(request, arrival=0.0)], self._settings, self._own.times)
        tokens = simulated.outcomes[0].tokens
        return tokens[-1] if tokens else None

    def run(self, requests: Sequence[Request], watch: Watch, stop: Callable[[], bool]) -> Ran:
        """Simulate requests, and tell `watch` in the order in which things happened."""
        try:
            simulated = simulate(requests, self._settings, self._own.times, stop)
        except SimulationStoppedError:
            return Ran("interrupted")
        ends = [one.tokens[-1] if one.tokens else one.request.arrival for one in simulated.outcomes]
        times = np.linspace(0.0, max(ends, default=0.0), _SAMPLES)
        moments = deque(simulated.moments(times.tolist()))
        for number in np.argsort(ends, kind="stable").tolist():
            while moments and moments[0].time < ends[number]:
                self._sample(moments.popleft(), watch)
            if stop():
                return Ran("interrupted")
            watch.outcome(simulated.outcomes[number], simulated.servers[number])
        while moments:
            self._sample(moments.popleft(), watch)
        return Ran(engine=_engine(simulated))

    def _sample(self, moment: Moment, watch: Watch) -> None:
        pages = self._settings.pages * self._settings.replicas
        marks = Marks(
            moment.running,
            moment.waiting,
            moment.pages / pages,
            {"preemptions": float(moment.preemptions)},
        )
        watch.sample(moment.time, moment.running + moment.waiting, marks)

    def close(self) -> None:
        """There is nothing to end."""


def _up_to(own: MethodSteps) -> str:
    return "" if own.samples[0].mean else "up to "


def _engine(simulated: Simulated) -> dict[str, float]:
    """Return what an engine would have marked; see `kvprof.records.events.LoadRateFinished`."""
    served = [
        (outcome, admitted)
        for outcome, admitted in zip(simulated.outcomes, simulated.admitted, strict=True)
        if admitted is not None
    ]

    def total(seconds: Callable[[Outcome, float], float]) -> float:
        return float(sum(seconds(outcome, admitted) for outcome, admitted in served))

    return {
        "requests": float(len(served)),
        "waiting": total(lambda one, admitted: admitted - one.request.arrival),
        "prefill": total(lambda one, admitted: one.tokens[0] - admitted),
        "decode": total(lambda one, admitted: one.tokens[-1] - one.tokens[0]),
        "end_to_end": total(lambda one, admitted: one.tokens[-1] - one.request.arrival),
        "preemptions": float(simulated.totals.preemptions),
        "prefix_queries": float(sum(one.request.prompt for one, _ in served)),
        "prefix_hits": float(simulated.totals.found),
    }
