import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvprof.errors import FailedError, UsageError
from kvprof.recipes.check import load_recipe
from kvprof.recipes.ledger import merge_entries, model_of
from kvprof.recipes.machine import Machine
from kvprof.recipes.resolve import Planned
from kvprof.recipes.runs import (
    CellStore,
    Finished,
    Outcome,
    cell_key,
    code_version,
    one_by_one,
    prepare,
    run_planned,
)
from tests.recipes.written import CPU, TEXT, FakeRunner, plan_result, write


def planned(
    folder: Path,
    *texts: str,
    settings: dict[str, str] | None = None,
    machine: Machine = CPU,
    model: str | None = None,
    profile: str = "smoke",
) -> list[Planned]:
    recipes = []
    for place, text in enumerate(texts or (TEXT,)):
        name = f"small-{place}"
        recipes.append(load_recipe(write(folder, text.replace("small-claim", name), name)))
    return prepare(recipes, profile, settings or {}, model, machine, "version")


def run(
    plan: list[Planned],
    folder: Path,
    runner: FakeRunner,
    should_stop: Callable[[], bool] = lambda: False,
) -> Finished:
    store = CellStore(folder / "cells")
    return run_planned(
        plan, store, one_by_one(runner), machine=CPU, settings={}, should_stop=should_stop
    )


def verdicts(finished: Finished) -> list[str]:
    return [entry["verdict"] for entry in finished.entries]


def test_a_claim_that_holds_and_one_that_was_falsified(tmp_path: Path) -> None:
    true = run(planned(tmp_path), tmp_path / "a", FakeRunner({"fdc": 0.96, "kq": 0.95}))
    assert verdicts(true) == ["reproduced"]
    # The same recipe with a limit that nothing reaches, and no weaker claim to fall back to.
    text = TEXT.replace("at_least: 0.95", "at_least: 1.2").replace(
        "measure: ratio, at_least: 1, direction: true",
        "measure: ratio, published: kept, at_least: 1",
    )
    false = run(planned(tmp_path, text), tmp_path / "b", FakeRunner({"fdc": 0.96, "kq": 0.95}))
    assert verdicts(false) == ["not reproduced"]
    assert [line["holds"] for line in false.entries[0]["lines"]] == [False, True]


def test_a_tie_is_no_order(tmp_path: Path) -> None:
    text = (
        TEXT.partition("measures:")[0]
        + """\
measures:
  - {id: fdc, cell: plan-fdc, data: "rows[0].rate"}
  - {id: kq, cell: plan-kq, data: "rows[0].rate"}
  - {id: ahead, subtract: [fdc, kq]}
verdict:
  - {measure: ahead, above: 0, direction: true}
"""
    )

    def measure(spread: float, fdc: float) -> dict[str, Any]:
        def runner(words: Sequence[str], should_stop: Callable[[], bool]) -> Outcome:
            method = words[words.index("--method") + 1]
            value = fdc if method == "fdc" else 0.9
            near = (value - spread, value + spread)
            return Outcome(plan_result(method, value, interval=near), 0)

        store = CellStore(tmp_path / f"{spread} {fdc}")
        plan = planned(tmp_path, text)
        return run_planned(plan, store, one_by_one(runner), machine=CPU, settings={}).entries[0]

    assert measure(0.01, 0.95)["verdict"] == "trend only"
    assert measure(0.01, 0.85)["verdict"] == "not reproduced"
    for spread, fdc in ((0.01, 0.905), (0.01, 0.895), (0.0, 0.9)):
        tied = measure(spread, fdc)
        assert tied["verdict"] == "not testable here"
        assert tied["reasons"][0].startswith("ahead: 0 is inside its interval, ")
        assert not tied["lacking"]


def test_the_weaker_claim_alone_is_a_direction(tmp_path: Path) -> None:
    found = run(planned(tmp_path), tmp_path / "a", FakeRunner({"fdc": 0.5, "kq": 0.6}))
    assert verdicts(found) == ["trend only"]


