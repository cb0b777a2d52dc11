"""What a load's requests tell, against independent computation and queues with known answers."""

import numpy as np
import pytest

from kvprof.analysis.stats import share_interval
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


def test_a_percentile_whose_interval_would_end_beyond_all_requests_has_none():
    found = summarised(list(np.random.default_rng(4).exponential(1.0, 160)))
    assert found["p99"] is not None
    assert found["p99_interval"] is None


def queue(kind, load, count, seed):
    """Return arrivals and ends of M/M/1, M/D/1, or a server of up to 16 at once; a service is 1."""
    generator = np.random.default_rng(seed)
    arrivals = np.cumsum(generator.exponential(1 / load, count))
    if kind != "batches":
        services = generator.exponential(1, count) if kind == "mm1" else np.ones(count)
        done = np.cumsum(services)
        ends = done + np.maximum.accumulate(arrivals - done + services)
        return arrivals.tolist(), ends.tolist()
    ends, free, first = np.empty(count), 0.0, 0
    while first < count:
        free = max(free, arrivals[first])
        last = min(np.searchsorted(arrivals, free, "right"), first + 16)
        free += 8 + (last - first) / 2
        ends[first:last], first = free, last
    return arrivals.tolist(), ends.tolist()


def judged(kind, load, count, seed):
    arrivals, ends = queue(kind, load, count, seed)
    return growth(arrivals, ends, window_of(arrivals, ends).settled)


KINDS = ("mm1", "md1", "batches")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_served_and_what_is_not_is_told_of_many_requests(kind):
    """What keeps up is never said to grow, and one in forty too much seldom to be served."""
    for load in (0.5, 0.8, 0.9):
        assert [judged(kind, load, 20_000, seed)["grows"] for seed in range(20)].count(False) >= 18
    for load, least in ((1.06, 16), (1.25, 20)):
        grown = [judged(kind, load, 20_000, seed)["grows"] for seed in range(20)]
        assert grown.count(True) >= least
    assert [judged(kind, 1.025, 20_000, seed)["grows"] for seed in range(40)].count(False) <= 3


@pytest.mark.parametrize("kind", KINDS)
def test_few_requests_tell_of_much_too_large_a_load_alone(kind):
    for load in (0.9, 1.0, 1.1):
        grown = [judged(kind, load, 200, seed)["grows"] for seed in range(60)]
        assert (grown.count(True) <= 6, grown.count(False)) == (True, 0)
    assert judged(kind, 0.9, 30, 0)["growth_per_s_interval"] is None
    assert growth([], [], False)["growth_per_s"] is None


@pytest.mark.parametrize(
    ("kind", "load", "mean"), [("mm1", 0.8, 5.0), ("md1", 0.9, 5.5), ("batches", 0.8, None)]
)
def test_intervals_of_a_served_load_hold_the_truth_about_as_often_as_they_say(kind, load, mean):
    """M/M/1 stays 1 / (1 - load), M/D/1 1 + load / (2 (1 - load)), batches as a long run says."""
    stays = [np.subtract(*queue(kind, load, 400_000, seed)[::-1])[4000:] for seed in (1, 2)]
    long = np.concatenate(stays)
    mean = float(long.mean()) if mean is None else mean
    limit = float(np.percentile(long, 90))
    held = {"mean": 0, "p50": 0, "p90": 0, "share": 0}
    for seed in range(100, 150):
        arrivals, ends = queue(kind, load, 20_000, seed)
        begin, end, _ = window_of(arrivals, ends)
        own = [e - a for a, e in zip(arrivals, ends, strict=True) if begin <= a <= end]
        found = summarised(own)
        shares = share_interval([one <= limit for one in own])
        for name, truth in (("mean", mean), ("p50", np.median(long)), ("p90", limit)):
            low, high = found[f"{name}_interval"] or (truth, truth)  # it may end beyond all
            held[name] += low <= truth <= high
        held["share"] += shares[0] <= 0.9 <= shares[1]
    assert min(held.values()) >= 44, held


def test_a_crowd_at_the_end_and_a_system_that_fills_are_no_queue_that_grows():
    # Four a second, each there for 3 s, and a crowd at the end, of whom nobody has left yet.
    arrivals = [*(0.25 * n for n in range(80)), *(20.0 + 0.1 * n for n in range(40))]
    ends = [came + 3.0 for came in arrivals]
    assert growth(arrivals, ends, window_of(arrivals, ends).settled)["grows"] is not True
    # 4 a second, each served in 12 s: 48 are in the system for ever, once it has filled.
    for count, expected in ((64, None), (400, False)):
        arrivals = [0.25 * n for n in range(count)]
        ends = [came + 12.0 for came in arrivals]
        assert growth(arrivals, ends, window_of(arrivals, ends).settled)["grows"] is expected


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
