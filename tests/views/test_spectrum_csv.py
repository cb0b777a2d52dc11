import csv
import io

import pytest

from kvprof.views.spectrum import to_csv
from kvprof.views.spectrum_csv import COLUMNS
from kvprof.views.tidy import tidy_csv

from .synthetic import spectrum_result


@pytest.mark.parametrize(
    "shape",
    [{}, {"heads": [4, 2, 1], "widths": [128, 64, 256]}, {"heads": [1], "widths": [1]}],
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


def test_tidy_csv_leaves_missing_empty_and_refuses_unknown_columns():
    assert tidy_csv(("a", "b"), [{"a": 0.1}, {"b": None}]) == "a,b\n0.1,\n,\n"
    with pytest.raises(ValueError, match="c"):
        tidy_csv(("a",), [{"c": 1}])
