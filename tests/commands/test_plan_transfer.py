import json
from pathlib import Path
from typing import Any

import pytest

from kvprof.environment import collect_environment
from kvprof.methods.accounting import bytes_at, rate
from kvprof.methods.plan_files import load_plan
from kvprof.models.load import load_model
from kvprof.records.files import write_result
from kvprof.records.result import build_result
from kvprof.records.schema import validate_result
from tests.commands.running import kvprof

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


def prefill_file(
    folder: Path, path: Path, seconds: dict[int, float | None], **changes: Any
) -> Path:
    """Write what ``bench --jct`` leaves of prompts of a model, at full width and another method."""
    loaded = load_model(str(folder))
    first = loaded.layout.layers[0]
    case = {
        "rate": 0.0, "batch": 1, "output_len": 2, "jct_seconds": 1.0, "decode_seconds": 0.5,
        "tbt_seconds": 0.1, "tbt_p99_seconds": 0.1, "instrumented_seconds": None,
        "overhead": None, "decode_overhead": None, "unattributed_share": None,
        "energy_per_token_joules": None, "labels": {}, "complete": True,
    }  # fmt: skip
    cases = [
        {**case, "case": f"{m} {n}", "method": m, "input_len": n, "ttft_seconds": found}
        for n, one in seconds.items()
        for m, found in (("full", one), ("fdc", 1e-6))
    ]
    # Eight prompts at once are not one context computed again.
    cases.append({**cases[0], "case": "full b8", "batch": 8, "ttft_seconds": 99.0})
    shape = {
        "name": "tiny", "layers": 3, "hidden_size": loaded.layout.hidden_size,
        "num_heads": first.num_heads, "num_kv_heads": first.num_kv_heads,
        "head_dim": first.qk_head_dim, "fingerprint": loaded.fingerprint,
    }  # fmt: skip
    empty = {key: [] for key in ("parts", "steps", "layers", "memory", "balance")}
    data = {
        "mode": "real", "shape": {**shape, **changes.get("shape", {})}, "baseline": "full",
        "cases": cases, **empty, "telemetry": {}, "requests": None, "capacity": None,
        "check": None,
    }  # fmt: skip
    dtype = changes.get("dtype", "float32")
    inputs = {"model": "tiny", "dtype": dtype}
    result = build_result("jct", environment=collect_environment(), inputs=inputs, data=data)
    validate_result(result)
    write_result(path, result)
    return path


