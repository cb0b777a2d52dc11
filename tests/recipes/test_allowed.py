"""A recipe is a stranger's file: what its cells may ask for, however it gets there."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprof.commands.recipe import _command
from kvprof.errors import UsageError
from kvprof.recipes.allowed import _FREE, _KEPT, _READ, CELL_COMMANDS, _options, forbidden
from kvprof.recipes.check import InvalidRecipeError, load_recipe
from kvprof.recipes.runs import prepare
from kvprof.results import KINDS
from tests.commands.running import kvprof
from tests.recipes.written import CPU, TEXT, write

RATE = '{rate}"}'
WRITES = ("--csv", "--save", "--cache", "--json", "--out", "--svg", "--png", "--harness-include")


def options() -> set[str]:
    return {
        name
        for command in CELL_COMMANDS
        if command not in KINDS
        for one in _command(command).params
        for name in (*one.opts, *one.secondary_opts)
        if name.startswith("-")
    }


def test_every_option_of_a_command_is_judged() -> None:
    known = {*_FREE, *_READ, *_KEPT}
    # A new option is decided on here: none is let in because nobody thought of it.
    # A cell sends nothing to anybody's server, and sets up no engine as a stranger likes.
    servers = {"--url", "--served-model", "--key-env", "--engine"}
    assert not options() - known - servers
    assert servers <= options()
    assert not known - options()
    assert not _FREE & _READ


@pytest.mark.parametrize("command", sorted({*KINDS} & {*CELL_COMMANDS}))
def test_what_a_request_lets_in_neither_writes_nor_runs_code(command: str) -> None:
    free, reads = _options(command)
    assert "--device" in free
    assert not (free | reads) & {*_KEPT, *WRITES, "--trust-remote-code"}


@given(
    st.sampled_from(WRITES),
    st.sampled_from(("{o} {p}", "{o}={p}", "--device {o} {p}", "--rate=0.3 {o} {p}", "-- {o} {p}")),
    st.sampled_from(CELL_COMMANDS),
)
def test_no_form_of_an_option_that_writes_gets_in(option: str, form: str, command: str) -> None:
    words = [command, "reference", *form.format(o=option, p="x").split()]
    assert forbidden(words, Path()) is not None


@pytest.mark.parametrize(
    "words",
    [
        "export x --csv y", "recipe run x", "tui --demo", "plan reference --sav x",
        "plan reference --force", "eval reference -h", "plan reference -- /x",
        "generate reference --prompt-file /etc/passwd", "eval reference --text=/etc/passwd",
        "eval reference --text prose,/etc/passwd", "generate ../model --prompt x",
        "bench --model ~/x", "bench --ranks ../../plan.safetensors", "plan /root --method full",
        "eval reference --harness ./own.yaml", "eval reference --harness=own.yml",
        "eval reference --harness-include x", "eval reference --text outside.txt",
        "eval reference --text recipe/link.txt", "spectrum --from recipe/../outside.txt",
    ],
)  # fmt: skip
def test_nothing_outside_the_recipes_folder(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "outside.txt").write_text("secret")
    (tmp_path / "recipe" / "link.txt").symlink_to(tmp_path / "outside.txt")
    monkeypatch.chdir(tmp_path)
    assert forbidden(words.split(), tmp_path / "recipe") is not None


def test_what_is_its_own_or_the_users_word_may_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "own.txt").write_text("text")
    (tmp_path / "given.txt").write_text("text")
    # Embedded data, whatever has its name here.
    (tmp_path / "prose").mkdir()
    monkeypatch.chdir(tmp_path)
    cases: list[tuple[str, tuple[str, ...]]] = [
        (f"eval reference --text {folder / 'own.txt'}", ()),
        ("eval reference --text recipe/own.txt,prose", ()),
        ("eval hub/model --text prose --harness arc_easy,hellaswag", ()),
        ("eval /models/a --text given.txt", ("/models/a", "given.txt")),
        ("eval reference --text=/x/a.txt,/x/b.txt", ("/x/a.txt,/x/b.txt",)),
        ("bench --trace fdc/imdb --seq 1k,2k", ()),
    ]
    for words, user in cases:
        assert forbidden(words.split(), folder, user) is None


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace('rate: "0.30"', 'rate: "--save=/x"'),
        TEXT.replace("method: [fdc, kq]", "method: [fdc, --save=/x]"),
        TEXT.replace("plan reference", "{cmd} reference").replace("{rate:", "{cmd: export, rate:"),
        TEXT.replace(RATE, f"{RATE[:-2]} --save" + '"}'),
    ],
)
def test_a_placeholder_or_matrix_brings_nothing_in(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRecipeError, match=r"No such option|command '.*' cannot"):
        load_recipe(write(tmp_path, text))


def test_what_is_set_is_checked_before_anything_runs(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path))
    with pytest.raises(UsageError, match="plan-fdc: No such option in a recipe: --save"):
        prepare([recipe], "smoke", {"rate": "--save=/x"}, None, CPU, "v")
    # A file that the user gives is read; what the recipe makes of it is not.
    data = tmp_path / "data.txt"
    data.write_text("x")
    folder = tmp_path / "theirs"
    folder.mkdir()

    def planned(cell: str) -> int:
        recipe = load_recipe(write(folder, TEXT.replace(RATE, f"{RATE[:-2]} {cell}" + '"}')))
        return len(prepare([recipe], "smoke", {"data": str(data)}, None, CPU, "v")[0].cells)

    assert planned("--calibrate {data}") == 2
    with pytest.raises(UsageError, match="--set data=FILE"):
        planned("--calibrate {data}/../../x")


def test_code_of_a_model_needs_whoever_runs_it(tmp_path: Path) -> None:
    path = write(tmp_path, TEXT.replace(RATE, f"{RATE[:-2]} --trust-remote-code" + '"}'))
    assert kvprof("recipe", "validate", path).code == 0
    done = kvprof("recipe", "run", path, "--out", tmp_path / "out")
    assert done.code == 2
    assert "kvprof recipe run --trust-remote-code" in done.error
    assert not (tmp_path / "out").exists()
    trusted = prepare([load_recipe(path)], "smoke", {}, None, CPU, "v", trusted=True)
    assert len(trusted[0].cells) == 2
    done = kvprof("recipe", "run", write(tmp_path), "--trust-remote-code")
    assert (done.code, "--trust-remote-code" in done.error) == (2, True)
