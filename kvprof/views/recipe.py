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
    verdict_words,
)
from kvprof.views.tables import Column, DataTable

__all__ = ["VERDICT_ORDER", "answer", "paper_notes", "report"]

#: From what holds to what is open.
VERDICT_ORDER = ("reproduced", "reproduced in direction", "not reproduced", "cannot be judged here")
_READ = (
    "Claimed: the paper's number, then what must hold here, the recipe's tolerance included. "
    "A limit inside the 95 % interval is neither met nor missed: the line is open.",
    "Reproduced in direction: the weaker claim holds, the number does not or is open.",
    "By construction: arithmetic, or what the method is by definition, and no finding.",
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
    for title, verdict in (
        ("Not reproduced", VERDICT_ORDER[2]),
        ("In direction only", VERDICT_ORDER[1]),
    ):
        if found := [entry for entry in entries if entry["verdict"] == verdict]:
            parts += [heading(title), bullets([f"{e['recipe']}: {e['claim']}" for e in found])]
    if found := [entry for entry in entries if entry["reasons"]]:
        lines = [f"{entry['recipe']}: {'; '.join(entry['reasons'])}" for entry in found]
        parts += [heading("Why not judged, or not in full"), bullets(lines)]
    if found := [entry for entry in entries if entry["stand_in"] and entry["lines"]]:
        parts += [heading("Stand-ins: these verdicts are of them, not of the paper's own setting")]
        parts.append(bullets([f"{entry['recipe']}: {entry['stand_in']}" for entry in found]))
    if found := list(paper_notes(entries)):
        parts += [heading("Papers' own settings, and what of them is not the paper's")]
        parts.append(bullets(found))
    parts += [heading("How to read this"), bullets(_READ)]
    if result["warnings"]:
        parts += [heading("Warnings"), bullets(result["warnings"], "yellow")]
    return Fitted(Group(*parts), width=width, colour=colour)


def paper_notes(entries: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what differs from each paper's own setting that these entries ran, each once."""
    told = {
        paper["name"]: paper["differs"]
        for entry in entries
        if entry["lines"]
        for paper in entry.get("papers", ())
    }
    for name, differs in told.items():
        yield f"{name}: {' '.join(differs) or 'nothing is known to differ.'}"


def answer(data: Mapping[str, Any]) -> str:
    """Return the counts in a sentence."""
    entries = data["entries"]
    said = [_counted(entries, one) for one in VERDICT_ORDER if data["counts"].get(one)]
    names = {entry["recipe"] for entry in entries}
    of = f"{len(names)} {'recipe' if len(names) == 1 else 'recipes'}"
    if len(names) < len(entries):  # under several profiles, or on several machines
        of += f", {len(entries)} verdicts"
    return f"{of}: {', '.join(said) or 'nothing was run'}."


def _counted(entries: Sequence[Mapping[str, Any]], verdict: str) -> str:
    own = [verdict_words(entry) for entry in entries if entry["verdict"] == verdict]
    made = sum(words != verdict for words in own)
    return f"{len(own)} {verdict}{f' ({made} by construction)' if made else ''}"


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
    yield (entry["recipe"], of, "", "", verdict_words(entry).upper())
    for line in entry["lines"]:
        yield (
            f"· {line['measure']}",
            claimed_words(entry, line),
            measured_words(line),
            interval_words(line),
            line_words(line),
        )
