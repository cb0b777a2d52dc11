import re
from pathlib import Path

import pytest

from kvprof.reproduction.check import InvalidRecipeError, load_recipe
from kvprof.reproduction.find import recipe_files
from tests.reproduction.written import TEXT, write


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
    assert [line.check for line in smoke.verdict] == ["at_least", "above"]
    assert smoke.verdict[1].direction


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("judged: true", "judged: true\njudge: 1", "small-claim.yaml:9: unknown key 'judge'"),
        ("tolerance: 0.01", "tolerence: 0.01", ":21: unknown key 'tolerence': did you mean tolera"),
        ("tolerance: 0.01", "tolerance: -1", ":21: .*impossible tolerance"),
        ("tolerance: 0.01", "tolerance_share: 1.0", ":21: .*impossible tolerance"),
        ("at_least: 0.95, tolerance: 0.01", "about: 0.95, tolerance: 0", ":21: .*impossible tol"),
        ("at_least: 0.95, tolerance: 0.01", "about: 0.95", ":21: about needs a tolerance"),
        ("at_least: 0.95, tolerance: 0.01", "between: [2, 1]", ":21: nothing lies between"),
        ("at_least: 0.95, tolerance: 0.01", "between: [1]", ":21: .*2 are needed"),
        ("above: 0.5", "above: 0.5, below: 1", ":22: ratio: give one of"),
        ("published: kept", "published: keep", ":21: no published number 'keep': there are kept"),
        ("{measure: ratio", "{measure: rotio", ":22: no measure 'rotio': there are rate_fdc"),
        ("divide: [rate_fdc, worst]", "divide: [rate_fdc, best]", ":19: ratio: no measure 'best'"),
        ("divide: [rate_fdc, worst]", "divide: [1, 2]", ":19: ratio: two numbers are no measure"),
        ("divide: [rate_fdc, worst]", "divide: [rate_fdc, 0]", ":19: ratio: nothing can be divid"),
        (
            "    matrix:",
            "    needs: {extras: [nope]}\n    matrix:",
            ":13: .* no extra 'nope': there",
        ),
        ("cell: plan-fdc", "cell: plan-zack", ":17: .*makes no cell 'plan-zack': there are plan-f"),
        ("figure: rate, where", "figure: rate, data: a, where", ":17: .*one of figure, data"),
        ("figure: rate, over", 'data: "a[b", over', r":18: worst: 'a\[b' is no path"),
        ("--rate {rate}", "--rate {rata}", r":15: \{rata\} is no placeholder"),
        ('"plan-{method}"', "plan", ":15: two cells have the id 'plan'"),
        ('run: "plan', 'run: "kvprof plan', ":15: leave out the word kvprof"),
        ('run: "plan', 'run: "paln', ":15: .*no command 'paln'"),
        ("--rate {rate}", "--rate {rate} --json x", ":15: .*leave out --json"),
        (
            "    stand_in: The shipped model instead of the paper's.\n",
            "",
            ":11: smoke: say in stand_in",
        ),
        ("value: 0.95, unit", "value: high, unit", ':7: published.0..value: "high" is no number'),
        ("value: 0.95, unit", "low: 0.9, unit", ":7: kept: give a value, or low and high"),
        ("value: 0.95, unit", "low: 1, high: 0, unit", ":7: kept: low 1 is above high 0"),
        ("name: small-claim", "name: other", ":2: name is 'other', but the file is small-claim.y"),
        ("item: Table 7\n", "", ":1: the file: lacks item"),
        ("direction: true", "by_construction: yes", ":22: .*by_construction: .yes. is too short"),
        ("judged: true", "judged: yes", ":8: judged: is true, or a sentence"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    lines = wrong(tmp_path, old, new)
    assert any(re.search(said, line) for line in lines), lines


def test_a_profile_is_counted_before_it_is_made(tmp_path: Path) -> None:
    values = ", ".join(f"{key}: {[*range(900)]}" for key in ("method", "b", "c"))
    (line,) = wrong(
        tmp_path,
        'matrix: {method: [fdc, kq]}\n    cells:\n      - {id: "plan-{method}"',
        f'matrix: {{{values}}}\n    cells:\n      - {{id: "plan-{{method}}-{{b}}{{c}}"',
    )
    assert line.endswith(":11: smoke: its matrix makes 729,000,000 cells; at most 1,000")
    text = TEXT.replace('rate: "0.30"', f"rate: {'x' * 5000}").replace("{rate}", "{rate}" * 1000)
    with pytest.raises(InvalidRecipeError, match=r"fill in 10,0\d\d,\d{3} letters; at most 2,000"):
        load_recipe(write(tmp_path, text))


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
    from kvprof.commands.recipe_run import check_command

    load_recipe(path, check_command)


def test_a_profile_may_be_excluded_but_not_without_a_reason(tmp_path: Path) -> None:
    text = TEXT.replace("measures:", "  paper: {excluded: it needs 32 GPUs}\nmeasures:", 1)
    assert load_recipe(write(tmp_path, text)).profiles["paper"].excluded == "it needs 32 GPUs"
    assert (
        "paper.excluded"
        in wrong(
            tmp_path,
            "measures:\n  - {id: rate_fdc",
            "  paper: {excluded: no}\nmeasures:\n  - {id: rate_fdc",
        )[0]
    )


_OF_MODEL = """\
    models:
      my/llama:
        stand_in: A llama instead of the paper's.
        cells:
          - {id: plan-fdc, run: "plan my/llama --method fdc --rate 0.5"}
        measures:
          - {id: rate_fdc, cell: plan-fdc, figure: rate}
        verdict:
          - {measure: rate_fdc, at_least: 0.95}
measures:
"""


def test_what_a_profile_is_on_another_model_is_checked_like_it(tmp_path: Path) -> None:
    good = TEXT.replace("measures:\n", _OF_MODEL, 1)
    own = load_recipe(write(tmp_path, good)).profiles["smoke"].models["my/llama"]
    assert [cell.id for cell in own.cells] == ["plan-fdc"]
    for old, new, said in (
        ("        stand_in: A llama", "        claim: A llama", ":18: unknown key 'claim'"),
        ("        stand_in: A llama instead of the paper's.\n", "", ":17: smoke on my/llama: say"),
        ('run: "plan my', 'run: "kvprof my', ":20: leave out the word kvprof"),
        (
            "cell: plan-fdc, figure: rate}\n   ",
            "cell: x, figure: rate}\n   ",
            ":22: .* no cell 'x'",
        ),
        (
            "          - {measure: rate_fdc, at",
            "          - {measure: x, at",
            ":24: no measure 'x'",
        ),
        (
            "        verdict:\n          - {measure: rate_fdc, at_least: 0.95}\n",
            "",
            ":17: smoke on my/llama: no measure 'ratio' for its verdict: there are rate_fdc",
        ),
    ):
        assert good.count(old) == 1, old
        with pytest.raises(InvalidRecipeError) as caught:
            load_recipe(write(tmp_path, good.replace(old, new)))
        lines = [line.removeprefix(str(tmp_path) + "/") for line in caught.value.lines]
        assert any(re.search(said, line) for line in lines), (said, lines)
