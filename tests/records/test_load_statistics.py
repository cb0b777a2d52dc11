"""What a load's requests tell, against independent computation and queues with known answers."""

import numpy as np
import pytest

from kvprof.records.load_statistics import (
    break_even,
    fitted,
    growth,
    mean_ratio,
    summarised,
    window_of,
)


def test_mean_and_percentiles_are_numpys():
    values = np.random.default_rng(0).gamma(2.0, 1.0, 500)
    found = summarised(list(values))
    assert found["mean"] == pytest.approx(values.mean())
    for name, share in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert found[name] == pytest.approx(np.percentile(values, share))
        low, high = found[f"{name}_interval"]
        assert low <= found[name] <= high
        assert low < high


def test_what_few_requests_do_not_tell_is_none():
    found = summarised([1.0, 2.0, 3.0])
    assert (found["count"], found["mean"], found["p50"]) == (3, 2.0, 2.0)
    assert found["p90"] is None
    assert found["p99"] is None
    assert found["mean_interval"] is None
    assert summarised([])["mean"] is None
    assert summarised(list(range(99)))["p99"] is None
    assert summarised(list(range(100)))["p99"] is not None


def test_intervals_widen_for_neighbours_that_are_alike():
    generator = np.random.default_rng(1)
    independent = list(generator.normal(10, 1, 400))
    alike = list(np.repeat(generator.normal(10, 1, 20), 20))
    widths = [np.ptp(summarised(values)["mean_interval"]) for values in (independent, alike)]
    assert widths[1] > 3 * widths[0]
    assert widths[1] == pytest.approx(2 * 1.96 / np.sqrt(20), rel=0.5)


def test_the_interval_of_a_mean_holds_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(2)
    held = 0
    for _ in range(60):
        low, high = summarised(list(generator.exponential(1.0, 200)))["mean_interval"]
        held += low <= 1.0 <= high
    assert held >= 50


@pytest.mark.parametrize(("name", "share", "count"), [("p50", 0.5, 60), ("p95", 0.95, 400)])
def test_the_interval_of_a_percentile_holds_the_truth_about_as_often(name, share, count):
    generator = np.random.default_rng(3)
    truth, held = -np.log(1 - share), 0
    for _ in range(60):
        low, high = summarised(list(generator.exponential(1.0, count)))[f"{name}_interval"]
        held += low <= truth <= high
    assert held >= 54


def test_a_percentile_whose_interval_would_end_beyond_all_requests_has_none():
    found = summarised(list(np.random.default_rng(4).exponential(1.0, 160)))
    assert found["p99"] is not None
    assert found["p99_interval"] is None


def mm1(arrival_rate, service_rate, count, seed):
    """One server, first come first served: arrivals and ends."""
    generator = np.random.default_rng(seed)
    arrivals = np.cumsum(generator.exponential(1 / arrival_rate, count))
    ends, free = [], 0.0
    for came, takes in zip(arrivals, generator.exponential(1 / service_rate, count), strict=True):
        free = max(free, came) + takes
        ends.append(free)
    return list(arrivals), ends


def judged(arrival_rate, service_rate, count, seed):
    arrivals, ends = mm1(arrival_rate, service_rate, count, seed)
    return growth(arrivals, ends, window_of(arrivals, ends))


def test_a_queue_that_keeps_up_is_not_said_to_grow():
    grown = [judged(0.8, 1.0, 300, seed)["grows"] for seed in range(60)]
    assert grown.count(True) <= 3
    assert grown.count(False) >= 45
    assert [judged(0.5, 1.0, 300, seed)["grows"] for seed in range(20)].count(False) >= 19


def test_a_load_that_is_a_little_too_large_is_seldom_called_steady():
    grown = [judged(1.15, 1.0, 300, seed)["grows"] for seed in range(60)]
    assert grown.count(False) <= 20


def test_a_queue_that_cannot_keep_up_grows_by_what_is_left():
    found = [judged(1.5, 1.0, 400, seed) for seed in range(20)]
    assert all(one["grows"] for one in found)
    assert np.mean([one["growth_per_s"] for one in found]) == pytest.approx(0.5, rel=0.15)
    # It is told of the requests that came: how many these were is no part of its interval.
    held = 0
    for seed, one in enumerate(found):
        arrivals, ends = mm1(1.5, 1.0, 400, seed)
        begin, end, _ = window_of(arrivals, ends)
        came = sum(begin <= time < end for time in arrivals) / (end - begin)
        low, high = one["growth_per_s_interval"]
        held += low <= came - 1.0 <= high
    assert held >= 16


