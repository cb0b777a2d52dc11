"""How many dimensions each head keeps: the allocations of the papers, and the optimal one.

All share one view: a `RankTarget` per pair and group of heads. Ranks are whole multiples of a grid
with real columns (never padding), at most the target's width.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprof.analysis.width_clusters import KindChooser, Lattice, left_sums, spread_ranks
from kvprof.errors import UsageError

__all__ = [
    "ALLOCATIONS",
    "Choice",
    "Grid",
    "RankTarget",
    "allocation_losses",
    "budget_ranks",
    "cheapest",
    "few_kinds",
    "fisher_ranks",
    "head_units",
    "removal_ranks",
    "removal_ranks_of",
    "round_up",
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
    counted : Tensor
        ``[width]``: what a removal rate counts, mostly `values`.
    """

    layer: int
    side: str
    group: int
    values: Tensor
    errors: Tensor
    counted: Tensor

    @property
    def width(self) -> int:
        """Dimensions at full rank."""
        return int(self.values.shape[-1])


@dataclass(frozen=True)
class Grid:
    """Ranks that are allowed: multiples of `step` from `minimum` on, and the full rank."""

    step: int = 1
    minimum: int = 1

    def __post_init__(self) -> None:
        if self.step < 1 or self.minimum < 1:
            raise UsageError(f"no rank is available from {self.minimum} in steps of {self.step}")

    def up(self, rank: int, width: int) -> int:
        """Round a rank up to the grid."""
        return round_up(max(rank, self.minimum), self.step, width)

    def ranks(self, width: int) -> list[int]:
        """Return every rank that is allowed, ascending."""
        return [*range(self.up(1, width), width, self.step), width]


def removal_ranks(values: Tensor, removal_rate: float) -> Tensor:
    """Return the fewest leading dimensions whose removed rest is at most `removal_rate`.

    FDC eq. 1, ZACK eq. 6: ``Σ_removed s_i / Σ s_i ≤ r``, singular values and not their squares.

    Parameters
    ----------
    values : Tensor
        ``[..., d]``, descending.
    removal_rate : float
        Between 0 and 1.

    Returns
    -------
    Tensor
        ``[...]`` int64, at least 1.
    """
    # Sum from the small end, so that the tail is exact and rounding never keeps one too many.
    tail = values.flip(-1).cumsum(-1).flip(-1)
    removed = torch.cat([tail[..., 1:], torch.zeros_like(tail[..., :1])], dim=-1)
    # A share that equals the rate up to rounding counts as equal.
    allowed = removed <= removal_rate * tail[..., :1] * (1 + 1e-12)
    return allowed.to(torch.int64).argmax(-1) + 1


def round_up(rank: int, grid: int, width: int) -> int:
    """Round a rank up to a multiple of `grid`, at most the full `width`."""
    return min(math.ceil(rank / grid) * grid, width)


