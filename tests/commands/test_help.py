"""What ``--help`` says: groups, and examples that can be run as they stand."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from kvprof.cli import COMMANDS, app
from kvprof.commands.options import Command
from tests.commands.running import kvprof


def commands() -> dict[str, Any]:
    """Return every command that does something, by the words that call it."""
    top: Any = typer.main.get_command(app)
    found: dict[str, Any] = {}
    for entry in COMMANDS:
        loaded = top.commands[entry.name]._load()
        inner = getattr(loaded, "commands", None)
        own = (
            {entry.name: loaded}
            if inner is None
            else {f"{entry.name} {name}": command for name, command in inner.items()}
        )
        found |= own
    return found


ALL = commands()


@pytest.mark.parametrize("words", ALL)
def test_every_command_has_examples_that_its_own_parser_takes(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether this machine reaches a hub says nothing of the line.
    monkeypatch.setattr("kvprof.models.hub.check_reachable", lambda *_: None)
    command = ALL[words]
    assert isinstance(command, Command)
    assert command.examples
    shown = kvprof(*words.split(), "--help").stdout
    for line in command.examples:
        assert f"  {line}\n" in shown
        given = shlex.split(line, comments=True)
        target = next(
            name
            for name in sorted(ALL, key=len, reverse=True)
            if given[1 : 1 + len(name.split())] == name.split()
        )
        ALL[target].make_context(target, given[1 + len(target.split()) :])
    assert any(line.startswith(f"kvprof {words}") for line in command.examples)


@pytest.mark.parametrize("words", [[], ["recipe"]])
def test_help_of_what_only_has_commands_ends_with_examples(words: list[str]) -> None:
    shown = kvprof(*words, "--help").stdout.partition("\nExamples:\n")[2].partition("\n\n")[0]
    lines = [line.strip() for line in shown.splitlines()]
    assert lines
    for line in lines:
        given = shlex.split(line, comments=True)
        assert given[1 : 1 + len(words)] == words
        target = next((one for one in ALL if given[1:][: len(one.split())] == one.split()), None)
        assert target is not None or given == ["kvprof", "COMMAND", "--help"]
        if target is not None and "--help" not in given:
            ALL[target].make_context(target, given[1 + len(target.split()) :])


def test_no_option_is_lost() -> None:
    for command in ALL.values():
        text = command.get_help(typer.Context(command))
        for parameter in command.params:
            assert parameter.param_type_name == "argument" or parameter.opts[0] in text


def test_show_lists_the_runs_that_are_kept_and_says_what_is_wrong_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvprof.commands.run_source.runs_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr("kvprof.commands.show.runs_folder", lambda: tmp_path / "kept")
    none = kvprof("show")
    assert none.code == 0
    assert "no runs" in none.stderr
    good, bad = tmp_path / "kept" / "jct-1", tmp_path / "kept" / "jct-2"
    good.mkdir(parents=True)
    bad.mkdir()
    (good / "result.json").write_text(kvprof("show", "demo", "--json", "-").stdout)
    (bad / "result.json").write_text('{"schema": "kvprof/1"')
    (tmp_path / "kept" / "no-run").mkdir()
    monkeypatch.setenv("COLUMNS", "250")
    listed = kvprof("show")
    assert listed.code == 0
    assert "jct Llama-3.1-8B composed" in listed.stdout
    assert "complete" in listed.stdout
    assert "damaged or cut off" in listed.stdout
    assert "no-run" not in listed.stdout
    # Its name is enough, from any folder.
    assert kvprof("show", "jct-1").stdout == kvprof("show", "demo").stdout
