"""The report of ``kvprof stability``, as blocks."""

import numpy as np
import pytest

from kvprof.report.blocks import Curves, HeatMap, Paragraph, Table
from kvprof.report.stability import comparisons, share_text
from kvprof.results.stability import NOISE_FLOOR, StabilityResult
from tests.report.approved import blocks, rows, said
from tests.views.synthetic_stability import SMALL, averages, made, stability_result


@pytest.mark.parametrize(
    ("costs", "ratio", "answer"),
    [
        ((0.3, 0.2, 0.1, 0.02), 0.1, "qk does not hold (30.0 % extra lost energy on prose); vo"),
        ((0.3, 0.002, 0.001, 0.02), 0.1, "does not hold on prose, holds by cost on code and"),
        ((0.01, 0.01, 0.0, 0.02), 0.1, "qk holds by cost, not by elements"),
        ((0.01, 0.01, 0.0, 0.02), 0.004, "qk holds; vo holds."),
        ((0.03, 0.02, 0.01, 0.04), 0.1, "is inconclusive (another seed costs as much)"),
        ((0.03, 0.05, 0.01, 0.04), 0.1, "does not hold on code, is inconclusive"),
        ((None, None, None, None), 0.1, "not testable"),
        ((None, 0.5, None, None), None, "does not hold (50.0 % extra lost energy on code)"),
    ],
)
def test_the_verdict_follows_the_cost_and_the_noise_floor(
    costs: tuple[float | None, ...], ratio: float | None, answer: str
) -> None:
    result = made()
    cost = dict(zip(("prose", "code", "tasks", NOISE_FLOOR), costs, strict=True))
    for row in averages(result):
        row["extra_energy_loss"], row["ratio_sign_aligned"] = cost[row["target"]], ratio
    assert answer in said(result)[0]


@pytest.mark.parametrize("target", ["prose", "letters", "c"])
def test_what_is_like_random_tokens_costs_no_more_than_another_seed(target: str) -> None:
    """Its tokens are only drawn anew: with few of them its cost lies above or below the floor."""
    shape = {**SMALL, "counts": (256, 512), "targets": (target,)}
    for apart, answer in ((0.0, "is inconclusive"), (1.0, "does not hold")):
        result = stability_result(**{**shape, "apart": apart})
        assert said(result)[0].count(answer) == 2
        # A source without a seed, such as a text, beside a floor that has several.
        for row in result["data"]["curves"]:
            if row["target"] == target:
                row["seed"] = None
        assert said(result)[0].count(answer) == 2


@pytest.mark.parametrize(("pair", "target"), [("qk", "code"), ("vo", "tasks"), ("vo", NOISE_FLOOR)])
def test_the_tables_are_the_data(pair: str, target: str) -> None:
    result = made()
    own = averages(result, pair=pair, target=target, tokens=16384)
    at = 1 if pair == "qk" else 3
    ratios, costs = blocks(Table, result)[at : at + 2]
    place = ["prose", "code", "tasks", NOISE_FLOOR].index(target)
    error = "extra_score_error" if pair == "qk" else "extra_output_error"
    for cells, row in zip(rows(costs)[4 * place : 4 * place + 4], own, strict=True):
        assert cells["rank (removal rate)"].startswith(f"{row['rank']:.3g}")
        assert float(cells["subspace distance"]) == pytest.approx(row["subspace_distance"], 0.006)
        low, high = (
            share_text(end).removesuffix(" %") for end in row["spread"]["extra_energy_loss"]
        )
        shown = f"{share_text(row['extra_energy_loss'])} [{low}, {high}]"
        assert cells["extra lost energy"] == shown
        assert cells[error.replace("_", " ")] == share_text(row[error])
    ratio = rows(ratios)[place]
    assert float(ratio["ratio"]) == pytest.approx(own[0]["ratio"], 0.006)
    assert float(ratio["clusters aligned"]) == pytest.approx(own[0]["ratio_cluster_aligned"], 0.006)


