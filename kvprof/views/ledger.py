"""The ledger for readers: what holds, what does not, what is open, paper by paper."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvprof.methods.named import SOURCES
from kvprof.views.numbers import MISSING, duration
from kvprof.views.page import bullets, heading, paragraph, warned
from kvprof.views.recipe import (
    VERDICT_ORDER,
    Beside,
    answer,
    check_words,
    claimed_words,
    interval_words,
    line_words,
    measured_words,
    model_words,
    paper_notes,
    published_words,
    ratios_of,
)
from kvprof.views.tables import Column, DataTable

__all__ = ["ledger", "table"]

Entry = Mapping[str, Any]

_INTRODUCTION = (
    "Each recipe states a paper's claim, runs kvprof, and judges the claim on the model and GPU "
    "named. reference: a model of 20M parameters, trained for kvprof. smollm2: "
    "SmolLM2-135M-Instruct. A shape: one layer of that model's size with random data."
)


def ledger(result: Mapping[str, Any]) -> RenderableType:
    """Return the whole ledger as a report."""
    entries: Sequence[Entry] = result["data"]["entries"]
    parts: list[RenderableType] = [
        paragraph(answer(result["data"]), "bold"),
        paragraph(_INTRODUCTION),
        bullets(_runs(entries)),
        _counts(entries),
    ]
    if notes := list(paper_notes(entries)):
        parts += [
            paragraph("Methods named :paper run at the paper's setting, except:"),
            bullets(notes),
        ]
    for paper in dict.fromkeys(entry["paper"] for entry in entries):
        own = [entry for entry in entries if entry["paper"] == paper]
        own.sort(key=lambda entry: (entry["recipe"], entry["model"] or "", entry["gpu"] or ""))
        parts.append(heading(paper))
        if paper in SOURCES:
            parts.append(paragraph(SOURCES[paper]))
        for entry in own:
            parts += _entry(entry)
    return Group(*parts, *warned(result))


def table(result: Mapping[str, Any]) -> RenderableType:
    """Return the ledger as one table: claim, source, measured, verdict, model, GPU.

    Of a recipe stand the models that could test it, each with its larger sample, the reference
    model only where no other could; one row says of a recipe that none could.
    """
    entries: Sequence[Entry] = result["data"]["entries"]
    rows: dict[tuple[Any, ...], Entry] = {}
    tested = [entry for entry in entries if entry["verdict"] != VERDICT_ORDER[3]]
    others = {entry["recipe"] for entry in tested if not _of_reference(entry)}
    known = {entry["recipe"] for entry in tested}
    for entry in sorted(entries, key=lambda entry: entry["profile"] != "smoke"):
        if entry["recipe"] not in known:
            rows[entry["recipe"],] = entry
        elif entry in tested and not (_of_reference(entry) and entry["recipe"] in others):
            rows[entry["recipe"], entry["model"]] = entry
    titles = ("claim", "source", "measured", "verdict", "model", "GPU")
    papers = list(dict.fromkeys([*SOURCES, *(entry["paper"] for entry in entries)]))
    order = list(dict.fromkeys(entry["recipe"] for entry in entries))
    shown = sorted(
        rows.values(),
        key=lambda entry: (papers.index(entry["paper"]), order.index(entry["recipe"])),
    )
    return Group(
        paragraph(answer(result["data"])),
        DataTable([Column(name, words=True) for name in titles], [_row(one) for one in shown]),
    )


def _of_reference(entry: Entry) -> bool:
    return not {"reference", "shape of reference"}.isdisjoint((entry["model"] or "").split(", "))


def _row(entry: Entry) -> tuple[str, ...]:
    return (
        entry["claim"],
        f"{entry['paper']}, {entry['item']}",
        _deciding(entry),
        entry["verdict"],
        entry["model"] or MISSING,
        entry["gpu"] or MISSING,
    )


def _deciding(entry: Entry) -> str:
    """Write the measure that decides a verdict, and what it is held against."""
    held = {VERDICT_ORDER[0]: True, VERDICT_ORDER[1]: True, VERDICT_ORDER[2]: False}
    wanted = held.get(entry["verdict"])
    by_direction = entry["verdict"] in VERDICT_ORDER[1:3]
    for line in sorted(entry["lines"], key=lambda line: by_direction and not line["direction"]):
        if line["holds"] == wanted:
            return f"{line['measure']} {measured_words(line)}, must be {check_words(line)}"
    return MISSING


def _run(entry: Entry) -> tuple[str, ...]:
    return entry["profile"], entry["model"] or MISSING, entry["gpu"] or "no GPU", entry["machine"]


def _runs(entries: Sequence[Entry]) -> Iterator[str]:
    """Say which profile ran where; what was not run ran nowhere."""
    ran = [entry for entry in entries if entry["cells"]]
    for run in dict.fromkeys(_run(e) for e in ran):
        own = [e for e in ran if _run(e) == run]
        days = sorted({e["created"][:10] for e in own})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        profile, *on = run
        yield f"profile {profile}, {len(own)} recipes: {', '.join(on)}, {when}"


def _counts(entries: Sequence[Entry]) -> DataTable:
    kinds: dict[tuple[str, ...], Counter[str]] = {}
    for entry in entries:
        kind = (entry["paper"], entry["model"] or MISSING, entry["gpu"] or MISSING)
        kinds.setdefault(kind, Counter())[entry["verdict"]] += 1
    rows = [(*kind, *(str(own[one]) for one in VERDICT_ORDER)) for kind, own in kinds.items()]
    columns = [Column(name, words=True) for name in ("paper", "model", "GPU")]
    return DataTable(columns + [Column(verdict) for verdict in VERDICT_ORDER], rows)


def _entry(entry: Entry) -> Iterator[RenderableType]:
    profile = f", profile {entry['profile']}" if entry["profile"] else ""
    yield heading(f"{entry['paper']}, {entry['item']}: {entry['verdict']}")
    yield paragraph(f"{entry['claim']} ({entry['recipe']}{profile}, {model_words(entry)})")
    if entry["direction"]:
        yield paragraph(f"Direction: {entry['direction']}")
    if entry["stand_in"] and entry["lines"]:
        yield paragraph(f"Stand-in: {entry['stand_in']}")
    if entry["reasons"]:
        yield bullets(entry["reasons"])
    if entry["lines"]:
        yield _lines(entry)
    if ratios := ratios_of(entry):
        yield Text()
        yield Beside(ratios)
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
        Column("measure", words=True),
        Column("claimed", words=True),
        Column("measured"),
        Column("95 % interval"),
        Column("", words=True),
    ]
    rows = [
        (
            ": ".join(filter(None, (line["measure"], line.get("note")))),
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
        [
            Column(title, words=True)
            for title in ("published", *(titles[key] for key in shown), "where")
        ],
        [
            (published_words(one), *(one[key] or MISSING for key in shown), one["cell"])
            for one in published
        ],
    )


def _cell(one: Mapping[str, Any]) -> str:
    if one["message"]:
        return f"{one['command']} ({one['message']})"
    return one["command"] if one["known"] else f"{one['command']} ({duration(one['seconds'])})"
