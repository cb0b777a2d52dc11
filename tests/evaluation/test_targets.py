"""Shares of the baseline's metric, their intervals, and the rates read off them."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvprof.errors import UsageError
from kvprof.evaluation.targets import (
    Target,
    binding,
    check_baseline,
    check_metric,
    joint_interval,
    joint_rate,
    least_loss,
    max_rate,
    max_rate_interval,
    parse_targets,
    share_interval_of,
    share_of,
)
from tests.evaluation.search_families import evaluation


def points(*rows: tuple[float, float], half: float = 0.005) -> list[dict[str, Any]]:
    return [
        {
            "rate": rate,
            "share": share,
            "share_interval": [share - half, share + half],
            "least_loss": 0.001,
        }
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
    # What the two tasks lose or win at most, together, over what they had.
    assert share_interval_of(found, "tasks") == pytest.approx([1 - 0.08 / 1.2, 1 + 0.04 / 1.2])
    del found["tasks"]["copy"]["difference_interval"]
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
    unknown = {"rate": 0.1, "share": 1.0, "share_interval": None, "least_loss": 0.001}
    assert max_rate_interval([unknown], 0.99) is None


def test_a_sample_that_could_not_have_shown_the_loss_is_no_ground_for_a_rate() -> None:
    """Of 64 tokens with the very same hits a bootstrap says [1, 1]."""
    thin = {**evaluation(1.0, half=0.0), "decoded_tokens": 64}
    assert least_loss(thin, "accuracy") == pytest.approx(1 - 0.05 ** (1 / 32))
    assert least_loss(thin, "perplexity") == pytest.approx(1 - 0.05 ** (1 / 64))
    assert least_loss(thin, "needle") == pytest.approx(1 - 0.05 ** (1 / 16))
    assert least_loss(thin, "tasks") == pytest.approx(1 - 0.05 ** (1 / 24))
    point = {"rate": 0.8, "share": 1.0, "share_interval": [1.0, 1.0]}
    for tokens, low in ((64, None), (590, None), (601, 0.8)):
        loss = least_loss({**thin, "decoded_tokens": tokens}, "accuracy")
        assert max_rate_interval([{**point, "least_loss": loss}], 0.99) == (low, None)


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
        with pytest.raises(UsageError, match="scores 0"):
            check_baseline(metric, base)


def test_a_task_at_chance_is_in_no_mean() -> None:
    found = evaluation(0.9)
    found["tasks"]["needle"] |= {"accuracy": 0.6, "judges": True}
    found["tasks"]["copy"] |= {"judges": False, "chance": 0.3}
    assert share_of(found, "tasks") == share_of(found, "needle") == pytest.approx(0.6 / 0.8)
    assert share_interval_of(found, "tasks") == share_interval_of(found, "needle")
    assert least_loss(found, "tasks") == pytest.approx(1 - 0.05 ** (1 / 16))
    with pytest.raises(UsageError, match=r"0.4 .* above chance \(0.3\) on 20"):
        check_baseline("copy", found)
    check_baseline("tasks", found)
    found["tasks"]["needle"]["judges"] = False
    with pytest.raises(UsageError, match="scores 0"):
        check_baseline("tasks", found)


BOTH = (Target("accuracy", 0.99), Target("needle", 0.95))


def scored(rate: float, accuracy: float, needle: float, *, half: float = 0.001) -> dict[str, Any]:
    """Return an evaluation of many tokens and questions at a rate."""
    found = {**evaluation(accuracy, half=half), "rate": rate, "decoded_tokens": 100_000}
    found["tasks"]["needle"] |= {
        "accuracy": 0.8 * needle,
        "items": 10_000,
        "difference_interval": [0.8 * (needle - 1 - half), 0.8 * (needle - 1 + half)],
    }
    return found


@given(
    st.lists(
        st.tuples(st.floats(0.9, 1.0), st.floats(0.8, 1.0), st.floats(0.0005, 0.02)),
        min_size=1,
        max_size=8,
    )
)
def test_targets_together_hold_where_each_does(rows: list[tuple[float, float, float]]) -> None:
    """Against the rule itself: rate by rate, every target, point estimates and intervals."""
    tested = [scored(i / 10, a, n, half=h) for i, (a, n, h) in enumerate(rows)]
    holds = [a >= 0.99 and n >= 0.95 for a, n, _ in rows]
    sure = [a - h >= 0.99 and n - h >= 0.95 for a, n, h in rows]
    lost = [a + h < 0.99 or n + h < 0.95 for a, n, h in rows]

    def last(flags: list[bool]) -> float | None:
        until = flags.index(False) if False in flags else len(flags)
        return (until - 1) / 10 if until else None

    close = any(
        abs(x) < 1e-6
        for a, n, h in rows
        for x in (a - 0.99, n - 0.95, a - h - 0.99, n - h - 0.95, a + h - 0.99, n + h - 0.95)
    )
    assume(not close)
    assert joint_rate(tested, BOTH) == last(holds)
    high = lost.index(True) / 10 if True in lost else None
    assert joint_interval(tested, BOTH) == (last(sure), high)
    first = holds.index(False) if False in holds else None
    expected = []
    if first is not None:
        expected += ["accuracy"] if rows[first][0] < 0.99 else []
        expected += ["needle"] if rows[first][1] < 0.95 else []
    assert binding(tested, BOTH) == expected


def test_targets_are_read_as_people_write_them() -> None:
    assert parse_targets([]) == (Target("accuracy", 0.99),)
    assert parse_targets(["95%"], "perplexity") == (Target("perplexity", 0.95),)
    assert parse_targets(["needle=0.95", "0.99"]) == BOTH
    assert parse_targets(["needle=0.95"]) == (Target("needle", 0.95),)
    assert parse_targets(["accuracy=99 %", "needle=.95"], "needle") == BOTH
    assert parse_targets(["niah-single-1=1"], "niah-single-1") == (Target("niah_single_1", 1.0),)
    for texts, metric, says in (
        (["0.99", "0.95"], None, "needle=0.95"),
        (["0.99", "accuracy=0.95"], None, "two targets"),
        (["needle=0.95"], "perplexity", "--target perplexity=0.99"),
        (["needle=2"], None, "--target 2"),
        (["needle="], None, "--target"),
        (["0"], None, "--target 0"),
    ):
        with pytest.raises(UsageError, match=says):
            parse_targets(texts, metric)
