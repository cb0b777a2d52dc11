"""Which of several settings each part of a cache should take, for the least cost at a size."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Choice", "cheapest"]


@dataclass(frozen=True)
class Choice:
    """One way to store one part.

    Attributes
    ----------
    name : str
    size : float
        Bytes.
    cost : float
        What it costs, in a unit in which costs of parts add up.
    """

    name: str
    size: float
    cost: float


def cheapest(parts: Sequence[Sequence[Choice]], size: float) -> list[Choice] | None:
    """Choose for each part, greedily, by cost per byte saved, until all fit a size.

    Each part steps down its lower convex hull of cost over size, so that of all steps left the one
    with the least cost per byte is the best one: where the sum is met exactly, no choice costs
    less. What another choice beats in both is never taken.

    Parameters
    ----------
    parts : sequence of sequence of Choice
        The choices of each part.
    size : float
        Bytes of all parts together, at most.

    Returns
    -------
    list of Choice or None
        One per part; None where even the smallest choices do not fit.
    """
    hulls = [_hull(choices) for choices in parts]
    taken = [0] * len(hulls)
    steps = sorted(
        (_slope(hull[index], hull[index + 1]), part, index + 1)
        for part, hull in enumerate(hulls)
        for index in range(len(hull) - 1)
    )
    total = sum(hull[0].size for hull in hulls)
    for _, part, index in steps:
        if total <= size:
            break
        hull = hulls[part]
        total += hull[index].size - hull[index - 1].size
        taken[part] = index
    if total > size * (1 + 1e-12):
        return None
    return [hull[index] for hull, index in zip(hulls, taken, strict=True)]


def _slope(larger: Choice, smaller: Choice) -> float:
    """Return the cost of each byte that a step saves."""
    return (smaller.cost - larger.cost) / (larger.size - smaller.size)


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """Return the choices that some price of a byte makes the best ones, the cheapest first."""
    hull: list[Choice] = []
    least = min(choice.cost for choice in choices)
    best = min((c for c in choices if c.cost == least), key=lambda c: c.size)
    for choice in sorted(choices, key=lambda c: (-c.size, c.cost)):
        if choice.size > best.size or (choice.size == best.size and choice is not best):
            continue
        if hull and choice.size == hull[-1].size:
            continue  # the same size for more
        while hull and choice.cost <= hull[-1].cost:
            hull.pop()
        while len(hull) > 1 and _slope(hull[-1], choice) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(choice)
    return hull
