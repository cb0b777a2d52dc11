"""What ``--methods`` says: rows of a frontier, each a method with options of its own or none."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvprof.errors import UsageError
from kvprof.methods.named import ALWAYS, installed_points, method_entries, options_in, parts_of
from kvprof.methods.registry import (
    COMMON_OPTIONS,
    METHODS,
    calibration_needs,
    skips_layers,
    typed_options,
)

__all__ = ["MethodRequest", "option_names", "parse_methods"]

# Of a combination's quantiser and evictor, and of the calibration with Fisher information.
_BESIDE = ("bits", "keep", *COMMON_OPTIONS, "fisher_form")


@dataclass(frozen=True)
class MethodRequest:
    """One row of a frontier."""

    label: str  # as the user wrote it: the method, with options of its own where it has any
    method: str  # registered name
    options: dict[str, Any] = field(default_factory=dict)  # those of the whole command included


def parse_methods(text: str, common: Mapping[str, Any]) -> list[MethodRequest]:
    """Return the rows that a list of methods asks for, and those of `ALWAYS` after them."""
    requests: list[MethodRequest] = []
    taken: set[str] = set()
    for label, method, written in method_entries(text):
        calibration_needs(method)  # refuses an unknown name
        known = option_names(method)
        own = options_in(written)
        beside = tuple(COMMON_OPTIONS) if skips_layers(method) else ()
        for option in own:
            if option not in known and option not in _BESIDE:
                every = (*known, *(name for name in beside if name not in known))
                has = f"it has {', '.join(every)}" if every else "it has none"
                raise UsageError(f"--methods {label}: {method} has no option {option}: {has}")
        shared = {
            key: value
            for key, value in common.items()
            if (key in known or key in beside) and key not in own
        }
        taken |= shared.keys()
        try:
            typed = typed_options(method, {**shared, **own})
        except UsageError as problem:
            raise UsageError(f"--methods {label}: {problem}") if own else problem from None
        requests.append(MethodRequest(label, method, typed))
    for option, value in common.items():
        if option not in taken:
            raise UsageError(f"{option}={value}: no method given has this option")
    labels = [request.label for request in requests]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UsageError(f"--methods names {twice[0]} twice")
    return [*requests, *(MethodRequest(name, name) for name in ALWAYS if name not in labels)]


def option_names(method: str) -> tuple[str, ...]:
    """Return the options of a method; for a combination those of the method it is built on."""
    installed = installed_points()
    found = parts_of(method, (*METHODS, *installed))
    assert found is not None  # the registry knows it
    base, _ = found
    function: Any = METHODS[base] if base in METHODS else installed[base].load()
    return tuple(
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    )
