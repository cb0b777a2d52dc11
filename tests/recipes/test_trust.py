"""Intervals that follow from a row, and times that may not be judged."""

from typing import Any

import pytest

from kvprof.recipes.ledger import NOT_TESTABLE, REPRODUCED, judge_line, verdict_of
from kvprof.recipes.measures import Measured, measure_all
from kvprof.recipes.recipe import Line, Measure
from kvprof.records.cases import MOST_UNATTRIBUTED
from tests.views.synthetic_evaluation import evaluation_result


def answered(items: int, accuracy: float = 1.0) -> dict[str, Any]:
    result = evaluation_result(("full", "tale"), tasks=("needle",))
    for row, share in zip(result["data"]["evaluations"], (1.0, accuracy), strict=True):
        row["tasks"]["needle"] |= {"accuracy": share, "baseline": 1.0, "items": items}
    return {"a": result}


def measured(results: dict[str, Any], *measures: Measure) -> Measured:
    return list(measure_all(measures, results, {}).values())[-1]


TALE = Measure("tale", cell="a", data="evaluations[method=tale].tasks[*].accuracy", over="mean")
FULL = Measure("full", cell="a", data="evaluations[method=full].tasks[*].accuracy", over="mean")
KEPT = Measure("kept", divide=("tale", "full"))
LINE = Line("kept", "at_least", (0.98,))


@pytest.mark.parametrize(
    ("items", "accuracy", "holds"),
    [(4, 1.0, None), (48, 1.0, None), (4000, 1.0, True), (4, 0.75, None), (400, 0.5, False)],
)
def test_questions_that_every_method_answers_show_nothing_unless_they_are_many(
    items: int, accuracy: float, holds: bool | None
) -> None:
    found = measured(answered(items, accuracy), TALE, FULL, KEPT)
    assert found.value == accuracy
    assert judge_line(LINE, found).holds is holds


def test_a_figure_of_a_task_has_the_interval_of_its_questions() -> None:
    where = {"method": "tale", "task": "needle"}
    figure = Measure("m", cell="a", figure="task_accuracy", where=where)
    found = measured(answered(4), figure)
    # Wilson's interval of 4 out of 4.
    assert found.interval == pytest.approx((0.5101, 1.0), abs=1e-4)
    assert measured(answered(4), TALE).interval == pytest.approx(found.interval)


@pytest.mark.parametrize(
    ("value", "stderr", "interval"),
    [(0.5, 0.1, (0.304, 0.696)), (1.0, 0.0, (0.7225, 1.0)), (0.5, None, None)],
)
def test_a_harness_score_has_its_standard_error(
    value: float, stderr: float | None, interval: tuple[float, float] | None
) -> None:
    row = {"task": "gsm8k", "value": value, "stderr": stderr, "items": 10}
    results = {"a": {"kind": "eval", "data": {"harness": {"rows": [row]}}}}
    found = measured(results, Measure("m", cell="a", data="harness.rows[task=gsm8k].value"))
    if interval is None:
        assert found.interval is None
    else:
        assert found.interval == pytest.approx(interval, abs=1e-4)


@pytest.mark.parametrize(
    ("rate", "ends", "value", "interval"),
    [
        (0.4, [0.3, 0.5], 0.4, (0.3, 0.5)),
        (0.4, [None, 0.5], 0.4, (0.0, 0.5)),
        (0.4, [0.3, None], 0.4, (0.3, 1.0)),
        # Even the lowest rate that was tried misses the target.
        (None, [None, 0.1], 0.0, (0.0, 0.1)),
        (0.4, None, 0.4, (0.0, 1.0)),
    ],
)
def test_a_largest_rate_lies_where_a_frontier_says(
    rate: float | None,
    ends: list[float | None] | None,
    value: float,
    interval: tuple[float, float] | None,
) -> None:
    row = {"label": "fdc", "max_rate": rate, "max_rate_interval": ends, "points": [{"rate": 0.1}]}
    results = {"a": {"kind": "frontier", "data": {"methods": [row]}}}
    found = measured(results, Measure("m", cell="a", data="methods[label=fdc].max_rate"))
    assert (found.value, found.interval) == (value, interval)


def test_an_interrupted_frontier_decides_nothing() -> None:
    row = {"label": "fdc", "max_rate": 0.4, "max_rate_interval": [0.3, 0.5], "points": [{}]}
    result = {"kind": "frontier", "complete": False, "data": {"methods": [row]}}
    found = measured({"a": result}, Measure("m", cell="a", data="methods[label=fdc].max_rate"))
    assert "interrupted" in str(found.doubt)


def test_a_method_that_was_not_tried_has_no_largest_rate() -> None:
    row = {"label": "fdc", "max_rate": None, "max_rate_interval": None, "points": []}
    results = {"a": {"kind": "frontier", "data": {"methods": [row]}}}
    found = measured(results, Measure("m", cell="a", data="methods[label=fdc].max_rate"))
    assert found.value is None


def request_time(unattributed: float) -> dict[str, Any]:
    def case(method: str, seconds: float, share_: float | None) -> dict[str, Any]:
        return {
            "case": f"{method} 1k",
            "method": method,
            "ttft_seconds": seconds,
            "jct_seconds": seconds,
            "itl_seconds": None,
            "unattributed_share": share_,
        }

    part = {
        "case": "fdc 1k",
        "method": "fdc",
        "phase": "decode",
        "part": "attention",
        "seconds": 1.0,
        "share": 0.2,
    }
    data = {
        "cases": [case("fdc", 1.0, unattributed), case("palu", 2.0, 0.01)],
        "parts": [part],
        "steps": [],
    }
    return {"jct": {"kind": "jct", "data": data}}


FDC = Measure("fdc", cell="jct", data="cases[method=fdc].ttft_seconds")
PALU = Measure("palu", cell="jct", data="cases[method=palu].ttft_seconds")
GAIN = Measure("gain", subtract=("palu", "fdc"))
SHARE = Measure("share", cell="jct", data="parts[part=attention].share")
FIGURE = Measure("gain", cell="jct", figure="ttft_seconds", where={"case": "fdc 1k"})


@pytest.mark.parametrize("measures", [(FDC, PALU, GAIN), (SHARE,), (FIGURE,)])
@pytest.mark.parametrize(
    ("unattributed", "verdict"),
    [
        (0.0, REPRODUCED),
        (MOST_UNATTRIBUTED, REPRODUCED),
        (-MOST_UNATTRIBUTED, REPRODUCED),
        (MOST_UNATTRIBUTED + 0.01, NOT_TESTABLE),
        (-0.4, NOT_TESTABLE),
    ],
)
def test_a_request_whose_parts_do_not_add_up_is_not_judged(
    measures: tuple[Measure, ...], unattributed: float, verdict: str
) -> None:
    found = measured(request_time(unattributed), *measures)
    judged = judge_line(Line(measures[-1].id, "above", (0.0,)), found)
    assert found.value is not None  # it is shown nevertheless
    assert verdict_of([judged]) == verdict
    if verdict == NOT_TESTABLE:
        assert "fdc 1k" in str(found.doubt)
        assert ("has no part" in str(found.doubt)) is (unattributed > 0)


def test_the_doubt_about_one_request_is_none_about_another() -> None:
    assert measured(request_time(0.5), PALU).doubt is None
