"""Events of a load into the data of its result: what each rate gave, and what each method serves.

Every figure's definition is here or in `kvprof.records.load_statistics`; ``docs/load.md`` has them
in words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvprof.analysis.stats import quantile, share_interval
from kvprof.records.cases import mean
from kvprof.records.events import (
    LoadRateFinished,
    LoadRateStarted,
    LoadRequest,
    LoadSample,
    LoadServer,
    RunStarted,
)
from kvprof.records.load_names import baseline_of
from kvprof.records.load_served import ATTAINED, LOSSY, largest
from kvprof.records.load_statistics import (
    LATENCIES,
    Fit,
    Window,
    break_even,
    fitted,
    growth,
    mean_ratio,
    summarised,
    window_of,
)

__all__ = [
    "BESIDE",
    "LIMITS",
    "LOAD_EVENTS",
    "SHED",
    "Counted",
    "LoadCase",
    "LoadFold",
    "attains",
    "counted_of",
    "is_late",
    "rate_row",
    "undisturbed",
]

#: Failures by which a server says that it takes no more: such a request never waited.
SHED = ("HTTP 429", "HTTP 503")
#: What becomes of requests that were in the queue as long as they were: served, or given up.
_WAITED = (None, "timeout")
_KEPT_SAMPLES = 600
#: Share of a request's time from which on what passes beside its engine is told.
BESIDE = 0.1
_ROUNDING = 1e-9
_HUNDRED = 100  # requests, of fewer no 99th percentile is told
LoadEvent = LoadServer | LoadRateStarted | LoadRequest | LoadSample | LoadRateFinished
#: What a `LoadFold` takes.
LOAD_EVENTS = (LoadServer, LoadRateStarted, LoadRequest, LoadSample, LoadRateFinished)


#: Intervals of a rate not shown to be served: of nothing that stays the same.
_UNTOLD = dict.fromkeys(f"{name}_interval" for name in ("mean", *LATENCIES))
#: Share of the tokens that were asked for below which answers are called short.
_SHORT = 0.9


@dataclass
class LoadCase:
    """What happened at one rate, in the order in which it did."""

    started: LoadRateStarted
    requests: list[LoadRequest] = field(default_factory=list)
    samples: list[LoadSample] = field(default_factory=list)
    finished: LoadRateFinished | None = None

    def add(self, event: LoadRequest | LoadSample | LoadRateFinished) -> None:
        """Take the next event of the case."""
        match event:
            case LoadRequest():
                self.requests.append(event)
            case LoadSample():
                self.samples.append(event)
            case LoadRateFinished():
                self.finished = event


class LoadFold:
    """Takes the events of a load one by one."""

    def __init__(self) -> None:
        self.servers: dict[str, LoadServer] = {}  # by method
        #: In the order in which they began; a case that begins again replaces what was there.
        self.cases: dict[str, LoadCase] = {}

    def add(self, event: LoadEvent) -> None:
        """Take the next event."""
        match event:
            case LoadServer():
                self.servers[event.method] = event
            case LoadRateStarted():
                self.cases[event.case] = LoadCase(event)
            case _:
                self.cases[event.case].add(event)

    def caveats(self) -> list[str]:
        """Return what a reader must know of the answers before believing the figures."""
        tokens: dict[str, list[int]] = {}
        for case in self.cases.values():
            own = tokens.setdefault(case.started.method, [0, 0])
            for one in case.requests:
                if one.failure is None and one.last is not None:
                    own[0] += one.tokens
                    own[1] += one.output
        return [
            f"{method}: answers have {100 * came / wanted:.0f} % of the requested tokens: they "
            "ended early, or a streamed chunk has several"
            for method, (came, wanted) in tokens.items()
            if came < _SHORT * wanted
        ]

    def data(self, run: RunStarted | None) -> dict[str, Any]:
        """Return the `data` of the result; see ``schema/load.json``."""
        inputs: Mapping[str, Any] = run.inputs if run is not None else {}
        objective = dict(inputs.get("objective") or {})
        ordered = sorted(self.cases.values(), key=lambda one: one.started.rate)
        methods = list(run.cases) if run is not None else []
        methods += [m for m in dict.fromkeys(c.started.method for c in ordered) if m not in methods]
        by_method = {m: [c for c in ordered if c.started.method == m] for m in methods}
        rows = {m: [rate_row(case, objective) for case in by_method[m]] for m in methods}
        baseline = run.baseline if run is not None else None
        held = {m: baseline_of(m, baseline or "") for m in methods}
        fits = {m: fitted(_spans(by_method[m])) for m in methods}
        return {
            "mode": run.mode if run is not None else None,
            "shape": run.shape if run is not None else {},
            "baseline": baseline,
            "objective": objective,
            "methods": [
                {
                    "method": m,
                    **_server(self.servers.get(m)),
                    **largest(rows[m], rows.get(held[m])),
                    "fit": None if (fit := fits[m]) is None else fit.described(),
                    "pays": None
                    if m == held[m] or held[m] not in by_method
                    else {
                        "contexts": _contexts(fits[m], fits[held[m]]),
                        **_rates(by_method[m], by_method[held[m]]),
                    },
                }
                for m in methods
            ],
            "rates": [row for m in methods for row in rows[m]],
            "series": [_series(case) for m in methods for case in by_method[m]],
        }


# --- One rate.


@dataclass(frozen=True)
class Counted:
    """The requests of a rate, as far as it is, and those of them that count."""

    window: Window
    requests: list[LoadRequest]  # all that ended, by number
    done: list[LoadRequest]  # those that had all of their tokens
    shed: list[LoadRequest]  # those that the server did not take
    counted: list[LoadRequest]  # those that arrived in the window
    served: list[LoadRequest]  # of these, those that had all of their tokens

    @property
    def growth(self) -> dict[str, Any]:
        """Whether the queue grows, of the requests that left it served or not at all."""
        arrivals = [one.arrival for one in self.requests if one.failure in _WAITED]
        ends = [one.last or 0.0 for one in self.done]
        return growth(arrivals, ends, self.window.settled)

    @property
    def lateness(self) -> dict[str, float | None]:
        """How much later than its arrival a request was sent, in seconds."""
        late = [one.sent - one.arrival for one in self.requests]
        return {
            "p50": quantile(late, 0.5) if late else None,
            "p95": quantile(late, 0.95) if late else None,
            "p99": quantile(late, 0.99) if len(late) >= _HUNDRED else None,
            "most": max(late, default=None),
        }

    @property
    def latencies(self) -> list[float]:
        """Seconds from arrival to end, per token written."""
        return [((one.last or 0.0) - one.arrival) / one.tokens for one in self.served if one.tokens]

    @property
    def first_tokens(self) -> list[float]:
        """Seconds from arrival to the first token."""
        return [one.first - one.arrival for one in self.served if one.first is not None]

    @property
    def between_tokens(self) -> list[float]:
        """Mean seconds between a request's tokens."""
        return [_tpot(one) for one in self.served if one.tokens > 1]


