"""Job completion time from times at a few contexts, linear between them and summed over steps."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import BarycentricInterpolator, PchipInterpolator
from scipy.optimize import nnls

__all__ = [
    "Integral",
    "between",
    "beyond",
    "integral",
    "interpolated",
    "ladder",
    "percentiles",
    "step_weights",
]

_CLOSE = 1.02  # rungs nearer than this measure the same
#: Of requests, as the papers' tables have them.
SHARES = (50.0, 90.0, 99.0)


class Integral(NamedTuple):
    """A sum over steps.

    Attributes
    ----------
    value : float
    error : float or None
        How far it may be off because steps between rungs were not measured; None where there are
        too few rungs to tell.
    """

    value: float
    error: float | None


def ladder(ends: Iterable[int], ratio: float = 2.0) -> list[int]:
    """Return contexts to measure at: all ends, and between them steps of at most `ratio`."""
    if ratio <= 1:
        raise ValueError(f"ratio {ratio:g} must be above 1")
    wanted = sorted(set(ends))
    if not wanted or wanted[0] < 1:
        raise ValueError("ends must be 1 token or more")
    kept = [wanted[-1]]
    for point in reversed(wanted[:-1]):
        if point * _CLOSE < kept[-1] or point == wanted[0]:
            kept.append(point)
    kept.reverse()
    if len(kept) > 2 and kept[0] * _CLOSE >= kept[1]:
        del kept[1]
    found = [kept[0]]
    for low, high in pairwise(kept):
        count = int(np.ceil(np.log(high / low) / np.log(ratio) - 1e-9))
        between = np.geomspace(low, high, max(1, count) + 1)[1:-1]
        found += [round(float(point)) for point in between]
        found.append(high)
    return sorted(set(found))


def step_weights(nodes: Sequence[int], first: int, last: int) -> NDArray[np.float64]:
    """Return how many steps every measured context stands for, the weights of its time."""
    if last < first:
        return np.zeros(len(nodes))
    if not nodes or first < nodes[0] or last > nodes[-1]:
        raise ValueError(f"steps {first} to {last} are outside the measured contexts {list(nodes)}")
    weights = np.zeros(len(nodes))
    if len(nodes) == 1:
        weights[0] = last - first + 1
        return weights
    for place, (low, high) in enumerate(pairwise(nodes)):
        # A node belongs to the segment that begins with it, the last one to the last segment.
        end = high if place == len(nodes) - 2 else high - 1
        begin, stop = max(first, low), min(last, end)
        if stop < begin:
            continue
        count = stop - begin + 1
        right = count * ((begin + stop) / 2 - low) / (high - low)
        weights[place] += count - right
        weights[place + 1] += right
    return weights


def interpolated(nodes: Sequence[int], values: Sequence[float], at: int) -> float:
    """Return the time at a context on the straight line between its neighbours."""
    if not nodes[0] <= at <= nodes[-1]:
        raise ValueError(f"{at} is outside the measured contexts {list(nodes)}")
    return float(np.interp(at, nodes, values))


def between(lengths: Sequence[int], values: Sequence[float], at: int) -> float:
    """Return the time at a length from the three nearest, on a parabola (two: on a line)."""
    if not lengths[0] <= at <= lengths[-1]:
        raise ValueError(f"{at} is outside the measured lengths {list(lengths)}")
    if len(lengths) < 3:
        return interpolated(lengths, values, at)
    right = int(np.searchsorted(lengths, at))
    start = min(max(right - 1, 0), len(lengths) - 3)
    near = slice(start, start + 3)
    return float(BarycentricInterpolator(np.asarray(lengths[near], float), values[near])(at))


def integral(nodes: Sequence[int], values: Sequence[float], first: int, last: int) -> Integral:
    """Return the sum of a time over all steps, and how far it may be off.

    The error is the larger of two: a third of the change when every second rung is left out (what
    halving the distances would still change of a smooth curve, whose error falls with their
    square), and the distance to the sum over a smooth monotone curve through the same rungs.
    """
    points = np.asarray(values, dtype=np.float64)
    value = float(step_weights(nodes, first, last) @ points)
    if len(nodes) < 3 or last < first:
        return Integral(value, None)
    kept = sorted({*range(0, len(nodes), 2), len(nodes) - 1})
    coarse = float(step_weights([nodes[i] for i in kept], first, last) @ points[kept])
    smooth = PchipInterpolator(np.asarray(nodes, dtype=np.float64), points)
    # The sum of f over first … last is close to its integral from half a step before to half a
    # step after; the ends are held inside the nodes, where both curves are compared.
    low, high = max(first - 0.5, nodes[0]), min(last + 0.5, nodes[-1])
    if high <= low:
        return Integral(value, None)
    curved = float(smooth.integrate(low, high)) / (high - low)
    lined = _line_mean(np.asarray(nodes, dtype=np.float64), points, low, high)
    steps = last - first + 1
    return Integral(value, max(abs(value - coarse) / 3, abs(curved - lined) * steps))


def _line_mean(
    nodes: NDArray[np.float64], values: NDArray[np.float64], low: float, high: float
) -> float:
    """Return the mean of the straight lines between two places."""
    places = np.concatenate([[low], nodes[(nodes > low) & (nodes < high)], [high]])
    return float(np.trapezoid(np.interp(places, nodes, values), places)) / (high - low)


def beyond(lengths: Sequence[int], values: Sequence[float], at: int, *, degree: int) -> float:
    """Predict the time of an unmeasured length as ``a + b·T (+ c·T²)``, no coefficient negative."""
    if degree not in (1, 2) or len(lengths) < 2:
        raise ValueError(f"{len(lengths)} lengths are too few for a polynomial of degree {degree}")
    longest = max(lengths)
    powers = np.arange(degree + 1)
    terms = (np.asarray(lengths, dtype=np.float64)[:, None] / longest) ** powers
    seconds = np.asarray(values, dtype=np.float64)
    found, _ = nnls(terms / seconds[:, None], np.ones(len(seconds)))
    return float(((at / longest) ** powers) @ found)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and percentiles (``p50``, ``p90``, ``p99``) of one figure over requests."""
    found = np.percentile(np.asarray(values, dtype=np.float64), SHARES)
    named = {f"p{share:g}": float(value) for share, value in zip(SHARES, found, strict=True)}
    return {"mean": float(np.mean(values)), **named}