def test_many_who_come_at_the_end_are_no_queue_that_grows():
    # Four a second, each there for 3 s, and a crowd at the end.
    steady = [0.25 * n for n in range(80)]
    crowd = [20.0 + 0.1 * n for n in range(40)]
    arrivals = [*steady, *crowd]
    ends = [came + 3.0 for came in arrivals]
    found = growth(arrivals, ends, window_of(arrivals, ends))
    assert found["growth_per_s_interval"][0] > 0
    assert found["grows"] is None
    # The same arrivals where who comes late does not leave, and more and more are there.
    late = [came + 3.0 + 0.5 * max(0.0, came - 5.0) for came in arrivals]
    assert growth(arrivals, late, window_of(arrivals, late))["grows"] is True


def test_few_requests_tell_nothing_of_growth():
    assert judged(1.0, 2.0, 15, 0)["grows"] is None
    assert growth([], [], window_of([], []))["growth_per_s"] is None


def test_waiting_and_service_of_a_known_queue():
    arrivals, ends = mm1(0.5, 1.0, 6000, 5)
    begin, end, _ = window_of(arrivals, ends)
    inside = [e - a for a, e in zip(arrivals, ends, strict=True) if begin <= a <= end]
    low, high = summarised(inside)["mean_interval"]
    assert low <= 2.0 <= high  # 1 / (service rate - arrival rate)
    assert summarised(inside)["p50"] == pytest.approx(2 * np.log(2), rel=0.15)


def test_the_window_leaves_out_both_ends_and_what_came_before_a_tenth_had_ended():
    arrivals = [float(n) for n in range(100)]
    assert window_of(arrivals, [n + 1.0 for n in arrivals]) == (10.0, 89.0, True)
    assert window_of(arrivals, [n + 30.0 for n in arrivals]) == (39.0, 89.0, True)
    assert window_of(arrivals, [n + 500.0 for n in arrivals]) == (49.0, 89.0, False)
    # What never ended does not hold it up.
    assert window_of(arrivals, [None, *(n + 1.0 for n in arrivals[1:])]) == (10.0, 89.0, True)
    assert window_of([], []) == (0.0, 0.0, False)
    begin, end, _ = window_of([1.0], [2.0])
    assert begin <= 1.0 <= end


def test_a_system_that_fills_is_not_said_to_grow():
    # 4 a second, each served in 12 s by itself: 48 are in the system for ever, once it has filled.
    arrivals = [0.25 * n for n in range(64)]
    short = growth(
        arrivals,
        [came + 12.0 for came in arrivals],
        window_of(arrivals, [came + 12.0 for came in arrivals]),
    )
    assert short["growth_per_s"] > 1
    assert short["grows"] is None
    # Nor to be steady, where it grows for sure and one moment was as empty as early.
    generator = np.random.default_rng(122)
    arrivals = list(np.cumsum(generator.exponential(1.0, 100)))
    ends = [came + took for came, took in zip(arrivals, generator.gamma(4, 10, 100), strict=True)]
    window = window_of(arrivals, ends)
    assert not window.settled
    found = growth(arrivals, ends, window)
    assert found["growth_per_s_interval"][0] > 0
    assert found["grows"] is None
    longer = [0.25 * n for n in range(400)]
    ends = [came + 12.0 for came in longer]
    assert growth(longer, ends, window_of(longer, ends))["grows"] is False


def test_a_ratio_over_the_same_requests_is_told_closer_than_of_different_ones():
    generator = np.random.default_rng(3)
    base = generator.gamma(1.0, 1.0, 300)
    found = mean_ratio([(0.8 * one * generator.normal(1, 0.01), one) for one in base])
    assert found["ratio"] == pytest.approx(0.8, abs=0.01)
    low, high = found["interval"]
    assert 0.78 < low <= found["ratio"] <= high < 0.82
    assert mean_ratio([]) is None
    assert mean_ratio([(1.0, 2.0)])["interval"] is None


