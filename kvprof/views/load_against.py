"""How near a simulated load comes to one that was served, as a part of its report."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from kvprof.views.numbers import MISSING, number, percent, signed_percent, unit_of
from kvprof.views.page import bullets, heading
from kvprof.views.tables import DataTable, columns

__all__ = ["against_section", "against_verdict"]

Row = Mapping[str, Any]


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
