"""What becomes of requests at simulated engines, each a `Replica`, also in a server's place."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

import numpy as np

from kvprof.errors import UsageError
from kvprof.serving.load.marks import Marks
from kvprof.serving.load.pages import Held
from kvprof.serving.load.replica import (
    EngineSettings,
    LiveRequest,
    Replica,
    StepLog,
)
from kvprof.serving.load.requests import Outcome, Request
from kvprof.serving.load.step_records import SHIPPED, ModelSteps
from kvprof.serving.load.step_times import StepTimes
from kvprof.serving.load.target import LoadObserver, LoadOutcome, ServerInfo, Stop
from kvprof.sizes import format_bytes

__all__ = [
    "TOO_LONG",
    "Moment",
    "Simulated",
    "SimulatedTarget",
    "SimulationStoppedError",
    "Totals",
    "engine_settings",
    "simulate",
]

#: `Outcome.failure` of a request that no empty cache could hold.
TOO_LONG = "longer than the cache"

_ASKED = 2048  # requests between two looks at whether to stop
_WAITING = 4  # what a waiting request counts, as in vLLM's router for data parallelism; running: 1


class SimulationStoppedError(Exception):
    """A simulation was asked to end before it had."""


@dataclass(frozen=True)
class Totals:
    """What all replicas did."""

    #: Tokens that went through the model: of prompts, decoded ones, and those computed again.
    computed: int = 0
    found: int = 0  # tokens of prompts that were found in the cache
    again: int = 0  # tokens that preemptions gave up
    kept: int = 0  # of these, what was found once more
    preemptions: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Moment:
    """The state of all replicas together."""

    time: float  # seconds after the load began
    waiting: int  # requests
    running: int
    pages: int  # pages that running requests hold, each shared one once
    preemptions: int  # since the beginning


@dataclass(frozen=True)
class Simulated:
    """What a simulation found."""

    outcomes: list[Outcome]  # in the order of the requests
    admitted: list[float | None]  # when each was first given pages; None of those that failed
    servers: list[int]  # which replica each was sent to; 0 of those that failed
    totals: Totals
    settings: EngineSettings
    _logs: list[StepLog] = field(repr=False, default_factory=list)

    def moments(self, times: Sequence[float]) -> list[Moment]:
        """Return the state at given times, in seconds; pages at the end of a run of steps."""
        at = np.asarray(times, dtype=np.float64)
        running, pages, preemptions = (np.zeros(len(at), dtype=np.int64) for _ in range(3))
        for log in self._logs:
            if not len(log.first):
                continue
            stretch = np.searchsorted(np.array(log.start), at, side="right") - 1
            begun, stretch = stretch >= 0, np.maximum(stretch, 0)
            busy = begun & (at < np.array(log.end)[stretch])
            running += np.where(busy, np.array(log.running)[stretch], 0)
            pages += np.where(busy, np.array(log.pages)[stretch], 0)
            preemptions += np.where(begun, np.array(log.preemptions)[stretch], 0)
        served = [one for one in self.outcomes if one.tokens]
        arrived = np.sort([one.request.arrival for one in served])
        ended = np.sort([one.tokens[-1] for one in served])
        inside = np.searchsorted(arrived, at, "right") - np.searchsorted(ended, at, "right")
        return [
            Moment(float(time), int(some - run), int(run), int(held), int(times))
            for time, some, run, held, times in zip(
                at, inside, running, pages, preemptions, strict=True
            )
        ]


def simulate(
    requests: Sequence[Request],
    settings: EngineSettings,
    times: StepTimes,
    stop: Stop = lambda: False,
) -> Simulated:
    """Simulate requests sorted by arrival; SimulationStoppedError if `stop` returns True."""
    if any(b.arrival < a.arrival for a, b in pairwise(requests)):
        raise ValueError("requests must be sorted by arrival")
    if (empty := next((one for one in requests if one.output < 1), None)) is not None:
        raise ValueError(f"request {empty.number} generates no token")
    replicas = [Replica(settings, times) for _ in range(settings.replicas)]
    router = _Router(settings, replicas)
    lives: list[tuple[LiveRequest, int] | None] = []
    for number, request in enumerate(requests):
        if number % _ASKED == 0 and stop():
            raise SimulationStoppedError
        stored = request.prompt + request.output - 1
        if -(-stored // settings.block_size) > settings.pages:
            lives.append(None)
            continue
        live = LiveRequest(request, _shared(request, settings))
        index = router.next(request.arrival)
        replicas[index].run_until(request.arrival)
        replicas[index].deliver(live, request.arrival)
        lives.append((live, index))
    for replica in replicas:
        if stop():
            raise SimulationStoppedError
        replica.run_until(inf)
    own = (
        replica.token_times([one[0] for one in lives if one is not None and one[1] == number])
        for number, replica in enumerate(replicas)
    )
    times_of = list(own)
    outcomes = [
        Outcome(request, request.arrival, (), TOO_LONG)
        if entry is None
        else Outcome(request, request.arrival, next(times_of[entry[1]]))
        for request, entry in zip(requests, lives, strict=True)
    ]
    totals = Totals(
        computed=sum(replica.computed for replica in replicas),
        found=sum(replica.found for replica in replicas),
        again=sum(replica.again for replica in replicas),
        kept=sum(replica.kept for replica in replicas),
        preemptions=sum(replica.preemptions for replica in replicas),
        steps=sum(replica.steps for replica in replicas),
    )
    return Simulated(
        outcomes,
        [None if entry is None else entry[0].admitted for entry in lives],
        [0 if entry is None else entry[1] for entry in lives],
        totals,
        settings,
        [replica.log for replica in replicas],
    )


class _Router:
    """Sends each request to a replica."""

    def __init__(self, settings: EngineSettings, replicas: Sequence[Replica]) -> None:
        self._settings, self._replicas = settings, replicas
        self._sent = 0
        self._scores = [0] * len(replicas)
        self._heard = -1  # in which interval

    def next(self, time: float) -> int:
        """Return which replica gets the request that arrives now."""
        replicas, scores = self._replicas, self._scores
        self._sent += 1
        if len(replicas) == 1:
            return 0
        if self._settings.route == "round-robin":
            return (self._sent - 1) % len(replicas)
        refresh = self._settings.refresh
        interval = int(time / refresh) if refresh else self._sent
        if interval != self._heard:
            self._heard = interval
            heard_at = interval * refresh if refresh else time
            for index, replica in enumerate(replicas):
                replica.run_until(heard_at)
                scores[index] = _WAITING * len(replica.waiting) + len(replica.running)
        index = scores.index(min(scores))
        scores[index] += _WAITING
        return index


def _shared(request: Request, settings: EngineSettings) -> Held:
    """Return the part of a request's prompt that others may share, in whole pages."""
    size = settings.block_size
    if not settings.prefix_caching or not request.prefix:
        return Held()
    if request.blocks:
        count = min(request.prefix // request.block, len(request.blocks))
        # Of blocks that end in one page the last one stands for all of them.
        ends = {(n + 1) * request.block // size: request.blocks[n] for n in range(count)}
        ends.pop(0, None)
        return Held(list(ends.values()), list(ends))
    if request.session is None:
        return Held()
    count = min(request.prefix, request.prompt) // size
    keys = [(request.session, page) for page in range(count)]
    return Held(keys, range(1, count + 1))


# --- In the place of a server: the same requests, the same events, no GPU.

_SAMPLES = 200  # of a rate


def engine_settings(
    steps: ModelSteps, method: str, cache_bytes: int | None, **settings: object
) -> EngineSettings:
    """Return an engine whose cache has as many pages as fit."""
    room = steps.cache_bytes if cache_bytes is None else cache_bytes
    # Integers by the names of its fields, which mypy cannot know.
    engine = EngineSettings(1, **settings)  # type: ignore[arg-type]
    page = steps.method(method).token_bytes * engine.block_size
    if room < page:
        raise UsageError(
            f"--memory {format_bytes(room)}: not one page of {method} fits (a page has "
            f"{format_bytes(page)})"
        )
    return replace(engine, pages=int(room // page))


class SimulatedTarget:
    """A method whose steps take the times that a record tells."""

    waits_for = "simulated; no server is started"

    def __init__(self, method: str, steps: ModelSteps, settings: EngineSettings) -> None:
        self.method = method
        self._own = steps.method(method)
        self._steps = steps
        self._settings = settings

    def open(self, stop: Stop) -> ServerInfo:
        """Say what is simulated."""
        engine, own = self._settings, self._own
        tokens = engine.pages * engine.block_size
        positions = self._steps.positions
        longest, bound = tokens, f"{self.method}'s cache has room for {tokens:,}"
        if positions < tokens:
            longest, bound = positions, f"{self._steps.model} has {positions:,} positions"
        return ServerInfo(
            servers=engine.replicas,
            engine="kvprof's simulator of vLLM's scheduler",
            cache_tokens=engine.replicas * tokens,
            cache_bytes=round(engine.replicas * tokens * own.token_bytes),
            settings={
                "simulated": "no server was measured",
                "step times": f"{SHIPPED} ({self._steps.device}), {own.times.samples} steps",
                "block size": str(engine.block_size),
                "max num seqs": str(engine.max_num_seqs),
                "max num batched tokens": str(engine.max_num_batched_tokens),
                "prefix caching": "on" if engine.prefix_caching else "off",
            },
            warnings=[f"{self.method}: {one}" for one in own.notes],
            longest=longest,
            bound=bound,
        )

    def alone(self, request: Request) -> float | str:
        """Return the seconds of one request by itself, or that it fits into no cache."""
        simulated = simulate([replace(request, arrival=0.0)], self._settings, self._own.times)
        tokens = simulated.outcomes[0].tokens
        return tokens[-1] if tokens else "it does not fit in the cache"

    def run(self, requests: Sequence[Request], observer: LoadObserver, stop: Stop) -> LoadOutcome:
        """Simulate requests, and tell `observer` in the order in which things happened."""
        try:
            simulated = simulate(requests, self._settings, self._own.times, stop)
        except SimulationStoppedError:
            return LoadOutcome("interrupted")
        ends = [one.tokens[-1] if one.tokens else one.request.arrival for one in simulated.outcomes]
        times = np.linspace(0.0, max(ends, default=0.0), _SAMPLES)
        moments = deque(simulated.moments(times.tolist()))
        for number in np.argsort(ends, kind="stable").tolist():
            while moments and moments[0].time < ends[number]:
                self._sample(moments.popleft(), observer)
            if stop():
                return LoadOutcome("interrupted")
            observer.outcome(simulated.outcomes[number], simulated.servers[number])
        while moments:
            self._sample(moments.popleft(), observer)
        return LoadOutcome(engine=_engine(simulated))

    def _sample(self, moment: Moment, observer: LoadObserver) -> None:
        pages = self._settings.pages * self._settings.replicas
        marks = Marks(
            moment.running,
            moment.waiting,
            moment.pages / pages,
            {"preemptions": float(moment.preemptions)},
        )
        observer.sample(moment.time, moment.running + moment.waiting, marks)

    def close(self) -> None:
        """There is nothing to end."""


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
