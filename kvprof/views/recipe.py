"""The report of ``kvprof recipe run``: claimed, measured, interval and verdict in one table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvprof.views.page import Fitted, bullets, heading, incomplete_note, paragraph
from kvprof.views.recipe_words import (
    claimed_words,
    interval_words,
    line_words,
    measured_words,
)
from kvprof.views.tables import Column, DataTable

__all__ = ["report"]

_ORDER = ("reproduced", "reproduced in direction", "not reproduced", "cannot be judged here")
_READ = (
    "Claimed: the paper's number, then what must hold here, the recipe's tolerance included. "
    "Where the limit lies inside the interval, the measured value decides.",
    "Reproduced in direction: the weaker claim holds, the number does not.",
)


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report for people.

    Parameters
    ----------
    result : mapping
        A result of kind ``recipe``.
    width : int or None
        Columns at most; None takes the console's.
    colour : bool
        False leaves out every escape code.
    """
    entries = result["data"]["entries"]
    parts: list[RenderableType] = [] if result["complete"] else [incomplete_note(), Text()]
    parts += [paragraph(answer(result["data"]), "bold"), Text(), _table(entries)]
    for title, verdict in (("Not reproduced", _ORDER[2]), ("In direction only", _ORDER[1])):
        if found := [entry for entry in entries if entry["verdict"] == verdict]:
            parts += [heading(title), bullets([f"{e['recipe']}: {e['claim']}" for e in found])]
    if found := [entry for entry in entries if entry["reasons"]]:
        lines = [f"{entry['recipe']}: {'; '.join(entry['reasons'])}" for entry in found]
        parts += [heading("Why not judged, or not in full"), bullets(lines)]
    if found := [entry for entry in entries if entry["stand_in"] and entry["lines"]]:
        parts += [heading("Stand-ins: these verdicts are of them, not of the paper's own setting")]
        parts.append(bullets([f"{entry['recipe']}: {entry['stand_in']}" for entry in found]))
    parts += [heading("How to read this"), bullets(_READ)]
    if result["warnings"]:
        parts += [heading("Warnings"), bullets(result["warnings"], "yellow")]
    return Fitted(Group(*parts), width=width, colour=colour)


def answer(data: Mapping[str, Any]) -> str:
    """Return the counts in a sentence."""
    entries = data["entries"]
    said = [f"{data['counts'][one]} {one}" for one in _ORDER if data["counts"].get(one)]
    of = f"{len(entries)} {'recipe' if len(entries) == 1 else 'recipes'}"
    return f"{of}: {', '.join(said) or 'nothing was run'}."


def _table(entries: Sequence[Mapping[str, Any]]) -> DataTable:
    columns = [
        Column("recipe, measure", words=True),
        Column("claimed", words=True),
        Column("measured"),
        Column("95 % interval"),
        Column("verdict", words=True),
    ]
    rows = [row for entry in entries for row in _rows(entry)]
    # A column without a single entry costs room that the others need.
    if all(row[3] in ("", "–") for row in rows):
        columns.pop(3)
        rows = [(*row[:3], row[4]) for row in rows]
    return DataTable(columns, rows)


def _rows(entry: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    of = f"{entry['item']} of {entry['paper']}"
    yield (entry["recipe"], of, "", "", entry["verdict"].upper())
    for line in entry["lines"]:
        yield (
            f"· {line['measure']}",
            claimed_words(entry, line),
            measured_words(line),
            interval_words(line),
            line_words(line),
        )
