"""The report of ``kvprof sensitivity``, as blocks."""

import csv
import io
from typing import Any

from kvprof.records.figures import figures_of
from kvprof.report.blocks import HeatMap, Table
from kvprof.results.sensitivity import SensitivityResult
from tests.report.approved import blocks, said
from tests.views.synthetic_sensitivity import sensitivity_result


def tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    return {one.columns[0].title: one.cells() for one in blocks(Table, result)}


def test_the_verdict_names_the_sides_and_what_stays_within_the_limit() -> None:
    result = sensitivity_result()
    result["data"]["sides"][1]["more"] = "keys"
    assert said(result)[0].startswith("Keys are more sensitive than values at 2 bits; keys and")
    result["data"]["model_layers"] = 3
    assert "the measured layers together" in said(result)[0]
    result["data"]["sides"] = []
    assert "nothing can be compared" in said(result)[0]


def test_layers_that_stay_are_named_in_runs() -> None:
    result = sensitivity_result()
    result["data"]["heads"] = [2] * 9
    for stay, told in (([0, 2, 3, 4, 7, 8], "0, 2–4, 7, 8"), ([*range(9)], "0–8 (all)")):
        result["data"]["layers"][1]["stay"] = stay
        assert blocks(Table, result)[0].cells()[1][4] == told


def test_what_each_part_needs_is_counted() -> None:
    result = sensitivity_result()
    # A quarter of 0.01 nats each: 4 bits cost 0.001 and 0.002, 2 bits 0.02 and 0.04.
    assert tables(result)["needs"] == [["4 bits", "2", "2"]]
    first, *_, last = result["data"]["needed"]
    first |= {"setting": "2 bits", "bits": 2}
    last |= {"setting": "full", "bits": None}
    needs = [["2 bits", "1", "0"], ["4 bits", "1", "1"], ["more than 4 bits", "0", "1"]]
    assert tables(result)["needs"] == needs
    assert tables(result)["layer"] == [["0", "2 bits", "4 bits"], ["1", "4 bits", "full"]]
    heads = sensitivity_result(heads=(0, 1, 2))
    for one in heads["data"]["needed"][:2]:
        one["setting"] = "2 bits"
    assert tables(heads)["layer"][0] == ["0", "0–1: 2 bits, 2: full", "full"]


def test_maps_are_on_a_log_scale_by_side_or_by_head() -> None:
    maps = blocks(HeatMap, sensitivity_result())
    assert [one.title for one in maps][-1] == "2 bits, first 1 uncompressed: nats"
    assert maps[1].values == [[0.02, 0.02], [0.04, 0.04]]
    heads = blocks(HeatMap, sensitivity_result(heads=(0, 1)))
    assert len(heads) == 2 * len(maps)
    assert all(one.log for one in (*maps, *heads))
    assert (heads[2].low, heads[2].high) == (0.02, 0.04)


def test_a_mixture_for_a_rate_has_its_choices() -> None:
    result = sensitivity_result()
    budget = result["data"]["budgets"][0]
    budget |= {"like": None, "rate_asked": 0.7, "uniform": None}
    budget["choices"][0]["setting"] = "2 bits"
    assert blocks(Table, result)[-1].title == "mixed, at rate 70.0 %"
    assert blocks(Table, result)[-1].cells()[0] == ["0", "2 bits", "4 bits"]


def test_the_csv_has_every_cell_and_every_whole() -> None:
    result = sensitivity_result()
    rows = list(csv.DictReader(io.StringIO(SensitivityResult.of(result).to_csv())))
    assert [row["what"] for row in rows] == ["cell"] * 12 + ["budget", "uniform"]
    for row, cell in zip(rows, result["data"]["cells"], strict=False):
        assert {float(row[name]) for name in ("kl", "kl_low")} == {cell["kl"], cell["kl"] / 2}
        assert (row["layer"], row["kv_head"]) == (str(cell["layer"]), "")
    assert [float(row["kl"]) for row in rows[-2:]] == [0.007, 0.008]


def test_cells_and_wholes_are_compared_each_by_its_key() -> None:
    found = figures_of(sensitivity_result())
    assert len({(one.key, one.name) for one in found}) == len(found)
    costs = [one for one in found if one.name == "kl"]
    assert len(costs) == 12 + 2 + 1
    assert all(one.better == "lower" and one.interval for one in costs)
