"""What lines through an engine's steps say, in sentences of the report of a load."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprof.views.numbers import interval, number, percent, unit_of

__all__ = ["context_said", "fit_said"]

Row = Mapping[str, Any]


def fit_said(fit: Row) -> str:
    """Say the line through the steps: what a token costs, and each thing it grows with."""
    said, unresolved = [], []
    value, bounds = fit["intercept_seconds"], fit["intercept_seconds_interval"]
    if _resolved(value, bounds):
        said.append(f"a token costs {_seconds(value, bounds)}")
    else:
        unresolved.append(_unresolved("a token by itself", value, bounds))
    words = {
        "context": ("1,000 tokens held", 1000.0),
        "batch": ("request that decodes", 1.0),
        "prefill": ("1,000 prompt tokens read beside it", 1000.0),
    }
    for name, found in fit["slopes"].items():
        what, factor = words[name]
        bounds = found["seconds_interval"]
        scaled = None if bounds is None else [one * factor for one in bounds]
        if _resolved(found["seconds"], bounds):
            cost = f"{_seconds(found['seconds'] * factor, scaled)} for each {what}"
            said.append(cost if said else f"a token costs {cost}")
        else:
            unresolved.append(_unresolved(f"each {what}", found["seconds"] * factor, scaled))
    sentences = []
    if said:
        sentences.append(", and ".join((said[0], ", ".join(said[1:]))) if said[1:] else said[0])
    if unresolved:
        sentences.append(f"not resolved is what it costs for {', for '.join(unresolved)}")
    if fit["left_out"]:
        sentences.append(f"{' and '.join(fit['left_out'])} did not vary by itself")
    return "; ".join(sentences)


def _resolved(value: float, bounds: Sequence[float] | None) -> bool:
    """Whether a cost is told: none is below zero, and an interval that goes there tells none."""
    return value > 0 and (bounds is None or bounds[0] > 0)


def _unresolved(what: str, value: float, bounds: Sequence[float] | None) -> str:
    if bounds is None:
        return f"{what} (no interval)"
    factor, unit = unit_of([abs(value), *map(abs, bounds)])
    return f"{what} [{number(bounds[0] * factor)}, {number(bounds[1] * factor)}] {unit}"


def _seconds(value: float, bounds: Sequence[float] | None) -> str:
    factor, unit = unit_of([value])
    scaled = None if bounds is None else [one * factor for one in bounds]
    return f"{interval(value * factor, scaled)} {unit}"


def context_said(name: str, base: str, found: Row) -> str:
    """Say from which context on, or up to which, a method's steps are shorter."""
    batch = f"{found['batch']:g} request{'s' if found['batch'] != 1 else ''} at once"
    sure = "" if found["certain"] is None else f" ({percent(found['certain'], 0)} of resamples)"
    if found["pays"] in ("always", "never"):
        return f"{name}'s steps, {batch}: {found['pays']} shorter than {base}'s{sure}"
    if found["context"] is None:
        return f"{name}'s steps, {batch}: whether they are shorter than {base}'s is unclear"
    word = "from" if found["pays"] == "from" else "up to"
    beyond = "" if found["seen"] else "; such contexts were not measured, the lines are drawn on"
    tokens = f"{found['context']:,.0f}"
    if found["interval"] is not None:
        low, high = found["interval"]
        tokens += f" [{low:,.0f}, {high:,.0f}]"
    return f"{name}'s steps, {batch}: shorter than {base}'s {word} {tokens} tokens{sure}{beyond}"