def spans(intercept, context, batch, prefill, count=300, seed=0, noise=2e-5):
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        size = float(generator.integers(1, 30))
        held = size * generator.uniform(1000, 9000)
        read = float(generator.choice([0.0, 500.0]))
        seconds = intercept + context * held + batch * size + prefill * read
        found.append(
            {
                "at": 0.0,
                "tokens": float(generator.integers(5, 100)),
                "between": seconds + generator.normal(0, noise),
                "batch": size,
                "context": held,
                "prefill": read,
            }
        )
    return found


def test_a_line_is_the_weighted_least_squares_one():
    data = spans(6e-3, 2e-8, 1e-5, 4e-7)
    fit = fitted(data)
    matrix = np.array([[1, s["context"], s["batch"], s["prefill"]] for s in data])
    root = np.sqrt([s["tokens"] for s in data])
    between = np.array([s["between"] for s in data])
    expected = np.linalg.lstsq(matrix * root[:, None], between * root, rcond=None)[0]
    own = [fit.intercept, *(fit.slopes[name] for name in ("context", "batch", "prefill"))]
    assert own == pytest.approx(list(expected), rel=1e-6)
    for name, truth in (("intercept", 6e-3), ("context", 2e-8), ("batch", 1e-5), ("prefill", 4e-7)):
        low, high = fit.intervals[name]
        assert low < truth < high
    assert fit.r2 > 0.95


def test_what_varies_only_with_something_else_is_left_out():
    data = [{**one, "context": 4096 * one["batch"], "prefill": 0.0} for one in spans(1e-3, 0, 0, 0)]
    for one in data:
        one["between"] = 1e-3 + 1e-8 * one["context"]
    fit = fitted(data)
    assert fit.left_out == ("batch", "prefill")
    assert fit.slopes["context"] == pytest.approx(1e-8)
    assert fitted(data[:10]) is None


@pytest.mark.parametrize(
    ("intercept", "context", "said", "where"),
    [
        (8e-3, 1e-8, "from", 200_000),  # 2 ms more at once, 1e-8 s a token less
        (5e-3, 1e-8, "always", None),
        (8e-3, 3e-8, "never", None),
        (5e-3, 3e-8, "until", 100_000),
    ],
)
def test_the_break_even_context(intercept, context, said, where):
    full = fitted(spans(6e-3, 2e-8, 0, 0, seed=1))
    own = fitted(spans(intercept, context, 0, 0, seed=2))
    for batch in (1, 8):
        found = break_even(own, full, batch)
        assert found["pays"] == said
        assert found["certain"] > 0.9
        if where is not None:
            assert found["context"] * batch == pytest.approx(where, rel=0.05)
            low, high = found["interval"]
            assert low < where / batch < high
            assert found["seen"] == (where < 29 * 9000)
        else:
            assert found["context"] is None


def test_few_stretches_have_a_line_and_no_interval():
    few, many = (fitted(spans(6e-3, 2e-8, 1e-5, 4e-7, count=count)) for count in (49, 50))
    assert few.slopes["context"] == pytest.approx(2e-8, rel=0.1)
    assert set(few.intervals.values()) == {None}
    assert None not in many.intervals.values()
    assert break_even(few, many, 1)["pays"] == "unclear"


@pytest.mark.parametrize(
    ("intercept", "context"),
    [(-4e-3, 2e-7), (9e-3, -2e-8)],  # the one costs less than nothing, the other ever less
)
def test_a_line_that_no_step_can_follow_tells_no_break_even(intercept, context):
    full = fitted(spans(6e-3, 4e-8, 0, 0, seed=1))
    own = fitted(spans(intercept, context, 0, 0, seed=2))
    found = break_even(own, full, 1)
    assert (found["pays"], found["context"], found["interval"]) == ("unclear", None, None)
    assert not found["seen"]
    assert break_even(full, own, 1)["pays"] == "unclear"


def test_without_a_slope_there_is_no_break_even():
    flat = [{**one, "context": 1000.0} for one in spans(1e-3, 0, 1e-5, 0)]
    assert break_even(fitted(flat), fitted(flat), 1) is None
