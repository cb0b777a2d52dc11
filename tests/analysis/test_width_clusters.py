"""Tests of few head configs: against every choice there is, and against rounding."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.analysis.width_clusters import KindChooser, Lattice, left_sums, spread_ranks
from kvprof.errors import UsageError

STEP = 16


def drawn(seed: int, heads: int, ranks: int) -> Lattice:
    """Return heads of unlike, convex losses at multiples of 16."""
    rng = np.random.default_rng(seed)
    ladder = [STEP * (place + 1) for place in range(ranks)]

    def losses() -> np.ndarray:
        power = rng.choice([0.3, 1.0, 3.0], size=(heads, 1))
        lost = np.sort(rng.random((heads, ranks)) ** power, axis=1)[:, ::-1]
        lost[:, -1] = 0.0
        return np.array([left_sums(ladder, list(row)) for row in lost])

    cost = np.tile(np.array(ladder, dtype=float), (heads, 1))
    return Lattice(losses(), losses(), cost, cost)


def lost(lattice, pairs):
    """What an assignment loses: a pair of places on the lattice for every head."""
    return sum(
        lattice.key_loss[head, key] + lattice.value_loss[head, value]
        for head, (key, value) in enumerate(pairs)
    )


def spent(lattice, pairs):
    """What an assignment costs."""
    return sum(
        lattice.key_cost[head, key] + lattice.value_cost[head, value]
        for head, (key, value) in enumerate(pairs)
    )


def least_of_all(lattice: Lattice, kinds: int, budget: float) -> float:
    """Return the least loss, by trying every set of pairs and every cost that heads can have."""
    heads, ranks = lattice.key_loss.shape
    best = np.inf
    for chosen in itertools.combinations(itertools.product(range(ranks), repeat=2), kinds):
        reached = {0.0: 0.0}
        for head in range(heads):
            further: dict[float, float] = {}
            for spent, lost in reached.items():
                for key, value in chosen:
                    cost = spent + lattice.key_cost[head, key] + lattice.value_cost[head, value]
                    loss = lost + lattice.key_loss[head, key] + lattice.value_loss[head, value]
                    if cost <= budget and loss < further.get(cost, np.inf):
                        further[cost] = loss
            reached = further
        best = min(best, min(reached.values(), default=np.inf))
    return best


def test_small_cases_against_every_choice():
    found = []
    for seed in range(24):
        rng = np.random.default_rng(seed)
        heads, ranks, kinds = (int(rng.integers(*limits)) for limits in ((8, 15), (2, 4), (1, 4)))
        lattice = drawn(seed, heads, ranks)
        budget = float(STEP * rng.integers(2 * heads, 2 * heads * ranks + 1))
        pairs = KindChooser(lattice, kinds).choose(budget)
        assert len(set(pairs)) <= kinds
        assert spent(lattice, pairs) <= budget
        whole = lost(lattice, [(0, 0)] * heads)
        best = least_of_all(lattice, kinds, budget)
        assert lost(lattice, pairs) >= best - 1e-9
        found.append((lost(lattice, pairs) - best) / whole)
    # The search is a local one: nearly always the best there is, and else close to it.
    assert sum(gap < 1e-12 for gap in found) >= 20
    assert max(found) < 0.02


@given(st.integers(0, 10_000), st.integers(2, 24), st.floats(0.15, 0.95))
@settings(max_examples=12)
def test_more_kinds_never_lose_more_and_the_budget_is_used(seed, heads, share):
    lattice = drawn(seed, heads, 4)
    budget = float(STEP * max(2 * heads, round(share * 8 * heads)))
    losses = []
    for kinds in (1, 2, 3, 5, 8, 16):
        pairs = KindChooser(lattice, kinds).choose(budget)
        assert len(set(pairs)) <= kinds
        assert spent(lattice, pairs) <= budget
        if kinds >= 5:
            assert spent(lattice, pairs) >= budget - STEP
        losses.append(lost(lattice, pairs))
    assert all(few >= many - 1e-9 for few, many in itertools.pairwise(losses))


@pytest.mark.parametrize("seed", range(4))
def test_no_worse_than_rounding_each_head(seed):
    """Heads rounded down by themselves to pairs that their own optimum has most often."""
    lattice = drawn(seed, 48, 8)
    price = 0.3
    own = [
        (
            int((lattice.key_loss[head] + price * lattice.key_cost[head]).argmin()),
            int((lattice.value_loss[head] + price * lattice.value_cost[head]).argmin()),
        )
        for head in range(48)
    ]
    for kinds in (4, 8):
        often = sorted(set(own), key=lambda pair: (-own.count(pair), pair))[:kinds]
        below = [*often[1:], (0, 0)]  # which every head can be rounded down to
        rounded = [
            max(
                (pair for pair in below if pair[0] <= key and pair[1] <= value),
                key=lambda pair: (sum(pair), pair),
            )
            for key, value in own
        ]
        chooser = KindChooser(lattice, kinds)
        assert lost(lattice, chooser.choose(spent(lattice, rounded))) <= lost(lattice, rounded)
        assert lost(lattice, chooser.choose(spent(lattice, own))) >= lost(lattice, own) - 1e-9


def test_the_same_again_and_for_any_order_of_budgets():
    lattice = drawn(3, 32, 6)
    budgets = [float(STEP * columns) for columns in (180, 240, 200, 300)]
    once = KindChooser(lattice, 5)
    forth = [once.choose(budget) for budget in budgets]
    again = KindChooser(lattice, 5)
    back = [again.choose(budget) for budget in reversed(budgets)]
    assert forth == back[::-1]


def test_costs_that_are_no_whole_numbers_stay_within_the_budget():
    lattice = drawn(5, 20, 6)
    times = np.array([0.11, 0.13, 0.29, 0.31, 0.52, 0.77])
    slow = Lattice(lattice.key_loss, lattice.value_loss, *(np.tile(times, (20, 1)),) * 2)
    pairs = KindChooser(slow, 4).choose(12.345)
    assert spent(slow, pairs) <= 12.345
    assert spent(slow, pairs) > 12.0


def test_heads_of_unlike_width_take_ranks_that_they_have():
    lattice = drawn(7, 10, 6)
    for loss in (lattice.key_loss, lattice.value_loss):
        loss[:5, 3:] = np.inf
    pairs = KindChooser(lattice, 3).choose(100.0 * STEP)
    assert all(key < 3 and value < 3 for key, value in pairs[:5])
    lattice.key_loss[5:, :3] = np.inf
    with pytest.raises(UsageError, match=r"1 head shapes cannot meet"):
        KindChooser(lattice, 1).choose(100.0 * STEP)


def test_left_sums_are_minimised_by_the_rule_rounded_up():
    rng = np.random.default_rng(0)
    ranks = [16, 32, 48, 64, 72]
    for _ in range(50):
        share = np.sort(rng.random(73))[::-1]
        share[72] = 0.0
        losses = left_sums(ranks, [share[rank] for rank in ranks])
        assert all(np.diff(losses) <= 0)
        limit = rng.random()
        fewest = next(rank for rank in range(73) if share[rank] <= limit)
        rule = next(rank for rank in ranks if rank >= fewest)
        least = min(range(5), key=lambda place: losses[place] + limit * ranks[place])
        assert ranks[least] == rule


def test_spread_ranks_keep_both_ends():
    assert spread_ranks([16, 32, 40]) == [16, 32, 40]
    thin = spread_ranks(list(range(1, 129)))
    assert (len(thin), thin[0], thin[-1]) == (32, 1, 128)


def test_no_kind_is_refused():
    with pytest.raises(UsageError, match="kinds=0"):
        KindChooser(drawn(0, 3, 2), 0)
