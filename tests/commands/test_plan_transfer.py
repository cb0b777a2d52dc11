import json
from pathlib import Path
from typing import Any

import pytest

from kvprof.methods.accounting import bytes_at, rate
from kvprof.methods.plan_files import load_plan
from kvprof.moments.calibrator import Calibrator
from kvprof.records.schema import validate_result
from tests.commands.running import kvprof, words_of

pytestmark = pytest.mark.usefixtures("own_cache")

FINE = ("--grid", 1, "--minimum", 1)
LLAMA = "Llama-3.1-8B"


def moved(tmp_path: Path, *arguments: Any) -> dict[str, Any]:
    path = tmp_path / "transfer.json"
    done = kvprof("plan", *arguments, "--transfer", "--json", path, "--force")
    assert done.code == 0, done.stderr
    result = json.loads(path.read_text())
    validate_result(result)
    return result["data"]["transfer"]


def test_bytes_over_a_speed(tiny_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "own.safetensors"
    kvprof("plan", tiny_folder, "--method", "kq-4bit", "--rate", 0.75, *FINE, "--save", saved)
    asked = words_of("--seq 64,128,500 --link pcie4x16 --link slow=1MB/s")
    found = moved(tmp_path, tiny_folder, "--plan", saved, *asked)
    assert [one["context"] for one in found["contexts"]] == [64, 128, 500]
    assert [one["over_model_context"] for one in found["contexts"]] == [False, False, True]
    plan = load_plan(saved)
    row = found["rows"][-1]
    assert row["label"] == "own.safetensors"
    for at in row["at"]:
        size = bytes_at(plan, at["context"], itemsize=4).total
        assert at["bytes"] == size
        assert at["rate"] == rate(plan, at["context"])
        assert at["seconds"] == pytest.approx([size / 31_507_692_307.7, size / 1e6])
    # 64 tokens, 3 layers, K and V of 2 heads of 16, 4 bytes.
    assert found["rows"][0]["at"][0]["bytes"] == 49152


def test_a_method_of_one_setting_moves_as_it_is_beside_a_rate(
    tiny_folder: Path, tmp_path: Path
) -> None:
    asked = ("--methods", "hadamard-int4,sink-recent", "--rate", 0.5, "--seq", "96")
    found = moved(tmp_path, tiny_folder, *asked)
    rows = {row["label"]: row for row in found["rows"]}
    assert rows["hadamard-int4"]["at"][0]["rate"] == pytest.approx(1 - 12 / 32)
    assert rows["sink-recent"]["rate"] >= 0.5
    assert not found["missing"]


def test_nothing_is_calibrated_where_bytes_follow_from_the_rate(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing has to be calibrated for bytes")

    monkeypatch.setattr(Calibrator, "inputs", never)
    methods = "kq:allocation=budget,palu:allocation=fisher,fdc+h2o,tale"
    found = moved(tmp_path, tiny_folder, "--methods", methods, "--rate", 0.8, *FINE)
    assert [one["label"] for one in found["missing"]] == ["tale"]
    assert "reaches rates" in found["missing"][0]["reason"]
    for arguments, says in (
        (("--methods", "kq", "--rate", 0.3, "--calibrate", "random:128"), "leave out --calibrate"),
        (("--methods", "full", "--rate", 0.3), "--rate"),
    ):
        done = kvprof("plan", tiny_folder, "--transfer", *arguments)
        assert (done.code, says in done.error) == (2, True)


def test_without_a_rate_methods_of_one_setting_are_told(tiny_folder: Path, tmp_path: Path) -> None:
    found = moved(tmp_path, tiny_folder, "--methods", "hadamard-int4,kq")
    assert [row["label"] for row in found["rows"]] == ["full", "fp8", "hadamard-int4"]
    assert [entry["label"] for entry in found["missing"]] == ["kq"]
    assert "--rate" in found["missing"][0]["reason"]


def test_a_shape_is_enough(tmp_path: Path) -> None:
    found = moved(tmp_path, "--shape", LLAMA, "--methods", "full", "--seq", "100k")
    assert found["dtype"] == "bfloat16"
    # 32 layers, K and V of 8 heads of 128, 2 bytes.
    assert found["rows"][0]["at"][0]["bytes"] == 102_400 * 32 * 2 * 8 * 128 * 2


def test_what_is_not_decoded_from_says_so(tiny_folder: Path, tmp_path: Path) -> None:
    """Bytes after DEFLATE are calibrated for; nothing else that decodes takes such a plan."""
    path, own = tmp_path / "both.json", ("--calibrate", "random:1k", "--option", "window=8")
    asked = ("--methods", "kvtc", "--rate", 0.9, "--context", "4k", "--seq", "4k", *own)
    link = ("--transfer", "--link", "slow=1MB/s")
    done = kvprof("plan", tiny_folder, *link, *asked, "--json", path)
    assert done.code == 0, done.stderr
    result = json.loads(path.read_text())
    validate_result(result)
    assert "not for decoding from it" in result["warnings"][0]
    (row,) = [x for x in result["data"]["transfer"]["rows"] if x["label"] == "kvtc"]
    assert 0.9 <= row["at"][0]["rate"] < 1
    assert row["at"][0]["seconds"] == [pytest.approx(row["at"][0]["bytes"] / 1e6)]