def counted_of(case: LoadCase) -> Counted:
    """Return which requests of a rate count."""
    requests = sorted(case.requests, key=lambda one: one.number)
    done = [one for one in requests if one.failure is None and one.last is not None]
    ended = [one.last if one.failure is None else None for one in requests]
    window = window_of([one.arrival for one in requests], ended)
    shed = [one for one in requests if one.failure in SHED]
    counted = [one for one in requests if window.begin <= one.arrival <= window.end]
    served = [one for one in counted if one.failure is None and one.last is not None]
    return Counted(window, requests, done, shed, counted, served)


def rate_row(case: LoadCase, objective: Mapping[str, float]) -> dict[str, Any]:
    """Return a row of ``data.rates``."""
    asked = counted_of(case)
    requests, done, counted, served = asked.requests, asked.done, asked.counted, asked.served
    begin, end, settled = asked.window
    span = end - begin
    failures: dict[str, int] = {}
    for one in requests:
        if one.failure is not None and one.failure not in SHED:
            failures[one.failure] = failures.get(one.failure, 0) + 1
    limits = {name: objective[name] for name in LIMITS if objective.get(name) is not None}
    attained = [attains(one, limits) for one in counted]
    backlog = asked.growth
    steady = backlog["grows"] is False  # else what is asked of so few, or of ever more, has no mean
    sampled = [one for one in case.samples if begin <= one.at <= end]
    finished = case.finished
    return {
        "case": case.started.case,
        "method": case.started.method,
        "rate": case.started.rate,
        "complete": finished is not None and finished.complete,
        "reason": finished.reason if finished is not None else "it had not ended",
        "requests": case.started.requests,
        "answered": len(done),
        "failed": sum(failures.values()),
        "failures": failures,
        "shed": len(asked.shed),
        "window": [begin, end],
        "settled": settled,
        "counted": len(counted),
        "mean_prompt": mean([one.prompt for one in requests]),
        "mean_output": mean([one.tokens for one in done]),
        # An arrival at the window's very end opens what lies behind it.
        "arrived_per_s": sum(one.arrival < end for one in counted) / span if span > 0 else None,
        "completed_per_s": sum(begin <= (one.last or 0) < end for one in done) / span
        if span > 0
        else None,
        "tokens_per_s": sum(_tokens_within(one, begin, end) for one in requests) / span
        if span > 0
        else None,
        **backlog,
        **{
            name: summarised(values) | ({} if steady else _UNTOLD)
            for name, values in (
                ("normalised_latency_seconds", asked.latencies),
                ("ttft_seconds", asked.first_tokens),
                ("tpot_seconds", asked.between_tokens),
                ("longest_gap_seconds", [o.longest for o in served if o.longest is not None]),
            )
        },
        "objective_share": objective.get("share", ATTAINED),
        "attained_share": mean(attained) if limits else None,
        "attained_share_interval": share_interval(attained) if limits and steady else None,
        "goodput_per_s": sum(
            kept and one.arrival < end for kept, one in zip(attained, counted, strict=True)
        )
        / span
        if limits and span > 0
        else None,
        "preemptions": None if finished is None else _whole(finished.engine.get("preemptions")),
        "prefix_hit_share": None if finished is None else _hits(finished.engine),
        "cache_share": _level([one.cache for one in sampled]),
        "running": _level([one.running for one in sampled]),
        "waiting": _level([one.waiting for one in sampled]),
        "in_flight": _level([one.sent for one in sampled]),
        "lateness_seconds": asked.lateness,
        "parts": None if finished is None else _parts(finished.engine, requests),
        "client_busy_share": None if finished is None else finished.client_busy_share,
        "servers": _by_server(requests),
    }


