"""Events of a load that never happened: methods, rates, and how long requests take at each."""

from collections.abc import Iterator, Sequence

from kvprof.records.events import (
    Event,
    LoadRateFinished,
    LoadRateStarted,
    LoadRequest,
    LoadSample,
    LoadServer,
    RunFinished,
    RunStarted,
)
from kvprof.records.load_names import load_case
from tests.records.streams import stream

#: Tokens of every answer.
TOKENS = 10


def load(
    methods: Sequence[str] = ("full", "fdc"),
    rates: Sequence[float] = (1.0, 2.0, 4.0),
    *,
    requests: int = 60,
    mode: str = "simulated",
    told: bool = True,
) -> list[Event]:
    """Return the events of a load: a token takes `rate` times 10 ms, of the first method.

    Each next method takes four fifths of the one before. At 4 requests a second and more the queue
    grows: the answer to request n takes n times 0.3 s longer.

    Parameters
    ----------
    methods, rates : sequence
    requests : int
        At each rate.
    mode : str
        Of the run.
    told : bool
        Whether the servers tell what runs, waits and is used.
    """
    first = stream()[0]
    assert isinstance(first, RunStarted)
    events: list[Event] = [
        RunStarted(
            0.0,
            first.created,
            first.kvprof_version,
            "load",
            ("kvprof", "bench", "--load"),
            mode,
            {"objective": {"tpot_seconds": 0.03, "share": 0.9}},
            first.environment,
            {"name": "a-shape"},
            tuple(methods),
            methods[0],
        )
    ]
    time = 1.0
    for number, method in enumerate(methods):
        settings = {"block size": "16"}
        events.append(LoadServer(time, method, 2.0, 1, "an engine", 90_000, 10**9, settings))
        for rate in rates:
            events += _rate(method, rate, 0.8**number, requests, time, told)
            time += 60.0
    return [*events, RunFinished(time, True)]


def _rate(
    method: str, rate: float, factor: float, requests: int, time: float, told: bool
) -> Iterator[Event]:
    case = load_case(method, rate)
    yield LoadRateStarted(time, case, method, rate, requests, requests / rate)
    for number in range(requests):
        arrival = number / rate
        begin = arrival + (0.3 * number if rate >= 4 else 0.05)
        end = begin + TOKENS * 0.01 * rate * factor
        at = time + arrival / 10
        failure = "timeout" if number == 7 and rate == 2.0 else None
        yield LoadRequest(
            at, case, number, arrival, arrival, 1000, TOKENS, begin, end, TOKENS, 0.02, failure
        )
        if number % 3 == 0:
            waits = number // 2 if rate >= 4 else 0
            state = (min(8, number), waits, number / requests, number // 20) if told else ()
            yield LoadSample(at, case, arrival, waits + 3, *state)
    yield LoadRateFinished(time + requests / rate / 10, case, True)
