import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.analysis.rank_allocation import (
    Grid,
    RankTarget,
    allocation_losses,
    budget_ranks,
    few_kinds,
    fisher_ranks,
    head_units,
    removal_ranks_of,
    tail_ranks,
    uniform_ranks,
)
from kvprof.errors import UsageError

FREE = Grid()


def target(values, *, layer=0, side="keys", group=0):
    tensor = torch.tensor(values, dtype=torch.float64)
    tail = tensor.square().flip(0).cumsum(0).flip(0)
    return RankTarget(layer, side, group, tensor, torch.cat([tail, tail.new_zeros(1)]), tensor)


def test_removal_uses_one_rate_for_all_and_singular_values_themselves():
    targets = [target([4, 3, 2, 1]), target([1, 1, 1, 1])]
    # 10 % of 10 may go from the first: the last value; nothing of the second is that small.
    assert removal_ranks_of(targets, 0.1, FREE) == [3, 4]
    assert removal_ranks_of(targets, 0.3, FREE) == [2, 3]
    assert removal_ranks_of(targets, 0.0, FREE) == [4, 4]


def test_a_removal_rate_counts_what_a_target_says():
    large_mean = target([100, 4, 3, 2, 1])
    counted = replace(large_mean, counted=torch.tensor([4.0, 3, 2, 1, 0], dtype=torch.float64))
    assert removal_ranks_of([large_mean, counted], 0.3, FREE) == [1, 2]
    assert allocation_losses("removal", [counted], FREE) == allocation_losses(
        "removal", [target([4, 3, 2, 1, 0])], FREE
    )


def test_rate_zero_keeps_even_directions_without_energy():
    assert removal_ranks_of([target([1, 0, 0])], 0.0, FREE) == [3]
    assert tail_ranks([target([1, 0, 0])], 0.0, FREE) == [3]
    assert uniform_ranks([target([1, 0, 0])], 0.0, FREE) == [3]


def test_ranks_round_up_to_the_grid_with_a_minimum_and_at_most_the_width():
    targets = [target([1.0] * 20)]
    assert uniform_ranks(targets, 0.75, Grid(8, 1)) == [8]
    assert uniform_ranks(targets, 0.75, Grid(1, 7)) == [7]
    assert uniform_ranks(targets, 0.1, Grid(8, 8)) == [20]
    assert Grid(8, 16).ranks(20) == [16, 20]
    for grid, width in itertools.product((Grid(8, 16), Grid(16, 1), Grid(3, 5), FREE), (1, 16, 20)):
        assert grid.ranks(width) == sorted({grid.up(rank, width) for rank in range(1, width + 1)})


def test_decimal_shares_are_taken_as_written():
    # 10 * 0.7 is 6.999… or 7.000…1 in binary.
    assert uniform_ranks([target([1.0] * 10)], 0.3, FREE) == [7]
    assert uniform_ranks([target([1.0] * 100)], 0.9, FREE) == [10]


def test_tail_gives_one_rank_per_layer_and_side():
    targets = [target([3, 2, 1]), target([3, 0, 0], group=1), target([1, 1, 1], layer=1)]
    # Layer 0: energies 14 and 9; a tail of 1 of 23 is 4.3 %, of 5 of 23 21.7 %.
    assert tail_ranks(targets, 0.05, FREE) == [2, 2, 3]
    assert tail_ranks(targets, 0.22, FREE) == [1, 1, 3]
    assert tail_ranks(targets, 1 / 3, FREE) == [1, 1, 2]


def test_fisher_is_proportional_clipped_and_hands_the_rest_out():
    targets = [target([1.0] * 64) for _ in range(3)]
    # Half of 192 is 96: shares 72, 12, 12; the first is clipped at 64, 8 are left over.
    ranks = fisher_ranks(targets, 0.5, Grid(4, 4), [6, 1, 1])
    assert ranks == [64, 16, 16]
    assert fisher_ranks(targets, 0.0, Grid(4, 4), [6, 1, 1]) == [64, 64, 64]
    assert sum(fisher_ranks(targets, 1.0, Grid(4, 4), [6, 1, 0])) == 12


