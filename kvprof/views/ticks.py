"""Where an axis puts its ticks and what it writes there; the same for terminal and paper."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvprof.sizes import format_count
from kvprof.views.numbers import axis_number

__all__ = ["Axis", "linear_ticks", "log2_ticks", "log10_ticks"]


@dataclass(frozen=True)
class Axis:
    """One direction of a plot: from data to position, and its ticks.

    Attributes
    ----------
    low, high : float
        Ends of the axis, in positions (logarithms on a log axis).
    place : callable
        From a data value to a position.
    ticks : tuple of (float, str)
        Position and label, ascending.
    """

    low: float
    high: float
    place: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]


def linear_ticks(values: Sequence[float], at_most: int = 6) -> Axis:
    """Return a linear axis over `values` with ticks at multiples of 1, 2 or 5 times ten to the n.

    Parameters
    ----------
    values : sequence of float
        Finite, at least one.
    at_most : int
        Number of ticks that there is room for; where that leaves one, there are a few more.
    """
    low, high = min(values), max(values)
    if low == high:
        # A constant curve runs through the middle, not along an edge.
        pad = abs(low) / 2 or 0.5
        low, high = low - pad, high + pad
    # The widest spacing that fits may leave a single tick, which gives no scale: then a finer one.
    step = (high - low) / max(1, at_most - 1)
    for finer in (1, 2, 4, 8):
        ticks = _multiples(low, high, _round_up(step / finer))
        if len(ticks) >= 2:
            break
    return Axis(low, high, float, ticks)


def _multiples(low: float, high: float, step: float) -> tuple[tuple[float, str], ...]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [i * step for i in range(first, last + 1)]
    # Clamped, because 0.1 * 3 may lie outside an axis that ends at 0.3.
    return tuple((min(max(value, low), high), axis_number(value)) for value in values)


def _round_up(step: float) -> float:
    scale = 10.0 ** math.floor(math.log10(step))
    return next(m * scale for m in (1, 2, 5, 10, 20) if m * scale >= step * (1 - 1e-9))


def log10_ticks(values: Sequence[float], at_most: int = 6) -> Axis:
    """Return a log axis with ticks at powers of ten, and at 2 and 5 times them where few fit.

    Parameters
    ----------
    values : sequence of float
        Positive, at least one.
    at_most : int
        Number of ticks that there is room for.
    """
    low, high = math.log10(min(values)), math.log10(max(values))
    if high - low < 0.1:
        low, high = low - 0.35, high + 0.35
    decades = range(math.floor(low), math.ceil(high) + 1)
    candidates: list[list[float]] = [[d + math.log10(m) for d in decades for m in (1, 2, 5)]]
    candidates += [[float(d) for d in decades if d % every == 0] for every in range(1, 20)]
    inside = [[p for p in positions if low - 1e-9 <= p <= high + 1e-9] for positions in candidates]
    # The densest set that fits; the all-but-empty ones at the end always do.
    chosen = next((p for p in inside if len(p) <= at_most), [])
    if len(chosen) < 2:
        # Less than a factor of two or so: round numbers, as on a linear axis.
        linear = linear_ticks([10.0**low, 10.0**high], at_most)
        chosen = [math.log10(value) for value, _ in linear.ticks if value > 0]
    return Axis(low, high, math.log10, tuple((p, axis_number(10.0**p)) for p in chosen))


def log2_ticks(values: Sequence[float], at_most: int = 6) -> Axis:
    """Return a log axis for counts, with ticks as people write them (``1k``, ``2k``, ``4k``).

    Parameters
    ----------
    values : sequence of float
        Positive, at least one.
    at_most : int
        Number of ticks that there is room for.
    """
    low, high = math.log2(min(values)), math.log2(max(values))
    if low == high:
        low, high = low - 0.5, high + 0.5
        positions = [math.log2(values[0])]
    else:
        powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
        every = max(1, math.ceil(len(powers) / max(1, at_most)))
        positions = [float(p) for p in powers if (powers[-1] - p) % every == 0]
        if len(positions) < 2:
            # Less than a factor of two or so: round numbers, as on a linear axis.
            linear = linear_ticks([2.0**low, 2.0**high], at_most)
            positions = [math.log2(value) for value, _ in linear.ticks if value > 0]
    return Axis(low, high, math.log2, tuple((p, _count(2.0**p)) for p in positions))


def _count(value: float) -> str:
    whole = round(value)
    if whole >= 1 and math.isclose(whole, value, rel_tol=1e-9):
        return format_count(whole)
    return axis_number(value)
