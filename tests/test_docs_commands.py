"""Every command line of the documentation runs, or says why not and is at least one that there is.

Command lines are read from the pages: fenced ``sh`` and ``console`` blocks, and indented lines that
tell how a record was made. A block is run here unless a comment directly above it says why not
(``<!-- not run: needs a GPU -->``); ``<!-- exits: 2 -->`` names the exit code of a block that ends
in an error. The pages share one folder and are run in `ORDER`, so that a page can use what an
earlier one made; the same line is run once.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from kvprof.cli import COMMANDS, app
from kvprof.commands.recipe import check_command
from kvprof.recipes.allowed import CELL_COMMANDS
from kvprof.triton_probe import probe_triton
from tests.commands.running import Finished, kvprof
from tests.conftest import calibrate_on_few, few_layers, share_models, share_moments

ROOT = Path(__file__).parents[1]

#: Pages that are run first, as a reader would; the others come after them by name.
ORDER = ("start.md", "concepts.md", "choosing.md", "evaluating.md")

# A tour with files and models of the reader's own: its lines have to be ones that there are.
_TOURS = {"README.md": "names models to download and files of the reader's own"}

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<kind>sh|console)\n(?P<body>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
_PYTHON = re.compile(
    r"(?P<mark>^<!-- not run: [^\n]*? -->\n)?^```python\n(?P<body>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
_MARK = re.compile(r"(not run|exits|command): (.+)")


@dataclass(frozen=True)
class Line:
    """A command line of a page."""

    where: str  # page and line, as an editor opens it
    words: tuple[str, ...]  # what follows the word `kvprof`
    reason: str | None = None  # why it is not run here
    code: int = 0  # the exit code that it ends with
    record: bool = False  # whether it tells how a record was made, in an indented line


def kvprof_words(text: str, *, prompt: bool = False) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield what follows ``kvprof`` in every command of a block, with the line it begins on.

    With `prompt` only what stands after ``$ `` is a command, the rest is what it printed.
    """
    command, first = "", 0
    for number, line in enumerate(text.split("\n")):
        if not command:
            first = number
            if prompt and not line.startswith("$ "):
                continue
        command += line.removeprefix("$ ")
        if command.endswith("\\"):
            command = command[:-1]
            continue
        for part in command.split(" && "):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]  # variables of the environment
            if words and Path(words[0]).name == "kvprof":
                yield first, tuple(words[1:])
        command = ""


def lines_of(page: str, text: str) -> Iterator[Line]:
    """Yield every command line of a page.

    Raises
    ------
    ValueError
        For a comment above a block that is none of those that there are.
    """
    for block in _BLOCK.finditer(text):
        first = text[: block.start("body")].count("\n") + 1
        reason, code = _TOURS.get(page), 0
        if block["mark"] is not None:
            mark = _MARK.fullmatch(block["mark"])
            if mark is None:
                raise ValueError(f"{page}:{first - 2}: {block['mark']!r} says nothing to this test")
            if mark[1] == "exits":
                code = int(mark[2])
            else:
                reason = mark[2] if mark[1] == "not run" else "CI runs it as it is written"
        console = block["kind"] == "console"
        for offset, words in kvprof_words(block["body"], prompt=console):
            yield Line(f"{page}:{first + offset}", words, reason, code)
    rest = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    for found in re.finditer(r"^    kvprof (?:.*\\\n)*.*$", rest, re.MULTILINE):
        at = rest[: found.start()].count("\n") + 1
        for _, words in kvprof_words(re.sub(r"^    ", "", found[0])):
            yield Line(f"{page}:{at}", words, "tells how a record was made", record=True)


def documents() -> dict[str, str]:
    """Return every page's text by its name, in the order in which they are run."""
    ranks = {name: place for place, name in enumerate(ORDER)}
    pages = sorted(ROOT.glob("docs/*.md"), key=lambda p: (ranks.get(p.name, len(ORDER)), p))
    found = [ROOT / "README.md", *pages]
    return {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in found}


LINES = [line for page, text in documents().items() for line in lines_of(page, text)]
RUN = list({line.words: line for line in reversed(LINES) if line.reason is None}.values())[::-1]
NOT_RUN = [line for line in LINES if line.reason is not None]
SNIPPETS = [
    (page, found["body"])
    for page, text in documents().items()
    for found in _PYTHON.finditer(text)
    if found["mark"] is None and page.startswith("docs/")
]


