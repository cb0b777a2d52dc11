"""Loading the model that a command was asked for. It imports torch: only where the work begins."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvprof import console
from kvprof.environment import usable_threads
from kvprof.errors import UsageError
from kvprof.models.load import LoadedModel, OpenedModel, load_model
from kvprof.moments.collect import undefined_pairs

if TYPE_CHECKING:
    from kvprof.moments.uncalibrated import Laid

__all__ = ["defined_pairs", "load_for_command", "model_inputs", "spectra_only"]


def load_for_command(
    model: str | None,
    *,
    device: str,
    dtype: str,
    revision: str | None,
    gguf: str | None,
    trust_remote_code: bool,
    compressed: bool = False,
    before: Callable[[OpenedModel], object] = lambda _: None,
    laid: "Callable[[Laid], object] | None" = None,
) -> LoadedModel:
    """Load the model that a command was asked for; ``reference`` when it names none.

    `before` is called before weights are read, to refuse what needs none of them; `laid` after it
    with the model's layout, once weights are read only where its config does not say the layout.
    """
    _use_what_is_there()
    spec = model or "reference"
    seen: list[Laid] = []

    def first(opened: OpenedModel) -> None:
        before(opened)
        if laid is not None and opened.outline is not None:
            seen.append(opened.outline)
            laid(opened.outline)

    with console.status(f"loading {spec}"):
        loaded = load_model(
            spec,
            device=device,
            dtype=dtype,
            revision=revision,
            gguf=gguf,
            trust_remote_code=trust_remote_code,
            before=first,
        )
        if compressed:
            from kvprof.runtime.compressed import check_runs

            check_runs(loaded)
    if laid is not None and not seen:
        laid(loaded)
    return loaded


def model_inputs(loaded: LoadedModel) -> dict[str, Any]:
    """Return what a result says of the model that was planned for."""
    return {
        "model": loaded.spec,
        **loaded.origin,
        "fingerprint": loaded.fingerprint,
        "architecture": loaded.layout.architecture,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
    }


def spectra_only(loaded: LoadedModel) -> list[str]:
    """Return a warning for a model whose layout shows that it cannot run compressed."""
    if loaded.layout.layers[0].mla or (reason := loaded.layout.unstorable) is None:
        return []
    return [f"this model cannot run with a compressed cache: {reason}"]


def _use_what_is_there() -> None:
    """Keep torch from starting more threads than a container's share of the processor has room for.

    Torch counts the whole machine's cores; threads beyond the share make everything many times
    slower. Whoever sets ``OMP_NUM_THREADS`` knows better.
    """
    usable = usable_threads()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > usable:
        torch.set_num_threads(usable)


def defined_pairs(
    loaded: LoadedModel, pairs: Sequence[str], *, asked: bool, warnings: list[str]
) -> tuple[str, ...]:
    """Return the pairs that a model has."""
    lacking = [pair for pair in undefined_pairs(loaded.layout) if pair in pairs]
    left = tuple(pair for pair in pairs if pair not in lacking)
    if not lacking:
        return left
    reason = (
        f"{' and '.join(lacking)} is not available for {loaded.layout.architecture}: its W_O or "
        "W_V is not one projection per head"
    )
    if asked or not left:
        raise UsageError(f"--pairs: {reason}; leave {'it' if len(lacking) == 1 else 'them'} out")
    warnings.append(f"{reason}; left out")
    return left