@pytest.mark.parametrize("importance", [[1.0], [1.0, -1.0], [0.0, 0.0]])
def test_fisher_refuses_what_is_no_importance(importance):
    with pytest.raises(UsageError):
        fisher_ranks([target([1, 1]), target([1, 1])], 0.5, FREE, importance)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.floats(0.0, 10.0), min_size=4, max_size=4), min_size=2, max_size=3),
    st.lists(st.floats(0.1, 5.0), min_size=3, max_size=3),
    st.floats(0.0, 1.0),
)
def test_budget_is_optimal_among_all_ranks_of_its_cost(spectra, weights, rate):
    targets = [target(sorted(values, reverse=True)) for values in spectra]
    weights = weights[: len(targets)]
    ranks = budget_ranks(targets, rate, FREE, weights)

    def error(choice):
        return sum(w * float(t.errors[r]) for w, t, r in zip(weights, targets, choice, strict=True))

    assert sum(ranks) <= max(len(targets), (1 - rate) * 4 * len(targets) + 1e-9)
    best = min(
        error(choice)
        for choice in itertools.product(range(1, 5), repeat=len(targets))
        if sum(choice) == sum(ranks)
    )
    assert error(ranks) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_budget_spends_on_the_sensitive_head():
    targets = [target([2.0, 1.0, 1.0, 1.0]), target([2.0, 1.0, 1.0, 1.0])]
    assert budget_ranks(targets, 0.375, FREE, [1.0, 10.0]) == [1, 4]
    assert budget_ranks(targets, 0.375, FREE, [10.0, 1.0]) == [4, 1]


def test_budget_uses_what_each_width_costs():
    targets = [target([1.0] * 4), target([1.0] * 4)]
    # Ranks 3 and 4 cost the same (one width class): nobody stops at 3.
    price = {1: 1.0, 2: 2.0, 3: 4.0, 4: 4.0}
    ranks = budget_ranks(targets, 0.25, FREE, [1.0, 1.1], lambda _, rank: price[rank])
    assert 3 not in ranks
    assert sorted(ranks) == [2, 4]


def test_budget_needs_a_sensitivity_for_each():
    with pytest.raises(UsageError):
        budget_ranks([target([1, 1])], 0.5, FREE, [])


@pytest.mark.parametrize("allocate", [removal_ranks_of, uniform_ranks, tail_ranks])
@given(rates=st.lists(st.floats(0, 1), min_size=2, max_size=2))
@settings(max_examples=20)
def test_ranks_never_grow_with_the_knob(allocate, rates):
    targets = [target([5, 3, 2, 1, 0.5]), target([1, 1, 1, 1, 1], group=1)]
    low, high = sorted(rates)
    pairs = zip(allocate(targets, low, FREE), allocate(targets, high, FREE), strict=True)
    assert all(less_removed >= more_removed for less_removed, more_removed in pairs)


def test_a_grid_without_ranks_is_refused():
    with pytest.raises(UsageError):
        Grid(0, 1)


# --- Few head configs.


def heads(seed, layers, count, width, *, copies=1):
    """Return targets of K, then of V, of unlike spectra."""
    source = torch.Generator().manual_seed(seed)
    found = []
    for side, times in (("keys", copies), ("values", 1)):
        for layer in range(layers):
            for group in range(count * times):
                power = float(torch.rand(1, generator=source)) * 2
                values = torch.arange(1, width + 1, dtype=torch.float64) ** -power
                noise = 1 + 0.1 * torch.rand(width, generator=source, dtype=torch.float64)
                values = (values * noise).sort(descending=True).values
                found.append(target(values.tolist(), layer=layer, side=side, group=group))
    return found


def summed(losses, ranks):
    return sum(loss[rank] for loss, rank in zip(losses, ranks, strict=True))