def removal_ranks_of(targets: Sequence[RankTarget], rate: float, grid: Grid) -> list[int]:
    """Return ranks of one shared removal rate (FDC eq. 1, ZACK eq. 6).

    Parameters
    ----------
    targets : sequence of RankTarget
    rate : float
        The knob: share of ``Σ s_i`` that may go, 0 to 1.
    grid : Grid
    """
    ranks = [target.width for target in targets]
    if rate <= 0:
        return ranks
    of_width: dict[int, list[int]] = {}
    for index, target in enumerate(targets):
        of_width.setdefault(target.width, []).append(index)
    for width, indices in of_width.items():
        # Together: a search for a knob asks this dozens of times for hundreds of heads.
        found = removal_ranks(torch.stack([targets[index].counted for index in indices]), rate)
        for index, rank in zip(indices, found.tolist(), strict=True):
            ranks[index] = grid.up(rank, width)
    return ranks


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
        raise UsageError("fisher: requires one non-negative importance per layer, side and group")
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
        raise UsageError("budget: requires one non-negative sensitivity per layer, side and group")
    price = cost or (lambda _, rank: float(rank))
    steps: list[tuple[float, int, float, int]] = []
    ranks: list[int] = []
    spent = 0.0
    for index, (target, weight) in enumerate(zip(targets, sensitivities, strict=True)):
        errors = target.errors.tolist()
        points = [
            (price(target, rank), weight * errors[rank], rank) for rank in grid.ranks(target.width)
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


# --- At most so many head configs.


def allocation_losses(
    name: str,
    targets: Sequence[RankTarget],
    grid: Grid,
    weights: Sequence[float] | None = None,
) -> list[dict[int, float]]:
    """Return what an allocation itself minimises, for every target at each rank of the grid.

    ``removal``, ``uniform`` and ``tail`` keep the fewest columns of which at most a share is lost:
    of ``Σ s_i``, of the dimensions, of a layer's predicted error. They are the least
    ``Σ loss + knob · Σ rank`` of `kvprof.analysis.width_clusters.left_sums` of that share, so that
    no allocation of the same columns has a smaller sum. ``budget`` has its weighed errors. Ranks
    in proportion to F, ``fisher``'s, are the least ``-Σ F log rank`` of as many columns.

    Parameters
    ----------
    name : str
        One of `ALLOCATIONS`.
    targets : sequence of RankTarget
    grid : Grid
    weights : sequence of float, optional
        Of each target: Fisher information, or the sensitivity.

    Returns
    -------
    list of dict
        Rank to loss, per target; 0 at full rank.
    """
    summed: dict[tuple[int, str], Tensor] = {}
    if name == "tail":
        for target in targets:
            own = target.layer, target.side
            summed[own] = summed.get(own, torch.zeros_like(target.errors)) + target.errors
    found = []
    for index, target in enumerate(targets):
        ranks, width = grid.ranks(target.width), target.width
        if name in ("budget", "fisher"):
            assert weights is not None  # the allocation itself needs them
            if name == "budget":
                errors = target.errors.double()
                losses = [weights[index] * float(errors[rank]) for rank in ranks]
            else:
                losses = [weights[index] * math.log(width / rank) for rank in ranks]
            found.append(dict(zip(ranks, losses, strict=True)))
            continue
        if name == "uniform":
            lost = [1.0 - rank / width for rank in ranks]
        else:
            # At each rank, from no column on: singular values are summed from the small end.
            rest = summed[target.layer, target.side] if name == "tail" else _tail(target.counted)
            whole = float(rest[0])
            lost = [float(rest[rank]) / whole if whole > 0 else 0.0 for rank in ranks]
        found.append(dict(zip(ranks, left_sums(ranks, lost), strict=True)))
    return found


def _tail(values: Tensor) -> Tensor:
    rest = values.double().flip(-1).cumsum(-1).flip(-1)
    return torch.cat([rest, torch.zeros_like(rest[:1])])


def head_units(
    targets: Sequence[RankTarget], *, whole_layers: bool = False
) -> list[tuple[list[int], list[int]]]:
    """Return which targets have one pair of ranks: indices of K's and of V's, per head.

    A head is a KV head, or as many as share a latent. Where a layer stores a key per query head, a
    KV head's have one rank together; where one side is not ranked, its list is empty.

    Parameters
    ----------
    targets : sequence of RankTarget
    whole_layers : bool
        One pair per layer, as ``tail`` has it.
    """
    members: dict[int, tuple[list[int], list[int]]] = {}
    for index, target in enumerate(targets):
        members.setdefault(target.layer, ([], []))[target.side == "values"].append(index)
    units = []
    for keys, values in members.values():
        count = 1 if whole_layers else math.gcd(len(keys), len(values))
        units += [
            tuple(
                side[unit * len(side) // count : (unit + 1) * len(side) // count]
                for side in (keys, values)
            )
            for unit in range(count)
        ]
    return [(keys, values) for keys, values in units]


def few_kinds(
    targets: Sequence[RankTarget],
    units: Sequence[tuple[list[int], list[int]]],
    losses: Sequence[dict[int, float]],
    kinds: int,
    cost: Callable[[RankTarget, int], float] | None = None,
) -> Callable[[Sequence[int]], list[int]]:
    """Return a function from an allocation's ranks to those with at most so many head configs.

    They cost no more, and of all such ranks lose (nearly) the least by the allocation's own
    measure. Ranks that have so few kinds stay as they are. On a grid of more than 32 ranks kinds
    are chosen from 32 of them.

    Parameters
    ----------
    targets : sequence of RankTarget
    units : sequence of (list of int, list of int)
        From `head_units`.
    losses : sequence of dict
        From `allocation_losses`.
    kinds : int
        Distinct pairs of K's and V's rank, 1 or more.
    cost : callable, optional
        As `budget_ranks` takes it.

    Raises
    ------
    UsageError
        When it is called with ranks whose columns so few kinds cannot have.
    """
    price = cost or (lambda _, rank: float(rank))
    ladders = [
        spread_ranks(
            sorted({rank for unit in units for index in unit[side] for rank in losses[index]})
        )
        or [0]
        for side in (0, 1)
    ]

    def table(side: int, what: Callable[[int, int], float]) -> NDArray[np.float64]:
        return np.array(
            [
                [sum(what(index, rank) for index in unit[side]) for rank in ladders[side]]
                for unit in units
            ],
            dtype=np.float64,
        )

    def lost(index: int, rank: int) -> float:
        return losses[index].get(rank, math.inf)

    def spent(index: int, rank: int) -> float:
        return price(targets[index], rank) if rank in losses[index] else 0.0

    chooser = KindChooser(
        Lattice(table(0, lost), table(1, lost), table(0, spent), table(1, spent)), kinds
    )
    known: dict[float, list[int]] = {}

    def limited(ranks: Sequence[int]) -> list[int]:
        pairs = {
            tuple(tuple(sorted({ranks[index] for index in side})) for side in unit)
            for unit in units
        }
        if len(pairs) <= kinds and all(len(side) <= 1 for pair in pairs for side in pair):
            return list(ranks)
        budget = sum(price(target, rank) for target, rank in zip(targets, ranks, strict=True))
        if budget not in known:
            found = list(ranks)
            for unit, pair in zip(units, chooser.choose(budget), strict=True):
                for side, ladder, at in zip(unit, ladders, pair, strict=True):
                    for index in side:
                        found[index] = ladder[at]
            known[budget] = found
        return list(known[budget])

    return limited


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


# --- Which of several settings each part of a cache should take, for the least cost at a size.


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
