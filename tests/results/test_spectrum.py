import csv
import io

import pytest

from kvprof.records.figures import figures_of
from kvprof.results.spectrum import SpectrumResult
from tests.views.synthetic import spectrum_result

COLUMNS = SpectrumResult.columns


def to_csv(result):
    return SpectrumResult.of(result).to_csv()


@pytest.mark.parametrize(
    "shape", [{}, {"heads": [4, 2, 1], "widths": [128, 64, 256]}, {"heads": [1], "widths": [1]}]
)
def test_csv_is_exactly_the_data(shape):
    result = spectrum_result(**shape)
    rows = list(csv.DictReader(io.StringIO(to_csv(result))))
    seen = dict.fromkeys(("value", "head", "mean", "pair", "rank", "rate"), 0)
    removal = {row["removal_rate"]: row for row in result["data"]["removal"]}
    for row in rows:
        kind = row["kind"]
        seen[kind] += 1
        place = [int(row[key]) for key in ("layer", "kv_head") if row[key]]
        if kind == "rate":
            data = removal[float(row["removal_rate"])]
            for key in ("dim_rate", "dim_rate_rounded", "grid"):
                assert float(row[key]) == data[key]
        elif kind == "rank":
            data = removal[float(row["removal_rate"])]
            layer, head = place
            assert int(row["rank"]) == data[f"ranks_{row['pair']}"][layer][head]
            assert int(row["rank_rounded"]) == data[f"rounded_ranks_{row['pair']}"][layer][head]
        else:
            pair = result["data"]["pairs"][row["pair"]]
            if kind == "pair":
                assert float(row["cv_of_max"]) == pair["cv_of_max"]
            elif kind == "mean":
                assert float(row["singular_value"]) == pair["mean"][int(row["dim"]) - 1]
            elif kind == "head":
                layer, head = place
                assert float(row["effective_rank"]) == pair["effective_rank"][layer][head]
            else:
                layer, head = place
                at = int(row["dim"]) - 1
                value, energy = float(row["singular_value"]), float(row["energy_kept"])
                assert value == pair["singular_values"][layer][head][at]
                assert energy == pair["energy_kept"][layer][head][at]
    pairs = result["data"]["pairs"].values()
    heads = sum(len(ranks) for ranks in result["data"]["removal"][0]["ranks_qk"])
    assert seen["value"] == sum(len(h) for p in pairs for lay in p["singular_values"] for h in lay)
    assert seen["head"] == heads * len(pairs)
    assert seen["pair"] == len(pairs)
    assert seen["mean"] == sum(len(pair["mean"]) for pair in pairs)
    assert seen["rate"] == len(removal)
    assert seen["rank"] == 2 * heads * len(removal)


def test_one_table_with_one_header():
    text = to_csv(spectrum_result(pairs=("k",)))
    lines = text.splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert {line.count(",") for line in lines} == {len(COLUMNS) - 1}
    assert {line.split(",")[0] for line in lines[1:]} == {"value", "head", "mean", "pair"}
    assert text.endswith("\n")


def test_bases_per_query_head_are_a_pair_of_their_own():
    result = spectrum_result(heads=[2, 1], widths=[8, 8], group=3, grid=4)
    rows = list(csv.DictReader(io.StringIO(to_csv(result))))
    own = [row for row in rows if row["pair"] == "qk_per_query_head"]
    data = result["data"]["per_query_head"]
    assert all(not row["kv_head"] for row in own)
    values = {
        (int(row["layer"]), int(row["query_head"]), int(row["dim"]) - 1): float(
            row["singular_value"]
        )
        for row in own
        if row["kind"] == "value"
    }
    assert len(values) == 9 * 8
    for (layer, head, dim), value in values.items():
        assert value == data["qk"]["singular_values"][layer][head][dim]
    by_rate = {row["removal_rate"]: row for row in data["removal"]}
    ranks = [row for row in own if row["kind"] == "rank"]
    assert len(ranks) == 9 * len(by_rate)
    for row in ranks:
        at, place = by_rate[float(row["removal_rate"])], (int(row["layer"]), int(row["query_head"]))
        assert int(row["rank"]) == at["ranks"][place[0]][place[1]]
        assert int(row["rank_rounded"]) == at["rounded_ranks"][place[0]][place[1]]
    assert {row["query_head"] for row in rows if row["pair"] != "qk_per_query_head"} == {""}


def test_marked_fields_are_compared_with_their_keys():
    result = spectrum_result(heads=[2, 1], widths=[8, 8], pairs=("qk", "vo"), rates=(0.1,))
    found = {(one.key, one.name): one for one in figures_of(result)}
    row = result["data"]["removal"][0]
    rate = found[(("removal_rate", 0.1),), "dim_rate"]
    assert (rate.value, rate.better) == (row["dim_rate"], "higher")
    assert rate.headline
    assert rate.exact
    assert not found[(("removal_rate", 0.1),), "dim_rate_rounded"].headline
    ranks = [rank for layer in result["data"]["pairs"]["vo"]["effective_rank"] for rank in layer]
    assert found[(("pair", "vo"),), "mean_effective_rank"].value == sum(ranks) / 3
    assert len(found) == 2 + 2 * 2  # a rate without first positions has no such figure
