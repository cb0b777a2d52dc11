"""Rates upwards until the queue grows, method by method, each as events on disk."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvprof.errors import FailedError, KvprofError, UsageError
from kvprof.records.events import (
    Event,
    LoadRateFinished,
    LoadRateStarted,
    LoadRequest,
    LoadSample,
    LoadServer,
    Warned,
)
from kvprof.records.journal import Journal
from kvprof.records.load import LOAD_EVENTS, LoadFold, rate_row
from kvprof.records.load_names import load_case
from kvprof.records.load_served import ATTAINED, is_overloaded, is_starved, is_unsettled, is_within
from kvprof.serving.load.arrivals import Arrivals
from kvprof.serving.load.lengths import Lengths, arriving
from kvprof.serving.load.marks import Marks
from kvprof.serving.load.requests import Outcome
from kvprof.serving.load.target import LoadTarget, Stop

__all__ = ["SweepOptions", "cases_of", "longest_gap", "next_rate", "run_sweep", "spans_of"]

_MOST_RATES = 12  # of auto
_LEAST_RATES = 4  # downwards, where the first is too much already
_DIGITS = 2
_BUSY = 0.7  # of a processor: the client takes tokens one after another
_GIVEN_UP = " was given up: "


@dataclass(frozen=True)
class SweepOptions:
    """What is asked of every method."""

    lengths: Lengths
    arrivals: Arrivals = field(default_factory=Arrivals)
    #: Requests a second, ascending; empty finds them: from half of what one request at a time
    #: gives, doubled until the queue grows.
    rates: tuple[float, ...] = ()
    requests: int = 200  # at each rate
    seconds: float | None = None  # in place of `requests`: as many as arrive in these
    #: As `kvprof.records.load.rate_row` has it.
    objective: dict[str, float] = field(default_factory=dict)
    refine: int = 0  # further rates, halfway between the largest within and the next beyond
    seed: int = 0
    engines: int = 1  # that share the requests of a method

    def count(self, rate: float) -> int:
        """Return how many requests arrive at a rate."""
        return self.requests if self.seconds is None else max(1, math.ceil(rate * self.seconds))


def next_rate(
    rows: Sequence[Mapping[str, Any]], options: SweepOptions, first: float | None
) -> float | None:
    """Return the rate to be measured next; None where there is nothing left to find out."""
    known = sorted(rows, key=lambda row: row["rate"])
    measured = [row["rate"] for row in known]
    share = options.objective.get("share", ATTAINED)
    within = [row["rate"] for row in known if is_within(row, share)]
    grown = [row["rate"] for row in known if is_overloaded(row)]
    if options.rates:
        for rate in options.rates:
            if grown and rate > min(grown):
                break
            if rate not in measured:
                return rate
    elif not known:
        return first
    elif not within and len(known) <= _LEAST_RATES:
        return _rounded(measured[0] / 2)
    elif not grown and within and len(known) < _MOST_RATES and not any(map(is_unsettled, known)):
        return _rounded(measured[-1] * 2)
    return _middle_rate(known, measured, within, options, share)


def _middle_rate(
    known: Sequence[Mapping[str, Any]],
    measured: Sequence[float],
    within: Sequence[float],
    options: SweepOptions,
    share: float,
) -> float | None:
    beyond = [row["rate"] for row in known if not is_within(row, share)]
    edge = min(beyond, default=None)
    below = [rate for rate in within if edge is not None and rate < edge]
    # What was asked for stands in the list, or on the ladder of doublings.
    ladder = options.rates or _ladder(measured)
    halved = sum(rate not in ladder for rate in measured)
    if edge is None or not below or halved >= options.refine:
        return None
    middle = _rounded((max(below) + edge) / 2, digits=_DIGITS + 1)
    return None if middle in measured else middle


def _ladder(measured: Sequence[float]) -> set[float]:
    """Return the measured rates that come from each other by doubling, from the smallest."""
    found, rate = set(), measured[0]
    while rate <= measured[-1] * 1.001:
        found.add(rate)
        rate = _rounded(rate * 2)
    return found


def _rounded(rate: float, digits: int = _DIGITS) -> float:
    return float(f"{rate:.{digits}g}")


def cases_of(events: Iterable[Event]) -> tuple[dict[str, list[Event]], dict[str, list[Event]]]:
    """Return the events of an earlier run's cases by name: the complete ones, and the others."""
    found: dict[str, list[Event]] = {}
    before: dict[str, list[Event]] = {}
    complete: set[str] = set()
    for event in events:
        if isinstance(event, LoadRateStarted):
            before[event.case] = max(
                before.get(event.case, []), found.get(event.case, []), key=_ended
            )
            found[event.case] = []
            complete.discard(event.case)
        if isinstance(event, LOAD_EVENTS) and not isinstance(event, LoadServer):
            found[event.case].append(event)
        if isinstance(event, LoadRateFinished) and event.complete:
            complete.add(event.case)
    for case, own in before.items():
        if case not in complete and _ended(own) > _ended(found[case]):
            found[case] = own
    return (
        {case: own for case, own in found.items() if case in complete},
        {case: own for case, own in found.items() if case not in complete},
    )


