"""The report of a frontier: order, doubts, reasons, widths; its CSV and its figure."""

import csv
import io
import re
from typing import Any

import pytest

from kvprof.records.schema import validate_result
from kvprof.views.figure import figure_bytes
from kvprof.views.frontier import figure, report, running_table, to_csv
from kvprof.views.frontier_data import lowest_drawn, ranked, undecided
from kvprof.views.page import render_text
from tests.views.synthetic_frontier import TASKS, frontier_result


def test_methods_are_ranked_and_those_without_a_rate_come_last() -> None:
    labels = [method["label"] for method in ranked(frontier_result())]
    assert labels == ["fp8", "kq:allocation=budget", "fdc", "kq", "full", "palu", "zack"]


def test_neighbours_whose_rates_may_be_swapped_are_named() -> None:
    result = frontier_result()
    assert undecided(result) == [("kq:allocation=budget", "fdc"), ("fdc", "kq")]
    result["data"]["methods"][0]["max_rate_interval"] = [0.25, 0.38]
    result["data"]["methods"][2]["max_rate_interval"] = [0.41, 0.44]
    assert undecided(result) == []


def test_the_report_says_what_it_found() -> None:
    text = " ".join(render_text(report(frontier_result()), 120).split())
    assert "fp8 holds 0.99 of the baseline's next-token accuracy with 50.0 % of the cache's" in text
    assert "than full width at 16 bits): lower end of the 95 % interval." in text
    assert "Whether these go further is open: kq:allocation=budget (45.0–53.0 %)." in text
    assert "Not measured: zack." in text
    assert "Not calibrated on the same tokens: fdc, kq on 8,192 tokens of random" in text
    assert "zack: not measured: zack folds Q and K, which QK-norm does not allow" in text
    assert "Cannot be told apart" in text
    assert "kq:allocation=budget 0.450 0.480 1.82 13,517 0.9960 [0.992, 1.000]" in text
    assert "fdc, kq: 8k tokens of random in sequences of 512; palu: 8k tokens of calib" in text
    assert "INCOMPLETE" not in text
    assert "INCOMPLETE" in render_text(report(frontier_result(complete=False)), 120)


def test_a_winner_needs_its_interval() -> None:
    result = frontier_result()

    def first() -> str:
        return " ".join(render_text(report(result), 200).split("\n\n")[0].split())

    by_label = {method["label"]: method for method in result["data"]["methods"]}
    best = by_label["kq:allocation=budget"]
    best["max_rate_interval"] = [0.48, 0.49]
    by_label["fp8"] |= {"points": [], "max_rate": None, "max_rate_interval": None}
    by_label["kq"]["max_rate_interval"] = by_label["fdc"]["max_rate_interval"] = [0.25, 0.44]
    kept = "holds 0.99 of the baseline's next-token accuracy with"
    assert f"kq:allocation=budget {kept} 48.0 %" in first()
    assert "Next comes fdc with 25.0 %. Not measured: zack, fp8." in first()
    best["max_rate_interval"] = None  # of one sequence
    assert f"fdc {kept} 25.0 %" in first()
    assert "kq:allocation=budget (0.0 % or more)" in first()
    for method in result["data"]["methods"]:
        method["max_rate_interval"] = None
    assert "32 sequences or more give an interval" in render_text(report(result), 200)
    assert first().startswith("No verdict: this sample of 8,192 tokens is too small")
    assert "By point estimates alone kq:allocation=budget goes to 48.0 %" in first()
    result["complete"] = False
    best["reason"] = "interrupted"
    text = " ".join(render_text(report(result), 200).split())
    assert "Interrupted, so there is no verdict" in text
    assert "Stopped on the way: kq:allocation=budget. Not measured: zack, fp8." in text
    assert "kq:allocation=budget – 0.480 so far" in text