@pytest.mark.parametrize("name", ["removal", "uniform", "tail"])
def test_an_allocation_has_the_least_of_its_own_loss_at_its_columns(name):
    """Whatever else has as few columns, drawn at random or changed by one step, loses more."""
    rule = {"removal": removal_ranks_of, "uniform": uniform_ranks, "tail": tail_ranks}[name]
    targets, grid = heads(0, 2, 2, 40), Grid(8, 8)
    losses = allocation_losses(name, targets, grid)
    source = torch.Generator().manual_seed(0)
    for knob in (0.05, 0.2, 0.4, 0.7):
        ranks = rule(targets, knob, grid)
        least, columns = summed(losses, ranks), sum(ranks)
        for _ in range(300):
            other = [8 * int(torch.randint(1, 6, (1,), generator=source)) for _ in targets]
            if sum(other) <= columns:
                assert summed(losses, other) >= least - 1e-9
        for index, next_one in itertools.permutations(range(len(targets)), 2):
            other = list(ranks)
            other[index] -= 8
            other[next_one] += 8
            if other[index] >= 8 and other[next_one] <= 40:
                assert summed(losses, other) >= least - 1e-9


def test_fisher_and_budget_lose_by_their_own_weights():
    targets = heads(1, 1, 2, 16)
    fisher = allocation_losses("fisher", targets, Grid(4, 4), [1.0, 2.0, 3.0, 4.0])
    # In proportion to F where nothing is clipped: 4, 8, 12 and 16 columns of 40.
    every = itertools.product((4, 8, 12, 16), repeat=4)
    least = min((ranks for ranks in every if sum(ranks) <= 40), key=lambda r: summed(fisher, r))
    assert least == (4, 8, 12, 16)
    budget = allocation_losses("budget", targets, Grid(4, 4), [1.0, 2.0, 3.0, 4.0])
    assert budget[2][8] == pytest.approx(3.0 * float(targets[2].errors[8]))


@pytest.mark.parametrize(("name", "copies"), [("removal", 1), ("removal", 2), ("tail", 1)])
def test_few_kinds_cost_no_more_and_lose_less_with_more_of_them(name, copies):
    targets, grid = heads(2, 6, 2, 64, copies=copies), Grid(8, 8)
    losses = allocation_losses(name, targets, grid)
    units = head_units(targets, whole_layers=name == "tail")
    assert len(units) == (6 if name == "tail" else 12)
    assert sorted(place for unit in units for side in unit for place in side) == list(
        range(len(targets))
    )
    rule = removal_ranks_of if name == "removal" else tail_ranks
    ranks = rule(targets, 0.3, grid)
    lost = []
    for kinds in (1, 2, 3, 4, 6):
        few = few_kinds(targets, units, losses, kinds)(ranks)
        assert sum(few) <= sum(ranks)
        pairs = {tuple(tuple(few[place] for place in side) for side in unit) for unit in units}
        assert len(pairs) <= kinds
        assert all(len(set(side)) == 1 for pair in pairs for side in pair)
        lost.append(summed(losses, few))
    assert lost == sorted(lost, reverse=True)
    if copies == 1:  # with a key per query head a KV head's have one rank in any case
        assert few_kinds(targets, units, losses, len(units))(ranks) == ranks
        assert lost[-1] >= summed(losses, ranks) - 1e-9


def test_few_kinds_of_one_side_alone():
    targets = [one for one in heads(3, 4, 2, 32) if one.side == "values"]
    losses = allocation_losses("removal", targets, Grid(4, 4))
    units = head_units(targets)
    assert units == [([], [place]) for place in range(8)]
    ranks = removal_ranks_of(targets, 0.25, Grid(4, 4))
    few = few_kinds(targets, units, losses, 3)(ranks)
    assert len(set(few)) == 3 < len(set(ranks))
    best = min(
        summed(losses, other)
        for three in itertools.combinations(sorted({4, *ranks}), 3)
        for other in itertools.product(three, repeat=8)
        if sum(other) <= sum(ranks)
    )
    assert summed(losses, few) <= best + 1e-9


def test_few_kinds_within_a_budget_of_measured_times():
    targets = heads(4, 4, 2, 32)
    times = {4 * step: 0.1 + 0.031 * step for step in range(1, 9)}
    cost = lambda _, rank: times[rank]  # noqa: E731
    ranks = budget_ranks(targets, 0.4, Grid(4, 4), [1.0] * 16, cost)
    losses = allocation_losses("budget", targets, Grid(4, 4), [1.0] * 16)
    few = few_kinds(targets, head_units(targets), losses, 3, cost)(ranks)
    assert len({(few[head], few[head + 8]) for head in range(8)}) <= 3
    assert sum(map(times.get, few)) <= sum(map(times.get, ranks))
