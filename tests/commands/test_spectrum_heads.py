"""``kvprof spectrum --per-query-head``."""

import json
from pathlib import Path

import numpy as np

from kvprof.records.schema import validate_result
from tests.commands.running import kvprof, words_of
from tests.commands.test_spectrum import SMALL, spectrum_json
from tests.models.folder import save_tiny


def test_bases_per_query_head_and_what_their_cache_would_cost(
    tiny_folder: Path, tmp_path: Path
) -> None:
    path, table = tmp_path / "r.json", tmp_path / "r.csv"
    done = kvprof(
        "spectrum",
        tiny_folder,
        *SMALL,
        *words_of(f"--per-query-head --removal 0.2 --grid 4 --json {path} --csv"),
        table,
    )
    assert done.code == 0, done.stderr
    result = json.loads(path.read_text())
    validate_result(result)
    data = result["data"]["per_query_head"]
    assert data["group"] == [2, 2, 2]
    assert np.array(data["qk"]["singular_values"]).shape == (3, 4, 16)
    (row,) = data["removal"]
    assert row["stored_dims"] == np.sum(row["ranks"])
    grouped = result["data"]["removal"][0]
    assert row["grouped_dims"] == np.sum(grouped["ranks_qk"])
    assert row["grouped_dims_rounded"] == np.sum(grouped["rounded_ranks_qk"])
    assert row["full_dims"] == 3 * 2 * 16
    shown = " ".join(done.stdout.split())
    assert "One basis of qk per query head" in shown
    assert "stores 2 compressed keys per KV head and token" in shown
    assert f"{row['stored_dims'] / row['grouped_dims']:.2f}×" in shown
    lines = [x for x in table.read_text().splitlines() if x.startswith("rank,qk_per_query_head")]
    assert len(lines) == 3 * 4
    plain = spectrum_json(tmp_path, tiny_folder, *SMALL)
    assert "per_query_head" not in plain["data"]


def test_one_query_head_per_kv_head_is_said_to_change_nothing(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "gpt2", arch="GPT2")
    result = spectrum_json(tmp_path, folder, *SMALL, "--per-query-head")
    data = result["data"]["per_query_head"]
    assert data["group"] == [1, 1, 1]
    assert data["qk"] == result["data"]["pairs"]["qk"]
    done = kvprof("spectrum", folder, *SMALL, "--per-query-head")
    assert "so both bases are equal" in " ".join(done.stdout.split())
