import json
import os
import re
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from kvprof.records.schema import validate_result
from tests.commands.running import kvprof, press_ctrl_c, result_of, words_of

SMALL = ("--tokens", "512", "--seq-len", "64")


spectrum_json = partial(result_of, "spectrum")


def test_the_report_and_the_json_agree(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    done = kvprof("spectrum", tiny_folder, *SMALL, "--removal", "0.2", "--json", path)
    assert done.code == 0
    result = json.loads(path.read_text())
    row = result["data"]["removal"][0]
    assert f"{row['dim_rate']:.3f}" in done.stdout
    assert result["inputs"]["tokens"] == 512
    assert result["inputs"]["positions"] == "0-63"
    assert result["complete"] is True


def test_json_has_every_pair_by_layer_head_and_dimension(tiny_folder: Path, tmp_path: Path) -> None:
    pairs = "qk,vo,q,k,v,q_pre,k_pre,w_v"
    data = spectrum_json(tmp_path, tiny_folder, *SMALL, "--pairs", pairs)["data"]
    assert list(data["pairs"]) == pairs.split(",")
    for entry in data["pairs"].values():
        values = np.array(entry["singular_values"])
        assert values.shape == (3, 2, 16)
        assert (np.diff(values, axis=-1) <= 0).all()
        np.testing.assert_allclose(entry["mean"], values.mean((0, 1)))
        largest = values[..., 0]
        assert entry["cv_of_max"] == pytest.approx(largest.std() / largest.mean())


def test_random_tokens_are_reproducible_bit_for_bit(tiny_folder: Path, tmp_path: Path) -> None:
    first = spectrum_json(tmp_path, tiny_folder, *SMALL, "--seed", 3)
    second = spectrum_json(tmp_path, tiny_folder, *SMALL, "--seed", 3)
    other = spectrum_json(tmp_path, tiny_folder, *SMALL, "--seed", 4)
    assert first["data"] == second["data"]
    assert first["data"]["pairs"]["qk"] != other["data"]["pairs"]["qk"]


def test_the_weight_of_v_decides_vo_only(tiny_folder: Path, tmp_path: Path) -> None:
    scaled = spectrum_json(tmp_path, tiny_folder, *SMALL)["data"]["pairs"]
    raw = spectrum_json(tmp_path, tiny_folder, *SMALL, "--vo-weight", "raw")["data"]["pairs"]
    assert scaled["vo"]["singular_values"] != raw["vo"]["singular_values"]
    assert scaled["qk"] == raw["qk"]


def test_the_paired_form_counts_keys_once_per_query_head(tiny_folder: Path, tmp_path: Path) -> None:
    def energy(pair: dict[str, Any]) -> Any:
        return np.square(pair["singular_values"]).sum(-1)

    arguments = (tiny_folder, *SMALL, "--pairs", "qk,q,k")
    stacked = spectrum_json(tmp_path, *arguments)["data"]["pairs"]
    paired = spectrum_json(tmp_path, *arguments, "--paired")["data"]["pairs"]
    np.testing.assert_allclose(energy(stacked["qk"]), energy(stacked["q"]) + energy(stacked["k"]))
    np.testing.assert_allclose(
        energy(paired["qk"]), energy(stacked["q"]) + 2 * energy(stacked["k"])
    )


def test_saved_moments_give_the_same_spectrum_without_the_model(
    tiny_folder: Path, tmp_path: Path
) -> None:
    moments = tmp_path / "moments.safetensors"
    live = spectrum_json(tmp_path, tiny_folder, *SMALL, "--save", moments)
    again = spectrum_json(tmp_path, "--from", moments)
    assert again["data"] == live["data"]
    assert again["inputs"]["fingerprint"] == live["inputs"]["fingerprint"]


def test_text_and_token_ids_are_read(tiny_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "some.txt"
    text.write_text("The cache holds keys and values.\n" * 40)
    whole = spectrum_json(tmp_path, tiny_folder, "--text", text, "--seq-len", 64)
    assert whole["inputs"]["tokens"] > 1000
    part = spectrum_json(tmp_path, tiny_folder, "--text", text, "--tokens", 200, "--seq-len", 64)
    assert part["inputs"]["tokens"] == 200
    ids = tmp_path / "ids.npy"
    np.save(ids, np.arange(3, 93).reshape(3, 30))
    assert spectrum_json(tmp_path, tiny_folder, "--token-ids", ids)["inputs"]["tokens"] == 90


def test_csv_holds_every_singular_value(tiny_folder: Path, tmp_path: Path) -> None:
    done = kvprof("spectrum", tiny_folder, *SMALL, "--csv", "-")
    assert done.code == 0
    lines = done.stdout.splitlines()
    value_rows = [line for line in lines if re.match(r"(value|.*,value,)", line)]
    assert len(value_rows) == 4 * 3 * 2 * 16
    assert "Removal rates" not in done.stdout


def test_damaged_models_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    for name, damage in (("cut", _truncate), ("nan", _put_nan)):
        folder = tmp_path / name
        folder.mkdir()
        for file in tiny_folder.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        damage(folder / "model.safetensors")
        done = kvprof("spectrum", folder, *SMALL)
        assert done.code == 1, done.stderr
        assert done.error


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _put_nan(path: Path) -> None:
    weights = load_file(path)
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(weights, path, {"format": "pt"})


def test_ctrl_c_keeps_what_was_measured(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "partial.json"
    killer = threading.Thread(target=press_ctrl_c)
    killer.start()
    done = kvprof(
        *words_of(f"spectrum {tiny_folder} --tokens 4M --seq-len 64 --batch-size 8 --json {path}")
    )
    killer.join()
    assert done.code == 130
    result = json.loads(path.read_text())
    validate_result(result)
    assert result["complete"] is False
    assert 0 < result["inputs"]["tokens"] < 4 * 1024**2
    assert result["inputs"]["tokens"] % 64 == 0
    assert "interrupted" in " ".join(result["warnings"])


def test_a_failing_save_does_not_cost_the_result(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    done = kvprof("spectrum", tiny_folder, *SMALL, "--save", "/dev/full", "--json", path)
    assert done.code == 1
    assert "/dev/full" in done.error
    assert json.loads(path.read_text())["complete"] is True


def test_ctrl_c_while_the_spectra_are_taken_still_writes_them(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvprof.analysis import spectrum

    original = spectrum.singular_values

    def interrupted(gram: Any) -> Any:
        monkeypatch.setattr(spectrum, "singular_values", original)
        os.kill(os.getpid(), signal.SIGINT)
        return original(gram)

    monkeypatch.setattr(spectrum, "singular_values", interrupted)
    path = tmp_path / "kept.json"
    done = kvprof("spectrum", tiny_folder, *SMALL, "--json", path)
    assert done.code == 0, done.stderr
    assert json.loads(path.read_text())["complete"] is True


def test_few_tokens_are_said_to_limit_the_spectra(tiny_folder: Path, tmp_path: Path) -> None:
    result = spectrum_json(tmp_path, tiny_folder, "--tokens", 20)
    assert any("the sample limits" in line for line in result["warnings"])
