import csv
import io

import pytest

from kvprof.views.stability import COLUMNS, to_csv

from .synthetic_stability import stability_result


@pytest.fixture(scope="module")
def result():
    return stability_result(counts=(1024, 4096), heads=(2, 1), widths=(8, 16))


@pytest.fixture(scope="module")
def rows(result):
    return list(csv.DictReader(io.StringIO(to_csv(result))))


def test_every_row_in_full(result, rows):
    assert len(rows) == len(result["data"]["curves"])
    for line, row in zip(rows, result["data"]["curves"], strict=True):
        for key, value in row.items():
            if key == "spread":
                for figure, (low, high) in value.items():
                    assert float(line[f"{figure}_low"]) == low
                    assert float(line[f"{figure}_high"]) == high
            elif value is None:
                assert line[key] == ""
            else:
                assert line[key] == (value if isinstance(value, str) else repr(value))


def test_a_single_head_has_no_spread(rows):
    heads = [row for row in rows if row["layer"] != ""]
    assert {row[name] for row in heads for name in COLUMNS if name.endswith("_low")} == {""}
    assert {row["heads_and_seeds"] for row in heads} == {""}
    assert {row["heads_and_seeds"] for row in rows if row["layer"] == ""} == {"9"}


def test_the_keys_of_definitions_come_first():
    keys = (
        "pair, source, target, tokens, seq_len_source, seq_len_target, seed, layer, kv_head, rank, "
        "removal_rate, ratio, ratio_sign_aligned, ratio_cluster_aligned, subspace_distance, "
        "principal_angle, extra_energy_loss, extra_score_error, extra_output_error"
    )
    assert list(COLUMNS[:19]) == keys.split(", ")
    assert len(set(COLUMNS)) == len(COLUMNS)
