import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvprof.errors import FailedError
from kvprof.methods.accounting import bytes_at, full_bytes
from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import load_plan
from kvprof.records.schema import validate_result
from tests.commands.running import kvprof, result_of
from tests.models.folder import save_tiny

pytestmark = pytest.mark.usefixtures("own_cache")

FINE = ("--grid", 1, "--minimum", 1)
COARSE = ("--grid", 4, "--minimum", 4)


plan_json = partial(result_of, "plan")


def test_a_plan_is_told_as_it_is_saved(tiny_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "fdc.safetensors"
    result = plan_json(
        tmp_path, tiny_folder, "--method", "fdc", "--rate", 0.3, *COARSE, "--save", saved
    )
    told, plan = result["data"]["plan"], load_plan(saved)
    tokens = told["context"]
    assert tokens == 96  # three quarters of the model's 128
    assert told["bytes"]["total"] == bytes_at(plan, tokens, itemsize=2).total
    assert told["bytes"]["full"] == full_bytes(plan, tokens, itemsize=2)
    assert told["rate"] >= 0.3
    assert told["ranks"]["keys"] == [[g.rank for g in x.keys.groups] for x in plan.layers]
    assert told["folded"] == {"W_V": 3, "W_O": 3}
    assert told["online"] == {"K into its latent": 3, "Q into the latent": 3}
    assert result["inputs"]["fingerprint"] == plan.fingerprint


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("grid=16", None),
        ("levels=lloyd-max", "latents are quantised by lloyd-max-rms"),
        ("heads=0", "heads share latents and latents are quantised"),
    ],
)
def test_a_plan_says_whether_kernels_run_it(
    options: str, reason: str | None, tiny_folder: Path, tmp_path: Path
) -> None:
    how = ("--method", "kq-wf", "--rate", 0.6, "--option", options, "--option", "allocation=output")
    few = ("--option", "window=4", "--calibrate", "random", "--calibrate-tokens", 64)
    path = tmp_path / "plan.json"
    done = kvprof("plan", tiny_folder, *how, *few, "--json", path)
    kernel = {"layers": 0 if reason else 3, "of": 3, "reason": reason}
    assert json.loads(path.read_text())["data"]["plan"]["kernel"] == kernel
    assert (str(reason) in " ".join(done.stdout.split())) == (reason is not None)


def test_bits_by_column_are_handed_out_by_probes_of_single_heads(
    tiny_folder: Path, tmp_path: Path
) -> None:
    how = ("--method", "kq-wf", "--rate", 0.6, "--allocation", "budget", "--option", "window=4")
    told = plan_json(tmp_path, tiny_folder, *how, "--calibrate-tokens", 64)["data"]["plan"]
    assert told["made"]["options"]["allocation"] == "budget"
    assert told["made"]["sensitivity"]["tokens"] == 64
    assert told["rate"] >= 0.6