#: What an objective may limit of a request.
LIMITS = ("ttft_seconds", "tpot_seconds", "normalised_latency_seconds")


def attains(one: LoadRequest, limits: Mapping[str, float]) -> bool:
    """Whether a request is within every limit; one that failed is within none."""
    own = _seconds(one)
    # A single token is in time whatever lies between tokens.
    return own is not None and all(own.get(name, 0.0) <= limit for name, limit in limits.items())


def _seconds(one: LoadRequest) -> dict[str, float] | None:
    """Return what an objective may limit of a request; None of one that was not served.

    Of a single token there is no time between tokens.
    """
    if one.failure is not None or one.first is None or one.last is None or not one.tokens:
        return None
    found = {
        "ttft_seconds": one.first - one.arrival,
        "normalised_latency_seconds": (one.last - one.arrival) / one.tokens,
    }
    if one.tokens > 1:
        found["tpot_seconds"] = _tpot(one)
    return found


def _tpot(one: LoadRequest) -> float:
    return ((one.last or 0.0) - (one.first or 0.0)) / (one.tokens - 1)


def _tokens_within(one: LoadRequest, begin: float, end: float) -> float:
    """Tokens that came inside the window, taken as evenly spaced from the first to the last."""
    if one.first is None or one.last is None:
        return 0.0
    if one.last <= one.first:
        return float(one.tokens) if begin <= one.first <= end else 0.0
    inside = max(0.0, min(end, one.last) - max(begin, one.first))
    return one.tokens * inside / (one.last - one.first)


def _parts(engine: Mapping[str, float], asked: Sequence[LoadRequest]) -> dict[str, Any] | None:
    """Return where a request's time goes, by the engine's marks: means over requests that ended.

    What clients waited beyond them is known where both tell of the same requests: all of them were
    answered, and the engine tells of as many.
    """
    count = engine.get("requests", 0.0)
    if not count:
        return None
    known = {
        f"{name}_seconds": engine[name] / count if name in engine else None
        for name in ("waiting", "prefill", "decode", "end_to_end")
    }
    named = [known[f"{name}_seconds"] for name in ("waiting", "prefill", "decode")]
    total = known["end_to_end_seconds"]
    rest = None
    if total is not None and None not in named:
        rest = _remainder(total, sum(one for one in named if one is not None))
    outside = None
    waited = [one.last - one.arrival for one in asked if one.last is not None and not one.failure]
    if total is not None and count == len(waited) == len(asked):
        outside = _remainder(sum(waited) / count, total)
    return {
        "requests": int(count),
        **known,
        "elsewhere_seconds": rest,
        "outside_seconds": outside,
        "preemptions_per_request": engine["preemptions"] / count
        if "preemptions" in engine
        else None,
        "preempted_seconds": None,
    }


def _remainder(whole: float, known: float) -> float:
    """Return what is left of the whole, without what rounding leaves."""
    rest = whole - known
    return rest if abs(rest) > _ROUNDING * abs(whole) else 0.0


def _hits(engine: Mapping[str, float]) -> float | None:
    queries = engine.get("prefix_queries")
    return engine.get("prefix_hits", 0.0) / queries if queries else None


