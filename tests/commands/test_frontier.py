"""``kvprof frontier`` from the command line, on a tiny model."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from kvprof.records.schema import validate_result
from tests.commands.running import kvprof, over, result_of, words_of

SMALL = (
    *words_of(
        "--text prose --text code --sequences 3 --seq-len 24 --tasks none --metric perplexity"
    ),
    *words_of("--target 0.97 --points 4"),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVPROF_CACHE", str(folder))
    return folder


def frontier_json(tmp_path: Path, *arguments: Any, code: int = 0) -> dict[str, Any]:
    return result_of("frontier", tmp_path, *over(SMALL, arguments), code=code)


def test_a_frontier_is_measured_reported_and_resumed(
    tiny_folder: Path, tmp_path: Path, cache: Path
) -> None:
    # Of 48 tokens one can be sure that something is kept.
    methods = words_of(
        "--methods kq,kq:allocation=tail,kivi --grid 1 --minimum 1 --calibrate-tokens 512"
        " --seq-len 48 --sequences 64"
    )
    first = frontier_json(tmp_path, tiny_folder, *methods)
    labels = [method["label"] for method in first["data"]["methods"]]
    assert labels == ["kq", "kq:allocation=tail", "kivi", "full", "fp8"]
    by_label = {method["label"]: method for method in first["data"]["methods"]}
    assert len(by_label["kq"]["points"]) == 4
    assert by_label["kq"]["options"] == {"grid": 1, "minimum": 1}
    assert by_label["kivi"]["options"] == {}
    full = by_label["full"]["points"][0]
    assert full["rate"] == 0
    assert full["share"] == pytest.approx(1, abs=1e-6)
    assert full["bytes_per_token"] == 3 * 2 * 2 * 16 * 2
    assert by_label["fp8"]["points"][0]["rate"] == 0.5
    # What running takes is each plan's own, and what a long context stores is counted there.
    assert {tuple(p["needs"]) for p in by_label["kq"]["points"]} == {("online", "folded")}
    assert full["needs"] == by_label["kivi"]["points"][0]["needs"] == []
    # 3 layers, K and V of 2 heads of 16, 2 bytes.
    long = {"context": 102_400, "bytes_per_token": 384, "rate": 0}
    assert full["long_context"] == long
    window = by_label["kivi"]["points"]  # its window weighs less there than in 48 tokens
    assert all(p["long_context"]["rate"] > p["rate"] for p in window)
    assert full["kernel"] == {"layers": 3, "of": 3, "reason": None}
    odd = [p["kernel"]["reason"] for p in by_label["kq"]["points"]]
    assert any("multiples of 16" in (reason or "") for reason in odd)
    base = first["data"]["baseline"]["perplexity"]
    for method in first["data"]["methods"]:
        for point in method["points"]:
            assert point["share"] == pytest.approx(base / point["perplexity"])
            low, high = point["share_interval"]
            assert low <= point["share"] + 1e-9
            assert high >= point["share"] - 1e-9
    assert first["inputs"]["calibration"]["kq"] == {
        "source": "random",
        "tokens": 512,
        "seq_len": 48,
    }
    assert first["inputs"]["evaluations_found"] == 0

    done = kvprof("frontier", tiny_folder, *over(SMALL, methods))
    assert done.code == 0
    assert "cached evaluations of this model on this data" in done.stderr
    # Of random weights it is chance which one.
    sure = {
        label: method["max_rate_interval"][0] or 0
        for label, method in by_label.items()
        if method["max_rate_interval"]
    }
    best = max(sure, key=sure.__getitem__)
    told = rf"{best} holds 0.97 of the uncompressed .* saves {100 * sure[best]:.1f} %"
    assert re.search(told, " ".join(done.stdout.split()))
    again = frontier_json(tmp_path, tiny_folder, *methods)
    assert again["data"] == first["data"]
    assert again["inputs"]["evaluations_measured"] == 0


def test_targets_hold_together(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvprof.evaluation.evaluator import Evaluator

    # A model of random weights gets no token right; here it does, but for fewer than 4 bits.
    evaluate, baseline = Evaluator.evaluate, Evaluator.baseline

    def evaluated(self: Evaluator, plan: Any, *arguments: Any) -> dict[str, Any]:
        few = plan.quantiser is not None and min(plan.quantiser.keys.bits) < 4
        kept = {"relative_accuracy": 0.8 if few else 1.0, "relative_accuracy_interval": None}
        return {**evaluate(self, plan, *arguments), **kept, "baseline_accuracy": 0.5}

    def based(self: Evaluator, *arguments: Any) -> dict[str, Any]:
        return {**baseline(self, *arguments), "accuracy": 0.5}

    monkeypatch.setattr(Evaluator, "evaluate", evaluated)
    monkeypatch.setattr(Evaluator, "baseline", based)
    results = []
    asked = (
        *(word for word in SMALL if word not in ("--target", "0.97")),
        "--methods",
        "per-token",
    )
    for targets in (("--target", "0.01"), ("--target", "accuracy=0.9", "--target", "0.01")):
        path = tmp_path / "frontier.json"
        done = kvprof("frontier", tiny_folder, *asked, *targets, "--json", path, "--force")
        assert done.code == 0, done.stderr
        results.append(json.loads(path.read_text()))
        validate_result(results[-1])
    one, two = results
    assert two["data"]["targets"] == [
        {"metric": "perplexity", "target": 0.01},
        {"metric": "accuracy", "target": 0.9},
    ]
    assert two["inputs"]["targets"] == {"perplexity": 0.01, "accuracy": 0.9}
    assert two["inputs"]["evaluations_measured"] == 0  # what was evaluated is known
    rates = {}
    for name, result in (("one", one), ("two", two)):
        row = result["data"]["methods"][0]
        rates[name] = row["max_rate"]
        assert row["binding"] == ([] if name == "one" else ["accuracy"])
    met = [p["rate"] for p in two["data"]["methods"][0]["points"] if p["relative_accuracy"] == 1]
    assert rates["two"] == max(met) < rates["one"]


def test_without_a_cache_nothing_is_kept(tiny_folder: Path, tmp_path: Path, cache: Path) -> None:
    frontier_json(tmp_path, tiny_folder, "--methods", "fp8", "--no-cache")
    assert not cache.exists()


def test_csv_and_figures(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="figures need the extra plot")
    svg, png = tmp_path / "f.svg", tmp_path / "f.png"
    done = kvprof(
        "frontier",
        tiny_folder,
        *SMALL,
        *words_of(f"--methods kivi --csv - --svg {svg} --png {png}"),
    )
    assert done.code == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 + 4 + 2
    assert svg.read_text().lstrip().startswith("<?xml")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_keeps_what_was_measured(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvprof.evaluation.evaluator import Evaluator

    original = Evaluator.evaluate
    calls: list[int] = []

    def interrupted(self: Evaluator, *arguments: Any, **named: Any) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 5:  # two halves of two points
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *arguments, **named)

    monkeypatch.setattr(Evaluator, "evaluate", interrupted)
    result = frontier_json(tmp_path, tiny_folder, "--methods", "kivi", code=130)
    assert result["complete"] is False
    by_label = {method["label"]: method for method in result["data"]["methods"]}
    assert len(by_label["kivi"]["points"]) == 2
    assert by_label["full"]["reason"] == "interrupted"
    monkeypatch.setattr(Evaluator, "evaluate", original)
    resumed = frontier_json(tmp_path, tiny_folder, "--methods", "kivi")
    assert resumed["complete"] is True
    assert resumed["inputs"]["evaluations_found"] == 6  # with the baselines
