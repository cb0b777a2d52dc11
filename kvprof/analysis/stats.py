"""Intervals, and what a sample can tell: every place that needs one computes it here.

Intervals are of 95 %. Without torch, so that all of the package may use it.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "LEAST_SAMPLES",
    "LEAST_SEQUENCES",
    "RESAMPLES",
    "SEED",
    "binomial_interval",
    "binomial_tail",
    "draws",
    "ends",
    "log_ratio_interval",
    "mean_interval",
    "mean_ratio_interval",
    "median_ends",
    "median_ratio_ends",
    "normal_interval",
    "quantile",
    "quantile_interval",
    "ratio_interval",
    "share_interval",
    "significantly_above",
    "unseen_share",
    "weighted_quantile",
]

Array = NDArray[np.float64]
Interval = tuple[float, float]

#: Sequences, or questions, that a bootstrap takes: of 8 a "95 %" interval holds 86 to 90 %.
LEAST_SEQUENCES = 32
#: Times that a median's interval takes; of fewer their range is given.
LEAST_SAMPLES = 15
RESAMPLES = 1000
SEED = 0

_LEVEL = 0.95
_UPPER = (1 + _LEVEL) / 2
_BATCHES = 20
_MOST_ALIKE = 0.95


# --- Paired bootstraps over sequences or questions.


def draws(sizes: Sequence[int], resamples: int = RESAMPLES) -> NDArray[np.int64]:
    """Return how often each member is drawn, ``[resamples, members]``; strata on their own."""
    generator = np.random.default_rng(SEED)
    parts = [generator.multinomial(n, np.full(n, 1 / n), size=resamples) for n in sizes if n]
    return np.concatenate(parts, axis=1)


def ends(values: ArrayLike, members: int) -> Interval:
    """Return where the middle 95 % of resampled figures lie.

    The percentiles are those of Hesterberg's expanded interval (2015), because resamples of so many
    members vary less than samples do.
    """
    from scipy.special import ndtr, stdtrit

    wider = math.sqrt(members / (members - 1)) * stdtrit(members - 1, _UPPER)
    low, high = np.quantile(np.asarray(values), [ndtr(-wider), ndtr(wider)])
    return float(low), float(high)


def ratio_interval(above: ArrayLike, below: ArrayLike, sizes: Sequence[int]) -> Interval | None:
    """Return the interval of ``Σ above / Σ below``, both of the same members drawn again.

    Parameters
    ----------
    above, below : array
        ``[members]``, for example correct tokens of two models per sequence.
    sizes : sequence of int
        Members of each stratum (source), in order.

    Returns
    -------
    tuple of float or None
        None with fewer than `LEAST_SEQUENCES` members, or where a resample's denominator is 0.
    """
    members = sum(sizes)
    if members < LEAST_SEQUENCES:
        return None
    counts = draws(sizes)
    denominator = counts @ np.asarray(below, dtype=np.float64)
    if not np.all(denominator > 0):
        return None
    return ends((counts @ np.asarray(above, dtype=np.float64)) / denominator, members)


# --- Shares of yes or no answers.


def binomial_interval(share: float, trials: int) -> Interval:
    """Return Wilson's interval of a share, which stays wide where every answer was the same."""
    from scipy.stats import binomtest

    found = binomtest(round(share * trials), trials).proportion_ci(_LEVEL, "wilson")
    return float(found.low), float(found.high)


def binomial_tail(right: float, trials: int, chance: float) -> float:
    """Return how likely guessing gets as many right; a part of one does not count."""
    from scipy.special import bdtrc  # scipy.stats takes most of a second to import

    return float(bdtrc(math.floor(right + 1e-9) - 1, trials, chance))


def unseen_share(trials: float) -> float:
    """Return the largest share that may be lost where none of so many trials was, at 95 %."""
    return 1 - (1 - _LEVEL) ** (1 / trials) if trials else 1.0


def normal_interval(value: float, error: float) -> Interval:
    """Return the interval of a figure that comes with a standard error."""
    from scipy.special import ndtri

    half = float(ndtri(_UPPER)) * error
    return value - half, value + half


def significantly_above(heads: Sequence[float], seeds: Sequence[float], weight: int = 1) -> bool:
    """Whether the mean of heads lies above 0 by two standard errors, those of both together.

    `weight` is how often the squared error of the seeds counts.
    """
    error = _squared_error(heads) + weight * _squared_error(seeds)
    return bool(np.mean(heads) > 2.0 * math.sqrt(error))


def _squared_error(values: Sequence[float]) -> float:
    return float(np.var(values, ddof=1)) / len(values) if len(values) > 1 else 0.0


# --- Times: few, and of any distribution.


def median_ends(samples: Sequence[float]) -> Interval | None:
    """Return a median's interval; of fewer than `LEAST_SAMPLES` their range, and None of one."""
    if len(samples) < 2:
        return None
    if len(samples) < LEAST_SAMPLES:
        return min(samples), max(samples)
    return ends(_medians(np.asarray([samples]), SEED)[0], len(samples))


