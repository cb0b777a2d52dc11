"""The report of ``kvprof frontier``, as blocks."""

from typing import Any

import pytest

from kvprof.report import report_of
from kvprof.report.blocks import Curves, Heading, Table
from kvprof.report.figure import drawn
from kvprof.report.frontier import ranked
from kvprof.results.frontier import FrontierResult
from tests.report.approved import said
from tests.views.synthetic_frontier import frontier_result, two_targets, with_facts


def table(result: dict[str, Any], heading: str) -> dict[str, dict[str, str]]:
    """Return the first table under a heading, by its rows' names."""
    blocks = report_of(result).blocks
    found = blocks[blocks.index(Heading(heading)) + 1]
    assert isinstance(found, Table)
    titles = [column.title for column in found.columns]
    return {row[0]: dict(zip(titles, row, strict=True)) for row in found.cells()}


def by_label(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {method["label"]: method for method in result["data"]["methods"]}


def test_methods_are_ranked_and_those_without_a_rate_come_last() -> None:
    methods = FrontierResult.of(frontier_result()).data.methods
    labels = [method.label for method in ranked(methods)]
    assert labels == ["fp8", "kq:allocation=budget", "fdc", "kq", "full", "palu", "zack"]


def test_a_winner_needs_its_interval_and_rivals_are_named() -> None:
    result = frontier_result()
    methods = by_label(result)
    assert "fp8 holds 0.99" in said(result)[0]
    assert "50.0 %" in said(result)[0]
    assert any("kq:allocation=budget (45.0–53.0 %)" in one for one in said(result, "caution"))
    best = methods["kq:allocation=budget"]
    best["max_rate_interval"] = [0.48, 0.49]
    methods["fp8"] |= {"points": [], "max_rate": None, "max_rate_interval": None}
    methods["kq"]["max_rate_interval"] = methods["fdc"]["max_rate_interval"] = [0.25, 0.44]
    assert "kq:allocation=budget holds 0.99" in said(result)[0]
    assert not any("May save more" in one for one in said(result, "caution"))
    best["max_rate_interval"] = None  # of one sequence
    assert "fdc holds 0.99" in said(result)[0]
    assert any("kq:allocation=budget (0.0 % or more)" in one for one in said(result, "caution"))
    for method in methods.values():
        method["max_rate_interval"] = None
    assert "No method holds" in said(result)[0]
    assert "by point estimate kq:allocation=budget does and saves 48.0 %" in said(result)[0]
    for method in methods.values():
        method["max_rate"] = None
    assert "No method holds" in said(result)[0]


def test_an_interrupted_search_has_no_winner() -> None:
    result = frontier_result(complete=False)
    methods = by_label(result)
    methods["kq:allocation=budget"] |= {"max_rate_interval": None, "reason": "interrupted"}
    assert "Interrupted before" in said(result)[0]
    assert {"Not measured: zack.", "Search stopped: kq:allocation=budget."} <= {
        *said(result, "caution")
    }
    assert table(result, "Largest rates")["kq:allocation=budget"]["largest rate"] == "0.480 so far"
    result["data"]["methods"] = [method | {"points": []} for method in methods.values()]
    assert not any("May save" in one for one in said(result, "caution"))


def test_what_is_not_known_has_no_table_and_what_is_hidden_is_there() -> None:
    assert table(with_facts(), "Largest rates")["kq:allocation=budget"]["smaller"] == "1.82×"
    assert Heading("Requirements") not in report_of(frontier_result()).blocks


def test_overlapping_neighbours_are_named() -> None:
    result = frontier_result()
    named = "Intervals overlap: kq:allocation=budget and fdc; fdc and kq."
    assert named in said(result, "caution")
    methods = by_label(result)
    methods["fdc"]["max_rate_interval"] = [0.25, 0.38]
    methods["kq"]["max_rate_interval"] = [0.41, 0.44]
    assert not any("overlap" in one for one in said(result, "caution"))


def test_accuracy_at_another_rate_is_said_to_be_so() -> None:
    result = with_facts()
    for method in result["data"]["methods"]:
        for one in method["points"]:
            one["long_context"]["rate"] += 0.4 if one["rate"] == 0.25 else 0.04
    (aside,) = [one for one in said(result, "aside") if "differ" in one]
    assert "fdc (0.250 and 0.650)" in aside
    assert not any("differ" in one for one in said(with_facts(), "aside"))


def test_several_targets_hold_together() -> None:
    result = two_targets()
    assert "next-token accuracy and 0.95 of its accuracy on needle" in said(result)[0]
    rates = table(result, "Largest rates")
    assert (rates["kq"]["holds"], rates["kq"]["bound by"]) == ("n/a", "needle")
    assert rates["fdc"]["accuracy on needle kept"] == "0.970 [0.400, 0.980]"
    accuracy, needle = [one for one in report_of(result).blocks if isinstance(one, Curves)]
    assert [one.title.partition(",")[0] for one in (accuracy, needle)] == [
        "Share of next-token accuracy kept",
        "Share of accuracy on needle kept",
    ]
    assert needle.series[0].y == [0.95, 0.95]


def test_curves_are_the_points_above_the_floor() -> None:
    result = frontier_result()
    (curves,) = [one for one in report_of(result).blocks if isinstance(one, Curves)]
    target, *methods = curves.series
    assert target.reference
    assert [one.label for one in methods] == ["fp8", "kq:allocation=budget", "fdc", "kq", "full",
                                              "palu"]  # fmt: skip
    fdc = next(one for one in methods if one.label == "fdc")
    assert (list(fdc.x), list(fdc.y)) == ([0.25, 0.34, 0.38, 0.5], [0.999, 0.992, 0.985, 0.93])
    assert fdc.low is not None
    assert fdc.low[0] == pytest.approx(0.995)
    assert "from 0.9" in curves.y_label
    assert {one.method for one in methods if one.label.startswith("kq")} == {"kq"}
    kept = result["data"]["methods"][0]
    kept["points"], kept["max_rate"] = kept["points"][:1], 0.25
    result["data"]["methods"] = [kept]
    (alone,) = [one for one in report_of(result).blocks if isinstance(one, Curves)]
    assert alone.series[0].x == [0.0, 1.0]  # all that a rate may be


def test_names_that_would_hide_the_curves_stand_under_them() -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra plot")
    result = with_facts()
    curves = report_of(result).figure
    assert curves is not None
    assert drawn(curves).axes[0].get_legend() is not None
    first = result["data"]["methods"][0]
    result["data"]["methods"] += [{**first, "label": f"fdc:grid={grid}"} for grid in range(1, 9)]
    more = report_of(result).figure
    assert more is not None
    figure = drawn(more)
    assert figure.axes[0].get_legend() is None
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 6 + 8 + 1
