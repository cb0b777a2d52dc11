import copy
import csv
import io
import json
import os
import re
import signal
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kvprof.commands import eval as command
from kvprof.errors import LackingError
from kvprof.evaluation.evaluator import Evaluator
from kvprof.evaluation.tasks import embedded
from kvprof.methods.named import ENGINE_FORMATS
from kvprof.records.schema import validate_result
from tests.commands.running import kvprof, over, result_of, words_of
from tests.models.folder import byte_tokenizer
from tests.models.tiny import tiny

SMALL = ("--sequences", 3, "--seq-len", 32, "--tasks", "none")
FINE = ("--grid", 1, "--minimum", 1)


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "notes.txt"
    path.write_text("".join(f"Line-{i}-of-a-text-about-caches;" for i in range(200)))
    return path


eval_json = partial(result_of, "eval")


def test_full_and_fp8_stand_beside_every_method(
    tiny_folder: Path, notes: Path, tmp_path: Path
) -> None:
    result = eval_json(
        tmp_path,
        *words_of(f"{tiny_folder} --method kq,fdc --method svd-kv --rate 0.4"),
        *over(SMALL, ("--seq-len", 64)),  # of which random weights foretell a token
        *FINE,
        *words_of(f"--text {notes} --text prose"),
    )
    rows = result["data"]["evaluations"]
    assert [row["method"] for row in rows] == ["full", "fp8", "kq", "fdc", "svd-kv"]
    full, fp8, *others = rows
    assert (full["rate"], full["kl"]["worst"], full["relative_accuracy"]) == (0, 0, 1)
    assert fp8["rate"] == 0.5  # a byte instead of two
    assert result["data"]["dtype"] == "float32"
    assert result["data"]["context"] == 48
    for row in others:
        assert 0.4 <= row["rate"] < 0.45
        assert row["bytes_per_token"] == pytest.approx(full["bytes_per_token"] * (1 - row["rate"]))
        assert row["kl"]["mean"] > fp8["kl"]["mean"]
        assert list(row["sources"]) == ["notes.txt", "prose"]
        assert row["decoded_tokens"] == 2 * 3 * 32
        assert row["plan"]["made"]["calibration"]["source"] == "random"
        assert not {"sketch", "files", "digest"} & row["plan"]["made"]["calibration"].keys()
    inputs = result["inputs"]
    assert inputs["methods"] == ["kq", "fdc", "svd-kv"]
    assert inputs["text"] == ["notes.txt", "prose"]
    assert inputs["protocol"] == "one_pass"


def test_report_and_csv(tiny_folder: Path, notes: Path) -> None:
    arguments = ("eval", tiny_folder, "--method", "kq", "--rate", 0.5, *SMALL, *FINE)
    done = kvprof(*arguments, "--text", notes, "--decode")
    assert done.code == 0, done.stderr
    assert "kq saves 50" in done.stdout
    assert "token by token" in " ".join(done.stdout.split())
    done = kvprof(*arguments, "--text", notes, "--csv", "-")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert {row["method"] for row in rows} == {"full", "fp8", "kq"}


def test_a_row_of_the_same_name_that_is_another_says_so(
    tiny_folder: Path, notes: Path, tmp_path: Path
) -> None:
    arguments = (tiny_folder, "--method", "fp8", *SMALL, "--text", notes)
    warnings = eval_json(tmp_path, *arguments, "--option", "scale=none")["warnings"]
    assert any("scale=none" in warning for warning in warnings)
    warnings = eval_json(tmp_path, *arguments)["warnings"]
    assert not any("the row fp8 is" in warning for warning in warnings)


def test_a_plan_from_a_file(tiny_folder: Path, notes: Path, tmp_path: Path) -> None:
    from kvprof.methods.family import MethodInputs, plan_at
    from kvprof.methods.plan_files import save_plan
    from kvprof.methods.registry import plan_family
    from kvprof.models.load import load_model

    loaded = load_model(str(tiny_folder))
    family = plan_family("sink-recent", MethodInputs(loaded.layout, loaded.fingerprint))
    save_plan(plan_at(family, family.bounds[1] / 2), tmp_path / "my.plan")
    arguments = (tiny_folder, "--plan", tmp_path / "my.plan", *SMALL, "--text", notes)
    result = eval_json(tmp_path, *arguments)
    assert [x["method"] for x in result["data"]["evaluations"]] == ["full", "fp8", "sink-recent"]
    assert result["inputs"]["plan"] == "my.plan"


