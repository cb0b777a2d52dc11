"""Whether a recipe's cell is a command that there is, asked of the command, which is not run."""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import typer

from kvprof.errors import KvprofError, UsageError

__all__ = ["check_command"]

# Of everything that a wrong command line raises; see kvprof.cli.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]


def check_command(words: Sequence[str]) -> str | None:
    """Return what is wrong with a cell's words (an option, its value, a method), or None.

    Parameters
    ----------
    words : sequence of str
        A command's name and what follows it.
    """
    name = words[0]
    command = _command(name)
    try:
        with command.make_context(name, list(words[1:])) as context:
            values = dict(context.params)
    except _CommandLineError as problem:
        return f"{_told(problem)} (kvprof {name} --help shows what there is)"
    except UsageError as problem:  # of an option that reads its value itself
        return str(problem)
    except typer.Exit:
        return f"{' '.join(words)}: measures nothing"
    try:
        _check_methods(name, values)
    except UsageError as problem:
        return str(problem)
    except KvprofError:
        pass  # a library that is missing here may be there where the recipe runs
    return None


def _told(problem: Any) -> str:
    message: str = problem.format_message().rstrip(".")
    # Typer's validation says what it wanted but not what it got; its cause knows.
    errors = getattr(problem.__cause__, "errors", None)
    details = errors() if callable(errors) else None
    return f"{message}, not {details[0]['input']!r}" if details else message


@cache
def _command(name: str) -> Any:
    function = getattr(import_module(f"kvprof.commands.{name}"), name)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name)(function)
    return typer.main.get_command(alone)


def _check_methods(command: str, values: dict[str, Any]) -> None:
    """Refuse a method that does not exist.

    Raises
    ------
    UsageError
        With what there is.
    """
    named = values.get("methods") or values.get("method")
    if not named:
        return
    text = named if isinstance(named, str) else ",".join(named)
    names = [one.strip() for one in text.split(",") if one.strip()]
    if command == "bench" and not values.get("real"):
        from kvprof.benchmark.jct.ablations import parse_variant
        from kvprof.benchmark.methods import parse_method

        for one in names:
            (parse_variant if values.get("jct") else parse_method)(one)
        return
    from kvprof.evaluation.requests import method_entries
    from kvprof.methods.registry import calibration_needs

    for _, method, _ in method_entries(text):
        calibration_needs(method)