def test_clusters_are_counted_in_columns() -> None:
    result = made()
    for entry in result["data"]["clusters"]:
        entry["sizes"] = {"1": 3, "2": 2, "5": 1}  # 12 columns
    cells = rows(blocks(Table, result)[1])[0]
    assert (cells["columns aligned singly"], cells["largest cluster"]) == ("25.0 %", "5")


def test_costs_are_read_at_the_rank_that_the_result_names() -> None:
    result = made("ragged")
    for rank in (4, 12):
        result["data"]["half_ranks"] = {"qk": rank, "vo": 12}
        final = averages(result, pair="qk", target="prose", tokens=16384)
        wanted = final[(4, 12).index(rank)]["extra_energy_loss"]
        assert comparisons(StabilityResult.of(result))["qk"][0].cost == wanted


def test_the_map_is_the_mean_over_seeds_of_the_worst_target() -> None:
    result = made("ragged")
    drawn = blocks(HeatMap, result)[0]
    assert "on tasks, 16k tokens, rank 4" in drawn.title
    assert [len(row) for row in drawn.values] == [3, 1]
    for layer, row in enumerate(drawn.values):
        for head, value in enumerate(row):
            own = [
                one["extra_energy_loss"]
                for one in result["data"]["curves"]
                if (one["pair"], one["target"], one["tokens"]) == ("qk", "tasks", 16384)
                and (one["layer"], one["kv_head"], one["rank"]) == (layer, head, 4)
                and one["removal_rate"] is None
            ]
            assert len(own) == 3
            assert value == pytest.approx(100 * np.mean(own))


def test_curves_hold_the_averages_and_their_spread() -> None:
    result = made()
    curves = blocks(Curves, result)
    assert [one.title.partition(":")[0] for one in curves] == ["qk", "qk", "vo", "vo"]
    own = [row for row in averages(result, pair="qk", target="code") if row["rank"] == 8]
    own = [row for row in own if row["removal_rate"] is None]
    series = curves[0].series[1]
    assert (series.label, list(series.x)) == ("code", [1024, 4096, 16384])
    np.testing.assert_allclose(series.y, [100 * row["extra_energy_loss"] for row in own])
    low = [100 * row["spread"]["extra_energy_loss"][0] for row in own]
    np.testing.assert_allclose(series.low, low)
    assert not blocks(Curves, made("one count"))
    itself = blocks(Curves, made("itself"))[0].series[0]
    assert itself.y[-1] == 0  # what rounding leaves is no curve


def test_costs_far_apart_get_a_log_axis() -> None:
    one = {**SMALL, "pairs": ("qk",)}
    assert blocks(Curves, stability_result(**{**one, "apart": 0.5}))[0].log_y
    assert not blocks(Curves, stability_result(**{**one, "apart": 0.001}))[1].log_y


def test_advice_says_whether_the_cost_still_falls() -> None:
    result = made()
    found = result["data"]["recommendation"]
    for falls, advice in ((False, "4k random tokens or more"), (True, "4k random tokens; more do")):
        found |= {"tokens": 4096, "stopped_falling": falls}
        assert any(advice in one.text for one in blocks(Paragraph, result))
    steps = [step for one in found["pairs"].values() for step in one["evidence"]]
    shown = rows(blocks(Table, result)[-1])
    assert [one["removed per doubling"] for one in shown] == [
        share_text(step["removed_per_doubling"]) for step in steps
    ]
    assert not any(one.text.startswith("Calibrate") for one in blocks(Paragraph, made("one count")))


def test_nothing_compared_and_nothing_measured_are_said() -> None:
    result = made()
    for row in result["data"]["curves"]:
        row |= dict.fromkeys(row.keys() & {"extra_energy_loss", "subspace_distance", "ratio"})
    assert "n/a" in rows(blocks(Table, result)[2])[0].values()
    result["data"] |= {"curves": [], "claims": [], "recommendation": None, "clusters": []}
    assert said(result)[0] == "Nothing was compared."
    lengths = made("lengths")
    row = lengths["data"]["lengths"][0]
    cells = list(rows(blocks(Table, lengths)[-1])[0].values())
    assert cells[2:] == ["2,048", share_text(row["cost"])] or share_text(row["cost"]) in cells
