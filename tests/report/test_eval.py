"""What the blocks of an evaluation's report say."""

from typing import Any

import pytest

from kvprof.report import report_of
from kvprof.report.blocks import Curves, Facts, Heading, Notes, Table
from tests.report.approved import said
from tests.views.synthetic_evaluation import evaluation_result


def table(result: dict[str, Any], heading: str) -> list[list[str]]:
    """Return a section's table, its titles first."""
    blocks = report_of(result).blocks
    found = blocks[blocks.index(Heading(heading)) + 1]
    assert isinstance(found, Table)
    return [[one.title for one in found.columns], *found.cells()]


def headings(result: dict[str, Any]) -> list[str]:
    return [one.text for one in report_of(result).blocks if isinstance(one, Heading)]


def test_one_method_is_answered_with_its_interval() -> None:
    result = evaluation_result(("full", "fp8", "kq"))
    row = result["data"]["evaluations"][2]
    (verdict,) = said(result, "verdict")
    low, high = row["relative_accuracy_interval"]
    kept = f"{row['relative_accuracy']:.3f} [{low:.3f}, {high:.3f}]"
    assert verdict.startswith("kq saves 50.0 %")
    assert kept in verdict


def test_of_several_methods_the_one_that_holds_and_saves_most_is_named() -> None:
    names = [f"m{number}" for number in range(6)]
    result = evaluation_result(("full", "fp8", *names))
    lows = (0.97, 0.999, 0.995, 0.989, 0.993, 0.98)
    rates = (0.9, 0.2, 0.4, 0.6, 0.3, 0.8)
    for row, low, rate in zip(result["data"]["evaluations"][2:], lows, rates, strict=True):
        row["relative_accuracy_interval"], row["rate"] = [low, 1.01], rate
    (verdict,) = said(result, "verdict")
    assert [name for name in names if name in verdict] == ["m2"]
    assert verdict.startswith("3 of the 6 methods asked for hold 0.99")
    assert not any(one.startswith("Tokens of largest divergence") for one in headings(result))
    for row in result["data"]["evaluations"]:
        row["relative_accuracy_interval"] = None
    (verdict,) = said(result, "verdict")
    assert verdict.startswith("No method of 6 is known to hold 0.99")
    assert [name for name in names if name in verdict] == ["m0"]
    (notes,) = [one for one in report_of(result).blocks if isinstance(one, Notes)]
    assert any("32 sequences or more give an interval" in line for line in notes.lines)


def test_a_task_at_chance_has_no_cell_and_is_in_no_mean() -> None:
    result = evaluation_result(("full", "fp8", "kq"), at_chance=("copy",))
    titles, chance, base, *methods = table(result, "Tasks")
    assert [row[0] for row in (chance, base, *methods)] == ["chance", "uncompressed", "fp8", "kq"]
    copied = titles.index("copy")
    assert [row[copied] for row in (chance, base, *methods)] == ["0", "0/6", "n/a", "n/a"]
    tasks = result["data"]["evaluations"][2]["tasks"]
    judging = [tasks[name]["accuracy"] for name in ("needle", "variables", "frequent_words")]
    assert titles[-1] == "mean of 3"
    assert (base[-1], methods[1][-1]) == ("100.0 %", f"{100 * sum(judging) / 3:.1f} %")
    assert [one for one in said(result, "caution") if one.endswith("copy.")]
    # Two of the tasks that judge have a depth, each with two questions at one.
    assert table(result, "Tasks by depth")[1] == ["full", *["4/4"] * 3]


def test_answers_by_depth_and_length() -> None:
    result = evaluation_result(("full", "fp8", "kq"))
    assert table(result, "Tasks by depth")[1] == ["full", *["6/6"] * 3]
    assert table(result, "Tasks by length in tokens")[1] == ["full", *["12/12"] * 2]
    assert "Tasks" not in headings(evaluation_result(tasks=()))