def test_full_by_name_runs_through_the_cache(
    tiny_folder: Path, notes: Path, tmp_path: Path
) -> None:
    result = eval_json(
        tmp_path, tiny_folder, "--method", "full", "--decode", *SMALL, "--text", notes
    )
    rows = {row["method"]: row for row in result["data"]["evaluations"]}
    assert list(rows) == ["fp8", "full"]
    assert rows["full"]["measured_bytes"] == rows["full"]["accounted_bytes"]
    assert rows["full"]["kl"]["worst"] < 1e-9


def test_questions_on_the_reference_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = tmp_path / "tasks.jsonl"
    rows = embedded._ROWS.read_text("utf-8").splitlines(keepends=True)
    short.write_text("".join(row for row in rows if json.loads(row)["length"] == 256), "utf-8")
    monkeypatch.setattr(embedded, "_ROWS", short)
    result = eval_json(
        tmp_path,
        *words_of("--method kq --rate 0.0 --calibrate random:256 --sequences 1 --seq-len 8"),
        *words_of("--tasks needle --task-items 2"),
    )
    for row in result["data"]["evaluations"]:
        needle = row["tasks"]["needle"]
        assert (needle["accuracy"], needle["baseline"], needle["items"]) == (1, 1, 2)
    assert row["worst_tokens"][0]["text"]
    assert row["relative_accuracy_interval"] is None  # one sequence shows no spread


def test_questions_that_do_not_fit_are_counted(
    tiny_folder: Path, notes: Path, tmp_path: Path
) -> None:
    result = eval_json(
        tmp_path,
        *words_of(f"{tiny_folder} --method fp8 --sequences 500 --seq-len 32 --tasks copy"),
        *words_of(f"--text {notes}"),
    )
    left_out, few = (text for text in result["warnings"] if "calibrated" not in text)
    assert left_out.startswith("20 questions exceed the context")
    assert few.startswith("notes.txt has ")
    assert "500" in few