def median_ratio_ends(
    above: Sequence[float], below: Sequence[float], *, paired: bool
) -> Interval | None:
    """Return the interval of the ratio of two medians, or the range of ratios of few samples.

    Parameters
    ----------
    above, below : sequence of float
        Above 0.
    paired : bool
        Whether those of one index were taken in one round: then rounds are drawn, and what slows a
        round down cancels.

    Returns
    -------
    tuple of float or None
        None where either is a single sample, or pairs are not.
    """
    least = min(len(above), len(below))
    if least < 2 or (paired and len(above) != len(below)):
        return None
    one, other = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    if least < LEAST_SAMPLES:
        if paired:
            return float((one / other).min()), float((one / other).max())
        return float(one.min() / other.max()), float(one.max() / other.min())
    if paired:
        over, under = _medians(np.stack([one, other]), SEED)
    else:
        over, under = _medians(one[None], SEED)[0], _medians(other[None], SEED + 1)[0]
    return ends(over / under, least)


def _medians(rows: Array, seed: int) -> Array:
    """Return medians of each row, ``[rows, resamples]``, of columns drawn again."""
    number = rows.shape[1]
    drawn = np.random.default_rng(seed).integers(number, size=(RESAMPLES, number))
    return np.asarray(np.median(rows[:, drawn], axis=2))


def log_ratio_interval(
    ours: tuple[float, float, float], theirs: tuple[float, float, float]
) -> Interval:
    """Return the interval of ``log(ours / theirs)`` from each one's value, low and high end.

    Distances to the figures add in squares, as of independent runs (Zou and Donner's MOVER).
    """
    (a, a_low, a_high), (b, b_low, b_high) = np.log(ours).tolist(), np.log(theirs).tolist()
    middle = a - b
    low, high = math.hypot(a - a_low, b_high - b), math.hypot(a_high - a, b - b_low)
    return middle - low, middle + high


# --- Figures of neighbours, which are not independent: batch means.


def _half(values: ArrayLike, batches: int = _BATCHES) -> float | None:
    """Return half the width of a mean's interval; None of fewer values than batches.

    Batch means and Student's t, widened as a first-order autoregression of them asks for: batches
    that follow their neighbours are too short to be independent.
    """
    from scipy.special import stdtrit

    own = np.asarray(values, dtype=np.float64)
    if len(own) < batches:
        return None
    means = np.array([part.mean() for part in np.array_split(own, batches)])
    apart = means - means.mean()
    total = float(apart @ apart)
    if not total:
        return 0.0
    # A correlation of so few is estimated too low by one over their number.
    alike = float(apart[1:] @ apart[:-1]) / total + 1 / batches
    alike = min(_MOST_ALIKE, max(0.0, alike))
    error = math.sqrt(total / (batches - 1) / batches * (1 + alike) / (1 - alike))
    return float(stdtrit(batches - 1, _UPPER)) * error


def mean_interval(values: ArrayLike, batches: int = _BATCHES) -> Interval | None:
    """Return the interval of a mean of figures in the order in which they came."""
    half = _half(values, batches)
    if half is None:
        return None
    middle = float(np.mean(np.asarray(values)))
    return middle - half, middle + half


def mean_ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """Return the interval of the ratio of two means over the same requests, in order."""
    one, other = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    ratio = one.mean() / other.mean()
    half = _half(one - ratio * other)
    if half is None:
        return None
    half /= float(other.mean())
    return float(ratio) - half, float(ratio) + half


def share_interval(answers: Sequence[bool]) -> Interval | None:
    """Return the interval of a share of requests: the wider of batch means and Wilson's."""
    half = _half(answers)
    if half is None:
        return None
    share = float(np.mean(answers))
    low, high = binomial_interval(share, len(answers))
    return max(0.0, min(low, share - half)), min(1.0, max(high, share + half))


def quantile(values: ArrayLike, share: float) -> float:
    """Return a quantile, between two values on a straight line."""
    return float(np.quantile(np.asarray(values, dtype=np.float64), share))


def weighted_quantile(
    values: Sequence[float], weights: Sequence[float], share: float
) -> float | None:
    """Return the smallest value at or below which `share` of the weight lies; None of no values.

    A median of equal weights may lie between two.
    """
    if not values:
        return None
    if len(set(weights)) == 1 and share == 0.5:
        return quantile(values, share)
    return float(np.quantile(values, share, weights=weights, method="inverted_cdf"))


def quantile_interval(values: Sequence[float], share: float) -> Interval | None:
    """Return the interval of a quantile of figures in the order in which they came.

    It lies between the quantiles at the ends of the interval of the share that is below it; None
    where the values do not reach so far.
    """
    own = np.asarray(values, dtype=np.float64)
    bounds = share_interval((own <= np.quantile(own, share)).tolist())
    if bounds is None or not bounds[0] > 0 or not bounds[1] < 1:
        return None
    return quantile(own, bounds[0]), quantile(own, bounds[1])