@pytest.mark.parametrize(
    ("interval", "never", "told"),
    [
        (None, 0.0, "n/a"),
        ([0.9, 1.2], 0.0, "not significantly longer"),
        ([0.8, 0.9], 0.0, "shorter"),
        ([1.1, 1.2], 0.0, "longer; steps must take 12.3 % less time"),
        ([1.1, 1.2], 0.6, "mostly truncated"),
    ],
)
def test_longer_answers_say_what_they_cost(interval: Any, never: float, told: str) -> None:
    result = evaluation_result(("full", "fp8", "kq"), written=True)
    found = result["data"]["evaluations"][2]["answer_lengths"]
    found |= {"ratio_interval": interval, "never_ended": never, "baseline_never_ended": never}
    row = table(result, "Length of answers")[-1]
    assert (row[0], row[1], row[2], row[-1]) == ("kq", "8", "81.5", told)
    assert row[3].startswith("1.140")


def test_texts_stand_apart_only_where_there_are_several() -> None:
    assert "By text" not in headings(evaluation_result())
    result = evaluation_result(("full", "kq"), texts=("prose", "code"))
    names = [row[0] for row in table(result, "By text")[1:]]
    assert names == ["full, prose", "full, code", "kq, prose", "kq, code"]


def test_worst_tokens_are_of_the_methods_asked_for_and_show_what_does_not_print() -> None:
    result = evaluation_result(("full", "fp8", "kq"))
    assert "Tokens of largest divergence, fp8" not in headings(result)
    first = table(result, "Tokens of largest divergence, kq")[1][0]
    assert first == "…bold] + some longer text[\\n  def]"


def test_engines_and_kernels_are_told_of_the_plans_that_have_them() -> None:
    result = evaluation_result(("full", "fp8", "q8_0"))
    plan = result["data"]["evaluations"][2]["plan"]
    plan["made"] |= {"engine": "llama.cpp", "flag": "-ctk q8_0"}
    plan["kernel"] = {"layers": 0, "of": 4, "reason": "no kernel"}
    assert table(result, "Formats by engine")[1:] == [["q8_0", "llama.cpp", "-ctk q8_0"]]
    assert table(result, "Without kernels")[1:] == [["q8_0", "0 of 4", "no kernel"]]


def test_what_was_asked_for_and_not_measured_is_named_where_the_run_stopped() -> None:
    result = evaluation_result(("full", "fp8", "kq"), complete=False)
    result["inputs"]["methods"] = ["kq", "palu"]
    assert "Not measured: palu." in said(result, "caution")
    result["complete"] = True
    assert not said(result, "caution")


def test_methods_calibrated_on_different_tokens_say_so() -> None:
    result = evaluation_result(("full", "fp8", "kq", "fdc"))
    made = result["data"]["evaluations"][3]["plan"]["made"]
    made["calibration"] = {"source": "prose", "tokens": 1024, "seq_len": 256}
    (caution,) = said(result, "caution")
    assert "kq on 8,192 tokens of random" in caution
    assert "fdc on 1,024 tokens of prose (calibration split) in sequences of 256" in caution


def test_the_figure_has_a_point_for_each_method_that_has_one() -> None:
    result = evaluation_result(("full", "kq", "fdc"))
    result["data"]["evaluations"][2] |= {"relative_accuracy": None}
    chart = report_of(result).figure
    assert isinstance(chart, Curves)
    assert [(one.method, *one.x) for one in chart.series] == [("full", 0.0), ("kq", 0.25)]
    assert chart.series[1].low == [
        result["data"]["evaluations"][1]["relative_accuracy_interval"][0]
    ]
    assert report_of(evaluation_result((), complete=False)).figure is None


def test_full_by_name_is_said_to_have_run_through_the_cache() -> None:
    result = evaluation_result(("fp8", "full"))
    (facts,) = [one for one in report_of(result).blocks if isinstance(one, Facts)]
    assert "row full" in facts.pairs
