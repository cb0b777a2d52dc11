"""What a load's requests tell: percentiles with intervals, growth of a queue, a line through steps.

Requests that are served together are not independent: intervals come from resampling blocks of
neighbours (a block bootstrap), not single requests. Standard library only, as all of `records`.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from statistics import median
from typing import Any, NamedTuple

from kvprof.records.figures import Z, interval_of_share

__all__ = [
    "COLUMNS",
    "LATENCIES",
    "LEAST",
    "Fit",
    "Window",
    "blocks",
    "break_even",
    "fitted",
    "growth",
    "mean_ratio",
    "percentile",
    "share_with_interval",
    "summarised",
    "window_of",
]

#: What is told of each latency; fewer than 1 / (1 - share) requests have no such percentile.
LATENCIES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}

_BLOCKS = 20
_RESAMPLES = 200
_SEED = 0
_ENDS = (0.025, 0.975)
#: Requests, or stretches, from which an interval or a line is told.
LEAST = 20
# Resamples of 20 blocks spread by sqrt(19 / 20) of what the blocks do, and Student's t with 19
# degrees of freedom is wider than the normal: without this 95 % would be 90.
_WIDER = 2.093024 / Z * math.sqrt(_BLOCKS / (_BLOCKS - 1))
_EDGE = 0.1  # of the requests at each end: while the queue fills, and while it empties
_HALF = 0.5
_GROWTH_BLOCKS = 10
_T9 = 2.262157  # Student's t with 9 degrees of freedom, 97.5 %
#: Of the rate: a queue that grows by less is not said to grow.
_LEAST_GROWTH = 0.02


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of ascending values, between two of them on a straight line."""
    index = share * (len(ordered) - 1)
    below = math.floor(index)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (index - below)


def blocks(count: int, wanted: int = _BLOCKS) -> list[range]:
    """Cut neighbours into blocks of nearly equal size, fewer than `wanted` where there are few."""
    number = min(wanted, count)
    edges = [round(index * count / number) for index in range(number + 1)] if number else [0]
    return [range(low, high) for low, high in pairwise(edges)]


def _resampled(cut: Sequence[range], figure: Callable[[list[range]], float | None]) -> list[float]:
    generator = random.Random(_SEED)
    found = (figure(generator.choices(cut, k=len(cut))) for _ in range(_RESAMPLES))
    return sorted(one for one in found if one is not None)


def _interval(values: Sequence[float]) -> list[float] | None:
    if len(values) < _RESAMPLES // 2:
        return None
    ordered = sorted(values)
    return [percentile(ordered, end) for end in _ENDS]


def _widened(interval: list[float] | None, figure: float | None) -> list[float] | None:
    """Take an interval's ends as far from the figure as so few blocks ask for."""
    if interval is None or figure is None:
        return None
    low, high = (figure + _WIDER * (end - figure) for end in interval)
    return [low, high]


def _by_rank(ordered: Sequence[float], share: float) -> list[float] | None:
    """Return between which of the values a percentile lies; None where they do not reach so far.

    Of independent values, as many lie below a percentile as a binomial distribution says.
    """
    count = len(ordered)
    half = Z * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - half), round(count * share + half)
    return [ordered[max(0, low - 1)], ordered[high]] if low >= 0 and high < count else None


def summarised(values: Sequence[float]) -> dict[str, Any]:
    """Return mean and percentiles of one figure of requests, each with its interval.

    Parameters
    ----------
    values : sequence of float
        Seconds, in the order of arrival.

    Returns
    -------
    dict
        ``count``, and of ``mean``, ``p50``, ``p90``, ``p95`` and ``p99`` the value in seconds and
        ``…_interval`` (95 %); None for what so few requests do not tell. Of a percentile it is the
        wider of two: by blocks, and by the ranks of independent requests.
    """
    found: dict[str, Any] = {"count": len(values)}
    ordered = sorted(values)
    found["mean"] = sum(values) / len(values) if values else None
    for name, share in LATENCIES.items():
        enough = len(values) * (1 - share) >= 1 - 1e-9
        found[name] = percentile(ordered, share) if enough else None
    several: dict[str, list[float]] = {name: [] for name in ("mean", *LATENCIES)}
    if len(values) >= LEAST:
        # What is sorted in parts is soon sorted as a whole.
        cut = [sorted(values[block.start : block.stop]) for block in blocks(len(values))]
        generator = random.Random(_SEED)
        for _ in range(_RESAMPLES):
            again = sorted(chain.from_iterable(generator.choices(cut, k=len(cut))))
            several["mean"].append(sum(again) / len(again))
            for name, share in LATENCIES.items():
                several[name].append(percentile(again, share))
    for name, resampled in several.items():
        own = _widened(_interval(resampled), found[name])
        if own is not None and name in LATENCIES:
            ranks = _by_rank(ordered, LATENCIES[name])
            own = [min(own[0], ranks[0]), max(own[1], ranks[1])] if ranks is not None else None
        found[f"{name}_interval"] = [max(0.0, own[0]), own[1]] if own is not None else None
    return found