def test_an_evaluation_says_which_plans_no_kernel_runs(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    sample = ("--sequences", 1, "--seq-len", 32, "--tasks", "none", "--json", path)
    done = kvprof("eval", tiny_folder, "--method", "turboquant", "--rate", 0.7, *sample)
    assert done.code == 0, done.stderr
    result = json.loads(path.read_text())
    validate_result(result)
    plans = {one["method"]: one["plan"] for one in result["data"]["evaluations"]}
    reason = "latents are quantised by lloyd-max"
    assert plans["turboquant"]["kernel"] == {"layers": 0, "of": 3, "reason": reason}
    assert plans["fp8"]["kernel"]["reason"] is None
    assert "Without kernels" in done.stdout


def test_rounding_costs_what_the_ranks_say(tiny_folder: Path, tmp_path: Path) -> None:
    told = plan_json(tmp_path, tiny_folder, "--method", "fdc", "--removal", 0.3, *COARSE)
    rounding = told["data"]["plan"]["rounding"]
    fine = plan_json(tmp_path, tiny_folder, "--method", "fdc", "--removal", 0.3, *FINE)
    assert rounding["value"] == 0.3
    assert (rounding["grid"], rounding["minimum"]) == (4, 4)
    assert rounding["requested"] == fine["data"]["plan"]["ranks"]
    assert rounding["stored"] == told["data"]["plan"]["ranks"]
    lost = 0
    for side in ("keys", "values"):
        for asked, kept in zip(rounding["requested"][side], rounding["stored"][side], strict=True):
            assert all(b == min(16, -(-a // 4) * 4) for a, b in zip(asked, kept, strict=True))
            lost += sum(kept) - sum(asked)
    assert rounding["bytes_lost"] == lost * 96 * 2
    assert rounding["requested_rate"] == fine["data"]["plan"]["rate"]
    assert fine["data"]["plan"]["rounding"]["bytes_lost"] == 0


def test_a_combination_rounds_the_ranks_of_its_method(tiny_folder: Path, tmp_path: Path) -> None:
    one = plan_json(tmp_path, tiny_folder, "--method", "kq-4bit", "--rate", 0.7, *COARSE)
    rounding = one["data"]["plan"]["rounding"]
    assert rounding["bytes_lost"] > 0
    plain = plan_json(
        tmp_path, tiny_folder, "--method", "kq", "--removal", rounding["value"], *FINE
    )
    assert rounding["requested"] == plain["data"]["plan"]["ranks"]


@pytest.mark.parametrize("method", ["full", "fp8"])
def test_methods_without_ranks_have_no_rounding(
    tiny_folder: Path, tmp_path: Path, method: str
) -> None:
    told = plan_json(tmp_path, tiny_folder, "--method", method)["data"]["plan"]
    assert told["rounding"] is None
    assert told["folded"] == told["online"] == {}
    assert told["weights"]["total"] == told["weights"]["running"] == 0
    assert told["rate"] == (0.5 if method == "fp8" else 0)


def test_bytes_are_counted_at_the_context_asked_for(tiny_folder: Path, tmp_path: Path) -> None:
    arguments = (tiny_folder, "--method", "kivi", "--option", "bits=2")
    short = plan_json(tmp_path, *arguments, "--context", 100)
    assert short["data"]["plan"]["rate"] == 0  # nothing has left the window yet
    long_plan = plan_json(tmp_path, *arguments, "--context", "4k")
    assert long_plan["data"]["plan"]["context"] == 4096
    assert long_plan["data"]["plan"]["rate"] > 0.5


@pytest.mark.parametrize(("method", "unseen"), [("kq", True), ("palu", False)])
def test_rotated_keys_beyond_calibration_are_warned_of(
    method: str, unseen: bool, tiny_folder: Path, tmp_path: Path
) -> None:
    how = ("--method", method, "--rate", 0.3, *COARSE, "--calibrate-tokens", 256)
    for length, warned in ((16, unseen), (32, False)):
        at = ("--calibrate-seq-len", length, "--context", 64)
        warnings = plan_json(tmp_path, tiny_folder, *how, *at)["warnings"]
        assert any(f"sequences of {length} tokens" in one for one in warnings) is warned


def test_a_saved_plan_needs_no_model(tiny_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "tale.safetensors"
    made = plan_json(
        tmp_path, tiny_folder, "--method", "tale", "--rate", 0.2, *FINE, "--save", saved
    )["data"]["plan"]
    alone = plan_json(tmp_path, "--plan", saved)["data"]["plan"]
    assert alone["weights"] is None
    for key in ("bytes", "rate", "ranks", "levels", "folded", "context"):
        assert alone[key] == made[key]
    assert made["levels"]["least_ranks"]["values"] != made["ranks"]["values"]
    with_model = plan_json(tmp_path, tiny_folder, "--plan", saved)["data"]["plan"]
    assert with_model["weights"] == made["weights"]
    half = plan_json(tmp_path, "--plan", saved, "--dtype", "bf16")["data"]["plan"]
    assert half["bytes"]["full"] == made["bytes"]["full"]


def test_two_plans_are_compared(tiny_folder: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one.safetensors", tmp_path / "other.safetensors"
    arguments = (tiny_folder, "--method", "fdc", *FINE)
    first = plan_json(tmp_path, *arguments, "--rate", 0.2, "--save", one)["data"]["plan"]
    second = plan_json(tmp_path, *arguments, "--rate", 0.4, "--save", other)["data"]["plan"]
    compared = plan_json(tmp_path, "--plan", one, "--compare", other)["data"]["comparison"]
    assert compared["rate"] == second["rate"]
    place = {entry["path"]: entry for entry in compared["differences"]}
    for layer, (a, b) in enumerate(
        zip(first["ranks"]["keys"], second["ranks"]["keys"], strict=True)
    ):
        for group, (x, y) in enumerate(zip(a, b, strict=True)):
            entry = place.get(f"layers.{layer}.keys.groups.{group}.ranks.0")
            assert (entry["this"], entry["other"]) == (x, y) if entry else x == y
    same = plan_json(tmp_path, "--plan", one, "--compare", one)["data"]["comparison"]
    assert same["differences"] == []


def test_text_and_json_lines_calibrate(tiny_folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("The cache holds keys and values. " * 60)
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        "".join(json.dumps({"text": f"Line {i}: " + "ab " * 20}) + "\n" for i in range(40))
    )
    for source in (plain, lines):
        told = plan_json(
            tmp_path, tiny_folder, "--method", "kq", "--rate", 0.2, *FINE, "--calibrate", source
        )
        assert told["data"]["plan"]["made"]["calibration"]["source"] == source.name


def test_what_exists_is_not_overwritten(tiny_folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "kept.safetensors"
    saved.write_text("mine")
    done = kvprof("plan", tiny_folder, "--method", "fp8", "--save", saved)
    assert (done.code, saved.read_text()) == (2, "mine")
    assert kvprof("plan", tiny_folder, "--method", "fp8", "--save", saved, "--force").code == 0
    assert load_plan(saved).method == "fp8"


def test_ctrl_c_keeps_the_rows_that_were_made(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvprof.commands import plan_transfer

    original = plan_transfer._planned

    def pressed_after_two(*arguments: Any) -> Any:
        plan = original(*arguments)
        if plan.method == "fp8":
            os.kill(os.getpid(), signal.SIGINT)
        return plan

    monkeypatch.setattr(plan_transfer, "_planned", pressed_after_two)
    path = tmp_path / "cut.json"
    done = kvprof("plan", tiny_folder, "--transfer", "--rate", 0.2, "--json", path)
    assert done.code == 130
    assert "INCOMPLETE" in done.stdout
    result = json.loads(path.read_text())
    assert not result["complete"]
    rows = result["data"]["transfer"]["rows"]
    assert {row["label"] for row in rows} <= {"full", "fp8"}
    assert "fp8" in {row["label"] for row in rows}
    missing = {one["label"]: one["reason"] for one in result["data"]["transfer"]["missing"]}
    assert missing["kq"] == "interrupted before it was planned"


def test_a_model_that_no_plan_fits_is_told_so(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "mla", arch="DeepseekV3")
    for arguments in (("--transfer", "--rate", 0.2), ("--method", "fp8")):
        done = kvprof("plan", folder, *arguments)
        assert (done.code, "multi-head latent attention" in done.error) == (2, True)


def test_a_plan_that_could_not_be_saved_is_not_said_to_be(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as on a disk that became full; what was planned is shown all the same."""

    def full(made: Plan, path: Path, *, force: bool) -> None:
        raise FailedError(f"cannot write {path.name}: No space left on device")

    monkeypatch.setattr("kvprof.methods.plan_files.save_plan", full)
    asked = ("--method", "kq", "--rate", 0.2, *COARSE, "--save", tmp_path / "kq.plan")
    done = kvprof("plan", tiny_folder, *asked)
    assert done.code == 1
    assert "kq.plan: No space left" in done.error
    assert "kq stores" in done.stdout
    assert "kq.plan" not in done.stdout


def test_a_rate_of_0_is_a_method_s_least_compression() -> None:
    def planned(method: str) -> dict[str, Any]:
        arguments = ("--method", method, "--rate", 0, "--context", "16k", "--json", "-")
        found: dict[str, Any] = json.loads(kvprof("plan", *arguments).stdout)["data"]["plan"]
        return found

    # What is kept beside whole latents, or beside tokens of which none is dropped, is bytes too.
    for method in ("xkv", "h2o", "keyformer"):
        assert planned(method)["dim_rate"] == 0
        assert planned(method)["rate"] < 0


def test_a_removal_of_all_leaves_one_dimension(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "spectrum.json"
    plan = ("plan", tiny_folder, "--method", "fdc", "--calibrate", "random:256", "--removal")
    spectrum = ("spectrum", tiny_folder, "--tokens", 256, "--json", path, "--removal")
    assert kvprof(*plan, "1").code == kvprof(*spectrum, "1").code == 0
    (found,) = json.loads(path.read_text())["data"]["removal"]
    assert found["removal_rate"] == 1
    assert {rank for layer in found["ranks_qk"] for rank in layer} == {1}