def test_none_is_not_what_was_not_measured() -> None:
    result = frontier_result()
    for method in result["data"]["methods"]:
        if method["label"] in ("fp8", "full"):
            method |= {"points": [], "max_rate": None, "max_rate_interval": None}
    lines = {
        " ".join(line.split()[:3])
        for line in render_text(report(result), 160).splitlines()
        if line.split()[:1] in (["fp8"], ["full"], ["palu"], ["zack"])
    }
    assert {"fp8 not measured", "zack not measured", "palu none –", "full 0 0"} <= lines


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_cut(width: int) -> None:
    text = render_text(report(frontier_result()), width)
    assert max(map(len, text.splitlines())) <= width
    for figure_ in ("0.450", "[0.992, 1.000]", "13,517", "0.9960", "frequent"):
        assert figure_ in text


def test_an_interrupted_frontier_without_points_is_still_a_report() -> None:
    result = frontier_result(complete=False, tasks=False)
    for method in result["data"]["methods"]:
        method |= {"points": [], "max_rate": None, "max_rate_interval": None}
        method["reason"] = "interrupted"
    text = render_text(report(result), 80)
    flat = " ".join(text.split())
    assert "Interrupted, so there is no verdict on which method keeps 0.99" in flat
    assert "Not measured: fdc, kq:allocation=budget, kq, palu, zack, fp8." in flat
    assert "nothing to plot" in text


def test_points_far_below_the_target_do_not_flatten_the_plot() -> None:
    result = frontier_result()
    assert lowest_drawn(result["data"]["target"]) == pytest.approx(0.9)
    assert "points below 0.9 are left out" in render_text(report(result), 120)


def test_csv_has_a_row_per_tested_rate() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(frontier_result()))))
    assert len(rows) == 17
    best = [row for row in rows if row["max_rate"] == "True"]
    assert [(row["label"], float(row["rate"])) for row in best] == [
        ("fdc", 0.34),
        ("kq:allocation=budget", 0.48),
        ("kq", 0.41),
        ("full", 0.0),
        ("fp8", 0.5),
    ]
    assert float(best[0]["share_low"]) == pytest.approx(0.988)
    assert all(float(row[f"task_{task}_baseline"]) == 0.975 for row in rows for task in TASKS)
    assert rows[0]["options"] == "{}"


def test_the_figure_is_drawn_and_reproducible() -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra plot")
    result = frontier_result()
    first = figure_bytes(figure(result), "svg")
    assert first == figure_bytes(figure(result), "svg")
    axes = figure(result).axes[0]
    assert axes.get_ylim()[0] == pytest.approx(0.9)


def test_the_schema_knows_the_result() -> None:
    validate_result(frontier_result())
    broken = frontier_result()
    del broken["data"]["methods"][0]["points"][0]["share"]
    with pytest.raises(ValueError, match="share"):
        validate_result(broken)


def two_targets() -> dict[str, Any]:
    """Return the frontier of two targets: of needles kq keeps 0.95 to 0.25 alone."""
    result = frontier_result()
    data = result["data"]
    data["targets"] = [
        {"metric": "accuracy", "target": 0.99},
        {"metric": "needle", "target": 0.95},
    ]
    for method in data["methods"]:
        method["binding"] = [] if method["label"] in ("full", "fp8") else ["accuracy"]
        for point in method["points"]:
            kept = {key: point[key] for key in ("share", "share_interval")}
            lost = method["label"] == "kq" and point["rate"] > 0.3
            needle = {"share": 0.5 if lost else 0.97, "share_interval": [0.4, 0.98]}
            point["shares"] = {"accuracy": kept, "needle": needle}
        if method["label"] == "kq":
            method |= {"max_rate": 0.25, "max_rate_interval": [None, 0.41]}
            method["binding"] = ["needle"]
    return result