def test_equal_cells_of_several_recipes_run_once(tmp_path: Path) -> None:
    runner = FakeRunner({"fdc": 0.96, "kq": 0.95})
    found = run(planned(tmp_path, TEXT, TEXT), tmp_path, runner)
    assert len(runner.asked) == 2
    assert runner.asked[0] == ("plan", "reference", "--method", "fdc", "--rate", "0.30")
    assert verdicts(found) == ["reproduced", "reproduced"]


def test_what_cells_warned_of_is_said_once_with_whose_it_is(tmp_path: Path) -> None:
    both = "intervals come from 4 sequences"
    warned = {"fdc": [both, "cast clips"], "kq": [both]}

    def runner(words: Sequence[str], should_stop: Callable[[], bool]) -> Outcome:
        method = words[words.index("--method") + 1]
        return Outcome({**plan_result(method, 0.96), "warnings": warned[method]}, 0)

    plan = planned(tmp_path, TEXT, TEXT)
    store = CellStore(tmp_path / "cells")
    for _ in range(2):  # measured, then known
        found = run_planned(plan, store, one_by_one(runner), machine=CPU, settings={})
        assert found.warnings == [
            f"small-0 plan-fdc, small-0 plan-kq, small-1 plan-fdc and 1 more: {both}",
            "small-0 plan-fdc, small-1 plan-fdc: cast clips",
        ]


def test_a_failing_cell_is_a_verdict_and_loses_no_other(tmp_path: Path) -> None:
    other = TEXT.replace("method: [fdc, kq]", "method: [fdc, zack]")
    runner = FakeRunner({"fdc": 0.96, "kq": 0.95, "zack": "out of memory: 3 GB"})
    found = run(planned(tmp_path, other, TEXT), tmp_path, runner)
    assert verdicts(found) == ["not testable here", "reproduced"]
    assert found.entries[0]["failed"]
    assert found.entries[0]["reasons"] == ["plan-zack: out of memory: 3 GB"]
    # What could be measured of it is there nevertheless.
    assert found.entries[0]["measures"][0]["value"] == 0.96


def test_an_interrupted_run_resumes_and_a_changed_cell_runs_alone(tmp_path: Path) -> None:
    stop = False
    runner = FakeRunner({"fdc": 0.96, "kq": 0.95})

    def interrupt() -> None:
        nonlocal stop
        stop = len(runner.asked) == 2

    runner.after = interrupt
    first = run(planned(tmp_path), tmp_path, runner, lambda: stop)
    assert first.interrupted
    assert verdicts(first) == ["not testable here"]
    assert "plan-kq: interrupted" in first.entries[0]["reasons"]

    again = FakeRunner({"fdc": 0.96, "kq": 0.95})
    second = run(planned(tmp_path), tmp_path, again)
    assert [words[3] for words in again.asked] == ["kq"]
    assert verdicts(second) == ["reproduced"]
    assert [cell["known"] for cell in second.entries[0]["cells"]] == [True, False]

    changed = TEXT.replace("method: [fdc, kq]", "method: [fdc, zack]")
    third = FakeRunner({"zack": 0.95})
    run(planned(tmp_path, changed), tmp_path, third)
    assert [words[3] for words in third.asked] == ["zack"]


def test_nothing_is_known_with_fresh(tmp_path: Path) -> None:
    runner = FakeRunner({"fdc": 0.96, "kq": 0.95})
    plan = planned(tmp_path)
    store = CellStore(tmp_path / "cells")
    for fresh in (False, False, True):
        run_planned(plan, store, one_by_one(runner), machine=CPU, settings={}, fresh=fresh)
    assert len(runner.asked) == 4


def test_accuracy_is_not_testable_on_the_reference_model(tmp_path: Path) -> None:
    text = TEXT.replace("judged: true", "accuracy: true\njudged: true")
    rates = {"fdc": 0.96, "kq": 0.95}
    found = run(planned(tmp_path, text), tmp_path, FakeRunner(rates)).entries[0]
    assert (found["verdict"], found["model"]) == ("not testable here", "reference")
    assert found["lines"][0]["holds"]
    other = run(planned(tmp_path, text, model="my/llama"), tmp_path, FakeRunner(rates)).entries[0]
    assert (other["verdict"], other["model"]) == ("reproduced", "my/llama")


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        (["frontier smollm2 --methods kq", "eval smollm2 --method kq"], "smollm2"),
        (["eval reference --method fdc", "spectrum meta/llama"], "reference, meta/llama"),
        (["bench --jct --composed --model Llama-3.1-8B"], "shape of Llama-3.1-8B"),
        (["bench --jct --real --model smollm2"], "smollm2"),
        (["bench --seq 1k", "plan --rate 0.5"], None),
    ],
)
def test_a_verdict_says_which_model_it_rests_on(commands: list[str], said: str | None) -> None:
    assert model_of([command.split() for command in commands]) == said


