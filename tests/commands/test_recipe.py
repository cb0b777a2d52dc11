import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from kvprof.commands.recipe import RunRequest, run_recipes
from kvprof.errors import ClaimNotMetError, ExitCode, FailedError, LackingError
from kvprof.printable import UNPRINTABLE
from kvprof.recipes import find
from kvprof.records.files import read_result
from tests.commands.running import kvprof
from tests.recipes.written import CPU, TEXT, FakeRunner, write

# A command that is soon done, as it loads no torch, and always finds the same.
CELL = "bench --load --simulate --methods {method} --request-rate 1 --requests {rate}"
REAL = (
    TEXT.replace("method: [fdc, kq]", "method: [full]")
    .replace('"0.30"', '"8"')
    .replace("plan reference --method {method} --rate {rate}", CELL)
    .replace("plan-fdc", "plan-full")
    .replace("method: fdc}", "method: full}")
    .replace("figure: rate", "figure: largest_rate")
    .replace("at_least: 0.95", "about: 1")
)


def run(path: Path, out: Path, rates: dict[str, Any], **more: Any) -> None:
    run_recipes(RunRequest((str(path),), out=out, **more), run=FakeRunner(rates), machine=CPU)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("judged:", "jugded:"),
            "small-claim.yaml: the file: unknown key 'jugded': did you mean judged?",
        ),
        (("--method {method}", "--method fcd"), "small-claim.yaml: smoke, cell plan-fdc: .*fcd"),
        (
            ("--rate {rate}", "--rrate {rate}"),
            "small-claim.yaml: smoke, cell plan-fdc: .*No such option",
        ),
        (
            ("--rate {rate}", "--rate much"),
            "small-claim.yaml: smoke, cell plan-fdc: --rate much",
        ),
    ],
)
def test_validate_names_file_place_and_way_out(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    done = kvprof("recipe", "validate", write(tmp_path, TEXT.replace(*change)))
    assert done.code == ExitCode.USAGE
    assert re.search(said, " ".join(done.stdout.split())), done.stdout
    assert "1 of 1 recipes are invalid" in done.error


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ("--load --model Llama-3.1-8B --methods full:rate={rate}", "full is vLLM's own"),
        ("--load --model Llama-3.1-8B --methods full --slo ttft=soon", "'ttft=soon'"),
        ("--load --simulate --methods full --request-rate 0", "--request-rate: '0'"),
        ("--load --simulate --methods full --seconds 5", "--requests and --seconds"),
        (
            "--load --model Llama-3.1-8B --methods full,{method}:rate=0.3 --baseline {method}",
            "--baseline fdc is not among --methods full,fdc:rate=0.3",
        ),
        ("--load --simulate --methods full --arrivals often", "--arrivals often"),
        ("--load --model Llama-3.1-8B --methods full,{method}:rate={rate}", None),
        (
            "--load --model Llama-3.1-8B --methods {method}:rate=2",
            "fdc:rate=2: rate 2 is not between 0 and 1",
        ),
        (
            "--load --simulate --methods {method}:rate={rate}",
            "fdc:rate=0.30: --simulate has recorded rates",
        ),
    ],
)
def test_a_served_load_of_a_recipe_may_give_a_method_its_rate(
    tmp_path: Path, load: str, said: str | None
) -> None:
    cell = f"bench {load} --requests 8" + " --request-rate 1" * ("--request-rate" not in load)
    text = TEXT.replace("plan reference --method {method} --rate {rate}", cell)
    done = kvprof("recipe", "validate", write(tmp_path, text))
    assert done.code == (0 if said is None else ExitCode.USAGE)
    assert (said or "1 recipe is valid.") in " ".join(done.stdout.split())


def test_a_wrong_recipe_is_refused_before_anything_is_run_or_written(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT.replace("--method {method}", "--method fcd"))
    done = kvprof("recipe", "run", path, "--out", tmp_path / "out")
    assert done.code == ExitCode.USAGE
    assert "smoke, cell plan-fdc" in done.error
    assert not (tmp_path / "out").exists()


def test_a_falsified_claim_ends_in_4_with_the_table_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TEXT.replace("at_least: 0.95", "at_least: 1.2").replace(
        "measure: ratio, at_least: 1, direction: true",
        "measure: ratio, published: kept, at_least: 1",
    )
    with pytest.raises(ClaimNotMetError, match="not reproduced: small-claim") as caught:
        run(write(tmp_path, text), tmp_path / "out", {"fdc": 0.96, "kq": 0.95})
    assert caught.value.exit_code == 4
    shown = capsys.readouterr().out
    assert "NOT REPRODUCED" in shown
    assert "0.95 share of accuracy; ≥ 1.19" in " ".join(shown.split())


def test_a_failed_cell_ends_in_1_and_lacking_everything_in_3(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match=r"runs failed.*small-claim"):
        run(write(tmp_path), tmp_path / "a", {"fdc": 0.96, "kq": "ended by signal 9"})
    text = TEXT.replace("    matrix:", "    needs: {gpu: true}\n    matrix:")
    with pytest.raises(LackingError, match="it needs a GPU"):
        run(write(tmp_path, text), tmp_path / "b", {})


