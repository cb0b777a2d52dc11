"""Sums over steps from a few rungs, against closed forms."""

from itertools import pairwise

import numpy as np
import pytest

from kvprof.analysis.jct import (
    between,
    beyond,
    integral,
    interpolated,
    ladder,
    percentiles,
    step_weights,
)


def test_a_ladder_holds_its_ends_and_climbs_by_no_more_than_its_ratio():
    rungs = ladder([129, 102_400, 4_000])
    assert rungs[0] == 129
    assert rungs[-1] == 102_400
    assert 4_000 in rungs
    assert max(b / a for a, b in pairwise(rungs)) < 2.02
    assert len(rungs) < 15


def test_ends_that_measure_the_same_are_measured_once_and_the_last_is_kept():
    rungs = ladder([100, 102_401, 102_655])
    assert rungs[-1] == 102_655
    assert 102_401 not in rungs
    assert ladder([1000, 1010]) == [1000, 1010]  # one request: its own ends
    assert ladder([1000, 1010, 1015]) == [1000, 1015]
    assert ladder([7]) == [7]


@pytest.mark.parametrize("ends", [[], [0, 5]])
def test_a_ladder_without_tokens_is_refused(ends):
    with pytest.raises(ValueError, match="1 token"):
        ladder(ends)


@pytest.mark.parametrize(("first", "last"), [(10, 1000), (10, 10), (700, 1000), (11, 13), (65, 64)])
def test_weights_equal_a_sum_over_every_step(first, last):
    nodes = [10, 12, 64, 65, 700, 1000]
    values = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0])
    every = sum(np.interp(c, nodes, values) for c in range(first, last + 1))
    assert step_weights(nodes, first, last) @ values == pytest.approx(every)
    assert step_weights(nodes, first, last).sum() == pytest.approx(max(0, last - first + 1))


def test_what_grows_with_the_context_is_summed_exactly():
    first, last = 257, 102_655
    nodes = ladder([first, last])
    found = integral(nodes, [2.0 + 3.0 * c for c in nodes], first, last)
    count = last - first + 1
    assert found.value == pytest.approx(2.0 * count + 3.0 * count * (first + last) / 2, rel=1e-12)
    assert found.error == pytest.approx(0, abs=1e-6 * found.value)


@pytest.mark.parametrize("curve", [lambda c: c**2, np.sqrt, np.log])
def test_the_error_estimate_holds_for_curves_and_is_not_far_too_large(curve):
    first, last = 1000, 60_000
    nodes = ladder([first, last])
    exact = float(curve(np.arange(first, last + 1, dtype=float)).sum())
    found = integral(nodes, [float(curve(c)) for c in nodes], first, last)
    off = abs(found.value - exact)
    assert off <= 1.3 * found.error
    assert found.error < 5 * off


def test_too_few_rungs_tell_no_error():
    assert integral([10, 20], [1.0, 2.0], 10, 20).error is None
    assert integral([10], [1.5], 10, 10) == (1.5, None)


def test_nothing_is_extrapolated():
    with pytest.raises(ValueError, match="outside"):
        step_weights([10, 20], 10, 21)
    with pytest.raises(ValueError, match="outside"):
        interpolated([10, 20], [1, 2], 9)
    assert interpolated([10, 20], [1, 2], 15) == pytest.approx(1.5)


def test_a_quadratic_is_predicted_beyond_what_was_measured():
    lengths = [512, 1024, 2048]
    found = beyond(lengths, [1e-3 + 2e-6 * t + 3e-9 * t * t for t in lengths], 102_400, degree=2)
    assert found == pytest.approx(1e-3 + 2e-6 * 102_400 + 3e-9 * 102_400**2, rel=1e-6)


def test_no_part_of_a_prediction_is_negative():
    # Falling times would ask for a negative slope: the curve stays flat, at the constant whose
    # relative distances have the least squares, (1/2 + 1) / (1/4 + 1).
    assert beyond([100, 200], [2.0, 1.0], 1000, degree=1) == pytest.approx(1.2)


@pytest.mark.parametrize(("lengths", "degree"), [([100], 1), ([1, 2], 3)])
def test_too_little_tells_no_curve(lengths, degree):
    with pytest.raises(ValueError, match="degree"):
        beyond(lengths, [1.0] * len(lengths), 1000, degree=degree)


def test_percentiles_are_named_by_their_share():
    found = percentiles([float(n) for n in range(101)])
    assert found == {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_between_lengths_sums_of_plain_costs_are_exact():
    lengths = [2**n for n in range(6, 12)]

    def cost(tokens):
        return 1e-3 + 1e-5 * tokens + 2e-8 * tokens**2

    values = [cost(length) for length in lengths]
    for at in range(64, 2049, 7):
        assert between(lengths, values, at) == pytest.approx(cost(at))
    with pytest.raises(ValueError, match="2049"):
        between(lengths, values, 2049)


def test_between_lengths_noise_hardly_grows():
    lengths = [64, 128, 256, 512]
    for place in range(4):
        values = [1.0 + 0.1 * (n == place) for n in range(4)]
        for at in range(64, 513):
            assert 0.96 < between(lengths, values, at) < 1.12


def test_between_two_lengths_is_a_line():
    assert between([100, 200], [1.0, 3.0], 150) == 2.0
    assert between([100], [1.0], 100) == 1.0
