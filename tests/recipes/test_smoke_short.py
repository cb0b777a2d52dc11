"""A recipe of each paper through the command line to a verdict: the short form of a smoke run.

They are those that ship, on fewer tokens; `tests/commands/test_recipe.py` runs a cell in a process.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvprof.commands.recipe import run_recipes
from kvprof.errors import ExitCode
from kvprof.recipes.ledger import NOT_REPRODUCED, NOT_TESTABLE
from kvprof.recipes.runs import Outcome
from kvprof.records.files import read_result
from tests.commands.running import Finished, kvprof

# Two cells between them: spectra of the reference model, and one layer's attention on the CPU.
NAMES = ("fdc-table-3", "zack-table-6", "palu-fig-6", "tale-fig-2")

SHIPPED = Path(__file__).parents[2] / "recipes"
FEWER = {
    "run: spectrum reference\n": "run: spectrum reference --tokens 256\n",
    "--seq 4k": "--seq 256",
}

pytestmark = pytest.mark.slow


def in_this_process(words: Sequence[str], _: Callable[[], bool]) -> Outcome:
    """Run a cell as `run_child` does, without loading torch for it."""
    done = kvprof(*words, "--json", "-")
    return Outcome(json.loads(done.stdout) if done.code == 0 else None, done.code, done.stderr)


@pytest.fixture(scope="module", autouse=True)
def _one_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        own = partial(run_recipes, run=in_this_process)
        patch.setattr("kvprof.commands.recipe.run_recipes", own)
        yield


def run(out: Path) -> Finished:
    return kvprof("recipe", "run", *(out.with_name(f"{name}.yaml") for name in NAMES), "--out", out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smoke") / "out"
    for name in NAMES:
        text = (SHIPPED / f"{name}.yaml").read_text("utf-8")
        smaller = text
        for many, few in FEWER.items():
            smaller = smaller.replace(many, few)
        assert smaller != text, f"{name}: it asks for other tokens"
        out.with_name(f"{name}.yaml").write_text(smaller, "utf-8")
    done = run(out)
    entries = read_result(out / "result.json")["data"]["entries"]
    fell = any(entry["verdict"] == NOT_REPRODUCED for entry in entries)
    assert done.code == (ExitCode.CLAIM_NOT_MET if fell else ExitCode.DONE), done.stderr
    assert f"{len(NAMES)} recipes: " in done.stdout
    return out


@pytest.fixture(scope="module")
def entries(folder: Path) -> dict[str, Any]:
    found = read_result(folder / "result.json")["data"]["entries"]
    return {entry["recipe"]: entry for entry in found}


def test_every_measure_is_had_and_every_recipe_judged(entries: dict[str, Any]) -> None:
    assert list(entries) == list(NAMES)
    for name, entry in entries.items():
        assert not entry["failed"], entry["reasons"]
        assert not entry["lacking"], entry["reasons"]
        for line in entry["lines"]:
            assert line["measured"] is not None, (name, line["missing"])
        # Only a limit inside an interval may keep any of these from a verdict.
        if entry["verdict"] == NOT_TESTABLE:
            assert any(line["uncertain"] for line in entry["lines"]), name


def test_equal_cells_ran_once(folder: Path, entries: dict[str, Any]) -> None:
    assert len(list((folder / "cells").iterdir())) == 2
    of = {name: entry["lines"][0]["measured"] for name, entry in entries.items()}
    assert of["fdc-table-3"] == of["zack-table-6"]


def test_a_second_run_measures_nothing(folder: Path, entries: dict[str, Any]) -> None:
    again = run(folder)
    assert again.stderr.count("known: ") == 2, again.stderr
    after = read_result(folder / "result.json")["data"]["entries"]
    assert [entry["verdict"] for entry in after] == [e["verdict"] for e in entries.values()]
    assert all(cell["known"] for entry in after for cell in entry["cells"])
