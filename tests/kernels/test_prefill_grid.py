"""Widths that prefill rewards: the search against trying everything."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.kernels.prefill.grid import class_costs, rewarded_widths

GRID = (32, 64, 96, 128)


def steps(key, value):
    """A library's steps: 96 costs what 128 does, values pay more than keys."""
    return 1.0 + (key > 64) * 0.3 + (value > 64) * 0.9


def errors(decay):
    return {width: 100.0 * decay**width for width in GRID}


def everything(costs, keys, values, budget):
    options = [(k, v) for k in GRID for v in GRID]
    for choice in itertools.product(options, repeat=len(keys)):
        if sum(map(sum, choice)) <= budget:
            lost = sum(keys[h][k] + values[h][v] for h, (k, v) in enumerate(choice))
            yield sum(costs[pair] for pair in choice), lost


decays = st.lists(st.floats(0.9, 0.999), min_size=2, max_size=2)


@settings(max_examples=40, deadline=None)
@given(decays, decays, st.sampled_from([192, 256, 320, 416]), st.floats(1.0, 1.6))
def test_nothing_beats_it_at_its_error_but_between_corners(keys, values, budget, slack):
    costs = class_costs(steps, GRID)
    keys, values = [errors(d) for d in keys], [errors(d) for d in values]
    tried = list(everything(costs, keys, values, budget))
    least = min(lost for _, lost in tried)
    limit = least * slack
    found = rewarded_widths(costs, keys, values, budget, error_limit=limit)
    assert found.dimensions <= budget
    assert found.error <= limit * (1 + 1e-6) + 1e-6
    pairs = zip(found.widths, keys, values, strict=True)
    assert found.error == pytest.approx(sum(k[w[0]] + v[w[1]] for w, k, v in pairs))
    assert found.seconds == pytest.approx(sum(costs[pair] for pair in found.widths))
    # On the hull: no mix of two choices that do as well in both is below it.
    for (t0, e0), (t1, e1) in itertools.product(
        [p for p in tried if p[0] < found.seconds - 1e-9],
        [p for p in tried if p[1] < found.error - 1e-9],
    ):
        share = (found.error - e1) / (e0 - e1) if e0 != e1 else 0.0
        if 0 <= share <= 1:
            assert share * t0 + (1 - share) * t1 >= found.seconds - 1e-6


def test_the_least_error_is_the_default_and_equal_errors_take_the_faster():
    costs = class_costs(steps, GRID)
    flat = [{32: 5.0, 64: 1.0, 96: 0.5, 128: 0.5}]
    sharp = [{32: 9.0, 64: 6.0, 96: 3.0, 128: 0.0}]
    found = rewarded_widths(costs, flat, sharp, 256)
    assert found.widths == ((96, 128),)
    found = rewarded_widths(costs, flat, sharp, 256, error_limit=1.0)
    assert found.widths == ((64, 128),)
    found = rewarded_widths(costs, flat, sharp, 256, error_limit=7.0)
    assert found.widths == ((64, 64),)
    assert found.seconds == 1.0


def test_the_same_bytes_are_faster_at_hardly_more_error():
    costs = class_costs(steps, GRID)
    keys, values = [errors(0.98)] * 8, [errors(0.985)] * 8
    careful = rewarded_widths(costs, keys, values, 8 * 160)
    quick = rewarded_widths(costs, keys, values, 8 * 160, error_limit=careful.error * 1.2)
    assert quick.seconds < careful.seconds
    assert quick.error <= careful.error * 1.2 + 1e-6


def test_what_cannot_be_had_is_refused():
    costs = class_costs(steps, GRID)
    keys = values = [errors(0.98)]
    with pytest.raises(UsageError, match="63"):
        rewarded_widths(costs, keys, values, 63)
    with pytest.raises(UsageError, match="least"):
        rewarded_widths(costs, keys, values, 128, error_limit=1e-9)
    with pytest.raises(UsageError, match="cost is known"):
        rewarded_widths({}, keys, values, 128)
    with pytest.raises(UsageError, match="no cost"):
        class_costs(lambda key, value: 0.0, GRID)
