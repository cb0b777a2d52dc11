import re
from pathlib import Path

import pytest

from kvprof.recipes.check import InvalidRecipeError, load_recipe
from kvprof.recipes.find import recipe_files
from tests.recipes.written import TEXT, write


def wrong(folder: Path, old: str, new: str) -> list[str]:
    """Return the complaints about the small recipe with one thing changed, without the folder."""
    assert TEXT.count(old) >= 1
    path = write(folder, TEXT.replace(old, new, 1))
    with pytest.raises(InvalidRecipeError) as caught:
        load_recipe(path)
    return [line.removeprefix(str(folder) + "/") for line in caught.value.lines]


def test_the_small_recipe_is_read(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    smoke = recipe.profiles["smoke"]
    assert recipe.published["kept"].value == 0.95
    assert smoke.set == {"rate": "0.30"}
    assert smoke.matrix == {"method": ("fdc", "kq")}
    assert [line.check for line in smoke.verdict] == ["at_least", "at_least"]
    assert smoke.verdict[1].direction


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("judged: true", "judged: true\njudge: 1", "unknown key 'judge'"),
        ("tolerance: 0.01", "tolerence: 0.01", "verdict.0.: unknown key 'tolerence': did you mean"),
        ("tolerance: 0.01", "tolerance: -1", "verdict.0..tolerance: -1"),
        ("at_least: 0.95, tolerance: 0.01", "about: 0.95", "about requires a tolerance"),
        ("at_least: 0.95, tolerance: 0.01", "between: [2, 1]", "between requires"),
        ("at_least: 0.95", "at_least: 0.95, below: 1", "rate_fdc: give one of"),
        ("published: kept", "published: keep", "no published number 'keep': use kept"),
        ("published: kept, at", "at", "requires a published number"),
        (
            "at_least: 1, direction",
            "at_least: 1.2, direction",
            "a direction must be above or below 0 or 1",
        ),
        ("direction: The method keeps more than another.\n", "", "direction"),
        ("{measure: ratio", "{measure: rotio", "rotio: no such measure: use rate_fdc"),
        ("divide: [rate_fdc, worst]", "divide: [rate_fdc, best]", "ratio: no measure 'best'"),
        ("divide: [rate_fdc, worst]", "divide: [1, 2]", "ratio: requires at least one measure"),
        ("    matrix:", "    needs: {extras: [nope]}\n    matrix:", "no extra 'nope': use"),
        ("cell: plan-fdc", "cell: plan-zack", "'plan-zack': use plan-f"),
        ("figure: rate, where", "figure: rate, data: a, where", "give one of figure, data"),
        ("figure: rate, over", 'data: "a[b", over', r"worst: 'a\[b' is not a path"),
        ("--rate {rate}", "--rate {rata}", r"\{rata\}"),
        ('"plan-{method}"', "plan", "two cells have the id 'plan'"),
        ('run: "plan', 'run: "kvprof plan', "without the word kvprof"),
        ('run: "plan', 'run: "paln', "'paln'"),
        ("--rate {rate}", "--rate {rate} --json x", "leave out --json"),
        (
            "    stand_in: The shipped model instead of the paper's.\n",
            "",
            "smoke: state in stand_in",
        ),
        ("value: 0.95, unit", "low: 0.9, unit", "kept: give a value, or low and high"),
        ("name: small-claim", "name: other", "name is 'other', but the file is small-claim.y"),
        ("item: Table 7\n", "", "the file: lacks item"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    lines = wrong(tmp_path, old, new)
    assert any(re.search(said, line) for line in lines), lines


def test_every_mistake_is_listed(tmp_path: Path) -> None:
    text = TEXT.replace("tolerance", "tolerence").replace("claim: The", "calim: The")
    with pytest.raises(InvalidRecipeError) as caught:
        load_recipe(write(tmp_path, text))
    assert len(caught.value.lines) == 3  # two unknown keys, and claim is lacking
    assert "and 2 more" in str(caught.value)
    with pytest.raises(InvalidRecipeError) as caught:
        load_recipe(write(tmp_path, "name: small-claim\n"))
    (line,) = caught.value.lines
    assert "lacks format, " in line


@pytest.mark.parametrize("path", recipe_files(), ids=lambda path: path.stem)
def test_the_recipes_that_ship_are_valid(path: Path) -> None:
    from kvprof.commands.recipe import check_command

    load_recipe(path, check_command)


def test_a_profile_may_be_excluded(tmp_path: Path) -> None:
    text = TEXT.replace("measures:", "  paper: {excluded: it needs 32 GPUs}\nmeasures:", 1)
    assert load_recipe(write(tmp_path, text)).profiles["paper"].excluded == "it needs 32 GPUs"
