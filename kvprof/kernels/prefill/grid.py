"""Ranks on the grid that prefill rewards: measured times per pair of widths, and what they choose.

In decoding a head costs its bytes, and every dimension given up pays. In prefill softmax's
exponentials do not shrink with the width and libraries have steps (on an H200 96 and more cost
what 128 does, and values pay more than keys), so of the plans with the same bytes some are faster
for hardly more error. `kvprof.analysis.rank_allocation.budget_ranks` takes one cost per rank and
side; a prefill's time belongs to a pair of widths and bytes are a second budget, so there is a
search of its own here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvprof.errors import UsageError

__all__ = ["GridChoice", "class_costs", "rewarded_widths"]

#: Halvings of the range of exchange rates, 10⁻⁹ to 10⁹ on a logarithmic scale.
_ROUNDS = 24


def class_costs(
    measure: Callable[[int, int], float],
    key_widths: Sequence[int],
    value_widths: Sequence[int] | None = None,
) -> dict[tuple[int, int], float]:
    """Return a measured time for every pair of widths.

    Parameters
    ----------
    measure : callable
        Returns the seconds of one head with keys and values of the given widths, all else equal
        (`kvprof.kernels.prefill.paths.pair_seconds`).
    key_widths : sequence of int
    value_widths : sequence of int, optional
        As the keys' by default.

    Raises
    ------
    UsageError
        When a time is not above 0.
    """
    found = {}
    for key_width in dict.fromkeys(key_widths):
        for value_width in dict.fromkeys(key_widths if value_widths is None else value_widths):
            seconds = measure(key_width, value_width)
            if not seconds > 0:
                raise UsageError(
                    f"keys {key_width} and values {value_width} wide took {seconds} s: no cost"
                )
            found[key_width, value_width] = seconds
    return found


@dataclass(frozen=True)
class GridChoice:
    """Widths and what they cost.

    Attributes
    ----------
    widths : tuple of (key width, value width)
        Per head.
    seconds, error : float
        Summed over heads.
    dimensions : int
        Of keys and values together, summed over heads.
    """

    widths: tuple[tuple[int, int], ...]
    seconds: float
    error: float
    dimensions: int


def rewarded_widths(
    costs: Mapping[tuple[int, int], float],
    key_errors: Sequence[Mapping[int, float]],
    value_errors: Sequence[Mapping[int, float]],
    dimensions: int,
    *,
    error_limit: float | None = None,
) -> GridChoice:
    """Return every head's widths with the least time at the same bytes and hardly more error.

    For one exchange rate of error and time the search is exact: a dynamic programme over heads and
    dimensions spent finds the least ``time + rate · error`` of all choices that spend at most
    `dimensions`. The rate is then found by bisection, as low as the error limit allows. So what is
    returned is on the lower convex hull of time and error; a point between two corners of the hull
    may be a little faster still.

    Parameters
    ----------
    costs : mapping
        Seconds of one head by key and value width (`class_costs`).
    key_errors, value_errors : sequence of mapping
        Per head, the predicted error at each width that may be chosen (weighted by sensitivity).
    dimensions : int
        Budget: kept dimensions of all heads' keys and values, which are bytes by a constant.
    error_limit : float, optional
        Largest summed error; by default the least that the budget allows, so that only what costs
        no error at all is sped up.

    Raises
    ------
    UsageError
        When no choice is within the budget, or none within the limit.
    """
    options = [_options(costs, *pair) for pair in zip(key_errors, value_errors, strict=True)]
    if not options or any(not own for own in options):
        raise UsageError("every head needs a pair of widths whose cost is known")
    least = sum(min(option[0] for option in own) for own in options)
    if least > dimensions:
        raise UsageError(
            f"{dimensions} dimensions are too few: the narrowest heads need {least} together"
        )
    # Common factors make the programme's table smaller.
    step = int(np.gcd.reduce([option[0] for own in options for option in own]))

    def best(seconds: float, error: float) -> GridChoice:
        return _spent(options, dimensions // step, step, seconds, error)

    # Of equal first halves the smaller second one: a tiny weight breaks ties.
    scale = max(option[1] for own in options for option in own)
    size = max((option[2] for own in options for option in own), default=0.0) or 1.0
    careful = best(1e-9 / scale, 1.0 / size)
    limit = careful.error if error_limit is None else error_limit
    slack = 1e-9 * size
    if careful.error > limit + slack:
        raise UsageError(
            f"an error of {limit:g} cannot be had with {dimensions} dimensions: {careful.error:g} "
            "is the least"
        )
    fast = best(1.0 / scale, 1e-9 / size)
    if fast.error <= limit + slack:
        return fast
    found, low, high = careful, 1e-9, 1e9
    for _ in range(_ROUNDS):
        rate = float(np.sqrt(low * high))
        tried = best(1.0 / scale, rate / size)
        if tried.error <= limit + slack:
            high = rate
            if (tried.seconds, tried.error) < (found.seconds, found.error):
                found = tried
        else:
            low = rate
    return found


def _options(
    costs: Mapping[tuple[int, int], float],
    key_errors: Mapping[int, float],
    value_errors: Mapping[int, float],
) -> list[tuple[int, float, float, int, int]]:
    """Return what a head may be: dimensions, seconds, error, key width, value width."""
    return [
        (key + value, costs[key, value], key_errors[key] + value_errors[value], key, value)
        for key in key_errors
        for value in value_errors
        if (key, value) in costs
    ]


def _spent(
    options: Sequence[Sequence[tuple[int, float, float, int, int]]],
    budget: int,
    step: int,
    seconds: float,
    error: float,
) -> GridChoice:
    """Return the choice with the least ``seconds · time + error · error`` within the budget."""
    values: NDArray[np.float64] = np.zeros(budget + 1)
    taken = []
    for own in options:
        better = np.full(budget + 1, np.inf)
        choice: NDArray[np.int32] = np.full(budget + 1, -1, dtype=np.int32)
        for number, (size, time, lost, *_) in enumerate(own):
            units = size // step
            if units > budget:
                continue
            tried = np.full(budget + 1, np.inf)
            tried[units:] = values[: budget + 1 - units] + (seconds * time + error * lost)
            smaller = tried < better
            better[smaller] = tried[smaller]
            choice[smaller] = number
        values = better
        taken.append(choice)
    left = int(np.argmin(values))
    picked = []
    for own, choice in zip(reversed(options), reversed(taken), strict=True):
        option = own[int(choice[left])]
        picked.append(option)
        left -= option[0] // step
    picked.reverse()
    return GridChoice(
        tuple((key, value) for *_, key, value in picked),
        sum(option[1] for option in picked),
        sum(option[2] for option in picked),
        sum(option[0] for option in picked),
    )