#: What a line leaves behind for others, and the line.
MADE = {
    value: line
    for line in RUN
    for option, value in pairwise(line.words)
    if option in ("--save", "--out")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, short_splits: Path) -> Iterator[Path]:
    """Return the folder that all lines run in, with a text of the reader's own.

    Where a line says nothing of it, few tokens are calibrated and evaluated on, and splits are
    short. The model that ships has three of its six layers: a first, a last, and one between.
    """
    path = tmp_path_factory.mktemp("documentation")
    _SAID.clear()  # of an earlier folder, to whose lines a worker comes back
    (path / "notes.txt").write_text("\n".join(documents().values()), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPROF_CACHE", str(path / "cache"))
        patch.setenv("COLUMNS", "80")
        patch.setenv("NO_COLOR", "1")
        calibrate_on_few(patch)
        share_models(patch)
        share_moments(patch)
        # Whether Triton works here is found out once: a compiler is started for it.
        patch.setattr("kvprof.commands.doctor.probe_triton", cache(probe_triton))
        few_layers(patch, tmp_path_factory.mktemp("reference"), 3)
        patch.setattr("kvprof.evaluation.data._SPLITS", short_splits)
        patch.setattr("kvprof.evaluation.data._CPU_SHAPE", (32, 64))
        patch.chdir(path)
        yield path


def parsed(words: tuple[str, ...]) -> None:
    """Let Typer read a command line without running it; raises what a wrong one raises."""
    name, *rest = words
    group: Any = typer.main.get_command(app)
    context = group.commands[name].make_context(name, list(rest))
    subcommands = getattr(context.command, "commands", None)
    if subcommands is not None:  # recipe
        subcommands[rest[0]].make_context(rest[0], rest[1:])


#: What the lines that were run here said, by their words.
_SAID: dict[tuple[str, ...], Finished] = {}


def run_in(folder: Path, line: Line) -> Finished:
    """Run a line once, after those that make what it names: another process may have had them.

    A line that makes something may have been run for another one before its own turn comes, since
    tests are stolen from other processes; it would find what it makes, and refuse to replace it.
    """
    if line.words not in _SAID:
        for word in line.words:
            word = word.rpartition("=")[2]  # of an option, as in cells=result.json
            maker = MADE.get(word)
            if maker is not None and maker is not line and not (folder / word).exists():
                run_in(folder, maker)
        _SAID[line.words] = kvprof(*line.words)
    return _SAID[line.words]


@pytest.mark.parametrize("line", RUN, ids=lambda line: line.where)
def test_a_command_line_runs(line: Line, folder: Path) -> None:
    done = run_in(folder, line)
    assert done.code == line.code, f"kvprof {shlex.join(line.words)}\n{done.stderr}"
    assert done.error if line.code else "Traceback" not in done.stderr


@pytest.mark.parametrize("line", NOT_RUN, ids=lambda line: line.where)
def test_a_command_line_that_is_not_run_is_one_that_there_is(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    if line.words[0].startswith("-"):
        return  # --help and --version, which other tests run
    # Whether this machine reaches a hub says nothing of the line.
    monkeypatch.setattr("kvprof.models.hub.check_reachable", lambda *_: None)
    parsed(line.words)
    if line.words[0] in CELL_COMMANDS and not line.record and "keys-only" not in str(line.words):
        assert check_command(line.words) is None


@pytest.mark.parametrize(("page", "body"), SNIPPETS, ids=lambda value: str(value)[:20])
def test_a_python_snippet_runs(page: str, body: str, folder: Path) -> None:
    exec(compile(body, page, "exec"), {"__name__": "documentation"})  # our own pages


def test_every_command_is_run_by_a_page_but_those_that_need_a_terminal_or_a_gpu() -> None:
    names = {entry.name for entry in COMMANDS}
    assert {line.words[0] for line in LINES} <= {*names, "--help"}
    assert names - {line.words[0] for line in RUN} == {"tui", "serve"}


def test_tours_are_pages_that_have_blocks() -> None:
    assert set(_TOURS) <= {line.where.partition(":")[0] for line in LINES}
