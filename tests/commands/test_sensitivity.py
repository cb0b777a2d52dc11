import json
from pathlib import Path
from typing import Any

import pytest

from kvprof.records.schema import validate_result
from tests.commands.running import kvprof


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "notes.txt"
    path.write_text("".join(f"Line {i} of a text about caches.\n" for i in range(60)))
    return path


@pytest.fixture(scope="module")
def result(tiny_folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("result") / "result.json"
    done = kvprof(
        *("sensitivity", tiny_folder, "--text", text, "--tokens", 96, "--seq-len", 32),
        *("--bits", "fp8,4,2", "--ranks", "8", "--limit", "0.5", "--json", path),
    )
    assert done.code == 0, done.stderr
    found = json.loads(path.read_text())
    validate_result(found)
    return found


def test_every_part_has_every_setting_and_wholes_are_measured(result: Any) -> None:
    data = result["data"]
    cells = {(c["layer"], c["side"], c["setting"], c["exact_first"]) for c in data["cells"]}
    # 3 layers, 2 sides; fp8, 4 and 2 bits, a rank, and bits below 8 again
    assert len(cells) == len(data["cells"]) == 3 * 2 * (4 + 2)
    assert [one["setting"] for one in data["first_tokens"]] == ["4 bits", "2 bits"]
    assert {one["like"] for one in data["budgets"]} == {"fp8", "4 bits", "2 bits", "rank 8"}
    for one in data["budgets"]:
        assert one["bytes_per_token"] <= one["uniform"]["bytes_per_token"] * (1 + 1e-9)
        assert one["predicted_kl"] <= one["uniform"]["predicted_kl"] * (1 + 1e-9)
    flags = {one["program"]: one["flags"] for one in data["flags"]}
    assert flags["vLLM"] == "--kv-cache-dtype fp8"
    assert "llama.cpp" not in flags  # heads of 16 are no blocks of 32


def test_heads_are_measured_one_by_one(tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    asked = ("--text", text, "--tokens", 64, "--seq-len", 32, "--layers", "0,-1", "--bits", "4")
    asked += ("--limit", "9")
    found = {}
    for by in ("head", "layer"):
        path = tmp_path / f"{by}.json"
        done = kvprof("sensitivity", tiny_folder, "--by", by, *asked, "--json", path)
        assert done.code == 0, done.stderr
        found[by] = json.loads(path.read_text())
        validate_result(found[by])
    cells = found["head"]["data"]["cells"]
    heads = found["head"]["data"]["heads"][0]
    assert heads > 1
    # 2 layers, 2 sides; 4 bits, and again with the first token exact
    assert len({(c["layer"], c["side"], c["kv_head"], c["exact_first"]) for c in cells}) == len(
        cells
    )
    assert len(cells) == 2 * 2 * heads * 2
    for whole in found["layer"]["data"]["cells"]:
        own = [c for c in cells if all(c[k] == whole[k] for k in ("layer", "side", "exact_first"))]
        assert sum(c["bytes_per_token"] for c in own) == pytest.approx(whole["bytes_per_token"])
        assert max(c["kl"] for c in own) > 0
    # The whole is the same, however it was cut into cells.
    both = [one["data"]["budgets"][0]["uniform"]["measured"]["kl"] for one in found.values()]
    assert both[0] == pytest.approx(both[1], rel=1e-6)
    assert {one["kv_head"] for one in found["head"]["data"]["needed"]} == set(range(heads))


@pytest.fixture(scope="module")
def handed_out(tiny_folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bits and ranks by head at a rate, kept as a result and as a plan."""
    folder = tmp_path_factory.mktemp("budget")
    done = kvprof(
        *("sensitivity", tiny_folder, "--by", "head", "--text", text, "--tokens", 96),
        *("--seq-len", 32, "--bits", "fp8,4,2", "--ranks", "12", "--exact-first", 0),
        *("--rate", "0.7", "--save", folder / "mixed.plan", "--out", folder / "run"),
    )
    assert done.code == 0, done.stderr
    assert "allocations as a whole" in done.stderr  # it takes as long as many cells do
    return folder


def test_eval_of_what_was_handed_out_is_what_was_measured(
    handed_out: Path, tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    measured = json.loads((handed_out / "run" / "result.json").read_text())
    validate_result(measured)
    asked = measured["data"]["budgets"][0]
    assert (asked["like"], asked["rate_asked"], asked["uniform"]) == (None, 0.7, None)
    given = {one["setting"] for one in asked["choices"]}
    assert len(given) > 1
    assert "fp8" not in given
    how = ("--plan", handed_out / "mixed.plan")
    done = kvprof(
        *("eval", tiny_folder, *how, "--text", text, "--sequences", 3, "--seq-len", 32),
        *("--tasks", "none", "--decode", "--json", tmp_path / "e.json"),
    )
    assert done.code == 0, done.stderr
    result = json.loads((tmp_path / "e.json").read_text())
    (found,) = [one for one in result["data"]["evaluations"] if one["method"] == "budget"]
    assert found["kl"]["mean"] == pytest.approx(asked["measured"]["kl"], rel=5e-3)
    assert found["accuracy"] == pytest.approx(asked["measured"]["accuracy"], abs=0.03)
    assert found["rate"] == pytest.approx(asked["rate"])
    assert found["rate"] >= 0.7 - 1e-9
    assert found["measured_bytes"] == found["accounted_bytes"]
    assert any("figures are optimistic" in one for one in result["warnings"])
    sketch = found["plan"]["made"]["cells"]["measured_on"]["notes.txt"]
    assert "sketch" not in sketch  # long, and of no use to a reader


def test_an_interrupt_keeps_the_plan_and_the_wholes_that_were_measured(
    tiny_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvprof.commands import sensitivity_study

    whole = sensitivity_study._measured

    def stopped(measuring: Any, wanted: Any, data: Any, stop: Any) -> bool:
        seen: list[int] = []
        return whole(measuring, wanted, data, lambda: len(seen) > 1 or bool(seen.append(1)))

    monkeypatch.setattr(sensitivity_study, "_measured", stopped)
    done = kvprof(
        *("sensitivity", tiny_folder, "--text", text, "--tokens", 64, "--seq-len", 32),
        *("--bits", "4,2", "--rate", "0.7", "--save", tmp_path / "p", "--json", tmp_path / "j"),
    )
    assert done.code == 130
    kept = json.loads((tmp_path / "j").read_text())
    validate_result(kept)
    assert not kept["complete"]
    assert [one["rate_asked"] for one in kept["data"]["budgets"]][:1] == [0.7]
    assert (tmp_path / "p").is_file()


def test_an_interrupt_keeps_the_cells_that_were_measured(
    tiny_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvprof.evaluation.sensitivity import Sensitivity

    asked: list[int] = []
    whole = Sensitivity.cells

    def stopped(self: Any, parts: Any, settings: Any, **given: Any) -> Any:
        given["should_stop"] = lambda: len(asked) == 8
        given["advance"] = asked.append
        return whole(self, parts, settings, **given)

    monkeypatch.setattr(Sensitivity, "cells", stopped)
    path = tmp_path / "kept.json"
    done = kvprof(
        *("sensitivity", tiny_folder, "--text", text, "--tokens", 64, "--seq-len", 32),
        *("--bits", "4,2", "--json", path, "--rate", "0.5", "--save", tmp_path / "p"),
    )
    assert done.code == 130
    assert "not everything was measured" in " ".join(done.stdout.split())
    assert not (tmp_path / "p").exists()
    kept = json.loads(path.read_text())
    validate_result(kept)
    assert not kept["complete"]
    assert len(kept["data"]["cells"]) == 8
    assert [one["setting"] for one in kept["data"]["sides"]] == ["4 bits"]  # the other is partial
    assert "interrupted" in done.stdout
