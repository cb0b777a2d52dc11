"""Options that several commands share: the model, where it runs, how it is fed."""

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprof import console
from kvprof.commands.completion import models
from kvprof.commands.help import MODEL
from kvprof.environment import usable_threads
from kvprof.errors import UsageError
from kvprof.sizes import parse_share

if TYPE_CHECKING:
    from kvprof.models.load import LoadedModel

__all__ = [
    "BatchSizeOption",
    "DeviceOption",
    "DtypeOption",
    "ModelArgument",
    "RevisionOption",
    "SeedOption",
    "TrustOption",
    "defined_pairs",
    "load_for_command",
    "parse_rates",
    "share_option",
    "spectra_only",
]


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
