"""The result of ``kvprof frontier``: its CSV, what is compared, what is refused."""

import csv
import io
from typing import Any

import pytest

from kvprof.records.figures import figures_of
from kvprof.records.schema import validate_result
from kvprof.results.frontier import FrontierResult
from tests.views.synthetic_frontier import TASKS, frontier_result, two_targets, with_facts


def rows_of(result: dict[str, Any]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(FrontierResult.of(result).to_csv())))


def test_every_tested_rate_is_a_row() -> None:
    rows = rows_of(frontier_result())
    assert len(rows) == sum(len(m["points"]) for m in frontier_result()["data"]["methods"])
    best = [row for row in rows if row["max_rate"] == "True"]
    assert [(row["label"], float(row["rate"])) for row in best] == [
        ("fdc", 0.34), ("kq:allocation=budget", 0.48), ("kq", 0.41), ("full", 0.0), ("fp8", 0.5),
    ]  # fmt: skip
    assert [row["rate"] for row in rows if row["sure_rate"] == "True"][:2] == ["0.25", "0.45"]
    assert float(best[0]["share_low"]) == pytest.approx(0.988)
    assert all(float(row[f"task_{task}_baseline"]) == 0.975 for row in rows for task in TASKS)
    assert (rows[0]["options"], rows[0]["needs"]) == ("{}", "")


def test_running_and_further_targets_have_columns() -> None:
    rows = rows_of(with_facts())
    assert {row["needs"] for row in rows if row["label"] == "kq"} == {"online;folded"}
    assert {row["kernel"] for row in rows if row["label"] == "fdc"} == {"False"}
    rows = rows_of(two_targets())
    assert {row["targets"] for row in rows} == {"accuracy=0.99;needle=0.95"}
    assert {row["binding"] for row in rows if row["label"] == "kq"} == {"needle"}
    assert [float(row["share_needle"]) for row in rows if row["label"] == "kq"][:2] == [0.97, 0.5]


def test_rates_are_compared() -> None:
    found = {(one.key, one.name): one for one in figures_of(two_targets())}
    key = (("method", "kq:allocation=budget"),)
    sure, largest = found[key, "sure_rate"], found[key, "max_rate"]
    assert (sure.value, sure.headline, sure.exact, sure.better) == (0.45, True, True, "higher")
    assert (largest.value, largest.interval) == (0.48, (0.45, 0.53))
    assert found[(*key, ("target", "0.95")), "max_rate"].value == 0.6


def test_a_result_that_lacks_a_figure_is_refused() -> None:
    for result in (frontier_result(), two_targets(), with_facts()):
        validate_result(result)
    broken = frontier_result()
    del broken["data"]["methods"][0]["points"][0]["share"]
    with pytest.raises(ValueError, match=r"methods\[0\].points\[0\].share"):
        validate_result(broken)