def run_sweep(
    targets: Sequence[LoadTarget],
    options: SweepOptions,
    journal: Journal,
    *,
    stop: Stop = lambda: False,
    earlier: Sequence[Event] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[bool, list[KvprofError]]:
    """Measure every method at every rate, the baseline first; resume from an `earlier` run."""
    return _Sweep(options, journal, stop, progress).run(targets, earlier)


class _Sweep:
    def __init__(
        self, options: SweepOptions, journal: Journal, stop: Stop, progress: Callable[[str], None]
    ) -> None:
        self._options = options
        self._journal = journal
        self._stop = stop
        self._progress = progress
        self._fold = LoadFold()
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._first: float | None = None
        self._problems: list[KvprofError] = []
        self._said: set[str] = set()

    def run(
        self, targets: Sequence[LoadTarget], earlier: Sequence[Event]
    ) -> tuple[bool, list[KvprofError]]:
        # All of it before anything is started: it must not be lost with a method before its own.
        with self._journal.carrying_over():
            self._carry([target.method for target in targets], earlier)
        complete = True
        for target in targets:
            complete = self._method(target, bool(self._rows[target.method])) and complete
            if self._stop():
                return False, self._problems
        return complete, self._problems

    def _carry(self, methods: Sequence[str], earlier: Sequence[Event]) -> None:
        """Take over what an earlier run measured: its rates, and the one that it was at."""
        cases, begun = cases_of(earlier)
        servers = {one.method: one for one in earlier if isinstance(one, LoadServer)}
        for event in earlier:
            if isinstance(event, Warned) and _GIVEN_UP not in event.message:
                self._emit(event)
        for method in methods:
            self._rows[method] = []
            again = [own for own in cases.values() if _started(own).method == method]
            parts = [own for own in begun.values() if _started(own).method == method]
            if (again or parts) and method in servers:
                self._emit(servers[method])
            for own in again:
                for event in own:
                    self._emit(event)
                self._judge(_started(own).case)
            for own in parts:
                self._carry_part(own)
            if again and self._first is None:
                self._first = min(row["rate"] for row in self._rows[method])

    def _carry_part(self, own: Sequence[Event]) -> None:
        """Take over a rate that was under way, as one that is not complete."""
        started = _started(own)
        if not (ended := _ended(own)):
            return
        for event in own:
            self._emit(event)
        if not isinstance(own[-1], LoadRateFinished):
            said = "the run stopped during this rate"
            self._emit(LoadRateFinished(0.0, started.case, False, said))
        self._progress(
            f"{started.case} was interrupted: {ended:,} of its {started.requests:,} requests had "
            "finished; they are saved until it is measured again"
        )

    def _method(self, target: LoadTarget, began: bool) -> bool:
        """Measure a method's rates; return whether all of them were."""
        method = target.method
        rows = self._rows[method]
        if began and next_rate(rows, self._options, self._first) is None:
            return True
        try:
            opened = self._open(target)
            if opened is None:
                return False
            while (rate := next_rate(rows, self._options, self._first)) is not None:
                if not self._rate(target, rate):
                    return False
        except UsageError:
            raise
        except KvprofError as problem:
            self._problems.append(problem)
            said = str(problem).removeprefix(f"{method}: ")
            self._warn(f"{method}{_GIVEN_UP}{said}")
            return False
        finally:
            target.close()
        return True

    def _open(self, target: LoadTarget) -> LoadServer | None:
        self._progress(f"{target.method}: {target.waits_for}")
        began = self._journal.now()
        opened = target.open(self._stop)
        if self._stop():
            return None
        now = self._journal.now()
        event = LoadServer(
            now,
            target.method,
            now - began,
            opened.servers,
            opened.engine,
            opened.cache_tokens,
            opened.cache_bytes,
            opened.settings,
        )
        self._emit(event)
        for said in opened.warnings:
            self._warn(said)
        if opened.longest is not None:
            who = opened.bound or f"{target.method}'s server accepts at most {opened.longest:,}"
            self._options.lengths.refuse_over(opened.longest, who)
        one = self._options.lengths.draw(1, self._options.seed)[0]
        self._progress(f"{target.method}: a single request")
        seconds = target.alone(one)
        if isinstance(seconds, str):
            raise FailedError(
                f"{target.method}: a single request failed: {seconds}"
                + (" (--timeout)" if seconds == "timeout" else "")
            )
        if self._first is None:
            self._first = _rounded(0.5 / seconds, digits=1)
        return event

    def _rate(self, target: LoadTarget, rate: float) -> bool:
        """Measure one rate; return whether the method can go on."""
        options = self._options
        requests = arriving(
            options.lengths, options.arrivals, rate, options.count(rate), options.seed
        )
        case = load_case(target.method, rate)
        seconds = requests[-1].arrival
        self._progress(f"{case}: {len(requests):,} requests in {seconds:.0f} s")
        self._emit(
            LoadRateStarted(self._journal.now(), case, target.method, rate, len(requests), seconds)
        )
        observer = _EventObserver(self, case)
        ended = target.run(requests, observer, self._stop)
        self._emit(
            LoadRateFinished(
                self._journal.now(),
                case,
                ended.reason is None,
                ended.reason,
                ended.engine,
                spans_of(observer.outcomes, self._options.engines),
                ended.client_busy_share,
            )
        )
        if ended.reason is not None:
            if ended.gone:
                raise FailedError(ended.reason)
            return False
        row = self._judge(case)
        if not row["answered"]:
            kinds = ", ".join([*row["failures"], *["rejected by the server"] * bool(row["shed"])])
            raise FailedError(f"{case}: every request failed ({kinds})")
        self._tell_client(row)
        if uneven := sum(one.uneven for one in observer.outcomes):
            self._warn(
                f"{case}: in {uneven:,} answers the token count differs from the number of "
                "chunks; token times are spread over the chunks"
            )
        return True

    def _judge(self, case: str) -> dict[str, Any]:
        held = self._fold.cases[case]
        row = rate_row(held, self._options.objective)
        self._rows[held.started.method].append(row)
        return row

    def _tell_client(self, row: Mapping[str, Any]) -> None:
        if is_starved(row):
            self._warn(
                f"{row['case']}: not judged: the client is too slow (p95 send delay "
                f"{row['lateness_seconds']['p95'] * 1000.0:.3g} ms, over 5 % of the time between "
                "requests)"
            )
        busy = row["client_busy_share"]
        if busy is not None and busy > _BUSY:
            self._warn(
                f"{row['case']}: the client was busy {busy:.0%} of the time; measured times may "
                "include its delays"
            )

    def _warn(self, said: str) -> None:
        self._emit(Warned(self._journal.now(), said))

    def _emit(self, event: Event) -> None:
        if isinstance(event, Warned):
            if event.message in self._said:
                return
            self._said.add(event.message)
        event = replace(event, time=self._journal.now())
        self._journal.emit(event)
        if isinstance(event, LOAD_EVENTS):
            self._fold.add(event)


class _EventObserver:
    """Makes events of what a target tells."""

    def __init__(self, sweep: _Sweep, case: str) -> None:
        self._sweep = sweep
        self._case = case
        self._preempted: float | None = None
        self.outcomes: list[Outcome] = []

    def outcome(self, outcome: Outcome, server: int) -> None:
        self.outcomes.append(outcome)
        request = outcome.request
        self._sweep._emit(
            LoadRequest(
                0.0,
                self._case,
                request.number,
                request.arrival,
                outcome.sent,
                request.prompt,
                request.output,
                outcome.tokens[0] if outcome.tokens else None,
                outcome.tokens[-1] if outcome.tokens else None,
                len(outcome.tokens),
                longest_gap(outcome),
                outcome.failure,
                server,
            )
        )

    def sample(self, at: float, sent: int, marks: Marks | None) -> None:
        preemptions = None
        if marks is not None and (total := marks.totals.get("preemptions")) is not None:
            self._preempted = total if self._preempted is None else self._preempted
            preemptions = max(0, round(total - self._preempted))
        self._sweep._emit(
            LoadSample(
                0.0,
                self._case,
                at,
                sent,
                marks.running if marks is not None else None,
                marks.waiting if marks is not None else None,
                marks.cache if marks is not None else None,
                preemptions,
            )
        )


def _ended(events: Sequence[Event]) -> int:
    return sum(isinstance(event, LoadRequest) for event in events)


def _started(events: Sequence[Event]) -> LoadRateStarted:
    started = events[0]
    assert isinstance(started, LoadRateStarted)
    return started


# --- Decoding in short stretches of time, from when each token came: what a line is fitted through.

_MOST_SPANS = 200  # stretches of a case
_GAPS = 5  # median times between tokens that a stretch lasts at least
_LEAST_TOKENS = 3
_MOMENT = 1e-6  # seconds within which a prompt is read at once

_Floats = NDArray[np.float64]


def longest_gap(outcome: Outcome) -> float | None:
    """Return the longest time between two tokens of a request; None for fewer than two."""
    times = outcome.tokens
    return float(np.diff(np.asarray(times)).max()) if len(times) > 1 else None


def spans_of(outcomes: Sequence[Outcome], engines: int = 1) -> list[dict[str, float]]:
    """Return stretches from the first token to the last arrival, as `LoadRateFinished` has them.

    Requests that failed count as far as they came; of several engines a step is one's, the mean. A
    request decodes from its first token to its last, and holds its prompt and what it wrote so far.
    Nobody outside the engine sees when a prompt is read: each is taken as read evenly from when it
    was sent, or the first token before its own where that is later, to its first token.
    """
    decoding = [one for one in outcomes if len(one.tokens) > 1]
    if not decoding:
        return []
    written = [np.asarray(one.tokens) for one in decoding]
    counts = np.array([len(one) for one in written])
    tokens = np.concatenate(written)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    first, last = tokens[starts], tokens[starts + counts - 1]
    later = np.ones(len(tokens), dtype=bool)
    later[starts] = False
    times, gaps = tokens[later], np.diff(tokens, prepend=0.0)[later]
    begin = float(first.min())
    end = max(one.request.arrival for one in outcomes)
    if end <= begin:
        end = float(last.max())
    width = max((end - begin) / _MOST_SPANS, _GAPS * float(np.median(gaps)))
    count = int((end - begin) / width)
    if count < 1 or width <= 0:
        return []
    edges: _Floats = (begin + width * np.arange(count + 1)).astype(np.float64)
    span = np.floor((times - begin) / width).astype(np.int64)
    inside = (span >= 0) & (span < count)
    came = np.bincount(span[inside], minlength=count)
    between = np.bincount(span[inside], gaps[inside], minlength=count) / np.maximum(came, 1)
    one, prompts = np.ones(len(decoding)), np.array([one.request.prompt for one in decoding])
    batch = _since(edges, first, one) - _since(edges, last, one)
    context = _since(edges, first, prompts) + _since(edges, tokens, np.ones(len(tokens)))
    context -= _since(edges, last, prompts + counts)
    read = _read([one for one in outcomes if one.tokens], edges)
    return [
        {
            "at": float(edges[n] + width / 2),
            "tokens": float(came[n]),
            "between": float(between[n]),
            "batch": float(batch[n] / width / engines),
            "context": float(context[n] / width / engines),
            "prefill": float(read[n] * between[n] / width / engines),
        }
        for n in range(count)
        if came[n] >= _LEAST_TOKENS
    ]


def _since(edges: _Floats, at: _Floats, weights: _Floats) -> _Floats:
    """Return the weighted seconds of each stretch that lie after given times, all together."""
    order = np.argsort(at)
    before = np.searchsorted(at[order], edges)
    weight, moment = (
        np.concatenate(([0.0], np.cumsum(values[order])))[before]
        for values in (weights, weights * (at - edges[0]))
    )
    found: _Floats = np.diff(weight * (edges - edges[0]) - moment)
    return found


def _read(outcomes: Sequence[Outcome], edges: _Floats) -> _Floats:
    """Return the prompt tokens that were read in each stretch."""
    told = [(one.tokens[0], one.sent, float(one.request.prompt)) for one in outcomes]
    first, sent, prompts = np.array(sorted(told)).T
    since = np.minimum(np.maximum(sent, np.concatenate(([0.0], first[:-1]))), first)
    lasts = first - since > _MOMENT
    found: _Floats = np.histogram(first[~lasts], edges, weights=prompts[~lasts])[0]
    first, since = first[lasts], since[lasts]
    weights = prompts[lasts] / (first - since)
    return found + _since(edges, since, weights) - _since(edges, first, weights)
