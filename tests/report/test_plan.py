"""The report and the result of ``kvprof plan``, as blocks and figures."""

import pytest

from kvprof.records.figures import figures_of
from kvprof.report import report_of
from kvprof.report.blocks import HeatMap, Table
from tests.report.approved import blocks, rows, said
from tests.views.synthetic_plan import STORED, plan_data, plan_result, results

RESULTS = results()


def test_bytes_and_ranks_are_the_data() -> None:
    parts, sides, differences = map(rows, blocks(Table, RESULTS["plan"]))
    sizes = {row["part"]: row["of uncompressed"] for row in parts}
    assert sizes["keys"] == f"{100 * STORED['keys'] / STORED['full']:.1f} %"
    assert "outliers" not in sizes
    assert (sides[0]["stored, mean"], sides[0]["requested, mean"]) == ("98.0", "87.0")
    assert len(differences) == 20


def test_a_rate_beyond_the_one_asked_for_is_named() -> None:
    made = plan_data()["made"]
    for asked, named in ((0.63, False), (0.5, True)):
        result = plan_result({"plan": plan_data(made={**made, "rate_asked": asked})})
        assert (f"{asked:g}" in said(result)[0]) == named


@pytest.mark.parametrize(
    ("name", "maps"), [("plan", 2), ("plan, levels", 0), ("plan, what moves", 0)]
)
def test_maps_are_of_a_described_plan(name: str, maps: int) -> None:
    assert len(blocks(HeatMap, RESULTS[name])) == maps


def test_what_is_compared_has_its_key() -> None:
    found = {(one.key, one.name): one for one in figures_of(RESULTS["plan"])}
    key = ("method", "kq-4bit"), ("context", 1536)
    assert found[key, "rate"].headline
    assert not found[key, "dim_rate"].headline
    assert found[(*key, ("bytes", "keys")), "bytes"].value == STORED["keys"]
    several = {(one.key, one.name): one.value for one in figures_of(RESULTS["plan, what moves"])}
    assert several[(("label", "kq"), ("context", 4096)), "bytes"] == 4096 * 6144


def test_a_result_of_what_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="kvprof advise"):
        report_of(plan_result({}))


def test_results_of_earlier_versions_are_read() -> None:
    result = plan_result()
    for late in ("kernel", "kinds"):
        del result["data"]["plan"][late]
    assert said(result)[0] == said(plan_result())[0]
