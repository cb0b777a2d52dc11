"""Events of a load that never happened: slots that serve one request each, first come first served.

Nothing here is a measurement. A method has slots and seconds a token, so that its largest rate is
known: slots / (output tokens × seconds a token).
"""

import heapq
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from kvprof.records.events import (
    Event,
    LoadRateFinished,
    LoadRateStarted,
    LoadRequest,
    LoadSample,
    LoadServer,
    RunFinished,
    RunStarted,
    Warned,
)
from kvprof.records.fold import result_of
from kvprof.records.load_names import load_case
from kvprof.serving.load.arrivals import Arrivals
from kvprof.serving.load.lengths import Lengths, arriving, load_lengths
from kvprof.serving.load.requests import Outcome, Request
from kvprof.serving.load.sweep import longest_gap, spans_of
from tests.records.sample import ENVIRONMENT

#: Slots, and seconds a token: without batching effects, but for the context's.
METHODS: dict[str, tuple[int, float, float]] = {
    "full": (8, 0.010, 2e-7),
    "fp8": (16, 0.010, 1e-7),
    "fdc": (16, 0.011, 1e-7),
}


def served(requests: Sequence[Request], slots: int, token: float, context: float) -> list[Outcome]:
    """Return what becomes of requests; each takes the first slot that is free."""
    free = [0.0] * slots
    heapq.heapify(free)
    found = []
    for request in requests:
        began = max(heapq.heappop(free), request.arrival)
        step = token + context * request.prompt
        times = [began + step * (n + 2) for n in range(request.output)]
        heapq.heappush(free, times[-1])
        found.append(Outcome(request, request.arrival, times))
    return found


def load_inputs(
    methods: Sequence[str], lengths: Lengths, objective: Mapping[str, float]
) -> dict[str, Any]:
    return {
        "model": "Llama-3.1-8B",
        "methods": list(methods),
        "plans": [],
        "baseline": methods[0],
        "rate": 0.5,
        "lengths": lengths.described(),
        "arrivals": "poisson",
        "rates": None,
        "requests": 120,
        "seconds": None,
        "objective": dict(objective),
        "refine": 0,
        "memory": 2**30,
        "replicas": 1,
        "router": "shortest-queue",
        "tp": 1,
        "timeout": 600.0,
        "seed": 0,
    }


def load_stream(
    methods: Sequence[str] = ("full", "fdc"),
    rates: Sequence[float] = (1.0, 2.0, 6.0, 12.0),
    requests: int = 120,
    lengths: str = "in=2k,out=200",
    objective: Mapping[str, float] | None = None,
    fails: Sequence[int] = (),
    ends: bool = True,
    failure: str = "timeout",
) -> list[Event]:
    """Return the events of a whole run; `ends` False leaves out its last two."""
    named = load_lengths(lengths)
    limits = {"share": 0.9, "ttft_seconds": 2.0} if objective is None else objective
    events: list[Event] = [
        RunStarted(
            0.0,
            "2026-11-23T07:00:00Z",
            "0.1.0",
            "load",
            ("kvprof", "bench", "--load"),
            "served",
            load_inputs(methods, named, limits),
            ENVIRONMENT,
            {"name": "Llama-3.1-8B"},
            tuple(methods),
            methods[0],
        )
    ]
    now = 0.0
    for method in methods:
        slots, token, context = METHODS[method]
        events.append(LoadServer(now, method, 30.0, 1, "vLLM 0.27.1", slots * 4096, 2**30))
        for rate in rates:
            case = load_case(method, rate)
            sent = arriving(named, Arrivals(), rate, requests, seed=0)
            outcomes = served(sent, slots, token, context)
            events.append(LoadRateStarted(now, case, method, rate, requests, sent[-1].arrival))
            last = max(one.tokens[-1] for one in outcomes)
            told: list[tuple[float, Event]] = []
            for n in range(40):
                at = n * last / 40
                running = sum(one.tokens[0] - token <= at <= one.tokens[-1] for one in outcomes)
                waiting = sum(one.request.arrival <= at < one.tokens[0] - token for one in outcomes)
                told.append(
                    (
                        at,
                        LoadSample(
                            now + at,
                            case,
                            at,
                            running + waiting,
                            running,
                            waiting,
                            running / slots,
                            0,
                        ),
                    )
                )
            for one in outcomes:
                failed = one.request.number in fails
                end = one.tokens[-1]
                told.append(
                    (
                        end,
                        LoadRequest(
                            now + end,
                            case,
                            one.request.number,
                            one.request.arrival,
                            one.sent,
                            one.request.prompt,
                            one.request.output,
                            None if failed else one.tokens[0],
                            None if failed else end,
                            0 if failed else len(one.tokens),
                            None if failed else longest_gap(one),
                            failure if failed else None,
                        ),
                    )
                )
            events += [event for _, event in sorted(told, key=lambda pair: pair[0])]
            now += last
            waits = sum(one.tokens[0] - token - one.request.arrival for one in outcomes)
            decodes = sum(one.tokens[-1] - one.tokens[0] for one in outcomes)
            engine = {
                "requests": float(requests),
                "waiting": waits,
                "prefill": token * requests,
                "decode": decodes,
                "end_to_end": waits + decodes + token * requests,
                "preemptions": 0.0,
            }
            events.append(LoadRateFinished(now, case, True, None, engine, spans_of(outcomes)))
    if not ends:
        return events[:-1]
    events.append(Warned(now, "a warning of the run"))
    events.append(RunFinished(now, True))
    return events


@cache
def load_result() -> dict[str, Any]:
    """Return the result of `load_stream`, made once; who changes it changes a copy."""
    return result_of(load_stream())
