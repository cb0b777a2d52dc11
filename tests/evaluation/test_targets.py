"""Shares of the baseline's metric, their intervals, and the rates read off them."""

from typing import Any

import pytest

from kvprof.errors import UsageError
from kvprof.evaluation.targets import (
    check_baseline,
    check_metric,
    max_rate,
    max_rate_interval,
    share_interval_of,
    share_of,
)
from tests.evaluation.search_families import evaluation


def points(*rows: tuple[float, float], half: float = 0.005) -> list[dict[str, Any]]:
    return [
        {"rate": rate, "share": share, "share_interval": [share - half, share + half]}
        for rate, share in rows
    ]


def test_shares_of_every_metric() -> None:
    found = evaluation(0.9)
    found["tasks"]["needle"]["accuracy"] = 0.6
    assert share_of(found, "accuracy") == 0.9
    assert share_of(found, "perplexity") == pytest.approx(10 / (10 / 0.9))
    assert share_of(found, "needle") == pytest.approx(0.6 / 0.8)
    assert share_of(found, "tasks") == pytest.approx((0.6 + 0.4) / (0.8 + 0.4))


def test_intervals_of_every_metric() -> None:
    found = evaluation(0.8, half=0.01)
    assert share_interval_of(found, "accuracy") == pytest.approx([0.79, 0.81])
    # The ratio there is the method's perplexity over the baseline's: its ends change places.
    assert share_interval_of(found, "perplexity") == pytest.approx([0.8 / 1.01, 0.8 / 0.99])
    assert share_interval_of(found, "needle") == pytest.approx([0.9, 1.05])
    assert share_interval_of(found, "tasks") is None


def test_max_rate_needs_every_lower_rate() -> None:
    assert max_rate(points((0.5, 0.99), (0.1, 1.0), (0.3, 0.98)), 0.99) == 0.1
    assert max_rate(points((0.5, 0.99), (0.1, 1.0), (0.3, 0.995)), 0.99) == 0.5
    assert max_rate(points((0.1, 0.98), (0.3, 1.0)), 0.99) is None
    assert max_rate([], 0.99) is None


def test_a_share_that_meets_the_target_exactly_meets_it() -> None:
    assert max_rate([{"rate": 0.4, "share": 99 / 100 * 3 / 3}], 0.99) == 0.4
    assert max_rate([{"rate": 0.4, "share": 0.3 * 3.3}], 0.99) == 0.4


def test_the_interval_of_a_rate_is_what_the_intervals_of_its_points_leave_open() -> None:
    tested = points((0.1, 1.0), (0.2, 0.996), (0.3, 0.992), (0.4, 0.988), (0.5, 0.97))
    assert max_rate_interval(tested, 0.99) == (0.2, 0.5)
    assert max_rate_interval(points((0.1, 0.99)), 0.99) == (None, None)
    assert max_rate_interval([{"rate": 0.1, "share": 1.0, "share_interval": None}], 0.99) is None


def test_metrics_that_are_not_measured_are_refused() -> None:
    for metric in ("accuracy", "perplexity", "tasks", "copy"):
        check_metric(metric, ["needle", "copy"])
    for metric, tasks, says in (
        ("variables", ["copy"], "not measured"),
        ("speed", [], "'speed'"),
        ("tasks", [], "--tasks"),
    ):
        with pytest.raises(UsageError, match=says):
            check_metric(metric, tasks)


def test_metrics_of_which_nothing_is_left_to_keep_are_refused() -> None:
    base = {"accuracy": 0.0, "tasks": {"needle": {"accuracy": 0.5}, "copy": {"accuracy": 0.0}}}
    for metric in ("needle", "tasks", "perplexity"):
        check_baseline(metric, base)
    for metric in ("accuracy", "copy"):
        with pytest.raises(UsageError, match="nothing right"):
            check_baseline(metric, base)
