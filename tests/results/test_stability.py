import csv
import io

import pytest

from kvprof.records.figures import figures_of
from kvprof.results.stability import StabilityResult
from tests.views.synthetic_stability import stability_result

COLUMNS = StabilityResult.columns


def to_csv(result):
    return StabilityResult.of(result).to_csv()


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


def test_averages_and_claims_are_compared_and_single_heads_are_not(result):
    found = figures_of(result)
    averages = [row for row in result["data"]["curves"] if row["layer"] is None]
    costs = [one for one in found if one.name == "extra_energy_loss"]
    assert [one.value for one in costs] == [row["extra_energy_loss"] for row in averages]
    assert all(one.headline and one.exact and one.better == "lower" for one in costs)
    judged = [one for one in result["data"]["claims"] if one["measured"] is not None]
    measured = [one for one in found if one.name == "measured"]
    assert [list(one.interval or ()) for one in measured] == [one["interval"] for one in judged]
