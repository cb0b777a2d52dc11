"""lm-evaluation-harness on a compressed model, with small task files of one's own, offline."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvprof.errors import UsageError
from kvprof.evaluation.harness import (
    HarnessSettings,
    check_harness,
    harness_rows,
    settings_described,
    single_pass_tasks,
)
from kvprof.models.load import load_model
from kvprof.records.schema import validate_result
from tests.commands.running import kvprof, words_of

needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm-eval (the extra harness) is not installed"
)

QUESTIONS = 6


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a task of choices and one that generates."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"what-is-{i}?", "choices": ["a", "bc", "def"], "answer": i % 3}
        for i in range(QUESTIONS)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
        "test_split: test\ndoc_to_text: '{{question}}'\n"
    )
    (folder / "own_choices.yaml").write_text(
        f"task: own_choices\noutput_type: multiple_choice\n{common}"
        "doc_to_choice: '{{choices}}'\ndoc_to_target: answer\n"
        "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    (folder / "own_texts.yaml").write_text(
        f"task: own_texts\noutput_type: generate_until\n{common}"
        "doc_to_target: '{{choices[answer]}}'\n"
        "generation_kwargs:\n  until: ['?']\n  max_gen_toks: 4\n"
        "metric_list:\n  - metric: exact_match\n    aggregation: mean\n"
        "    higher_is_better: true\n"
    )
    return folder


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.mark.slow
@needs_harness
def test_choices_and_texts_go_through_the_compressed_model(
    tiny_folder: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvprof.methods.family import MethodInputs, plan_at
    from kvprof.methods.registry import plan_family
    from kvprof.runtime.session import Compression

    passes: list[int] = []
    begin = Compression.begin

    def counted(self: Compression, *arguments: Any) -> Any:
        passes.append(1)
        return begin(self, *arguments)

    monkeypatch.setattr(Compression, "begin", counted)
    loaded = load_model(str(tiny_folder))
    settings = HarnessSettings(("own_choices", "own_texts"), include=tasks)
    check_harness(settings)
    plain = harness_rows(loaded, None, settings)
    assert not passes
    family = plan_family("full", MethodInputs(loaded.layout, loaded.fingerprint))
    full = harness_rows(loaded, plan_at(family, family.settings[0]), settings)
    # A pass for each of three choices, one and its steps for each text.
    assert len(passes) >= QUESTIONS * 4
    assert [(row["task"], row["metric"]) for row in plain] == [
        ("own_choices", "acc"),
        ("own_texts", "exact_match"),
    ]
    assert full == plain  # full is the model itself
    assert {row["items"] for row in plain} == {QUESTIONS}
    assert [row["single_pass"] for row in plain] == [True, False]
    assert all(0 <= row["value"] <= 1 for row in plain)


@pytest.mark.slow
@needs_harness
def test_a_limit_and_an_unknown_task(tiny_folder: Path, tasks: Path) -> None:
    loaded = load_model(str(tiny_folder))
    settings = HarnessSettings(("own_choices",), limit=2, include=tasks)
    (row,) = harness_rows(loaded, None, settings)
    assert row["items"] == 2
    assert settings_described(settings)["include"] == tasks.name
    with pytest.raises(UsageError, match="'no_such_task' is no task of lm-eval"):
        check_harness(HarnessSettings(("no_such_task",), include=tasks))
    with pytest.raises(UsageError, match="is no folder"):
        check_harness(HarnessSettings(("own_choices",), include=tasks / "missing"))


@pytest.mark.slow
@needs_harness
def test_the_command_shows_them_apart(tiny_folder: Path, tasks: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("".join(f"Line-{i}-of-a-text;" for i in range(100)))
    done = kvprof(
        *words_of(
            f"eval {tiny_folder} --method fp8 --sequences 2 --seq-len 32 --tasks none --text"
        ),
        text,
        *words_of("--harness own_choices,own_texts --harness-include"),
        tasks,
        "--out",
        tmp_path / "run",
    )
    assert done.code == 0, done.stderr
    assert "By its own protocol" in done.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    validate_result(result)
    harness = result["data"]["harness"]
    assert [(row["method"], row["task"]) for row in harness["rows"]] == [
        ("full", "own_choices"),
        ("full", "own_texts"),
        ("fp8", "own_texts"),
    ]
    assert "fp8 is not measured on own_choices" in done.stderr
    assert harness["version"]
    # The harness has nothing to say on its own: stdout and stderr are kvprof's.
    assert "lm_eval" not in done.stderr
    assert "%|" not in done.stderr


@pytest.mark.slow
@needs_harness
def test_what_it_cannot_download_is_told_in_a_line(tiny_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("".join(f"Line-{i}-of-a-text;" for i in range(100)))
    done = kvprof(
        *words_of(
            f"eval {tiny_folder} --method fp8 --sequences 2 --seq-len 32 --tasks none --text"
        ),
        text,
        *words_of(f"--harness arc_easy --out {tmp_path}/run"),
    )
    assert done.code == 1
    assert "lm-eval gave up" in done.error
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [row["method"] for row in result["data"]["evaluations"]] == ["full", "fp8"]


def test_what_the_harness_did_not_generate_was_scored_in_a_single_pass() -> None:
    kinds = {"a": "multiple_choice", "b": "generate_until", "c": "loglikelihood_rolling"}
    found = {
        "results": {task: {} for task in ("a", "b", "c", "texts", "both", "unknown")},
        "configs": {task: {"output_type": kind} for task, kind in kinds.items()},
        "group_subtasks": {"texts": ["b"], "both": ["texts", "a"], "a": []},
    }
    assert single_pass_tasks(found) == {"a", "c", "both", "unknown"}


def test_plans_that_a_single_pass_hides_have_no_such_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvprof.commands.eval import EvalRequest, _Run, _run_harness
    from kvprof.methods.family import MethodInputs, plan_at
    from kvprof.methods.registry import plan_family
    from tests.methods.models import model

    loaded = model("Llama")
    asked: list[str] = []

    def rows(_: Any, plan: Any, settings: HarnessSettings) -> list[dict[str, Any]]:
        name = "full" if plan is None else plan.method
        asked.append(name)
        return [
            {"method": name, "task": task, "single_pass": task != "texts"}
            for task in settings.tasks
        ]

    monkeypatch.setattr("kvprof.evaluation.harness.harness_rows", rows)
    monkeypatch.setattr("kvprof.evaluation.harness.settings_described", lambda _: {})
    kivi = plan_family("kivi", MethodInputs(loaded.layout, loaded.fingerprint))
    for tasks, wanted, runs in (
        (("choices", "texts"), [("full", "choices"), ("full", "texts"), ("kivi", "texts")], 2),
        (("choices",), [("full", "choices")], 1),  # nothing of it would be kept
    ):
        asked.clear()
        run = _Run(EvalRequest(), (), {})
        plans = [plan_at(kivi, kivi.settings[0])]
        _run_harness(run, loaded, plans, HarnessSettings(tasks), lambda: False)
        assert [(row["method"], row["task"]) for row in run.data["harness"]["rows"]] == wanted
        assert len(asked) == runs
        assert "kivi is not measured on choices" in run.warnings[0]