def test_a_folder_gathers_runs_and_the_report_shows_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, page, whole = tmp_path / "out", tmp_path / "a.md", tmp_path / "a.html"
    rates = {"fdc": 0.96, "kq": 0.95}
    run(write(tmp_path), out, rates)
    run(write(tmp_path, TEXT.replace("small-claim", "other"), "other"), out, rates)
    assert kvprof("recipe", "report", out, "--md", page, "--html", whole).code == 0
    assert "2 recipes: 2 reproduced." in page.read_text()
    assert "https://arxiv.org/abs/2408.04107" in page.read_text()
    text = whole.read_text()
    assert text.count("<svg") == 2
    assert "kvprof plan reference --method fdc --rate 0.30" in text
    # Nothing is overwritten unasked.
    assert kvprof("recipe", "report", out, "--md", page).code == ExitCode.USAGE
    assert kvprof("recipe", "report", out, "--md", page, "--force").code == 0
    assert "2 recipes: 2 reproduced." in kvprof("recipe", "report", out).stdout
    assert kvprof("show", out).stdout.startswith("2 recipes: 2 reproduced.")


def test_new_writes_a_recipe_that_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "my-sweep.yaml"
    assert kvprof("recipe", "new", path).code == 0
    assert "name: my-sweep" in path.read_text()
    assert kvprof("recipe", "validate", path).stdout == "1 recipe is valid.\n"
    assert kvprof("recipe", "new", path).code == ExitCode.USAGE


def test_list_and_show(tmp_path: Path) -> None:
    assert "example-sweep" in kvprof("recipe", "list").stdout
    shown = kvprof("recipe", "show", "example-sweep").stdout
    assert shown == next(p for p in find.recipe_files() if p.stem == "example-sweep").read_text()


def test_a_wheels_recipes_are_found_inside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "kvprof" / "assets" / "recipes"
    inside.mkdir(parents=True)
    write(inside)
    (tmp_path / "recipes").mkdir()  # a stranger's, beside site-packages
    write(tmp_path / "recipes", name="stranger")
    monkeypatch.setattr(find, "PACKAGE", tmp_path / "kvprof")
    assert [path.stem for path in find.recipe_files()] == ["small-claim"]


def test_a_real_cell_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = kvprof("recipe", "run", write(tmp_path, REAL), "--out", out, "--json", tmp_path / "j")
    assert done.code == 0, done.stderr
    entry = read_result(tmp_path / "j")["data"]["entries"][0]
    assert entry["verdict"] == "reproduced"
    assert entry["measures"][0]["value"] == 1
    start = time.monotonic()
    again = kvprof("recipe", "run", write(tmp_path, REAL), "--out", out)
    assert "known: bench --load" in again.stderr
    assert time.monotonic() - start < 5


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_two_runs_into_one_folder_lose_neither(tmp_path: Path) -> None:
    """The second one runs whole while the first one's cell does."""
    out, rates = tmp_path / "out", {"fdc": 0.96, "kq": 0.95}
    other = write(tmp_path, TEXT.replace("small-claim", "other"), "other")
    nested: list[int] = []

    def look(words: Any, should_stop: Any) -> Any:
        if not nested:
            nested.append(1)
            run(other, out, rates)
        return FakeRunner(rates)(words, should_stop)

    run_recipes(RunRequest((str(write(tmp_path)),), out=out), run=look, machine=CPU)
    names = {entry["recipe"] for entry in read_result(out / "result.json")["data"]["entries"]}
    assert names == {"small-claim", "other"}


def test_a_ledger_that_cannot_be_written_is_shown_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_arguments: Any, **_options: Any) -> None:
        raise FailedError("cannot write it: No space left on device")

    monkeypatch.setattr("kvprof.commands.recipe.write_result", full)
    with pytest.raises(FailedError, match="No space left"):
        run(write(tmp_path), tmp_path / "out", {"fdc": 0.96, "kq": 0.95})
    assert "reproduced" in capsys.readouterr().out


def test_a_strangers_recipe_is_shown_without_what_a_terminal_obeys(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text() + "# \x9b31m\u202e \x85\n", "utf-8")
    done = kvprof("recipe", "show", path)
    assert path.read_text("utf-8") != done.stdout
    assert not UNPRINTABLE.search(done.stdout + done.stderr)


@pytest.mark.parametrize(
    "more",
    [
        "[" + ",".join(f"&a{n} x" for n in range(40_000)) + "]",
        "\n" + "".join(f"  k{n}: &a{n} x\n" for n in range(40_000)),
        "\n  - &a x\n" + "  - *a\n" * 40_000,
        "\na0: &a0 x\n"
        + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
        "\na0: &a0 {x: 1}\n"
        + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 30)),
        "[" * 3000 + "]" * 3000,
        "&a [*a]",
        "&a {b: *a}",
        "x" * 2_000_000,
        "2024-99-99",
        "9" * 5000,
        "!!timestamp x",
        "!!bool x",
    ],
    ids=lambda text: text.strip()[:12],
)
def test_a_recipe_of_more_than_any_recipe_has_is_refused_at_once(tmp_path: Path, more: str) -> None:
    path = write(tmp_path)
    path.write_text(f"{path.read_text()}\nextra: {more}\n", "utf-8")
    begun = time.monotonic()
    done = kvprof("recipe", "show", path)
    assert time.monotonic() - begun < 20
    assert done.code == ExitCode.USAGE
    assert str(path) in done.error