def share_with_interval(answers: Sequence[bool]) -> tuple[float, list[float]] | None:
    """Return the share of requests that do, with an interval; None of none.

    The wider of two: by blocks, as of a mean, and Wilson's of independent ones, which stays wide
    where all agree and is told of few requests too.
    """
    if not answers:
        return None
    count = len(answers)
    share = sum(answers) / count
    low, high = interval_of_share(share, count)
    cut = blocks(count)
    sums = {block: sum(answers[index] for index in block) for block in cut}

    def figure(drawn: list[range]) -> float:
        return sum(sums[block] for block in drawn) / sum(map(len, drawn))

    resampled = _resampled(cut, figure) if count >= LEAST else []
    by_blocks = _widened(_interval(resampled), share) or [low, high]
    return share, [max(0.0, min(low, by_blocks[0])), min(1.0, max(high, by_blocks[1]))]


def mean_ratio(pairs: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """Return the ratio of two means over the same requests, the first over the second.

    Parameters
    ----------
    pairs : sequence of (float, float)
        In the order of arrival.

    Returns
    -------
    dict or None
        ``ratio``, ``interval`` (None for few pairs) and ``count``; None without a pair.
    """
    if not pairs or not sum(pair[1] for pair in pairs):
        return None
    cut = blocks(len(pairs))
    sums = {block: [sum(pairs[index][side] for index in block) for side in (0, 1)] for block in cut}

    def figure(drawn: list[range]) -> float | None:
        below = sum(sums[block][1] for block in drawn)
        return sum(sums[block][0] for block in drawn) / below if below else None

    ratio = figure(list(cut))
    resampled = _resampled(cut, figure) if len(pairs) >= LEAST else []
    return {
        "ratio": ratio,
        "interval": _widened(_interval(resampled), ratio),
        "count": len(pairs),
    }


# --- Which requests count, and whether the queue grows.


class Window(NamedTuple):
    """The time of a rate that counts.

    Attributes
    ----------
    begin, end : float
        Seconds.
    settled : bool
        Whether it begins when the system has filled: while it does, more requests arrive than are
        completed at any rate.
    """

    begin: float
    end: float
    settled: bool


def window_of(arrivals: Sequence[float], ends: Sequence[float | None]) -> Window:
    """Return the time that counts: neither while the queue fills nor while it empties.

    Parameters
    ----------
    arrivals : sequence of float
        Of all requests, ascending.
    ends : sequence of float or None
        When each had all of its tokens; None of one that never had.

    Returns
    -------
    Window
        From the arrival of the first request beyond the first tenth, or the moment when all of that
        tenth had ended where that is later (but before half of all arrived), to the arrival of the
        one before the last tenth.
    """
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


def growth(arrivals: Sequence[float], ends: Sequence[float], window: Window) -> dict[str, Any]:
    """Tell whether more requests come than are completed: whether the queue grows, or does not.

    The window is cut into ten. Growth is the rate at which requests arrived, less the mean rate at
    which they were completed; its interval comes from how much the latter differs from part to part
    (Student's t, nine degrees of freedom). The queue grows where the whole interval lies above 0,
    growth is at least a fiftieth of the rate, and the system had filled before: until as many
    requests are in it as arrive while one is served, their number grows at a rate that is served
    too. It does not where it came back: where at some arrival in the last third of the window no
    more requests were in the system than at the median arrival of the first third, and growth is
    not told from none. Where neither holds it is open: so few requests do not tell a load that is a
    little too large from one that is nearly. So it is where growth is told and the system came
    back: many came at the end, who could not have left yet; or where it had not filled.

    Parameters
    ----------
    arrivals, ends : sequence of float
        Seconds; a request that failed has no end.
    window : Window

    Returns
    -------
    dict
        ``growth_per_s``, ``growth_per_s_interval`` (None where fewer than 20 requests arrived) and
        ``grows`` (None where that is open).
    """
    begin, end, settled = window
    span = end - begin
    came = sum(begin <= time < end for time in arrivals)
    nothing = {"growth_per_s": None, "growth_per_s_interval": None, "grows": None}
    if span <= 0 or came < LEAST:
        return nothing
    counts = [0] * _GROWTH_BLOCKS
    for time in ends:
        if begin <= time < end:
            counts[min(_GROWTH_BLOCKS - 1, int((time - begin) / span * _GROWTH_BLOCKS))] += 1
    per_s = [count * _GROWTH_BLOCKS / span for count in counts]
    mean = sum(per_s) / _GROWTH_BLOCKS
    variance = sum((one - mean) ** 2 for one in per_s) / (_GROWTH_BLOCKS - 1)
    half = _T9 * math.sqrt(variance / _GROWTH_BLOCKS)
    found = came / span - mean
    interval = [found - half, found + half]
    above = interval[0] > 0 and found >= _LEAST_GROWTH * came / span
    back = _came_back(arrivals, ends, begin, end)
    grows = None if above == back or (above and not settled) else above
    return {"growth_per_s": found, "growth_per_s_interval": interval, "grows": grows}


def _came_back(arrivals: Sequence[float], ends: Sequence[float], begin: float, end: float) -> bool:
    """Whether the system held as few requests late in the window as it did early."""
    came, left = sorted(arrivals), sorted(ends)
    held: tuple[list[int], list[int]] = ([], [])
    for index, time in enumerate(came):
        third = int(3 * (time - begin) / (end - begin)) if begin <= time < end else 1
        if third != 1:
            held[third // 2].append(index + 1 - bisect_right(left, time))
    return all(held) and min(held[1]) <= median(held[0])


# --- The time between tokens as a line in context, batch and prefill.

#: What a step's time is taken to grow with, in the order in which each may explain it.
COLUMNS = ("context", "batch", "prefill")
_LEFT_OVER = 0.01  # of a column's variation that the columns before it do not explain
_SPREAD = 0.02  # a column whose deviation is below this share of its mean does not vary
_TOGETHER = 10  # spans of a block
_LEAST_BLOCKS = 5  # drawing from fewer gives the same few lines again and again, and no interval
_CERTAIN = 0.9  # of resamples


@dataclass(frozen=True)
class Fit:
    """Seconds between tokens = intercept + Σ slope × column.

    Attributes
    ----------
    intercept : float
    slopes : dict of str to float
        Of those `COLUMNS` that could be told apart.
    left_out : tuple of str
        Those that did not vary, or only with others.
    intervals : dict of str to list of float or None
        Of ``intercept`` and the slopes; None for fewer than five blocks of spans.
    resamples : list of dict
        Intercept and slopes of each resample, for what is computed from them.
    spans : int
    r2 : float
        Share of the variance that the line explains.
    seen : dict of str to list of float
        Least and most of each column.
    """

    intercept: float
    slopes: dict[str, float]
    left_out: tuple[str, ...]
    intervals: dict[str, list[float] | None]
    resamples: list[dict[str, float]] = field(repr=False)
    spans: int
    r2: float
    seen: dict[str, list[float]]

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
    """Fit a line through stretches of decoding by least squares, weighted by their tokens.

    Parameters
    ----------
    spans : sequence of mapping
        As `kvprof.records.events.LoadRateFinished` has them, those of one case after the other;
        intervals are a bootstrap over blocks of ten.

    Returns
    -------
    Fit or None
        None for fewer than 20 spans.
    """
    if len(spans) < LEAST:
        return None
    rows = [[1.0, *(span[name] for name in COLUMNS), span["between"]] for span in spans]
    weights = [span["tokens"] for span in spans]
    cut = blocks(len(rows), max(2, len(rows) // _TOGETHER))
    moments = {
        block: _moments([rows[n] for n in block], [weights[n] for n in block]) for block in cut
    }
    whole = _added([moments[block] for block in cut])
    kept = _distinct(whole)
    solution = _solved(whole, kept)
    if solution is None:
        return None
    generator = random.Random(_SEED)
    resamples = []
    for _ in range(_RESAMPLES if len(cut) >= _LEAST_BLOCKS else 0):
        again = _solved(_added([moments[one] for one in generator.choices(cut, k=len(cut))]), kept)
        if again is not None:
            resamples.append(dict(zip(("intercept", *kept), again, strict=True)))
    names = ("intercept", *kept)
    mean = whole[0][-1] / whole[0][0]
    total = whole[-1][-1] - whole[0][0] * mean**2
    indices = [0, *(1 + COLUMNS.index(name) for name in kept)]
    explained = sum(
        value * whole[index][-1] for value, index in zip(solution, indices, strict=True)
    )
    return Fit(
        intercept=solution[0],
        slopes=dict(zip(kept, solution[1:], strict=True)),
        left_out=tuple(name for name in COLUMNS if name not in kept),
        intervals={name: _interval([one[name] for one in resamples]) for name in names},
        resamples=resamples,
        spans=len(spans),
        r2=1 - max(0.0, whole[-1][-1] - explained) / total if total > 0 else 0.0,
        seen={
            name: [min(span[name] for span in spans), max(span[name] for span in spans)]
            for name in COLUMNS
        },
    )


def _moments(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> _Moments:
    size = len(COLUMNS) + 2
    return [
        [
            sum(w * row[i] * row[j] for row, w in zip(rows, weights, strict=True))
            for j in range(size)
        ]
        for i in range(size)
    ]


def _added(several: Sequence[_Moments]) -> _Moments:
    return [[sum(cell) for cell in zip(*rows, strict=True)] for rows in zip(*several, strict=True)]


def _distinct(moments: _Moments) -> tuple[str, ...]:
    """Return the columns that vary, and not only as those before them do."""
    total = moments[0][0]
    size = len(COLUMNS)
    means = [moments[0][1 + i] / total for i in range(size)]
    covariance = [
        [moments[1 + i][1 + j] / total - means[i] * means[j] for j in range(size)]
        for i in range(size)
    ]
    kept: list[int] = []
    for index in range(size):
        own = covariance[index][index]
        if own <= (_SPREAD * means[index]) ** 2 or own <= 0:
            continue
        inner = [[covariance[i][j] for j in kept] for i in kept]
        side = [covariance[i][index] for i in kept]
        weights = _gauss(inner, side) if kept else []
        if weights is None:
            continue
        rest = own - sum(w * s for w, s in zip(weights, side, strict=True))
        if rest > _LEFT_OVER * own:
            kept.append(index)
    return tuple(COLUMNS[index] for index in kept)


def _solved(moments: _Moments, kept: Sequence[str]) -> list[float] | None:
    indices = [0, *(1 + COLUMNS.index(name) for name in kept)]
    # Columns of one size: contexts are tens of thousands, batches a few.
    scales = [math.sqrt(moments[i][i]) or 1.0 for i in indices]
    matrix = [
        [moments[i][j] / (scales[a] * scales[b]) for b, j in enumerate(indices)]
        for a, i in enumerate(indices)
    ]
    side = [moments[i][-1] / scales[a] for a, i in enumerate(indices)]
    found = _gauss(matrix, side)
    return None if found is None else [v / s for v, s in zip(found, scales, strict=True)]


def _gauss(matrix: Sequence[Sequence[float]], side: Sequence[float]) -> list[float] | None:
    """Solve a small symmetric system; None where it is singular."""
    size = len(side)
    rows = [[*row, value] for row, value in zip(matrix, side, strict=True)]
    largest = max((abs(row[i]) for i, row in enumerate(rows)), default=1.0)
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        if abs(rows[pivot][i]) < 1e-12 * largest:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for k in range(size):
            if k != i:
                factor = rows[k][i] / rows[i][i]
                rows[k] = [a - factor * b for a, b in zip(rows[k], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] for i in range(size)]


def break_even(fit: Fit, baseline: Fit, batch: float) -> dict[str, Any] | None:
    """Return from which context on a method's steps are shorter than the baseline's.

    Parameters
    ----------
    fit, baseline : Fit
        Both with a slope for the context; a batch that one of them leaves out counts for nothing.
    batch : float
        Sequences that decode, all of one context.

    Returns
    -------
    dict or None
        ``batch``; ``pays``: ``always``, ``from``, ``until`` or ``never``, and ``unclear`` where
        fewer than nine of ten resamples say the same, or a line costs nothing or less without a
        context, or less the longer it is: no step does; ``context`` in tokens of
        each sequence, for ``from`` and ``until``; ``interval``: of that, None where it is not
        told; ``certain``: the share of resamples that say the same; ``seen``: whether such
        contexts were measured with both. None without a slope.
    """
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
        "interval": _interval(alike),
        "certain": certain,
        "seen": context is not None and both[0] <= context * batch <= both[1],
    }