def test_bytes_over_a_speed_against_a_measured_prefill(tiny_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "own.safetensors"
    kvprof("plan", tiny_folder, "--method", "kq-4bit", "--rate", 0.75, *FINE, "--save", saved)
    record = prefill_file(tiny_folder, tmp_path / "p.json", {64: 0.002, 128: None})
    found = moved(
        tmp_path,
        tiny_folder,
        "--plan",
        saved,
        "--prefill",
        record,
        "--seq",
        "64,128,500",
        "--link",
        "pcie4x16",
        "--link",
        "slow=1MB/s",
    )
    assert [one["context"] for one in found["contexts"]] == [64, 128, 500]
    assert [one["recompute_seconds"] for one in found["contexts"]] == [0.002, None, None]
    assert [one["over_model_context"] for one in found["contexts"]] == [False, False, True]
    plan = load_plan(saved)
    row = found["rows"][-1]
    assert row["label"] == "own.safetensors"
    for at in row["at"]:
        size = bytes_at(plan, at["context"], itemsize=4).total
        assert at["bytes"] == size
        assert at["rate"] == rate(plan, at["context"])
        assert at["seconds"] == pytest.approx([size / 31_507_692_307.7, size / 1e6])
    # 64 tokens, 3 layers, K and V of 2 heads of 16, 4 bytes: 49,152 bytes in 2 ms.
    full = found["rows"][0]["at"]
    assert full[0]["bytes"] == 49152
    assert full[0]["least_bytes_per_s"] == pytest.approx(49152 / 0.002)
    assert full[1]["least_bytes_per_s"] is None
    assert found["prefill"]["origin"] == "given"
    # What nobody measured has a command that does, for these lengths and no others.
    assert "--input-len 126 " in found["measure"]


def test_contexts_are_those_that_were_measured(tiny_folder: Path, tmp_path: Path) -> None:
    record = prefill_file(tiny_folder, tmp_path / "p.json", {32: 0.1, 64: 0.2})
    found = moved(tmp_path, tiny_folder, "--methods", "full", "--prefill", record)
    assert [one["context"] for one in found["contexts"]] == [32, 64]
    assert found["measure"] is None
    alone = moved(tmp_path, tiny_folder, "--methods", "full")
    assert {one["recompute_seconds"] for one in alone["contexts"]} == {None}
    assert alone["prefill"] is None
    assert "bench --jct --real" in alone["measure"]


def test_a_method_of_one_setting_moves_as_it_is_beside_a_rate(
    tiny_folder: Path, tmp_path: Path
) -> None:
    asked = ("--methods", "hadamard-int4,sink-recent", "--rate", 0.5, "--seq", "96")
    found = moved(tmp_path, tiny_folder, *asked)
    rows = {row["label"]: row for row in found["rows"]}
    assert rows["hadamard-int4"]["rate_from"] == "itself"
    assert rows["hadamard-int4"]["at"][0]["rate"] == pytest.approx(1 - 12 / 32)
    assert rows["sink-recent"]["rate_from"] == "given"
    assert not found["missing"]


def test_what_ships_is_named_and_of_this_model_alone(tmp_path: Path) -> None:
    found = moved(tmp_path, "--shape", LLAMA, "--methods", "full", "--seq", "100k,99k")
    assert found["dtype"] == "bfloat16"
    assert found["prefill"]["origin"] == "shipped"
    assert (found["prefill"]["device"], found["prefill"]["mode"]) == ("NVIDIA H200", "composed")
    seconds = {one["context"]: one["recompute_seconds"] for one in found["contexts"]}
    assert seconds[101_376] is None
    again = seconds[102_400]
    assert 5 < again < 10
    full = found["rows"][0]["at"][1]
    # 32 layers, K and V of 8 heads of 128, 2 bytes.
    assert full["bytes"] == 102_400 * 32 * 2 * 8 * 128 * 2
    assert full["least_bytes_per_s"] == pytest.approx(full["bytes"] / again)
    for other in (("--shape", "Mistral-7B-v0.3"), ("--shape", LLAMA, "--dtype", "float32")):
        assert moved(tmp_path, *other, "--methods", "full")["prefill"] is None
    shared = moved(tmp_path, "--shape", "Llama-3.1-70B", "--methods", "full")["prefill"]
    assert shared["devices"] == 4


def test_what_fits_and_what_moves_can_be_asked_at_once(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "both.json"
    both = ("--fit", "2MB", "--transfer", "--methods", "fdc", "--rate", 0.3, *FINE)
    done = kvprof("plan", tiny_folder, *both, "--json", path)
    assert done.code == 0, done.stderr
    data = json.loads(path.read_text())["data"]
    rows = [[row["rate"] for row in data[part]["rows"]] for part in ("fit", "transfer")]
    assert rows[0] == rows[1]
    assert "What fits into" in done.stdout
    assert "Moving the cache of" in done.stdout


def test_what_is_not_decoded_from_says_so_and_fits_nothing(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Bytes after DEFLATE are calibrated for; nothing else that decodes takes such a plan."""
    path, own = tmp_path / "both.json", ("--calibrate", "random:1k", "--option", "window=8")
    asked = ("--methods", "kvtc", "--rate", 0.9, "--context", "4k", "--seq", "4k", *own)
    both = ("--fit", "2MB", "--transfer", "--link", "slow=1MB/s")
    done = kvprof("plan", tiny_folder, *both, *asked, "--json", path)
    assert done.code == 0, done.stderr
    result = json.loads(path.read_text())
    validate_result(result)
    assert "not for decoding from it" in result["warnings"][0]
    moving, fitting = result["data"]["transfer"], result["data"]["fit"]
    ((row,),) = ([one for one in moving["rows"] if one["label"] == "kvtc"],)
    assert 0.9 <= row["at"][0]["rate"] < 1
    assert row["at"][0]["seconds"] == [pytest.approx(row["at"][0]["bytes"] / 1e6)]
    assert [one["label"] for one in fitting["missing"]] == ["kvtc"]
    assert "kvtc" not in [one["label"] for one in fitting["rows"]]
    done = kvprof("plan", tiny_folder, "--fit", "2MB", *asked[:4], *own)
    assert "not for decoding from it" in " ".join(done.stdout.split())
    assert "calibrating" not in done.stderr


@pytest.mark.parametrize("columns", [80, 120])
def test_the_report_keeps_its_width_and_says_what_it_rests_on(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    record = prefill_file(tiny_folder, tmp_path / "p.json", {64: 0.002})
    done = kvprof(
        "plan",
        tiny_folder,
        "--transfer",
        "--methods",
        "fdc",
        "--rate",
        0.2,
        *FINE,
        "--prefill",
        record,
        "--seq",
        "64,4k",
        "--link",
        "slow=1MB/s",
        "--link",
        "nvlink4",
    )
    assert done.code == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= columns
    words = " ".join(done.stdout.split())
    for said in ("nominal", "as given", "24.6 MB/s", "p.json", "--input-len 126 "):
        assert said in words
    # 49 ms over a megabyte a second, where computing takes 2.
    assert "49.2 ms!" in words
    assert "longer than computing it again" in words


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--link", "nvlink4"), "--link means nothing without --transfer"),
        (("--seq", "4k", "--prefill", "x"), "--seq and --prefill means nothing without"),
        (("--transfer", "--link", "quick"), "'quick' is no link"),
        (("--transfer", "--link", "nvlink4", "--link", "nvlink4"), "named twice"),
        (("--transfer", "--reserve", "1GB"), "--reserve means nothing without --fit"),
        (("--transfer", "--seq", "0"), "--seq"),
        (("--transfer", "--save", "x.plan"), "--save cannot be had with --transfer"),
        (("--transfer", "--prefill", "missing.json"), "missing.json"),
        (("--transfer", "--shape", LLAMA), "keep one"),
    ],
)
def test_bad_input_gets_one_line(tiny_folder: Path, arguments: tuple[str, ...], says: str) -> None:
    done = kvprof("plan", tiny_folder, *arguments)
    assert (done.code, says in done.error) == (2, True), done.error


def test_a_shape_has_no_weights(tmp_path: Path) -> None:
    for arguments, says in (
        (("--fit", "80GB"), "has none"),
        (("--device", "cpu"), "--device means nothing with --shape"),
        (("--plan", tmp_path / "x.plan"), "is of a model with weights"),
        (("--dtype", "int8"), "'int8'"),
    ):
        done = kvprof("plan", "--shape", LLAMA, "--transfer", "--methods", "full", *arguments)
        assert (done.code, says in done.error) == (2, True), done.error


def test_records_of_something_else_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    fit = tmp_path / "fit.json"
    kvprof("plan", tiny_folder, "--fit", "2MB", "--methods", "full", "--json", fit)
    for path, says in (
        (fit, "of kind plan has no time"),
        (
            prefill_file(tiny_folder, tmp_path / "a", {64: 1.0}, shape={"num_kv_heads": 1}),
            "another model: num_kv_heads 1",
        ),
        (
            prefill_file(tiny_folder, tmp_path / "b", {64: 1.0}, shape={"fingerprint": "f" * 32}),
            "another model: weights ffffffffffff",
        ),
        (prefill_file(tiny_folder, tmp_path / "c", {64: 1.0}, dtype="bfloat16"), "--dtype bf"),
        (prefill_file(tiny_folder, tmp_path / "d", {64: None}), "no prompt of one sequence"),
    ):
        done = kvprof("plan", tiny_folder, "--transfer", "--methods", "full", "--prefill", path)
        assert (done.code, says in done.error) == (2, True), done.error
