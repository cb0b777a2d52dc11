"""Sections of the report of a load: steps and lines through them, and a simulation held to it."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprof.records.parts import UNATTRIBUTED, ordered_parts
from kvprof.views.bars import Bar, Ink, StackedBars
from kvprof.views.numbers import (
    MISSING,
    duration,
    interval,
    number,
    percent,
    signed_percent,
    unit_of,
)
from kvprof.views.page import bullets, heading
from kvprof.views.tables import DataTable, SplitTable, columns

__all__ = [
    "NO_GRAPH",
    "against_section",
    "against_verdict",
    "context_said",
    "fit_said",
    "step_bars",
    "steps_section",
]

Row = Mapping[str, Any]

#: Called so in a table: what no mark names, the model's products above all.
_REST = "rest"
NO_GRAPH = (
    "inside steps: sequences that decode and prompt tokens that were read are means; steps in "
    "parts ran without their CUDA graph, where there are any: on a GPU they take longer than those "
    "that are served, which stand beside them as a whole, and shares hold of them alone"
)


def steps_section(data: Mapping[str, Any], method: str) -> list[RenderableType]:
    """Return the section of a method; nothing where none of its steps was sampled.

    Parameters
    ----------
    data : mapping
        Of a result of kind ``load``.
    method : str
    """
    rows = [row for row in data.get("steps", ()) if row["method"] == method]
    if not rows:
        return []
    parts = ordered_parts(one["part"] for row in rows for one in row["parts"])
    seconds = [row["whole_seconds"] or row["seconds"] for row in rows]
    factor, unit = unit_of(seconds)
    titles = [
        *(_REST if part == UNATTRIBUTED else part for part in parts),
        f"all {unit}", "steps", "served", "steps", "decoding", "read",
    ]  # fmt: skip
    cells = []
    for row in rows:
        own = {one["part"]: one["seconds"] * factor for one in row["parts"]}
        cells.append(
            [
                _called(row),
                *(number(own.get(part)) for part in parts),
                _scaled(row["seconds"], factor),
                f"{row['sampled']:,}",
                _scaled(row["whole_seconds"], factor),
                f"{row['whole']:,}",
                number(row["decodes"]),
                number(row["prefill"]),
            ]
        )
    groups = (len(parts) + 2, 2, 2)
    table = SplitTable(columns("step", figures=titles), cells, groups)
    found: list[RenderableType] = [Text(), Text(f"Inside its steps, {unit}", style="bold"), table]
    if any(row["parts"] for row in rows):
        found += [Text(), step_bars(rows)]
    return found


def step_bars(rows: Sequence[Row], ink: Ink | None = None) -> StackedBars:
    """Return a bar of shares for each row of ``data.steps`` that is in parts.

    Parameters
    ----------
    rows : sequence of mapping
    ink : Ink, optional
    """
    bars = []
    for row in rows:
        if not row["parts"]:
            continue
        said = duration(row["seconds"])
        if waited := row["waited_share"]:
            said += f", {percent(waited, 0)} may wait"
        parts = {one["part"]: one["seconds"] for one in row["parts"]}
        bars.append(Bar(_called(row), parts, Text(said)))
    return StackedBars(bars, "", shares=True, ink=ink)


def _called(row: Row) -> str:
    return f"{row['rate']:g}/s {row['phase']}"


def _scaled(seconds: float | None, factor: float) -> str:
    return MISSING if seconds is None else number(seconds * factor)


# --- What lines through the steps say, in sentences.


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


# --- How near a simulated load comes to one that was served.


def against_section(found: Row) -> list[RenderableType]:
    """Return the section of a report.

    Parameters
    ----------
    found : mapping
        As `kvprof.records.load_against.against` returns it.
    """
    parts: list[RenderableType] = [heading("Against the load that was served")]
    rows = found["rates"]
    if rows:
        factor, unit = unit_of(
            row["normalised_latency_seconds"]["measured"]
            for row in rows
            if row["normalised_latency_seconds"] is not None
        )
        cells = [
            [
                row["method"],
                number(row["rate"]),
                *_latency(row["normalised_latency_seconds"], factor),
                _difference(row["normalised_latency_seconds"]),
                _difference(row["ttft_seconds"]),
                _difference(row["tbt_seconds"]),
                _queue(row["grows"]),
            ]
            for row in rows
        ]
        titles = ("requests/s", f"simulated {unit}", "measured", "latency", "TTFT", "TBT", "queue")
        parts.append(DataTable(columns("method", figures=titles), cells))
    return [*parts, bullets(_said(found))]


def against_verdict(found: Row) -> str:
    """Say in a sentence how near it comes."""
    known = [row["normalised_latency_seconds"] for row in found["rates"]]
    compared = [one for one in known if one is not None]
    if not compared:
        return "no rate was completed by both: nothing is told of the simulation"
    near = sum(one["within"] for one in compared)
    widest = max(compared, key=lambda one: abs(one["difference"]))
    return (
        f"{near} of {len(compared)} rates are within {percent(found['near'], 0)} of the measured "
        "latency per token, or within its interval; the farthest is "
        f"{signed_percent(widest['difference'])} off"
    )


def _said(found: Row) -> list[str]:
    said = [against_verdict(found)]
    off = [
        f"{row['case']} ({signed_percent(row['normalised_latency_seconds']['difference'])})"
        for row in found["rates"]
        if row["normalised_latency_seconds"] is not None
        and not row["normalised_latency_seconds"]["within"]
    ]
    if off:
        said.append(f"not within: {', '.join(off)}")
    if found["missing"]:
        said.append(f"completed by one of them alone: {', '.join(found['missing'])}")
    return said


def _latency(one: Row | None, factor: float) -> list[str]:
    if one is None:
        return [MISSING, MISSING]
    return [number(one["simulated"] * factor), number(one["measured"] * factor)]


def _difference(one: Row | None) -> str:
    if one is None:
        return MISSING
    return f"{signed_percent(one['difference'])}{'' if one['within'] else ' !'}"


def _queue(grows: Sequence[bool | None]) -> str:
    words = {True: "grows", False: "no growth", None: MISSING}
    one, other = (words[each] for each in grows)
    return one if one == other else f"{one}, measured {other}"