def test_a_full_disk_is_said_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise FailedError("cannot write cells/x.json: No space left on device")

    monkeypatch.setattr("kvprof.recipes.runs.write_result", full)
    found = run(planned(tmp_path), tmp_path, FakeRunner({"fdc": 0.96, "kq": 0.95}))
    assert verdicts(found) == ["reproduced"]
    assert len(found.unkept) == 2
    assert "No space left on device" in found.unkept[0]


def test_a_damaged_or_incomplete_result_is_measured_again(tmp_path: Path) -> None:
    store = CellStore(tmp_path)
    store.put("half", plan_result("fdc", 0.5, complete=False))
    store.put("whole", plan_result("fdc", 0.5))
    assert store.get("half") is not None  # for the run in hand
    later = CellStore(tmp_path)
    assert later.get("half") is None
    assert later.get("whole") is not None
    (tmp_path / "whole.json").write_text("{")
    assert CellStore(tmp_path).get("whole") is None


def test_a_cell_is_known_by_its_command_and_the_version() -> None:
    found = [cell_key(words, version) for words in (("a", "b"), ("a b",)) for version in "12"]
    assert len(set(found)) == 4
    assert code_version().startswith("0.")


def test_set_fills_placeholders_as_one_word_and_narrows_the_matrix(tmp_path: Path) -> None:
    (one,) = planned(tmp_path, settings={"rate": "0.4 --device cuda", "method": "kq"})
    assert [cell.words for cell, _ in one.cells] == [
        ("plan", "reference", "--method", "kq", "--rate", "0.4 --device cuda")
    ]
    with pytest.raises(UsageError, match="--set colour"):
        planned(tmp_path, settings={"colour": "red"})


def test_the_model_takes_the_place_of_the_one_that_is_named(tmp_path: Path) -> None:
    (one,) = planned(tmp_path, model="my/llama")
    assert {cell.words[1] for cell, _ in one.cells} == {"my/llama"}
    named = TEXT.replace("plan reference", "plan {model}")
    (two,) = planned(tmp_path, named, model="my/llama")
    assert {cell.words[1] for cell, _ in two.cells} == {"my/llama"}
    (open_,) = planned(tmp_path, named)
    assert open_.open == "give --model"
    several = TEXT.replace("plan reference", "plan {method}")
    with pytest.raises(UsageError, match=r"name several \(fdc, kq\)"):
        planned(tmp_path, several, model="my/llama")


OF_MODEL = """\
    models:
      my/llama:
        stand_in: A llama instead of the paper's.
        matrix: {method: [fdc, palu]}
        cells:
          - {id: "{method}", run: "plan my/llama --method {method} --rate 0.5"}
        measures:
          - {id: rate_fdc, cell: fdc, figure: rate, where: {method: fdc}}
          - {id: palu, cell: palu, figure: rate, where: {method: palu}}
          - {id: ratio, divide: [rate_fdc, palu]}
measures:
"""


def test_a_model_may_have_cells_and_measures_of_its_own(tmp_path: Path) -> None:
    text = TEXT.replace("measures:\n", OF_MODEL, 1)
    (one,) = planned(tmp_path, text, model="my/llama")
    assert [cell.words for cell, _ in one.cells] == [
        ("plan", "my/llama", "--method", method, "--rate", "0.5") for method in ("fdc", "palu")
    ]
    (entry,) = run([one], tmp_path, FakeRunner({"fdc": 0.96, "palu": 0.8})).entries
    assert entry["stand_in"] == "A llama instead of the paper's."
    assert [line["measured"] for line in entry["lines"]] == [0.96, pytest.approx(1.2)]
    assert entry["verdict"] == "reproduced"
    (own,) = planned(tmp_path, text)
    assert {cell.words[1] for cell, _ in own.cells} == {"reference"}
    assert own.profile is not None
    assert own.profile.stand_in == "The shipped model instead of the paper's."
    (other,) = planned(tmp_path, text, model="your/llama")
    assert {cell.words[1] for cell, _ in other.cells} == {"your/llama"}
    assert other.profile is not None
    assert other.profile.stand_in == (
        "your/llama in place of the model that this names: "
        "The shipped model instead of the paper's."
    )


