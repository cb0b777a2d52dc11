"""Few head configs: at most so many distinct pairs of ranks, at the least loss within a budget.

A kernel is compiled for every head config, a pair of K's and V's rank. Which pairs a
model should have, and which head takes which, is a k-median problem on the lattice of ranks with a
budget of columns. It is solved in two steps. With a price λ on a column every head takes the pair
of least ``loss + λ · cost``, and the pairs are searched by exchanging one at a time for the best of
all that the lattice has (PAM); λ runs over prices until the heads together cost the budget. Then,
for the pairs found, the heads are assigned anew by dynamic programming: of all assignments within
the budget the one of least loss. Everything is deterministic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvprof.errors import UsageError

__all__ = ["KINDS", "KindChooser", "Lattice", "left_sums", "spread_ranks"]

#: Kinds of head that a plan has at most unless it is told otherwise. Ranks in steps of 16 have no
#: more by themselves on the models that were measured.
KINDS = 8

#: A loss that no assignment takes: a rank that a head does not have.
_NEVER = 1e30
# Prices are tried on a geometric ladder; neighbours on it differ by a few heads.
_PRICES = 192
# The set of pairs at the price that meets the budget is assigned exactly, and so many other sets
# to either side; with few heads one set holds for many prices.
_BESIDE = 4
_WALKED = 64
# Of the budget in dynamic programming; costs that are finer are rounded up to it.
_MOST_TICKS = 2**15
# Ranks of one side that are tried where the grid has more: 1,024 pairs.
_MOST_RANKS = 32

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def spread_ranks(ranks: Sequence[int]) -> list[int]:
    """Return at most 32 of these ranks, the least and the greatest among them.

    Parameters
    ----------
    ranks : sequence of int
        All that a grid has, ascending.
    """
    if len(ranks) <= _MOST_RANKS:
        return list(ranks)
    indices = np.linspace(0, len(ranks) - 1, _MOST_RANKS).round().astype(int)
    return [ranks[index] for index in indices]


def left_sums(ranks: Sequence[int], lost: Sequence[float]) -> list[float]:
    """Return the loss that a rule "keep the fewest columns that lose at most x" minimises.

    Such a rule, rounded up to a grid, takes the step from a rank to the next one as long as what is
    lost before it is over x. So does whoever minimises ``loss + x · rank`` where a step lowers the
    loss by its length times what is lost before it. Convex, 0 at full rank.

    Parameters
    ----------
    ranks : sequence of int
        Ascending, the last one the full rank.
    lost : sequence of float
        Share that is lost at each, never increasing.
    """
    sums = [0.0] * len(ranks)
    for index in range(len(ranks) - 2, -1, -1):
        sums[index] = sums[index + 1] + (ranks[index + 1] - ranks[index]) * lost[index]
    return sums


@dataclass(frozen=True, eq=False)
class Lattice:
    """What every head loses and costs at each rank of its keys and of its values.

    Attributes
    ----------
    key_loss, value_loss : ndarray
        ``[heads, ranks of K]`` and ``[heads, ranks of V]``; infinite where a head has no such rank.
    key_cost, value_cost : ndarray
        The same shapes, never decreasing in the rank; columns, bytes or a measured time.
    """

    key_loss: Floats
    value_loss: Floats
    key_cost: Floats
    value_cost: Floats


@dataclass(eq=False)
class KindChooser:
    """The assignments of least loss with at most `kinds` pairs, for any budget.

    Sets of pairs that were searched for one budget are kept for the next.

    Attributes
    ----------
    lattice : Lattice
    kinds : int
        1 or more.
    """

    lattice: Lattice
    kinds: int
    _loss: Floats = field(init=False, repr=False)
    _cost: Floats = field(init=False, repr=False)
    _prices: Floats = field(init=False, repr=False)
    _sets: dict[tuple[int, int], tuple[int, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.kinds < 1:
            raise UsageError(f"kinds={self.kinds} is below 1")
        on = self.lattice
        heads = len(on.key_loss)
        loss = on.key_loss[:, :, None] + on.value_loss[:, None, :]
        cost = on.key_cost[:, :, None] + on.value_cost[:, None, :]
        self._loss = np.where(np.isfinite(loss), loss, _NEVER).reshape(heads, -1)
        self._cost = np.where(np.isfinite(loss), cost, 0.0).reshape(heads, -1)
        self._prices = _ladder(on)
        self._sets = {}

    def choose(self, budget: float) -> list[tuple[int, int]]:
        """Return a pair of places on the lattice for every head, together within the budget.

        With more kinds allowed the loss is never larger.

        Parameters
        ----------
        budget : float
            In the unit of the lattice's costs.

        Raises
        ------
        UsageError
            When so few kinds do not reach the budget: heads of unlike width that share no rank.
        """
        best: tuple[float, tuple[int, ...], Ints] | None = None
        # From many kinds to few: what fewer could reach is mostly refused by their bound at once.
        for kinds in range(self.kinds, 0, -1):
            for pairs in self._candidates(kinds, budget):
                bound = self._bound(pairs, budget)
                if best is not None and bound >= best[0]:
                    continue
                assigned = self._assigned(pairs, budget)
                if assigned is None:
                    continue
                loss = float(self._loss[np.arange(len(assigned)), assigned].sum())
                if loss < _NEVER and (best is None or loss < best[0]):
                    best = loss, pairs, assigned
        if best is None:
            raise UsageError(
                f"{self.kinds} head shapes cannot meet the budget; raise --option kinds, or use "
                "kinds=0 for no limit"
            )
        width = self.lattice.value_loss.shape[1]
        return [(int(index) // width, int(index) % width) for index in best[2]]

    # --- Sets of pairs at a price.

    def _set(self, kinds: int, at: int) -> tuple[int, ...]:
        """Return the pairs that are best at a price, ascending places on the flat lattice."""
        if (kinds, at) not in self._sets:
            total = self._loss + self._prices[at] * self._cost
            if kinds == 1:
                found = [int(total.sum(axis=0).argmin())]
            else:
                found = list(self._set(kinds - 1, at))
                nearest = total[:, found].min(axis=1)
                found.append(int(np.minimum(total, nearest[:, None]).sum(axis=0).argmin()))
                found = _exchanged(total, found)
            self._sets[kinds, at] = tuple(sorted(set(found)))
        return self._sets[kinds, at]

    def _crossing(self, kinds: int, budget: float) -> int:
        """Return the place of the least price at which the heads cost at most the budget."""
        low, high = 0, len(self._prices) - 1
        while low < high:
            middle = (low + high) // 2
            pairs = list(self._set(kinds, middle))
            total = self._loss[:, pairs] + self._prices[middle] * self._cost[:, pairs]
            taken = total.argmin(axis=1)
            if self._cost[:, pairs][np.arange(len(taken)), taken].sum() <= budget * (1 + 1e-12):
                high = middle
            else:
                low = middle + 1
        return low

    def _candidates(self, kinds: int, budget: float) -> list[tuple[int, ...]]:
        """Return the sets of pairs at the price that meets a budget and beside it, each once."""
        if kinds == 1:  # all are tried: with one pair no price need meet the budget
            within = self._cost.sum(axis=0) <= budget * (1 + 1e-12)
            loss = np.where(within, self._loss.sum(axis=0), np.inf)
            return [(int(loss.argmin()),)] if within.any() else []
        at = self._crossing(kinds, budget)
        found = {self._set(kinds, at): None}
        for way in (1, -1):
            here: dict[tuple[int, ...], None] = {}
            for step in range(1, _WALKED + 1):
                index = at + way * step
                if not 0 <= index < len(self._prices) or len(here) >= _BESIDE:
                    break
                here[self._set(kinds, index)] = None
            found |= here
        return list(found)

    def _bound(self, pairs: tuple[int, ...], budget: float) -> float:
        """Return a loss that no assignment of these pairs within the budget is below (its dual)."""
        chosen = list(pairs)
        loss, cost = self._loss[:, chosen], self._cost[:, chosen]
        dual = [
            float((loss + price * cost).min(axis=1).sum() - price * budget)
            for price in self._prices[:: max(1, len(self._prices) // 64)]
        ]
        # Rounding must not refuse what is equal.
        return max(dual) - 1e-9 * (1 + abs(max(dual)))

    def _assigned(self, pairs: tuple[int, ...], budget: float) -> Ints | None:
        """Return the assignment of least loss within the budget; None where none is within it."""
        chosen = np.array(pairs, dtype=np.int64)
        cost = self._cost[:, chosen]
        # Cheap ones first: of pairs that lose the same the cheapest is taken.
        order = np.argsort(cost.sum(axis=0), kind="stable")
        chosen, cost = chosen[order], cost[:, order]
        ticks, limit = _in_ticks(cost, budget)
        taken = _cheapest(self._loss[:, chosen], ticks, limit)
        return None if taken is None else chosen[taken]


def _ladder(lattice: Lattice) -> Floats:
    """Return prices from one at which all columns are kept to one at which none is, ascending."""
    slopes = []
    for loss, cost in (
        (lattice.key_loss, lattice.key_cost),
        (lattice.value_loss, lattice.value_cost),
    ):
        with np.errstate(invalid="ignore", divide="ignore"):
            slope = -np.diff(loss, axis=1) / np.diff(cost, axis=1)
        slopes.append(slope[np.isfinite(slope) & (slope > 0)])
    found = np.concatenate(slopes)
    if not len(found):
        return np.array([0.0, 1.0])
    # A head of nearly no loss must not draw the ladder out: below a price of 1e-9 nothing changes.
    least = max(float(found.min()), float(found.max()) * 1e-9) / 2
    return np.concatenate([[0.0], np.geomspace(least, float(found.max()) * 2, _PRICES)])


def _exchanged(total: Floats, pairs: list[int]) -> list[int]:
    """Exchange one pair at a time for the best of all, until none is better (PAM).

    Parameters
    ----------
    total : ndarray
        ``[heads, pairs of the lattice]``.
    pairs : list of int
        Places of two or more.
    """
    rows = np.arange(len(total))
    reached = np.inf
    while True:
        near = total[:, pairs]
        first = near.argmin(axis=1)
        nearest = near[rows, first]
        others = near.copy()
        others[rows, first] = np.inf
        second = others.min(axis=1)
        now = float(nearest.sum())
        if now >= reached - 1e-12 * abs(reached):
            return pairs
        reached = now
        kept = np.minimum(total, nearest[:, None])
        lost = np.minimum(total, second[:, None]) - kept
        member = np.zeros((len(pairs), len(total)))
        member[first, rows] = 1.0
        change = member @ lost + kept.sum(axis=0)
        gone, new = divmod(int(change.argmin()), total.shape[1])
        if change[gone, new] >= now - 1e-12 * abs(now):
            return pairs
        pairs = [*pairs[:gone], new, *pairs[gone + 1 :]]


def _in_ticks(cost: Floats, budget: float) -> tuple[Ints, int]:
    """Return costs and a budget in whole ticks; what is within these is within those."""
    whole = np.rint(cost)
    if np.array_equal(whole, cost):
        step = int(np.gcd.reduce(whole.astype(np.int64), axis=None)) or 1
        limit = math.floor(budget * (1 + 1e-12) / step)
        if limit <= _MOST_TICKS:
            return (whole / step).astype(np.int64), limit
    tick = budget / _MOST_TICKS if budget > 0 else 1.0
    return np.ceil(cost / tick * (1 - 1e-12)).astype(np.int64), math.floor(budget / tick)


def _cheapest(loss: Floats, ticks: Ints, limit: int) -> Ints | None:
    """Return the column that each row takes, of least summed loss within the limit.

    Parameters
    ----------
    loss : ndarray
        ``[heads, pairs]``.
    ticks : ndarray
        The same shape.
    limit : int
        Of the ticks taken.
    """
    least = ticks.min(axis=1)
    room = limit - int(least.sum())
    if room < 0:
        return None
    extra = ticks - least[:, None]
    room = min(room, int(extra.max(axis=1).sum()))
    heads, pairs = loss.shape
    found = np.zeros(room + 1)  # least loss of the heads so far by what they take at most
    choice = np.empty((heads, room + 1), dtype=np.int16)
    for head in range(heads):
        options = np.full((pairs, room + 1), np.inf)
        for pair in range(pairs):
            skip = int(extra[head, pair])
            if skip <= room:
                options[pair, skip:] = found[: room + 1 - skip] + loss[head, pair]
        choice[head] = options.argmin(axis=0)
        found = options.min(axis=0)
    taken = np.empty(heads, dtype=np.int64)
    left = room
    for head in range(heads - 1, -1, -1):
        taken[head] = choice[head, left]
        left -= int(extra[head, taken[head]])
    return taken
