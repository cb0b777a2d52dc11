"""How large the values of heads are, counted by octave, and what a cast to e4m3 does to them.

A number of e4m3 has three bits behind the point at any magnitude from 2^-6 to 448, so that dividing
by a power of two changes nothing of a value but whether it lies in that range: what is larger is
clipped, what is smaller loses bits, and what is under 2^-10 becomes zero. Counts by octave, cut
once more at 7/4 of each (448 is 7/4 of 2^8), tell both shares exactly for every power of two.
"""

import math

import torch
from torch import Tensor

__all__ = [
    "E4M3_LARGEST",
    "E4M3_ZERO",
    "clipped_shares",
    "empty_counts",
    "flushed_shares",
    "magnitude_counts",
    "scales_for",
]

#: The largest number of e4m3, and where what is smaller is rounded to zero (half of 2^-9).
E4M3_LARGEST, E4M3_ZERO = 448.0, 2.0**-10

# Octaves that are told apart; what lies outside counts for the nearest.
_LOWEST, _OCTAVES = -64, 128
_CUT = 7 / 8  # of frexp's mantissas, which are 1/2 … 1: 7/4 of an octave
_BINS = 2 * _OCTAVES
# The largest value seen fits this many times: longer texts have larger ones, and an octave at the
# other end, of some eighteen, is nothing to lose.
_MARGIN = 2.0


def empty_counts(heads: int, device: torch.device) -> Tensor:
    """Return counts of nothing yet: what `magnitude_counts` returns can be added to it."""
    return torch.zeros(heads, _BINS + 1, dtype=torch.float64, device=device)


def magnitude_counts(vectors: Tensor) -> Tensor:
    """Count the values of each head by magnitude.

    Parameters
    ----------
    vectors : Tensor
        ``[batch, heads, T, d]``.

    Returns
    -------
    Tensor
        ``[heads, bins]`` float64; two bins for each octave, the last one for zeros.
    """
    heads = vectors.shape[1]
    total = empty_counts(heads, vectors.device)
    rows = (_BINS + 1) * torch.arange(heads, device=vectors.device)[:, None]
    for sequence in vectors:  # one at a time, which keeps the wide copies small
        values = sequence.flatten(1).float().abs()
        mantissa, exponent = torch.frexp(values)
        bins = 2 * (exponent.long() - 1 - _LOWEST) + (mantissa > _CUT)
        bins = torch.where(values == 0, _BINS, bins.clamp(0, _BINS - 1))
        found = torch.bincount((bins + rows).flatten(), minlength=total.numel())
        total += found.view_as(total)
    return total


def scales_for(counts: Tensor) -> list[float]:
    """Return a scale per head, the least power of two over which all values fit e4m3 twice over.

    Parameters
    ----------
    counts : Tensor
        From `magnitude_counts`.

    Returns
    -------
    list of float
        1 for a head without any value but zero.
    """
    found = []
    for row in counts[:, :_BINS].cpu():
        largest = max((int(one) for one in row.nonzero()), default=None)
        if largest is None:
            found.append(1.0)
            continue
        octave, above = divmod(largest, 2)
        # A value in the lower part of an octave 2^e is at most 7/4 · 2^e, else below 2^(e + 1).
        limit = math.frexp(E4M3_LARGEST / _MARGIN)[1] - 1  # 224 is 7/4 of 2^7
        found.append(2.0 ** (octave + _LOWEST + above - limit))
    return found


def clipped_shares(counts: Tensor, scales: list[float]) -> list[float]:
    """Return the share of each head's values that are over e4m3's largest once divided."""
    top = math.frexp(E4M3_LARGEST)[1] - 1
    return _shares(counts, [2 * (top + _octave(one) - _LOWEST) + 1 for one in scales], above=True)


def flushed_shares(counts: Tensor, scales: list[float]) -> list[float]:
    """Return the share of each head's values, zeros apart, that become zero once divided."""
    low = math.frexp(E4M3_ZERO)[1] - 1
    return _shares(counts, [2 * (low + _octave(one) - _LOWEST) for one in scales], above=False)


def _octave(scale: float) -> int:
    return math.frexp(scale)[1] - 1


def _shares(counts: Tensor, bounds: list[int], *, above: bool) -> list[float]:
    found = []
    for row, bound in zip(counts.cpu(), bounds, strict=True):
        values = row[:_BINS]
        cut = min(max(bound, 0), _BINS)
        part = values[cut:] if above else values[:cut]
        total = row.sum() if above else values.sum()
        found.append(float(part.sum() / total) if total else 0.0)
    return found