def test_an_interrupt_while_plans_are_made_evaluates_nothing(
    tiny_folder: Path, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(*_: Any) -> list[Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return []

    monkeypatch.setattr(command, "_plans", planned)
    monkeypatch.setattr(Evaluator, "baseline", lambda *_: pytest.fail("it went on"))
    done = kvprof("eval", tiny_folder, "--method", "fp8", *SMALL, "--out", tmp_path / "run")
    assert done.code == 130
    assert done.stderr.splitlines()[-1].startswith("kvprof: interrupted before anything was eval")
    assert not (tmp_path / "run").exists()


def test_an_interrupt_keeps_what_was_measured(
    tiny_folder: Path, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Evaluator.evaluate

    def interrupted(self: Evaluator, plan: Any, *rest: Any) -> dict[str, Any]:
        if plan.method == "kq":
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(self, plan, *rest)

    monkeypatch.setattr(Evaluator, "evaluate", interrupted)
    done = kvprof(
        *words_of(f"eval {tiny_folder} --method kq,svd-kv --rate 0.4"),
        *FINE,
        *words_of(f"--sequences 4 --seq-len 32 --tasks none --batch-size 1 --text {notes}"),
        *words_of(f"--out {tmp_path}/run"),
    )
    assert done.code == 130
    assert "INCOMPLETE" in done.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    validate_result(result)
    assert not result["complete"]
    rows = {row["method"]: row for row in result["data"]["evaluations"]}
    assert list(rows) == ["full", "kq"]  # the method asked for comes before fp8
    assert rows["kq"]["sequences"] == 1


def test_a_failure_in_the_middle_keeps_what_was_measured(
    tiny_folder: Path, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Evaluator.evaluate

    def short(self: Evaluator, plan: Any, *rest: Any) -> dict[str, Any]:
        if plan.method == "kq":
            raise LackingError("out of memory; --batch-size 2 would fit")
        return evaluate(self, plan, *rest)

    monkeypatch.setattr(Evaluator, "evaluate", short)
    done = kvprof(
        *words_of(f"eval {tiny_folder} --method kq --rate 0.4"),
        *FINE,
        *SMALL,
        *words_of(f"--text {notes} --out {tmp_path}/run"),
    )
    assert done.code == 3
    assert "--batch-size 2 would fit" in done.error
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["incomplete_reason"] == "out of memory; --batch-size 2 would fit"
    assert [row["method"] for row in result["data"]["evaluations"]] == ["full"]


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_the_harness_is_an_extra(tiny_folder: Path) -> None:
    done = kvprof("eval", tiny_folder, "--method", "fp8", "--harness", "arc_easy")
    assert done.code == 3
    assert re.search(r"-m pip install .*'lm-eval>=", done.error)


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with random weights and room for 2k letters."""
    folder = tmp_path_factory.mktemp("long")
    tiny("Llama", num_hidden_layers=1, max_position_embeddings=2048).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_generated_tasks_are_asked_at_their_lengths_and_their_answers_counted(
    long_folder: Path, notes: Path, tmp_path: Path
) -> None:
    common = (long_folder, "--sequences", 8, "--seq-len", 32, "--text", notes, "--task-items", 2)
    asked = ("--tasks", "niah-single-1,open-questions", "--task-lengths", "900,1k")
    result = eval_json(tmp_path, *common, *asked, "--method", "fp8")
    assert result["inputs"]["tasks"] == ["niah_single_1", "open_questions"]
    assert result["inputs"]["task_lengths"] == [900, 1024]
    assert any("SQuAD" in note for note in result["inputs"]["task_notes"])
    for row in result["data"]["evaluations"]:
        assert set(row["tasks"]) == {"niah_single_1"}
        task = row["tasks"]["niah_single_1"]
        assert set(task["by_length"]) == {"900", "1024"}
        assert not task["judges"]  # random weights find nothing
        lengths = row["answer_lengths"]
        assert lengths["prompts"] == 4
        assert lengths["by_task"]["open_questions"]["limit"] == 256
        assert lengths["tokens"] <= (2 * 128 + 2 * 256) / 4
    done = kvprof(
        "frontier", *common, *asked, "--methods", "fdc", "--no-cache", "--metric", "niah_single_1"
    )
    assert done.code == 2
    assert "scores 0" in done.error


def test_the_plain_cast_says_what_it_clips(tmp_path: Path) -> None:
    """On a model whose keys e4m3 cannot hold; with scales nothing is clipped, and nothing said."""
    model = copy.deepcopy(tiny("Llama", num_hidden_layers=1))
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[:16] *= 2.0**12
    folder = tmp_path / "large"
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    told = eval_json(tmp_path, folder, "--method", "fp8", "--option", "scale=none", *SMALL)
    (clips,) = [text for text in told["warnings"] if "clips" in text]
    assert clips.startswith("fp8:scale=none clips ")
    assert " % of the keys of layer 0, KV head 0, on " in clips
    told = eval_json(tmp_path, folder, "--method", "full", *SMALL)
    assert not [text for text in told["warnings"] if "fp8" in text and "calibrated" not in text]


def test_the_types_of_engines_are_measured_and_how_they_are_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    tiny("Llama", head_dim=64, num_hidden_layers=5).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    asked = ("--method", "engine-formats", *over(SMALL, ("--seq-len", 16)))
    told = eval_json(tmp_path, folder, *asked)
    rows = {row["method"]: row for row in told["data"]["evaluations"]}
    assert list(rows) == ["full", "fp8", *ENGINE_FORMATS]
    assert rows["q8_0"]["rate"] == pytest.approx(1 - 8.5 / 16)
    assert rows["q8_0"]["kl"]["mean"] < rows["q4_0"]["kl"]["mean"]
    shown = kvprof("show", tmp_path / "result.json").stdout
    for engine, flag in ENGINE_FORMATS.values():
        assert engine in shown
        assert flag in shown


def test_what_an_engine_does_not_take_is_left_out_and_said(
    tiny_folder: Path, tmp_path: Path
) -> None:
    told = eval_json(tmp_path, tiny_folder, "--method", "q8_0,int8_per_token_head", *SMALL)
    assert [row["method"] for row in told["data"]["evaluations"]][2:] == ["int8_per_token_head"]
    assert any("q8_0:" in text for text in told["warnings"])