def _by_server(requests: Sequence[LoadRequest]) -> list[int]:
    found: dict[int, int] = {}
    for one in requests:
        found[one.server] = found.get(one.server, 0) + 1
    return [found.get(number, 0) for number in range(max(found, default=-1) + 1)]


def _level(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [one for one in values if one is not None]
    return {"mean": sum(known) / len(known), "most": max(known)} if known else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _series(case: LoadCase) -> dict[str, Any]:
    """Return the samples of a case, thinned, by column."""
    kept = case.samples[:: -(-len(case.samples) // _KEPT_SAMPLES) or 1]
    names = ("at", "sent", "running", "waiting", "cache", "preemptions")
    return {
        "case": case.started.case,
        **{name: [getattr(sample, name) for sample in kept] for name in names},
    }


def undisturbed(rates: Sequence[LoadRateFinished]) -> list[LoadRateFinished]:
    """Return those rates of a method whose stretches tell what its steps cost.

    Of a request that is preempted the wait counts as a time between tokens, and nobody outside
    sees when its tokens are computed again. So they are those at which none was, and at which the
    engine's front end passed on in time what it wrote: less than `BESIDE` of a request's time is
    its own.
    """
    return [
        one
        for one in rates
        if not one.engine.get("preemptions") and not is_late(_parts(one.engine, []))
    ]


def is_late(parts: Mapping[str, Any] | None) -> bool:
    """Whether an engine's front end has so much of a request's time that its tokens come late."""
    front, total = ((parts or {}).get(f"{name}_seconds") for name in ("elsewhere", "end_to_end"))
    return bool(front and total and front >= BESIDE * total)


def _spans(cases: Sequence[LoadCase]) -> list[dict[str, float]]:
    ended = [case.finished for case in cases if case.finished is not None]
    rates = undisturbed([one for one in ended if one.complete])
    return [span for one in rates for span in one.spans]


# --- One method: from where on it pays.


def _server(server: LoadServer | None) -> dict[str, Any]:
    return {
        "engine": server.engine if server is not None else None,
        "servers": server.servers if server is not None else None,
        "ready_seconds": server.seconds if server is not None else None,
        "cache_tokens": server.cache_tokens if server is not None else None,
        "cache_bytes": server.cache_bytes if server is not None else None,
        "settings": server.settings if server is not None else {},
    }


def _contexts(fit: Fit | None, baseline: Fit | None) -> list[dict[str, Any]]:
    """Return the break-even context alone, and at the batch that the baseline saw in the middle."""
    if fit is None or baseline is None:
        return []
    middle = max(2, round(sum(baseline.seen["batch"]) / 2))
    found = (break_even(fit, baseline, batch) for batch in (1, middle))
    return [one for one in found if one is not None]


def _rates(own: Sequence[LoadCase], baseline: Sequence[LoadCase]) -> dict[str, Any]:
    """Compare latencies at equal rates, request by request."""
    theirs = {case.started.rate: case for case in baseline if _complete(case)}
    ratios, lossy = [], set()
    for case in own:
        rate = case.started.rate
        if not _complete(case) or rate not in theirs:
            continue
        if any(_failed_share(one) > LOSSY for one in (case, theirs[rate])):
            lossy.add(rate)
        both = _paired_times(case, theirs[rate])
        ttft, tpot, latency = (
            mean_ratio(
                [
                    (mine[name], other[name])
                    for mine, other in both
                    if name in mine and name in other
                ]
            )
            for name in LIMITS
        )
        if latency is None:
            continue
        row = {"rate": rate, **latency}
        for name, found in (("ttft", ttft), ("tpot", tpot)):
            known = found or {"ratio": None, "interval": None}
            row |= {f"{name}_ratio": known["ratio"], f"{name}_ratio_interval": known["interval"]}
        ratios.append(row)
    from_rate = None
    for row in reversed(ratios):
        if row["interval"] is None or row["interval"][1] >= 1 or row["rate"] in lossy:
            break
        from_rate = row["rate"]
    return {"ratios": ratios, "from_rate": from_rate}


def _failed_share(case: LoadCase) -> float:
    """Return the share of a rate's requests that failed."""
    return sum(one.failure is not None for one in case.requests) / max(1, len(case.requests))


def _complete(case: LoadCase) -> bool:
    return case.finished is not None and case.finished.complete


def _paired_times(
    case: LoadCase, other: LoadCase
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Return the times of requests that both served, inside both windows, in order of arrival."""
    found = [
        {one.number: own for one in counted_of(each).served if (own := _seconds(one)) is not None}
        for each in (case, other)
    ]
    return [(own, found[1][number]) for number, own in found[0].items() if number in found[1]]
