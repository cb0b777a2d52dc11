"""The embedded reference model from end to end."""

import json
from pathlib import Path

import pytest

from tests.commands.running import kvprof, words_of


def test_spectrum_of_the_reference_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: what is the script's own, a run that is ended shows (test_interrupts)."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    path = tmp_path / "spectrum.json"
    done = kvprof("spectrum", "--tokens", "1k", "--json", path)
    assert done.code == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    result = json.loads(path.read_text())
    assert result["inputs"]["tokens"] == 1024
    pair = result["data"]["pairs"]["qk"]
    assert len(pair["singular_values"]) >= 6
    assert {len(layer) for layer in pair["singular_values"]} == {4}
    # A trained model's keys are compact: far from what random weights give (nearly full rank).
    removal = {row["removal_rate"]: row for row in result["data"]["removal"]}
    assert removal[0.1]["dim_rate"] > 0.2


def test_stability_of_the_reference_model_finds_a_noise_floor_below_the_data(
    tmp_path: Path,
) -> None:
    path = tmp_path / "stability.json"
    done = kvprof(
        *words_of(f"stability --tokens 256,512 --against prose --seeds 2 --pairs qk --json {path}")
    )
    assert done.code == 0, done.stderr
    rows = [row for row in json.loads(path.read_text())["data"]["curves"] if row["layer"] is None]
    cost = {
        row["target"]: row["extra_energy_loss"]
        for row in rows
        if row["tokens"] == 512 and row["rank"] == 64
    }
    assert cost["random, another seed"] < cost["prose"]
