"""Intervals against independent computation, and how often they hold a truth that is known."""

from math import comb

import numpy as np
import pytest
from scipy.signal import lfilter
from scipy.stats import norm, t

from kvprof.analysis.stats import (
    binomial_interval,
    binomial_tail,
    draws,
    mean_interval,
    median_ends,
    median_ratio_ends,
    quantile_interval,
    ratio_interval,
    share_interval,
    unseen_share,
)

TRIALS = 400


def held(draw, interval, truth) -> float:
    """Return in what share of trials an interval holds the truth."""
    generator = np.random.default_rng(0)
    found = [interval(*draw(generator)) for _ in range(TRIALS)]
    return float(np.mean([low <= truth <= high for low, high in found]))


def test_of_32_sequences_it_holds_the_accuracy_kept_as_often_as_it_says():
    def draw(generator):
        base = generator.binomial(128, generator.beta(12, 8, 32))
        return generator.binomial(base, generator.beta(95, 5, 32)), base

    assert 0.92 <= held(draw, lambda a, b: ratio_interval(a, b, [32]), 0.95) <= 0.97


def test_a_share_of_questions_is_held_however_near_to_all():
    for truth in (0.5, 0.9, 0.98):
        found = held(lambda g, p=truth: (g.binomial(64, p) / 64, 64), binomial_interval, truth)
        assert 0.92 <= found <= 0.98


@pytest.mark.parametrize(("alike", "number"), [(0.0, 200), (0.5, 200), (0.8, 400), (0.9, 2000)])
def test_the_mean_of_neighbours_that_are_alike_is_held(alike: float, number: int):
    def draw(generator):
        return (lfilter([1], [1, -alike], generator.normal(size=number + 200))[200:],)

    assert 0.92 <= held(draw, mean_interval, 0.0) <= 0.98
    above = norm.ppf(0.9, scale=1 / np.sqrt(1 - alike**2))
    few = [
        found
        for one in range(60)
        if (found := quantile_interval(draw(np.random.default_rng(one))[0], 0.9))
    ]
    assert len(few) >= 30
    assert np.mean([low <= above <= high for low, high in few]) >= 0.85


def test_the_median_of_15_times_is_held_and_fewer_give_their_range():
    assert 0.92 <= held(lambda g: (g.lognormal(0, 0.1, 15).tolist(),), median_ends, 1.0) <= 0.98
    assert median_ends([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_ends([3.0]) is None
    paired = median_ratio_ends([2.0, 8.0, 3.0], [1.0, 2.0, 3.0], paired=True)
    assert paired == (1.0, 4.0)
    assert median_ratio_ends([2.0, 8.0], [1.0, 2.0, 4.0], paired=False) == (0.5, 8.0)
    assert median_ratio_ends([2.0, 8.0], [1.0, 2.0, 4.0], paired=True) is None


def test_what_slows_a_round_down_cancels():
    generator = np.random.default_rng(1)
    rounds = generator.lognormal(0, 0.5, 30)
    other = 2 * rounds * generator.lognormal(0, 0.01, 30)
    low, high = median_ratio_ends(other, rounds, paired=True)
    assert low <= 2 <= high
    apart = median_ratio_ends(other, rounds, paired=False)
    assert apart[1] - apart[0] > 5 * (high - low) or high - low < 0.3 * (apart[1] - apart[0])


def test_a_ratio_is_that_of_members_drawn_one_by_one_each_stratum_on_its_own():
    generator = np.random.default_rng(3)
    base = generator.integers(5, 20, size=40).astype(float)
    other = np.maximum(0, base - generator.integers(0, 4, size=40))
    counts = draws([15, 25])
    assert set(counts[:, :15].sum(1)) == {15}
    assert set(counts[:, 15:].sum(1)) == {25}
    members = [np.repeat(np.arange(40), row) for row in counts]
    ratios = [other[one].sum() / base[one].sum() for one in members]
    wide = np.sqrt(40 / 39) * t.ppf(0.975, 39)  # Hesterberg's expanded percentiles
    wanted = np.quantile(ratios, [norm.cdf(-wide), norm.cdf(wide)])
    np.testing.assert_allclose(ratio_interval(other, base, [15, 25]), wanted, rtol=1e-12)
    low, high = ratio_interval(0.9 * base, base, [40])
    assert low == pytest.approx(0.9) == pytest.approx(high)


def test_of_fewer_than_32_sequences_there_is_none():
    assert ratio_interval(np.ones(31), np.ones(31), [31]) is None
    assert ratio_interval(np.ones(32), np.ones(32), [16, 16]) is not None
    assert ratio_interval(np.ones(32), np.eye(32)[0], [32]) is None
    assert mean_interval(np.ones(19)) is None
    assert share_interval([True] * 19) is None


@pytest.mark.parametrize(("trials", "chance"), [(1, 0.25), (5, 0.25), (50, 0.07), (240, 0.5)])
def test_what_guessing_reaches_is_the_tail_of_the_binomial(trials: int, chance: float) -> None:
    each = [comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(trials + 1)]
    for right in {0, 1, trials // 3, trials - 1, trials}:
        assert binomial_tail(right, trials, chance) == pytest.approx(sum(each[right:]), rel=1e-9)
    assert binomial_tail(trials - 0.5, trials, chance) == binomial_tail(trials - 1, trials, chance)


def test_where_nothing_can_be_guessed_one_right_answer_is_enough() -> None:
    assert binomial_tail(1, 5, 0.0) == 0
    assert binomial_tail(0.9, 5, 0.0) == binomial_tail(0, 5, 0.0) == 1
    assert binomial_tail(5, 5, 1.0) == 1


def test_what_none_of_many_lost_may_be_lost_by_few():
    assert (1 - unseen_share(300)) ** 300 == pytest.approx(0.05)
    assert unseen_share(0) == 1
