"""What the screen *Load* shows of a run's state, before it is drawn: rates, samples, words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvprof.records.cases import mean
from kvprof.records.load import LoadCase, attains, counted_of
from kvprof.records.load_served import fails, is_starved, sheds
from kvprof.views.numbers import number

__all__ = ["SAMPLED", "RateBrief", "binned", "brief_from_row", "brief_of", "by_rate", "rate_words"]

#: Samples' names to what they are called, as lines of the screen.
SAMPLED = {"waiting": "waiting", "running": "running", "cache": "cache used"}


@dataclass(frozen=True)
class RateBrief:
    """One method at one rate in a few figures; a result has them with intervals."""

    case: str
    method: str
    rate: float  # requests a second
    #: Seconds from arrival to the last token, per token written: normalised latency.
    latency: float | None
    attained: float | None  # share of requests within the objective; None without one
    #: Whether the queue does; None where too few requests tell, or the client was too slow.
    grows: bool | None
    #: Whether the server turns requests away, and whether they fail: more than may be lost.
    sheds: bool
    fails: bool
    #: Requests that ended so far; those among them that failed, or that the server turned away.
    ended: int
    failed: int
    shed: int
    complete: bool  # whether the rate is over, and was not given up
    over: bool  # whether it is over


def brief_of(case: LoadCase, objective: Mapping[str, float]) -> RateBrief:
    """Return the figures of a case, of the requests that ended so far.

    While it runs, those that take long are not among them yet.
    """
    started, finished = case.started, case.finished
    asked = counted_of(case)
    requests, done, counted = asked.requests, asked.done, asked.counted
    shed = len(asked.shed)
    failed = len(requests) - len(done) - shed
    limits = {name: limit for name, limit in objective.items() if name != "share"}
    grows = asked.growth["grows"] if finished is not None else None
    if is_starved({"lateness_seconds": asked.lateness, "rate": started.rate}):
        grows = None  # the client's doing, maybe
    return RateBrief(
        started.case,
        started.method,
        started.rate,
        mean(asked.latencies),
        mean([float(attains(one, limits)) for one in counted]) if limits else None,
        grows,
        sheds({"shed": shed, "requests": started.requests}),
        fails({"failed": failed, "requests": started.requests}),
        len(requests),
        failed,
        shed,
        finished is not None and finished.complete,
        finished is not None,
    )


def brief_from_row(row: Mapping[str, Any]) -> RateBrief:
    """Return the figures of a row of a result's ``data.rates``."""
    return RateBrief(
        row["case"],
        row["method"],
        row["rate"],
        row["normalised_latency_seconds"]["mean"],
        row["attained_share"],
        None if is_starved(row) else row["grows"],
        sheds(row),
        fails(row),
        row["answered"] + row["failed"] + row.get("shed", 0),
        row["failed"],
        row.get("shed", 0),
        row["complete"],
        True,
    )


def by_rate(briefs: Sequence[RateBrief]) -> dict[float, dict[str, RateBrief]]:
    """Return the cases as rows of a table: rates ascending, methods as they began."""
    return {
        rate: {one.method: one for one in briefs if one.rate == rate}
        for rate in sorted({one.rate for one in briefs})
    }


def rate_words(rate: float) -> str:
    """Write a rate: ``2/s``."""
    return f"{number(rate)}/s"


def binned(
    times: Sequence[float], values: Sequence[float | None], columns: int
) -> list[float | None]:
    """Return the mean within each of so many stretches of time; None where nothing lies."""
    if not times:
        return []
    end = times[-1] or 1.0
    sums: list[list[float]] = [[] for _ in range(columns)]
    for time, value in zip(times, values, strict=True):
        if value is not None:
            sums[min(columns - 1, max(0, int(time / end * columns)))].append(value)
    return [mean(one) for one in sums]