@pytest.mark.parametrize(
    ("needs", "machine", "said"),
    [
        ("{gpu: true}", CPU, "it needs a GPU, and this machine has none"),
        ("{gpu: 2}", replace(CPU, gpus=("H200",)), "it needs 2 GPUs, and this machine has 1"),
        (
            "{weights: [meta/llama]}",
            replace(CPU, has_weights=lambda _: False),
            "weights of meta/ll",
        ),
        ("{extras: [harness]}", replace(CPU, has_extra=lambda _: False), "-m pip install"),
    ],
)
def test_what_is_missing_here_cannot_be_judged(
    tmp_path: Path, needs: str, machine: Machine, said: str
) -> None:
    text = TEXT.replace("    matrix:", f"    needs: {needs}\n    matrix:")
    (one,) = planned(tmp_path, text, machine=machine)
    found = run([one], tmp_path, FakeRunner({}))
    assert verdicts(found) == ["not testable here"]
    assert found.entries[0]["lacking"]
    assert re.search(said, found.entries[0]["reasons"][0])


def test_data_that_the_user_must_bring(tmp_path: Path) -> None:
    text = TEXT.replace("--rate {rate}", "--rate {rate} --calibrate {data}").replace(
        "    matrix:", '    needs: {data: ["IMDb as JSON Lines"]}\n    matrix:'
    )
    (one,) = planned(tmp_path, text)
    assert one.open == "give --set data=…: IMDb as JSON Lines"
    with pytest.raises(UsageError):
        planned(tmp_path, text, settings={"data": "nowhere.jsonl"})


def test_what_kvprof_cannot_judge_is_run_and_left_open(tmp_path: Path) -> None:
    text = TEXT.replace("judged: true", "judged: the claim is about 32 GPUs")
    found = run(planned(tmp_path, text), tmp_path, FakeRunner({"fdc": 0.96, "kq": 0.95}))
    assert verdicts(found) == ["not testable here"]
    assert not found.entries[0]["lacking"]
    assert found.entries[0]["lines"][0]["holds"]
    assert verdicts(run(planned(tmp_path, profile="paper"), tmp_path, FakeRunner({}))) == [
        "not testable here"
    ]


def test_later_entries_replace_earlier_ones_unless_they_know_less(tmp_path: Path) -> None:
    good = run(planned(tmp_path), tmp_path / "a", FakeRunner({"fdc": 0.96, "kq": 0.95})).entries
    bad = run(planned(tmp_path), tmp_path / "b", FakeRunner({"fdc": 0.1, "kq": 0.95})).entries
    left = run(planned(tmp_path), tmp_path / "c", FakeRunner({}), lambda: True).entries
    broken = run(planned(tmp_path), tmp_path / "d", FakeRunner({"fdc": "x", "kq": "y"})).entries
    assert [e["verdict"] for e in merge_entries(good, bad)] == ["trend only"]
    assert [e["verdict"] for e in merge_entries(good, left)] == ["reproduced"]
    assert [e["verdict"] for e in merge_entries(good, broken)] == ["not testable here"]
    # A run that measured everything and found it open says more than an older verdict.
    open_ = [{**good[0], "verdict": "not testable here"}]
    assert [e["verdict"] for e in merge_entries(good, open_)] == ["not testable here"]
    lacking = [{**open_[0], "lacking": True}]
    assert [e["verdict"] for e in merge_entries(good, lacking)] == ["reproduced"]
    other = [{**bad[0], "machine": "an H200"}]
    assert len(merge_entries(good, other)) == 2
