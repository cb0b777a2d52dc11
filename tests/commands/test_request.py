"""A request's class: options, parsing, rules, inputs and marks follow from its fields."""

import os
import signal
import time
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
import typer

from kvprof import interrupt
from kvprof.commands.output import Outcome, OutputOptions, measuring
from kvprof.commands.request import (
    Input,
    Mark,
    Parsed,
    Request,
    Rule,
    command,
    excludes,
    needs,
    one_of,
    written,
)
from kvprof.errors import Interrupted, UsageError
from kvprof.sizes import parse_count


class Asked(Request):
    """Ask.

    Examples
    --------
    kvprof ask
    """

    tokens: Annotated[
        int, typer.Option("--tokens", help="How many."), Parsed(parse_count), Mark.FREE, Input()
    ] = written("2k")
    heads: Annotated[int | None, typer.Option("--heads", min=1), Mark.FREE, Input("num")] = None
    text: Annotated[list[Path] | None, typer.Option("--text"), Mark.READS] = None
    plan: Annotated[Path | None, typer.Option("--plan"), Mark.READS] = None
    save: Annotated[Path | None, typer.Option("--save"), Mark.WRITES] = None
    fit: Annotated[bool, typer.Option("--fit")] = False

    rules: ClassVar[tuple[Rule, ...]] = (
        one_of("text", "plan"),
        needs("heads", "tokens"),
        excludes("plan", "fit", unless="save"),
    )


def test_text_is_parsed_and_what_is_a_value_stays() -> None:
    assert Asked().tokens == 2048
    assert Asked(tokens="4k").tokens == Asked(tokens=4096).tokens == 4096
    assert Asked(tokens="4k", heads=3).inputs() == {"tokens": 4096, "num": 3}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tokens": "many"}, ["--tokens", "many"]),
        ({"heads": 0, "tokens": 1}, ["--heads", "0"]),
        ({"heads": "x", "tokens": 1}, ["heads", "x"]),
        ({"head": 1}, ["head"]),
        ({"text": [Path("a")], "plan": Path("b")}, ["--text", "--plan"]),
        ({"heads": 2}, ["--heads", "--tokens"]),
        ({"plan": Path("a"), "fit": True}, ["--plan", "--fit"]),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], named: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        Asked(**given)
    assert all(one in caught.value.args[0] for one in named)
    assert Asked(plan=Path("a"), fit=True, save=Path("c")).fit


def test_a_recipe_gets_what_is_free_or_reads() -> None:
    assert Asked.recipe_options() == ({"--tokens", "--heads"}, {"--text", "--plan"})
    assert Asked(save=Path("x")).files(Mark.WRITES) == {"--save": Path("x")}


def test_a_command_is_made_of_the_fields() -> None:
    seen: list[Asked] = []

    def ask(request: Asked) -> None:
        seen.append(request)

    made = command(Asked, ask)
    app = typer.Typer()
    app.command()(made)
    typer.main.get_command(app).main(
        ["--tokens", "1k", "--text", "a", "--text", "b"], standalone_mode=False
    )
    assert seen[0] == Asked(tokens=1024, text=[Path("a"), Path("b")])
    assert seen[0].model_fields_set == {"tokens", "text"}  # what was not given has its default
    made(tokens="3", fit=True)
    assert (seen[1].tokens, seen[1].fit) == (3, True)
    assert made.__name__ == "ask"


def test_files_are_checked_before_anything_is_measured(tmp_path: Path) -> None:
    class Kept(OutputOptions):
        save: Annotated[Path | None, typer.Option("--save"), Mark.WRITES] = None

    def measured(request: Kept) -> Outcome:
        raise AssertionError

    (tmp_path / "there").write_text("mine")
    with pytest.raises(UsageError, match="there exists"):
        measuring(Kept)(measured)(save=tmp_path / "there")


def test_ctrl_c_breaks_off_a_step_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "_STEP_SECONDS", 0.1)

    def measured(_: OutputOptions) -> Outcome:
        with interrupt.graceful_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)
        raise AssertionError("it was not broken off")

    with pytest.raises(Interrupted):
        measuring(OutputOptions)(measured)()
