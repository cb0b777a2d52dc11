"""Options that several commands share: the model, where it runs, how it is fed."""

import os
import re
from collections.abc import Sequence
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from kvprof import console
from kvprof.commands.completion import methods, models
from kvprof.environment import usable_threads
from kvprof.errors import UsageError
from kvprof.sizes import parse_share

if TYPE_CHECKING:
    from kvprof.models.load import LoadedModel

__all__ = [
    "DATA",
    "METHOD",
    "MODEL",
    "OUTPUT",
    "AllocationOption",
    "BatchSizeOption",
    "CalibrateOption",
    "CalibrateTokensOption",
    "Command",
    "DeviceOption",
    "DtypeOption",
    "GridOption",
    "MethodOption",
    "MethodOptionsOption",
    "MinimumOption",
    "ModelArgument",
    "PlanFileOption",
    "RateOption",
    "RemovalOption",
    "RevisionOption",
    "SeedOption",
    "TrustOption",
    "defined_pairs",
    "load_for_command",
    "method_options",
    "parse_rates",
    "share_option",
    "spectra_only",
]

# --- What ``--help`` says of a command: its options in groups, and examples to copy.


# Titles of groups that commands share, for `rich_help_panel` of an option; a command names its own.
MODEL = "Model and device"
METHOD = "Method"
DATA = "Text and tasks"
OUTPUT = "Output"

# The head of a NumPy docstring's section; help ends before the first.
_SECTION = re.compile(r"^([A-Z][A-Za-z ]*)\n-{3,}\n", re.MULTILINE)


class Command(TyperCommand):
    """A command that shows its options in groups and ends with its docstring's examples.

    An option's group is its ``rich_help_panel``; those without one come first, as *Options*.

    Attributes
    ----------
    examples : list of str
        Command lines of the section *Examples* of the function's docstring.
    """

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        text, *sections = _SECTION.split(cleandoc(getattr(self.callback, "__doc__", None) or ""))
        self.help = text.strip().replace("``", "") or self.help
        named = dict(zip(sections[::2], sections[1::2], strict=True))
        self.examples = named.get("Examples", "").strip().splitlines()

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, a section for each group."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                own = getattr(parameter, "rich_help_panel", None)
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(own or kind, []).append(record)
        # What all commands share comes after what is this one's own.
        shared = {title: groups.pop(title, []) for title in (METHOD, DATA, MODEL, OUTPUT)}
        for title, records in (groups | shared).items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as they stand, and what else comes last."""
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.examples))
        super().format_epilog(ctx, formatter)


def share_option(name: str, help: str, group: str | None = None) -> Any:
    """Return an option that takes a share: ``30%``, ``0.3`` or ``.3``."""
    return typer.Option(
        name,
        help=help,
        metavar="SHARE",
        parser=partial(parse_share, what=name),
        rich_help_panel=group,
    )


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A hub id, a local folder, or reference (embedded; the default).",
        autocompletion=models,
        show_default=False,
    ),
]
BatchSizeOption = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        min=1,
        rich_help_panel=MODEL,
        help="Sequences per forward pass. Default by device.",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of random tokens.")]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", rich_help_panel=MODEL, help="auto, cpu, cuda, cuda:1, balanced or offload."
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        "--dtype",
        rich_help_panel=MODEL,
        help="auto (bf16 on a GPU, float32 on a CPU), float32, bfloat16 …",
    ),
]
RevisionOption = Annotated[
    str | None,
    typer.Option("--revision", rich_help_panel=MODEL, help="Branch, tag or commit of a hub model."),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        rich_help_panel=MODEL,
        help="Run code from the model's repository. Off.",
    ),
]


def load_for_command(
    model: str | None,
    *,
    device: str,
    dtype: str,
    revision: str | None,
    trust_remote_code: bool,
    compressed: bool = False,
) -> "LoadedModel":
    """Load the model that a command was asked for; ``reference`` when it names none.

    Parameters
    ----------
    model, device, dtype, revision, trust_remote_code
        From the command line.
    compressed : bool
        Whether the command needs it to run with a compressed cache; one that cannot is refused.
    """
    from kvprof.models.load import load_model

    _use_what_is_there()
    spec = model or "reference"
    with console.status(f"loading {spec}"):
        loaded = load_model(
            spec,
            device=device,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        if compressed:
            from kvprof.runtime.compressed import check_runs

            check_runs(loaded)
    return loaded


def spectra_only(loaded: "LoadedModel") -> list[str]:
    """Return what to say of a model that can be looked at and not run compressed."""
    from kvprof.runtime.compressed import refusal

    if loaded.layout.layers[0].mla or (reason := refusal(loaded)) is None:
        return []
    return [f"this model cannot run with a compressed cache, so no plan is for it: {reason}"]


def _use_what_is_there() -> None:
    """Keep torch from starting more threads than a container's share of the processor has room for.

    Torch counts the whole machine's cores; threads beyond the share make everything many times
    slower. Whoever sets ``OMP_NUM_THREADS`` knows better.
    """
    import torch

    usable = usable_threads()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > usable:
        torch.set_num_threads(usable)


def defined_pairs(
    loaded: "LoadedModel", pairs: Sequence[str], *, asked: bool, warnings: list[str]
) -> tuple[str, ...]:
    """Return the pairs that a model has.

    Parameters
    ----------
    loaded : LoadedModel
    pairs : sequence of str
    asked : bool
        Whether the user named them; a default leaves out what is not there and warns.
    warnings : list of str
        Gets what was left out.

    Raises
    ------
    UsageError
        When the user asked for one that the model does not have, or none is left.
    """
    from kvprof.moments.collect import undefined_pairs

    lacking = [pair for pair in undefined_pairs(loaded.layout) if pair in pairs]
    left = tuple(pair for pair in pairs if pair not in lacking)
    if not lacking:
        return left
    reason = (
        f"{' and '.join(lacking)} cannot be had from {loaded.layout.architecture}: its W_O or W_V "
        "is no plain projection per head"
    )
    if asked or not left:
        raise UsageError(f"--pairs: {reason}; leave {'it' if len(lacking) == 1 else 'them'} out")
    warnings.append(f"{reason}; left out")
    return left


def parse_rates(text: str, *, what: str) -> list[float]:
    """Read a comma-separated list of shares between 0 and 1, ascending and without repeats.

    Raises
    ------
    UsageError
        When one is no number, or not between 0 and 1.
    """
    rates = set()
    for entry in text.split(","):
        rate = parse_share(entry, what=what)
        if not 0 <= rate < 1:
            raise UsageError(f"{what}: {entry.strip()[:40]} is not between 0 and 1 (1 excluded)")
        rates.add(rate)
    return sorted(rates)


# --- Options that say which method, how much of it, and what it is calibrated on.


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
