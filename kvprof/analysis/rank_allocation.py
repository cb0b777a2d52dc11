"""How many dimensions each head keeps: the allocations of the papers, and the optimal one.

All share one view: a `RankTarget` per pair and group of heads. Ranks are whole multiples of a grid
with real columns (never padding), at most the target's width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvprof.analysis.spectrum import removal_ranks, round_up
from kvprof.errors import UsageError

__all__ = [
    "ALLOCATIONS",
    "Grid",
    "RankTarget",
    "budget_ranks",
    "fisher_ranks",
    "removal_ranks_of",
    "share_of",
    "tail_ranks",
    "uniform_ranks",
]

#: Names of the allocations; what each one's knob means is said in its function.
ALLOCATIONS = ("removal", "uniform", "tail", "fisher", "budget")


@dataclass(frozen=True, eq=False)
class RankTarget:
    """One group of heads of one layer's keys or values.

    Attributes
    ----------
    layer : int
    side : str
        ``keys`` or ``values``.
    group : int
        Among the layer's groups.
    values : Tensor
        ``[width]`` singular values, descending, on the CPU.
    errors : Tensor
        ``[width + 1]`` predicted squared error at every rank, never increasing, 0 at the end.
    """

    layer: int
    side: str
    group: int
    values: Tensor
    errors: Tensor

    @property
    def width(self) -> int:
        """Dimensions at full rank."""
        return int(self.values.shape[-1])


@dataclass(frozen=True)
class Grid:
    """Ranks that are allowed: multiples of `step` from `minimum` on, and the full width."""

    step: int = 1
    minimum: int = 1

    def __post_init__(self) -> None:
        if self.step < 1 or self.minimum < 1:
            raise UsageError(f"a grid of {self.step} from {self.minimum} on holds no rank")

    def up(self, rank: int, width: int) -> int:
        """Round a rank up to the grid."""
        return round_up(max(rank, self.minimum), self.step, width)

    def ranks(self, width: int) -> list[int]:
        """Return every rank that is allowed, ascending."""
        return sorted({self.up(rank, width) for rank in range(1, width + 1)})


def removal_ranks_of(targets: Sequence[RankTarget], rate: float, grid: Grid) -> list[int]:
    """Return ranks of one shared removal rate (FDC eq. 1, ZACK eq. 6).

    Parameters
    ----------
    targets : sequence of RankTarget
    rate : float
        The knob: share of ``Σ s_i`` that may go, 0 to 1.
    grid : Grid
    """
    return [
        grid.up(int(removal_ranks(target.values, rate)), target.width) if rate > 0 else target.width
        for target in targets
    ]


def uniform_ranks(targets: Sequence[RankTarget], rate: float, grid: Grid) -> list[int]:
    """Return the same share of dimensions for every target; the knob is the share removed."""
    return [grid.up(share_of(target.width, 1.0 - rate), target.width) for target in targets]


def tail_ranks(targets: Sequence[RankTarget], rate: float, grid: Grid) -> list[int]:
    """Return one rank per layer and side: the smallest with tail energy at most the knob (ε²).

    KQ-SVD's choice: ``Σ_heads tail(r) ≤ ε² Σ_heads energy``, errors summed over the layer's heads.

    Parameters
    ----------
    targets : sequence of RankTarget
    rate : float
        ε², 0 to 1.
    grid : Grid
    """
    members: dict[tuple[int, str], list[int]] = {}
    for index, target in enumerate(targets):
        members.setdefault((target.layer, target.side), []).append(index)
    ranks = [0] * len(targets)
    for indices in members.values():
        errors = torch.stack([targets[index].errors for index in indices]).sum(0)
        # Slack for rounding only: a rank whose tail equals the limit is good enough.
        fits = errors <= rate * errors[0] * (1 + 1e-12) if rate > 0 else errors <= 0
        rank = int(fits.to(torch.int64).argmax()) if rate > 0 else targets[indices[0]].width
        for index in indices:
            ranks[index] = grid.up(max(1, rank), targets[index].width)
    return ranks


def fisher_ranks(
    targets: Sequence[RankTarget], rate: float, grid: Grid, importance: Sequence[float]
) -> list[int]:
    """Return ranks proportional to Fisher information (Palu §3.3 as its code has it).

    Proportional to ``F / ΣF``, clipped at full; what the clipping leaves over is handed out to the
    others, a step of the grid at a time, in turn from the most important one on.

    Parameters
    ----------
    targets : sequence of RankTarget
    rate : float
        The knob: share of all dimensions removed, 0 to 1.
    grid : Grid
        Palu's step is 32.
    importance : sequence of float
        F of each target. The paper sums ``E[grad²]`` over the weight, its code takes the mean over
        the group of ``sqrt(E[grad²])``; both are the caller's choice.
    """
    if len(importance) != len(targets) or min(importance) < 0 or sum(importance) <= 0:
        raise UsageError(
            "fisher: one importance per layer, side and group is needed, none negative"
        )
    widths = [target.width for target in targets]
    wanted = (1.0 - rate) * sum(widths)
    total = sum(importance)
    lowest = [grid.up(1, width) for width in widths]
    ranks = []
    for share, width, least in zip(importance, widths, lowest, strict=True):
        rank = int(share / total * wanted) // grid.step * grid.step
        ranks.append(min(width, max(least, rank)))
    order = sorted(range(len(targets)), key=lambda index: -importance[index])
    while sum(ranks) < wanted - 1e-9:
        for index in order:
            if sum(ranks) >= wanted - 1e-9:
                break
            ranks[index] = min(widths[index], ranks[index] + grid.step)
    return ranks


def budget_ranks(
    targets: Sequence[RankTarget],
    rate: float,
    grid: Grid,
    sensitivities: Sequence[float],
    cost: Callable[[RankTarget, int], float] | None = None,
) -> list[int]:
    """Return the ranks with the least summed predicted error within a budget.

    Greedy by marginal gain per cost along each target's lower convex hull of (cost, error). With
    convex errors and steps of equal cost that is optimal; otherwise the last step alone may leave
    part of the budget unused.

    Parameters
    ----------
    targets : sequence of RankTarget
    rate : float
        The knob: share of the cost at full rank that is saved, 0 to 1.
    grid : Grid
    sensitivities : sequence of float
        Weight of each target's predicted error: the measured increase of the next-token KL
        divergence per unit of predicted error.
    cost : callable, optional
        Of a target at a rank, never decreasing in it: bytes by default (the rank itself), or a
        measured time per width.
    """
    if len(sensitivities) != len(targets) or min(sensitivities) < 0:
        raise UsageError(
            "budget: one sensitivity per layer, side and group is needed, none below 0"
        )
    price = cost or (lambda _, rank: float(rank))
    steps: list[tuple[float, int, float, int]] = []
    ranks: list[int] = []
    spent = 0.0
    for index, (target, weight) in enumerate(zip(targets, sensitivities, strict=True)):
        points = [
            (price(target, rank), weight * float(target.errors[rank]), rank)
            for rank in grid.ranks(target.width)
        ]
        hull = _lower_hull(points)
        ranks.append(hull[0][2])
        spent += hull[0][0]
        for (c0, e0, _), (c1, e1, rank) in pairwise(hull):
            steps.append(((e0 - e1) / (c1 - c0), index, c1 - c0, rank))
    limit = (1.0 - rate) * sum(price(target, target.width) for target in targets)
    # Stable, and slopes fall along a hull: a target's steps come in its own order.
    for _, index, extra, rank in sorted(steps, key=lambda step: -step[0]):
        if spent + extra > limit * (1 + 1e-12):
            break
        spent += extra
        ranks[index] = rank
    return ranks


def share_of(width: int, share: float) -> int:
    """Return a share of a width rounded up, decimal shares taken as they are written."""
    return max(1, math.ceil(width * share - 1e-9))


def _lower_hull(points: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Return the lower convex hull of (cost, error, rank), cost ascending, error descending."""
    hull: list[tuple[float, float, int]] = []
    for point in points:
        # Of equal cost (a width class) the larger rank is free.
        while hull and hull[-1][0] >= point[0]:
            hull.pop()
        while len(hull) >= 2:
            (c0, e0, _), (c1, e1, _) = hull[-2:]
            if (e0 - e1) * (point[0] - c1) >= (e1 - point[1]) * (c1 - c0):
                break
            hull.pop()
        hull.append(point)
    return hull
