"""docs/ledger.md is what the ledgers in records/ make, which say what today's recipes say."""

from functools import cache
from pathlib import Path

import pytest

from kvprof.recipes.check import load_recipe
from kvprof.recipes.find import ALL, find_recipes
from kvprof.records.files import read_result
from tests.commands.running import kvprof

ROOT = Path(__file__).parents[2]
read = cache(lambda name: load_recipe(next(iter(find_recipes([name])))))
LEDGERS = sorted((ROOT / "records").glob("ledger-*.json"))


def test_the_page_is_made_of_the_ledgers(tmp_path: Path) -> None:
    done = kvprof("recipe", "report", *LEDGERS, "--md", tmp_path / "page.md")
    assert done.code == 0, done.stderr
    text = (ROOT / "docs/ledger.md").read_text("utf-8")
    assert (tmp_path / "page.md").read_text("utf-8") == text
    assert len(text.splitlines()) <= 150


def test_every_recipe_is_in_a_ledger() -> None:
    entries = [entry for path in LEDGERS for entry in read_result(path)["data"]["entries"]]
    assert {entry["recipe"] for entry in entries} == {one.stem for one in find_recipes([ALL])}
    assert not any(entry["failed"] for entry in entries)


@pytest.mark.parametrize("path", LEDGERS, ids=lambda path: path.stem)
def test_a_ledger_states_the_claims_as_the_recipes_do(path: Path) -> None:
    for entry in read_result(path)["data"]["entries"]:
        recipe = read(entry["recipe"])
        profile = recipe.profile(entry["profile"], entry["settings"].get("model"))
        assert profile is not None
        assert entry["claim"] == recipe.claim, entry["recipe"]
        if entry["lines"]:
            limits = [(line["measure"], line["check"], *line["limit"]) for line in entry["lines"]]
            written = [(line.measure, line.check, *line.limit) for line in profile.verdict]
            assert limits == written, entry["recipe"]
