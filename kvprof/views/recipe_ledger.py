"""The ledger for readers: what holds, what does not, what is open, paper by paper."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvprof.views.durations import duration
from kvprof.views.numbers import MISSING
from kvprof.views.page import bullets, heading, paragraph
from kvprof.views.recipe import VERDICT_ORDER, answer, paper_notes
from kvprof.views.recipe_plot import Beside, strips_of
from kvprof.views.recipe_words import (
    claimed_words,
    interval_words,
    line_words,
    measured_words,
    published_words,
    verdict_words,
)
from kvprof.views.tables import Column, DataTable

__all__ = ["ledger"]

Entry = Mapping[str, Any]

_INTRODUCTION = (
    "Each recipe states a claim of a paper in words of its own, runs commands of kvprof, and says "
    "whether the claim holds of what was measured. The profiles smoke and small run stand-ins, "
    "such as a reference model of 19M parameters: their verdicts are of those and not of the "
    "paper's own setting, and each says what differs. Where a limit lies inside a 95 % interval, "
    "or a request's time does not add up, nothing is judged."
)


def ledger(result: Mapping[str, Any]) -> RenderableType:
    """Return the ledger as a report.

    Parameters
    ----------
    result : mapping
        A result of kind ``recipe``.
    """
    entries: Sequence[Entry] = result["data"]["entries"]
    # Of several runs the entries of one recipe stand together, in the order of the longest run.
    sizes = Counter(_run(entry) for entry in entries)
    ordered = sorted(entries, key=lambda entry: -sizes[_run(entry)])
    parts: list[RenderableType] = [
        paragraph(answer(result["data"]), "bold"),
        paragraph(_INTRODUCTION),
        bullets(_runs(ordered)),
        _counts(ordered),
    ]
    place = {name: i for i, name in enumerate(dict.fromkeys(e["recipe"] for e in ordered))}
    if notes := list(paper_notes(ordered)):
        parts += [
            paragraph("Methods named :paper run at the paper's own setting. Not the paper's is:"),
            bullets(notes),
        ]
    for paper in dict.fromkeys(entry["paper"] for entry in ordered):
        own = [entry for entry in ordered if entry["paper"] == paper]
        own.sort(key=lambda entry: place[entry["recipe"]])
        parts += [heading(paper), _overview(own)]
        for entry in own:
            parts += _entry(entry)
    if result["warnings"]:
        parts += [heading("Warnings"), bullets(result["warnings"])]
    return Group(*parts)


def _run(entry: Entry) -> tuple[str | None, str | None]:
    return entry["profile"], entry["machine"]


def _runs(entries: Sequence[Entry]) -> Iterator[str]:
    """Say which profile ran where; what was not run ran nowhere."""
    ran = [entry for entry in entries if entry["cells"]]
    for profile, machine in dict.fromkeys(_run(e) for e in ran):
        own = [e for e in ran if _run(e) == (profile, machine)]
        days = sorted({e["created"][:10] for e in own})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        yield f"profile {profile}: {len(own)} of the recipes ran, {machine}, {when}"


def _counts(entries: Sequence[Entry]) -> DataTable:
    papers = list(dict.fromkeys(entry["paper"] for entry in entries))
    found = dict.fromkeys((e["paper"], e["profile"] or MISSING) for e in entries)
    kinds = sorted(found, key=lambda kind: papers.index(kind[0]))
    rows = []
    for paper, profile in kinds:
        own = [e for e in entries if (e["paper"], e["profile"] or MISSING) == (paper, profile)]
        rows.append((paper, profile, *(_of(own, verdict) for verdict in VERDICT_ORDER)))
    columns = [Column("paper", words=True), Column("profile", words=True)]
    return DataTable(columns + [Column(verdict) for verdict in VERDICT_ORDER], rows)


def _of(entries: Sequence[Entry], verdict: str) -> str:
    own = [verdict_words(entry) for entry in entries if entry["verdict"] == verdict]
    made = sum(words != verdict for words in own)
    return f"{len(own)} ({made} by construction)" if made else str(len(own))


def _overview(entries: Sequence[Entry]) -> DataTable:
    columns = [Column(name, words=True) for name in ("item", "recipe", "profile", "verdict")]
    return DataTable(
        columns,
        [
            (e["item"], e["recipe"], e["profile"] or MISSING, verdict_words(e))
            for e in entries
        ],
    )  # fmt: skip


def _entry(entry: Entry) -> Iterator[RenderableType]:
    profile = f", profile {entry['profile']}" if entry["profile"] else ""
    yield heading(f"{entry['paper']}, {entry['item']}: {verdict_words(entry)}")
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
            ": ".join(filter(None, (line["measure"], line.get("note"), line["by_construction"]))),
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
