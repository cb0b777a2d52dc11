"""docs/reproduction.md is what the committed records make, and nothing else."""

from pathlib import Path

import pytest

from kvprof.records.files import read_result
from kvprof.reproduction.check import load_recipe
from kvprof.reproduction.find import ALL, find_recipes
from tests.commands.running import kvprof

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reproduction.md"
RECORDS = sorted((DOCS / "reproduction").glob("*.json"))


def test_the_page_is_made_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The other form has the same content, and its drawings take a minute.
    monkeypatch.setattr("kvprof.views.export.page_html", lambda *_: "")
    page = tmp_path / "page.md"
    done = kvprof("recipe", "report", *RECORDS, "--md", page, "--html", tmp_path / "page.html")
    assert done.code == 0, done.stderr
    assert page.read_text("utf-8") == PAGE.read_text("utf-8"), "see docs/reproduction/README.md"


def test_every_recipe_of_the_papers_is_in_the_smoke_record() -> None:
    (path,) = [one for one in RECORDS if one.stem.startswith("smoke")]
    result = read_result(path)
    assert result["complete"]
    entries = {entry["recipe"]: entry for entry in result["data"]["entries"]}
    assert set(entries) == {one.stem for one in find_recipes([ALL])}
    for name, entry in entries.items():
        assert not entry["failed"], name


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_states_the_claims_as_the_recipes_do(path: Path) -> None:
    for entry in read_result(path)["data"]["entries"]:
        recipe = load_recipe(next(iter(find_recipes([entry["recipe"]]))))
        profile = recipe.profile(entry["profile"], entry["settings"].get("model"))
        assert profile is not None
        assert entry["claim"] == recipe.claim, entry["recipe"]
        assert entry["stand_in"] == profile.stand_in, entry["recipe"]
        if entry["lines"]:
            limits = [(line["measure"], line["check"], *line["limit"]) for line in entry["lines"]]
            written = [(line.measure, line.check, *line.limit) for line in profile.verdict]
            assert limits == written, entry["recipe"]
