"""The ledger for readers: what holds, what does not, what is open, paper by paper."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvprof.views.durations import duration
from kvprof.views.numbers import MISSING
from kvprof.views.page import bullets, heading, paragraph
from kvprof.views.recipe import answer
from kvprof.views.recipe_plot import Beside, strips_of
from kvprof.views.recipe_words import (
    claimed_words,
    interval_words,
    line_words,
    measured_words,
    published_words,
)
from kvprof.views.tables import Column, DataTable

__all__ = ["ledger"]

Entry = Mapping[str, Any]

_INTRODUCTION = (
    "Each recipe states a claim of a paper in words of its own, runs commands of kvprof, and says "
    "whether the claim holds of what was measured. The smoke and small profiles run stand-ins: "
    "their verdicts are of those, and each says what differs."
)


def ledger(result: Mapping[str, Any]) -> RenderableType:
    """Return the ledger as a report.

    Parameters
    ----------
    result : mapping
        A result of kind ``recipe``.
    """
    entries: Sequence[Entry] = result["data"]["entries"]
    parts: list[RenderableType] = [
        paragraph(answer(result["data"]), "bold"),
        paragraph(_INTRODUCTION),
    ]
    for paper in dict.fromkeys(entry["paper"] for entry in entries):
        own = [entry for entry in entries if entry["paper"] == paper]
        parts += [heading(paper), _overview(own)]
        for entry in own:
            parts += _entry(entry)
    if result["warnings"]:
        parts += [heading("Warnings"), bullets(result["warnings"])]
    return Group(*parts)


def _overview(entries: Sequence[Entry]) -> DataTable:
    columns = [Column(name, words=True) for name in ("item", "recipe", "profile", "verdict")]
    return DataTable(
        columns,
        [
            (e["item"], e["recipe"], e["profile"] or MISSING, e["verdict"])
            for e in entries
        ],
    )  # fmt: skip


def _entry(entry: Entry) -> Iterator[RenderableType]:
    profile = f", profile {entry['profile']}" if entry["profile"] else ""
    yield heading(f"{entry['paper']}, {entry['item']}: {entry['verdict']}")
    yield paragraph(f"{entry['claim']} ({entry['recipe']}{profile})")
    if entry["stand_in"] and entry["lines"]:
        yield paragraph(f"Of a stand-in: {entry['stand_in']}")
    if entry["reasons"]:
        yield bullets(entry["reasons"])
    if entry["lines"]:
        yield _lines(entry)
    if strips := strips_of(entry):
        yield Text()
        yield Beside(strips)
    if entry["published"]:
        yield _published(entry["published"])
    if entry["cells"]:
        yield paragraph("Run with:")
        yield bullets([_cell(one) for one in entry["cells"]])
        yield paragraph(
            f"{entry['created'][:10]}, kvprof {entry['kvprof_version']}, {entry['machine']}"
        )


def _lines(entry: Entry) -> DataTable:
    columns = [
        Column("measure", words=True), Column("claimed", words=True), Column("measured"),
        Column("95 % interval"), Column("", words=True),
    ]  # fmt: skip
    rows = [
        (
            f"{line['measure']}{': ' + line['note'] if line.get('note') else ''}",
            claimed_words(entry, line),
            measured_words(line),
            interval_words(line),
            line_words(line),
        )
        for line in entry["lines"]
    ]
    return DataTable(columns, rows)


def _published(published: Sequence[Mapping[str, Any]]) -> DataTable:
    keys = ("model", "data", "gpu")
    shown = [key for key in keys if any(one[key] for one in published)]
    titles = {"model": "model", "data": "data", "gpu": "GPU"}
    return DataTable(
        [Column(title, words=True) for title in
         ("published", *(titles[key] for key in shown), "where")],
        [
            (published_words(one), *(one[key] or MISSING for key in shown), one["cell"])
            for one in published
        ],
    )  # fmt: skip


def _cell(one: Mapping[str, Any]) -> str:
    if one["message"]:
        return f"{one['command']} ({one['message']})"
    return one["command"] if one["known"] else f"{one['command']} ({duration(one['seconds'])})"
