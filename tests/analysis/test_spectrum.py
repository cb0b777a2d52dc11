"""Ranks by FDC's eq. 1 read literally, and the figures that have a closed form."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvprof.analysis.spectrum import (
    coefficient_of_variation,
    effective_rank,
    energy_kept,
    from_eigenvalues,
    removal,
    removal_ranks,
    round_up,
    singular_values,
)


def fewest_dimensions(values: list[int], rate: Fraction) -> int:
    """FDC eq. 1: the fewest leading dimensions whose removed rest is at most the rate."""
    total = sum(values)
    for rank in range(1, len(values) + 1):
        if Fraction(sum(values[rank:]), max(total, 1)) <= rate:
            return rank
    raise AssertionError("rank d removes nothing")


spectra = st.lists(st.integers(0, 10**6), min_size=1, max_size=24).map(
    lambda values: sorted(values, reverse=True)
)


@given(values=spectra, percent=st.integers(0, 99))
@example(values=[0, 0, 0], percent=10)
@example(values=[5, 5, 0, 0], percent=0)
@example(values=[90, 10], percent=10)  # a share that equals the rate exactly may go
@example(values=[7, 2, 1], percent=30)
def test_removal_ranks_equal_the_brute_force_reading(values, percent):
    rate = Fraction(percent, 100)
    ranks = removal_ranks(torch.tensor([values], dtype=torch.float64), percent / 100)
    assert ranks.tolist() == [fewest_dimensions(values, rate)]


def test_removal_ranks_sum_singular_values_and_not_their_squares():
    values = torch.tensor([8.0, 1.0, 1.0], dtype=torch.float64)
    assert int(removal_ranks(values, 0.1)) == 2  # squares would allow 1: 2/66 of the energy
    assert int(removal_ranks(values, 0.2)) == 1


def test_a_removal_of_nothing_keeps_all_that_is_not_zero():
    values = torch.tensor([[3.0, 2.0, 1e-9, 0.0], [1.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    assert removal_ranks(values, 0.0).tolist() == [3, 4]


@pytest.mark.parametrize(
    ("rank", "grid", "width", "rounded"),
    [
        (1, 16, 128, 16), (16, 16, 128, 16), (17, 16, 128, 32), (121, 16, 128, 128),
        (70, 16, 72, 72), (5, 1, 128, 5), (3, 16, 8, 8),
    ],
)  # fmt: skip
def test_ranks_round_up_to_the_grid_and_never_past_the_width(rank, grid, width, rounded):
    assert round_up(rank, grid, width) == rounded


def test_dim_rate_by_hand_with_layers_of_different_shape():
    # Two layers: 2 heads of 4 dimensions, then 1 head of 8; V is 4 wide everywhere.
    flat4, flat8 = torch.ones(2, 4, dtype=torch.float64), torch.ones(1, 8, dtype=torch.float64)
    steep4 = torch.tensor([[1.0, 0, 0, 0]] * 2, dtype=torch.float64)
    found = removal([flat4, flat8], [steep4, steep4[:1]], 0.5, grid=3)
    assert found.ranks_qk == [[2, 2], [4]]
    assert found.ranks_vo == [[1, 1], [1]]
    assert found.rounded_ranks_qk == [[3, 3], [6]]
    assert found.rounded_ranks_vo == [[3, 3], [3]]
    # Full rank: 2·4 + 8 of K and 2·4 + 4 of V.
    assert found.dim_rate == pytest.approx(1 - (2 + 2 + 4 + 1 + 1 + 1) / 28, abs=1e-15)
    assert found.dim_rate_rounded == pytest.approx(1 - (3 + 3 + 6 + 3 + 3 + 3) / 28, abs=1e-15)
    assert found.grid == 3


def test_coefficient_of_variation_is_over_all_heads_of_all_layers():
    layers = [
        torch.tensor([[2.0, 1.0], [4.0, 1.0]], dtype=torch.float64),
        torch.tensor([[9.0, 8.0, 7.0]], dtype=torch.float64),
    ]
    assert coefficient_of_variation(layers) == pytest.approx(np.std([2, 4, 9]) / 5, rel=1e-14)
    assert coefficient_of_variation([torch.zeros(2, 3, dtype=torch.float64)]) == 0.0


def test_effective_rank_has_its_closed_forms():
    one = torch.tensor([5.0, 0, 0, 0], dtype=torch.float64)
    flat = torch.full((4,), 0.3, dtype=torch.float64)
    two = torch.tensor([3.0, 1.0, 0, 0], dtype=torch.float64)
    found = effective_rank(torch.stack([one, flat, two, torch.zeros_like(one)]))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert found.tolist() == pytest.approx([1.0, 4.0, math.exp(entropy), 0.0], abs=1e-14)


def test_energy_kept_is_the_share_of_squares():
    values = torch.tensor([[3.0, 2.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    kept = energy_kept(values)
    assert kept[0].tolist() == pytest.approx([9 / 14, 13 / 14, 1.0], abs=1e-15)
    assert kept[1].tolist() == [1.0, 1.0, 1.0]  # nothing to lose


def test_noise_is_cut_against_each_head_by_itself():
    gram = torch.diag_embed(
        torch.tensor([[1.0, 1e-20, 0.0], [1e-16, 1e-20, -1e-40]], dtype=torch.float64)
    )
    values = singular_values(gram)
    assert values[0].tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert values[1].tolist() == pytest.approx([1e-8, 1e-10, 0.0])
    assert torch.equal(
        from_eigenvalues(torch.zeros(4, dtype=torch.float64)), torch.zeros(4).double()
    )


def test_a_head_without_any_signal_does_not_break_the_rest():
    values = singular_values(torch.zeros(1, 4, 4, dtype=torch.float64))
    assert removal([values], [values], 0.1, grid=1).ranks_qk == [[1]]
