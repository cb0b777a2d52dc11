"""What a load's requests tell: percentiles with intervals, growth of a queue, a line through steps.

Requests that are served together are not independent: intervals come from batch means.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvprof.analysis.stats import (
    draws,
    ends,
    mean_interval,
    mean_ratio_interval,
    quantile,
    quantile_interval,
)

__all__ = [
    "COLUMNS",
    "LATENCIES",
    "LEAST",
    "Fit",
    "Window",
    "break_even",
    "fitted",
    "growth",
    "mean_ratio",
    "summarised",
    "window_of",
]

#: What is told of each latency; fewer than 1 / (1 - share) requests have no such percentile.
LATENCIES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}

#: Requests, or stretches, from which growth or a line is told.
LEAST = 20
_EDGE = 0.1  # of the requests at each end: while the queue fills, and while it empties
_HALF = 0.5
_GROWTH_BLOCKS = 10
_TOLD = 0.02  # of the rate: growth that a rate must exclude to be served for sure


def summarised(values: Sequence[float]) -> dict[str, Any]:
    """Return mean and percentiles of one figure of requests, each with its interval."""
    found: dict[str, Any] = {
        "count": len(values),
        "mean": sum(values) / len(values) if values else None,
        "mean_interval": _positive(mean_interval(values)),
    }
    for name, share in LATENCIES.items():
        enough = len(values) * (1 - share) >= 1 - 1e-9
        found[name] = quantile(values, share) if enough else None
        bounds = quantile_interval(values, share) if enough else None
        found[f"{name}_interval"] = _positive(bounds)
    return found


def _positive(bounds: tuple[float, float] | None) -> list[float] | None:
    return None if bounds is None else [max(0.0, bounds[0]), bounds[1]]


def mean_ratio(pairs: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """Return the ratio of two means over the same requests, the first over the second."""
    above, below = zip(*pairs, strict=True) if pairs else ((), ())
    if not sum(below):
        return None
    return {
        "ratio": sum(above) / sum(below),
        "interval": mean_ratio_interval(above, below),
        "count": len(pairs),
    }


# --- Which requests count, and whether the queue grows.


class Window(NamedTuple):
    """The time of a rate that counts."""

    begin: float  # seconds
    end: float
    #: Whether it begins when the system has filled: while it does, more requests arrive than are
    #: completed at any rate.
    settled: bool


def window_of(arrivals: Sequence[float], ends: Sequence[float | None]) -> Window:
    """Return the time that counts: neither while the queue fills nor while it empties."""
    if not arrivals:
        return Window(0.0, 0.0, settled=False)
    last = len(arrivals) - 1
    edge = math.ceil(_EDGE * len(arrivals))
    begin = arrivals[min(last, edge)] if last > 1 else 0.0
    filled = max((end for end in ends[:edge] if end is not None), default=0.0)
    half = arrivals[math.floor(_HALF * last)]
    begin = max(begin, min(filled, half))
    end = arrivals[max(0, last - math.floor(_EDGE * len(arrivals)))]
    return Window(begin, max(begin, end), settled=filled <= begin)


def growth(arrivals: Sequence[float], ends: Sequence[float], settled: bool) -> dict[str, Any]:
    """Tell whether more requests come than are completed, by the slope of the backlog.

    It is that of the second half of the arrivals' time, in ten parts: what the backlog grows by in
    each is independent of the other parts where it grows for good, and sums to little where it does
    not, so that Student's t of the ten holds for both. The queue grows where the interval lies
    above 0 and the system had filled before; else the rate is served. That it is, is sure where
    growth of a fiftieth of the rate can be excluded; until then it is open.
    """
    came, left = sorted(arrivals), sorted(ends)
    begin, end = came[len(came) // 2 :][:1] or [0.0], came[-1:] or [0.0]
    span, number = end[0] - begin[0], len(came) - len(came) // 2
    if span <= 0 or number < LEAST:
        return {"growth_per_s": None, "growth_per_s_interval": None, "grows": None}
    times = [begin[0] + span * part / _GROWTH_BLOCKS for part in range(_GROWTH_BLOCKS + 1)]
    backlog = [bisect_left(came, time) - bisect_right(left, time) for time in times]
    slopes = [(b - a) * _GROWTH_BLOCKS / span for a, b in pairwise(backlog)]
    bounds = mean_interval(slopes, _GROWTH_BLOCKS)
    assert bounds is not None  # as many as it takes
    grows = bounds[0] > 0
    told = settled if grows else bounds[1] <= _TOLD * number / span
    return {
        "growth_per_s": (backlog[-1] - backlog[0]) / span,
        "growth_per_s_interval": list(bounds),
        "grows": grows if told else None,
    }


# --- The time between tokens as a line in context, batch and prefill.

#: What a step's time is taken to grow with, in the order in which each may explain it.
COLUMNS = ("context", "batch", "prefill")
_LEFT_OVER = 0.01  # of a column's variation that the columns before it do not explain
_SPREAD = 0.02  # a column whose deviation is below this share of its mean does not vary
_TOGETHER = 10  # spans of a block
_LEAST_BLOCKS = 5  # drawing from fewer gives the same few lines again and again, and no interval
_RESAMPLES = 200
_CERTAIN = 0.9  # of resamples


@dataclass(frozen=True)
class Fit:
    """Seconds between tokens = intercept + Σ slope × column."""

    intercept: float
    slopes: dict[str, float]  # of those `COLUMNS` that could be told apart
    left_out: tuple[str, ...]  # those that did not vary, or only with others
    #: Of `intercept` and the slopes; None for fewer than five blocks of spans.
    intervals: dict[str, list[float] | None]
    #: Intercept and slopes of each resample, for what is computed from them.
    resamples: list[dict[str, float]] = field(repr=False)
    spans: int
    r2: float  # share of the variance that the line explains
    seen: dict[str, list[float]]  # least and most of each column

    def described(self) -> dict[str, Any]:
        """Return it as a result has it."""
        return {
            "intercept_seconds": self.intercept,
            "intercept_seconds_interval": self.intervals["intercept"],
            "slopes": {
                name: {"seconds": slope, "seconds_interval": self.intervals[name]}
                for name, slope in self.slopes.items()
            },
            "left_out": list(self.left_out),
            "spans": self.spans,
            "r2": self.r2,
            "seen": self.seen,
        }


_Moments = list[list[float]]


def fitted(spans: Sequence[Mapping[str, float]]) -> Fit | None:
    """Fit a line through stretches of decoding by least squares, weighted by their tokens."""
    if len(spans) < LEAST:
        return None
    rows = np.array([[1.0, *(s[name] for name in COLUMNS), s["between"]] for s in spans])
    weighted = rows * np.array([[span["tokens"]] for span in spans])
    blocks = np.array_split(np.arange(len(rows)), max(2, len(rows) // _TOGETHER))
    moments = np.array([weighted[own].T @ rows[own] for own in blocks])
    whole = moments.sum(0)
    kept = _distinct(whole)
    indices = [0, *(1 + COLUMNS.index(name) for name in kept)]
    names = ("intercept", *kept)
    solution = _solved(whole, indices)
    enough = len(blocks) >= _LEAST_BLOCKS
    drawn = draws([len(blocks)], _RESAMPLES if enough else 0) @ moments.reshape(len(blocks), -1)
    again = _solved(drawn.reshape(-1, *whole.shape), indices)
    mean = whole[0, -1] / whole[0, 0]
    total = whole[-1, -1] - whole[0, 0] * mean**2
    left = max(0.0, float(whole[-1, -1] - solution @ whole[indices, -1]))
    return Fit(
        intercept=float(solution[0]),
        slopes=dict(zip(kept, solution[1:].tolist(), strict=True)),
        left_out=tuple(name for name in COLUMNS if name not in kept),
        intervals={
            name: list(ends(again[:, column], len(blocks))) if enough else None
            for column, name in enumerate(names)
        },
        resamples=[dict(zip(names, one, strict=True)) for one in again.tolist()],
        spans=len(spans),
        r2=1 - left / float(total) if total > 0 else 0.0,
        seen={
            name: [min(span[name] for span in spans), max(span[name] for span in spans)]
            for name in COLUMNS
        },
    )


def _distinct(moments: NDArray[np.float64]) -> tuple[str, ...]:
    """Return the columns that vary, and not only as those before them do."""
    means = moments[0, 1:-1] / moments[0, 0]
    covariance = moments[1:-1, 1:-1] / moments[0, 0] - np.outer(means, means)
    kept: list[int] = []
    for index, own in enumerate(np.diag(covariance)):
        if own <= (_SPREAD * means[index]) ** 2 or own <= 0:
            continue
        side = covariance[kept, index]
        rest = own - side @ np.linalg.solve(covariance[np.ix_(kept, kept)], side)
        if rest > _LEFT_OVER * own:
            kept.append(index)
    return tuple(COLUMNS[index] for index in kept)


def _solved(moments: NDArray[np.float64], indices: Sequence[int]) -> NDArray[np.float64]:
    """Return intercept and slopes by least squares; of each of several moments where there are."""
    own = moments[..., indices, :]
    # Columns of one size: contexts are tens of thousands, batches a few.
    scales = np.sqrt(np.diagonal(own[..., indices], axis1=-2, axis2=-1))
    scales = np.where(scales > 0, scales, 1.0)
    matrix = own[..., indices] / (scales[..., None] * scales[..., None, :])
    side = own[..., -1:] / scales[..., None]
    return np.asarray((np.linalg.pinv(matrix, hermitian=True) @ side)[..., 0] / scales)


def break_even(fit: Fit, baseline: Fit, batch: float) -> dict[str, Any] | None:
    """Return from which context on a method's steps are shorter than the baseline's."""
    if "context" not in fit.slopes or "context" not in baseline.slopes:
        return None

    def crossing(one: Mapping[str, float], other: Mapping[str, float]) -> tuple[str, float | None]:
        starts = [each["intercept"] + batch * each.get("batch", 0.0) for each in (one, other)]
        if min(starts) <= 0 or min(one["context"], other["context"]) < 0:
            return "unclear", None
        at_none = starts[0] - starts[1]
        slope = batch * (one["context"] - other["context"])
        if at_none < 0:
            return ("always", None) if slope <= 0 else ("until", -at_none / slope)
        return ("never", None) if slope >= 0 else ("from", -at_none / slope)

    own = {"intercept": fit.intercept, **fit.slopes}
    theirs = {"intercept": baseline.intercept, **baseline.slopes}
    pays, context = crossing(own, theirs)
    again = [crossing(a, b) for a, b in zip(fit.resamples, baseline.resamples, strict=False)]
    certain = sum(said == pays for said, _ in again) / len(again) if again else None
    if certain is None or certain < _CERTAIN:
        pays, context = "unclear", None
    alike = [at for said, at in again if said == pays and at is not None]
    both = [
        max(fit.seen["context"][0], baseline.seen["context"][0]),
        min(fit.seen["context"][1], baseline.seen["context"][1]),
    ]
    return {
        "batch": batch,
        "pays": pays,
        "context": context,
        "interval": list(ends(alike, len(alike))) if len(alike) > 1 else None,
        "certain": certain,
        "seen": context is not None and both[0] <= context * batch <= both[1],
    }