@pytest.mark.parametrize("width", [80, 120])
def test_several_targets_are_told_with_what_binds(width: int) -> None:
    text = render_text(report(two_targets()), width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    assert "0.99 of the baseline's next-token accuracy and 0.95 of its accuracy on needle" in flat
    table = [line.split() for line in text.splitlines() if "bound by" in line or "kq " in line]
    assert any("needle" in line for line in table)
    assert "Share of the baseline's next-token accuracy kept, by rate" in text
    assert "Share of the baseline's accuracy on needle kept, by rate" in text
    assert "missed at the smallest tested rate where any is" in flat


def test_several_targets_in_csv_and_figure() -> None:
    result = two_targets()
    rows = list(csv.DictReader(io.StringIO(to_csv(result))))
    assert {row["targets"] for row in rows} == {"accuracy=0.99;needle=0.95"}
    assert {row["binding"] for row in rows if row["label"] == "kq"} == {"needle"}
    assert [float(row["share_needle"]) for row in rows if row["label"] == "kq"][:2] == [0.97, 0.5]
    pytest.importorskip("matplotlib", reason="figures need the extra plot")
    labels = [axes.get_ylabel() for axes in figure(result).axes]
    assert labels == [
        "share of the baseline's next-token accuracy",
        "share of the baseline's accuracy on needle",
    ]


def with_facts() -> dict[str, Any]:
    """Return the frontier with what running takes."""
    result = frontier_result()
    kept = {"full": [], "palu": ["folded", "rebuilt"]}
    for method in result["data"]["methods"]:
        refused = None if method["label"] != "fdc" else "tokens are evicted"
        for one in method["points"]:
            one["needs"] = kept.get(method["label"], ["online", "folded"])
            one["kernel"] = {"layers": 0 if refused else 6, "of": 6, "reason": refused}
            one["long_context"] = {
                "context": 102_400,
                "rate": one["rate"],
                "bytes_per_token": 24_576 * (1 - one["rate"]),
            }
    return result


@pytest.mark.parametrize("width", [80, 120])
def test_what_running_takes_is_told(width: int) -> None:
    result = with_facts()
    validate_result(result)
    text = render_text(report(result), width)
    assert max(map(len, text.splitlines())) <= width
    part = text[text.index("What running it takes") :]
    lines = {line.split()[0]: " ".join(line.split()) for line in part.splitlines() if line.split()}
    if width == 120:
        assert lines["kq"].endswith("online, folded yes 0.250 18,432 1.0000")
        assert lines["fp8"].endswith("yes 0.500 12,288 0.9995")
        assert lines["fdc"].endswith("no 0.250 18,432 0.9990")


def test_a_share_of_another_rate_is_said_to_be_one() -> None:
    result = with_facts()
    for method in result["data"]["methods"]:
        for one in method["points"]:
            one["long_context"]["rate"] += 0.4 if method["label"] == "fdc" else 0.04
    flat = " ".join(render_text(report(result), 100).split())
    assert "save another rate than over the long context: fdc (0.250 and 0.650). What" in flat
    assert "another rate" not in render_text(report(with_facts()), 100)


def test_a_record_of_earlier_says_nothing_of_running() -> None:
    assert "What running it takes" not in render_text(report(frontier_result()), 120)
    assert running_table(frontier_result()) is None


def test_what_running_takes_is_in_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(with_facts()))))
    assert {row["needs"] for row in rows if row["label"] == "kq"} == {"online;folded"}
    assert {row["kernel"] for row in rows if row["label"] == "fdc"} == {"False"}


def test_names_that_would_hide_the_curves_stand_under_them() -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra plot")
    result = with_facts()
    assert figure(result).axes[0].get_legend() is not None
    first = result["data"]["methods"][0]
    more = [{**first, "label": f"fdc:grid={grid}"} for grid in range(1, 20)]
    result["data"]["methods"] += more
    drawn = figure(result)
    assert drawn.axes[0].get_legend() is None
    (legend,) = drawn.legends
    assert {text.get_text() for text in legend.get_texts()} >= {one["label"] for one in more}


def test_a_rate_alone_is_drawn_among_all_that_there_are() -> None:
    """Half as much again as one rate is more than everything, which nothing saves."""
    result = frontier_result()
    kept = result["data"]["methods"][0]
    kept["points"] = [point for point in kept["points"] if point["rate"] == kept["max_rate"]]
    kept["max_rate"] = kept["points"][0]["rate"] = 0.75
    kept["max_rate_interval"] = [0.75, None]
    result["data"]["methods"] = [kept]
    text = render_text(report(result), 120)
    (axis,) = [line for line in text.splitlines() if re.fullmatch(r"[ \d.]*0\.4 [ \d.]*", line)]
    assert max(map(float, axis.split())) == 1
    pytest.importorskip("matplotlib", reason="figures need the extra plot")
    assert figure(result).axes[0].get_xlim()[1] <= 1
