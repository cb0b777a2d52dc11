"""The report of ``kvprof spectrum``, as blocks."""

from typing import Any

import numpy as np
import pytest

from kvprof.report.blocks import Curves, HeatMap, Paragraph, Table
from kvprof.report.figure import drawn
from tests.report.approved import blocks
from tests.views.synthetic import spectrum_result


def flat(rows: Any) -> list[float]:
    return [value for row in rows for value in row]


def figures(table: Table) -> list[dict[str, str]]:
    titles = [column.title for column in table.columns]
    return [dict(zip(titles, row, strict=True)) for row in table.cells()]


def test_the_tables_are_the_data() -> None:
    result = spectrum_result()
    rates, pairs = map(figures, blocks(Table, result))
    for cells, row in zip(rates, result["data"]["removal"], strict=True):
        assert cells["removal rate"] == f"{100 * row['removal_rate']:g} %"
        assert float(cells["qk: mean rank"]) == pytest.approx(
            np.mean(flat(row["ranks_qk"])), abs=0.051
        )
        assert float(cells["vo: mean rank"]) == pytest.approx(
            np.mean(flat(row["ranks_vo"])), abs=0.051
        )
        assert cells["dim_rate"] == f"{row['dim_rate']:.3f}"
        assert cells["dim_rate, ranks × 16"] == f"{row['dim_rate_rounded']:.3f}"
    for cells, (name, pair) in zip(pairs, result["data"]["pairs"].items(), strict=True):
        half = [head[63] for head in flat(pair["energy_kept"])]
        assert (cells["pair"], cells["dims"]) == (name, "128")
        assert cells["effective rank"] == f"{np.mean(flat(pair['effective_rank'])):.1f}"
        assert cells["energy at half of dims"] == f"{100 * np.mean(half):.1f} %"
        assert cells["lowest head"] == f"{100 * min(half):.1f} %"


def test_the_verdict_and_the_maps_are_of_the_rate_nearest_half() -> None:
    result = spectrum_result(heads=[4, 2], widths=[128, 64])
    chosen = min(result["data"]["removal"], key=lambda row: abs(row["dim_rate"] - 0.5))
    said = next(one.text for one in blocks(Paragraph, result) if one.role == "verdict")
    assert f"{100 * chosen['removal_rate']:g} %" in said
    assert f"dim_rate is {chosen['dim_rate']:.2f}" in said
    qk, vo = blocks(HeatMap, result)
    assert (qk.values, vo.values) == (chosen["ranks_qk"], chosen["ranks_vo"])
    assert (qk.low, qk.high) == (vo.low, vo.high)


def test_curves_and_bands_are_those_of_the_heads() -> None:
    result = spectrum_result()
    (curves,) = blocks(Curves, result)
    pair = result["data"]["pairs"]["qk"]
    assert [one.label.partition(":")[0] for one in curves.series] == ["qk", "vo", "k", "v"]
    np.testing.assert_allclose(curves.series[0].y, np.array(pair["mean"]) / pair["mean"][0])
    heads = np.array(flat(pair["singular_values"])) / pair["mean"][0]
    ends = curves.series[0].low[9], curves.series[0].high[9]
    np.testing.assert_allclose(ends, np.percentile(heads[:, 9], [2.5, 97.5]))
    pytest.importorskip("matplotlib")
    assert len(drawn(curves, "title").axes[0].get_lines()) == 4


def test_bases_per_query_head_are_held_against_grouped_ones() -> None:
    result = spectrum_result(heads=[2, 1], widths=[64, 128], group=2)
    table = figures(blocks(Table, result)[1])
    for cells, row in zip(table, result["data"]["per_query_head"]["removal"], strict=True):
        assert cells["dims stored"] == f"{row['stored_dims']:,}"
        assert cells["of grouped"] == f"{row['stored_dims'] / row['grouped_dims']:.2f}×"
    alone = spectrum_result(heads=[1], widths=[8], group=1)
    assert any("both bases are equal" in one.text for one in blocks(Paragraph, alone))
    assert len(blocks(Table, alone)) == 2
