"""The embedded reference model from end to end, and the script in a process that is ended."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands.running import kvprof, words_of

KVPROF = [
    sys.executable,
    "-c",
    "import sys; sys.argv[0] = 'kvprof'; from kvprof.cli import main; main()",
]


def test_spectrum_of_the_reference_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, as the one below: what is the script's own, a run that is ended shows."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    path = tmp_path / "spectrum.json"
    done = kvprof("spectrum", "--tokens", "2k", "--json", path)
    assert done.code == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    result = json.loads(path.read_text())
    assert result["inputs"]["tokens"] == 2048
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


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is a console event there")
def test_ctrl_c_from_the_terminal_keeps_the_result(tmp_path: Path) -> None:
    path = tmp_path / "partial.json"
    process = subprocess.Popen(
        [*KVPROF, *words_of(f"spectrum --tokens 16M --seq-len 256 --batch-size 1 --json {path}")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    # The line that announces the pass comes once the handler is in place.
    while "tokens through" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    result = json.loads(path.read_text())
    assert result["complete"] is False
    assert result["inputs"]["tokens"] > 0
