"""Levels at equal distances, symmetric about 0, that lose least of a normal variable (Max, 1960).

A kernel multiplies codes of such levels as they are; levels at unlike distances
(`kvprof.methods.quantisers.normal_levels`) it would have to look up first.
"""

from collections.abc import Iterator
from functools import cache
from statistics import NormalDist

__all__ = ["uniform_distortion", "uniform_step"]

_NORMAL = NormalDist()
_HALVINGS = 60


def _cells(bits: int, step: float) -> Iterator[tuple[float, float, float]]:
    """Yield each level in steps, the share of its cell, and the integral of x over it."""
    count: int = 2**bits
    below, density = 0.0, 0.0
    for number in range(count):
        level = number - (count - 1) / 2
        end = (level + 0.5) * step
        last = number == count - 1
        above, high = (1.0, 0.0) if last else (_NORMAL.cdf(end), _NORMAL.pdf(end))
        yield level, above - below, density - high
        below, density = above, high


@cache
def uniform_step(bits: int) -> float:
    """Return the distance of levels of least squared error for a standard normal variable.

    There are ``2^bits`` levels, at ``step · (code - (2^bits - 1) / 2)``. If each has what is
    nearest to it, the error's derivative is 0 where ``step · Σ k² P_k = Σ k ∫_k x``, k being a
    level in steps.

    Parameters
    ----------
    bits : int
        1 or more.
    """
    low, high = 0.0, 4.0
    for _ in range(_HALVINGS):
        step = (low + high) / 2
        cells = list(_cells(bits, step))
        slope = step * sum(k * k * share for k, share, _ in cells) - sum(
            k * first for k, _, first in cells
        )
        low, high = (low, step) if slope > 0 else (step, high)
    return (low + high) / 2


def uniform_distortion(bits: int) -> float:
    """Return what levels at `uniform_step` lose of a standard normal variable, squared."""
    if not bits:
        return 1.0
    step = uniform_step(bits)
    # E (x - sk)² = 1 - 2s Σ k ∫ x + s² Σ k² ∫ 1 over the cells.
    return 1.0 + sum(
        step * step * k * k * share - 2 * step * k * first for k, share, first in _cells(bits, step)
    )
