"""Options that say which method, how much of it, and what it is calibrated on."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvprof.commands.completion import methods
from kvprof.commands.help import METHOD
from kvprof.commands.options import share_option
from kvprof.errors import UsageError

__all__ = [
    "AllocationOption",
    "CalibrateOption",
    "CalibrateTokensOption",
    "GridOption",
    "MethodOption",
    "MethodOptionsOption",
    "MinimumOption",
    "PlanFileOption",
    "RateOption",
    "RemovalOption",
    "method_options",
]

MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        autocompletion=methods,
        rich_help_panel=METHOD,
        help="fdc, zack, palu, tale, kq, fp8 …, or kq-4bit, fdc+keyformer.",
    ),
]
RateOption = Annotated[
    float | None,
    share_option(
        "--rate", "Share of the cache's bytes saved, everything counted; 0 is full.", METHOD
    ),
]
RemovalOption = Annotated[
    float | None,
    share_option("--removal", "Instead of --rate: the removal rate of FDC eq. 1.", METHOD),
]
PlanFileOption = Annotated[
    Path | None,
    typer.Option("--plan", rich_help_panel=METHOD, help="A saved plan, instead of --method."),
]
CalibrateOption = Annotated[
    str | None,
    typer.Option(
        "--calibrate",
        rich_help_panel=METHOD,
        help="random:8k, prose, code, tasks, calibration (embedded), a file, or saved moments. "
        "Default by method.",
    ),
]
CalibrateTokensOption = Annotated[
    str | None,
    typer.Option(
        "--calibrate-tokens",
        rich_help_panel=METHOD,
        help="How many; k is 1,024. Default 8k, less of a text.",
    ),
]
AllocationOption = Annotated[
    str | None,
    typer.Option(
        "--allocation",
        rich_help_panel=METHOD,
        help="removal, uniform, tail, fisher or budget. Default by method.",
    ),
]
GridOption = Annotated[
    int | None,
    typer.Option(
        "--grid",
        rich_help_panel=METHOD,
        min=1,
        help="Ranks are multiples of this. Default by method.",
    ),
]
MinimumOption = Annotated[
    int | None,
    typer.Option(
        "--minimum", rich_help_panel=METHOD, min=1, help="Smallest rank. Default by method."
    ),
]
MethodOptionsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        rich_help_panel=METHOD,
        metavar="KEY=VALUE",
        help="Another option of the method; repeatable.",
    ),
]


def method_options(
    allocation: str | None, grid: int | None, minimum: int | None, extra: list[str] | None
) -> dict[str, Any]:
    """Return the options of a method as keyword arguments; those not given are left out.

    Parameters
    ----------
    allocation, grid, minimum
        From the command line.
    extra : list of str or None
        ``KEY=VALUE``; values stay text, which `kvprof.methods.registry.typed_options` reads as what
        the method declares.

    Raises
    ------
    UsageError
        When an entry has no value, or an option is given twice.
    """
    named = {"allocation": allocation, "grid": grid, "minimum": minimum}
    options = {key: value for key, value in named.items() if value is not None}
    for entry in extra or []:
        key, equals, value = entry.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise UsageError(f"--option {entry!r}: write KEY=VALUE, for example heads=4")
        if key in options:
            raise UsageError(f"--option {entry!r}: {key} is given twice")
        options[key] = value.strip()
    return options
