"""The ledger for readers: what holds, what does not, what is open, paper by paper."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvprof.methods.papers import NOTES
from kvprof.views.numbers import MISSING, duration
from kvprof.views.page import bullets, heading, paragraph, warned
from kvprof.views.recipe import (
    VERDICT_ORDER,
    Beside,
    answer,
    claimed_words,
    interval_words,
    line_words,
    measured_words,
    model_words,
    paper_notes,
    published_words,
    ratios_of,
    verdict_words,
)
from kvprof.views.tables import Column, DataTable

__all__ = ["ledger", "setting_words"]

Entry = Mapping[str, Any]

_INTRODUCTION = (
    "Each recipe states a claim of a paper in words of its own, runs commands of kvprof, and says "
    "whether the claim holds of what was measured. The profiles smoke and small run stand-ins: "
    "reference, a model of 19M parameters trained for it, smollm2, the pretrained "
    "SmolLM2-135M-Instruct, or a layer's shape with random data. Their verdicts are of those and "
    "not of the paper's own setting, and each says which model it rests on and what differs. Where "
    "a limit lies inside a 95 % interval, or a request's time does not add up, nothing is judged."
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
    order = {name: i for i, name in enumerate(dict.fromkeys(e["recipe"] for e in ordered))}
    if notes := list(paper_notes(ordered)):
        parts += [
            paragraph("Methods named :paper run at the paper's own setting. Not the paper's is:"),
            bullets(notes),
        ]
    for paper in dict.fromkeys(entry["paper"] for entry in ordered):
        own = [entry for entry in ordered if entry["paper"] == paper]
        own.sort(key=lambda entry: (order[entry["recipe"]], *_place(entry)))
        parts += [heading(paper), _overview(own)]
        if paper in NOTES:
            parts.append(bullets(NOTES[paper]))
        for entry in own:
            parts += _entry(entry)
    return Group(*parts, *warned(result))


def _place(entry: Entry) -> tuple[str, bool]:
    """Return where an entry stands among those of its recipe: by model, the least sample first."""
    return entry["settings"].get("model") or "", entry["profile"] != "smoke"


def _run(entry: Entry) -> tuple[str | None, str | None, str | None]:
    return entry["profile"], entry["machine"], entry["settings"].get("model")


def _runs(entries: Sequence[Entry]) -> Iterator[str]:
    """Say which profile ran where; what was not run ran nowhere."""
    ran = [entry for entry in entries if entry["cells"]]
    for run in dict.fromkeys(_run(e) for e in ran):
        own = [e for e in ran if _run(e) == run]
        profile, machine, model = run
        on = f" with --model {model}" if model else ""
        days = sorted({e["created"][:10] for e in own})
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        yield f"profile {profile}{on}: {len(own)} of the recipes ran, {machine}, {when}"


def _counts(entries: Sequence[Entry]) -> DataTable:
    papers = list(dict.fromkeys(entry["paper"] for entry in entries))
    kinds: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        kinds.setdefault((entry["paper"], entry["profile"] or MISSING, _kind(entry)), []).append(
            entry
        )
    rows = [
        (*kind, *(_of(kinds[kind], verdict) for verdict in VERDICT_ORDER))
        for kind in sorted(kinds, key=lambda kind: papers.index(kind[0]))
    ]
    columns = [Column(name, words=True) for name in ("paper", "profile", "model")]
    return DataTable(columns + [Column(verdict) for verdict in VERDICT_ORDER], rows)


def _kind(entry: Entry) -> str:
    """Return the model, all shapes being one kind."""
    words = model_words(entry)
    return "shapes" if words.startswith("shape of") else words


def _of(entries: Sequence[Entry], verdict: str) -> str:
    own = [verdict_words(entry) for entry in entries if entry["verdict"] == verdict]
    made = sum(words != verdict for words in own)
    return f"{len(own)} ({made} by construction)" if made else str(len(own))


def _overview(entries: Sequence[Entry]) -> DataTable:
    titles = ("item", "recipe", "profile", "model", "verdict")
    return DataTable(
        [Column(name, words=True) for name in titles],
        [
            (e["item"], e["recipe"], e["profile"] or MISSING, model_words(e), verdict_words(e))
            for e in entries
        ],
    )


def _entry(entry: Entry) -> Iterator[RenderableType]:
    profile = f", profile {entry['profile']}" if entry["profile"] else ""
    model = f", on {words}" if (words := model_words(entry)) != MISSING else ""
    yield heading(f"{entry['paper']}, {entry['item']}: {verdict_words(entry)}")
    yield paragraph(f"{entry['claim']} ({entry['recipe']}{profile}{model})")
    if entry["stand_in"] and entry["lines"]:
        yield paragraph(f"Of a stand-in: {entry['stand_in']}")
    if entry["verdict"] == VERDICT_ORDER[2]:
        yield paragraph(setting_words(entry))
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


def setting_words(entry: Entry) -> str:
    """Say which methods ran at their paper's setting, which at kvprof's, and with what options.

    Parameters
    ----------
    entry : mapping
        What is not the paper's but no method's (model, data, metric) is in its ``stand_in``.
    """
    commands = [one["command"].split() for one in entry["cells"]]
    named = [value for words in commands for value in _values(words, _METHODS)]
    labels = dict.fromkeys(label for value in named for label in _labels(value))
    papers = [paper["name"] for paper in entry.get("papers", ())]
    plain = [label for label in labels if ":paper" not in label]
    added = dict.fromkeys(
        f"{option} {value}"
        for words in commands
        for option in _ADDED
        for value in _values(words, (option,))
    )
    if not labels and not papers:
        return "At the paper's setting: no method takes part; what was measured is the model's."
    said = f"At the paper's setting: {', '.join(papers) or 'no method'}."
    if papers and added:
        said += f" The commands add {', '.join(added)}."
    return f"{said} At kvprof's: {', '.join(plain)}." if plain else said


_METHODS = ("--method", "--methods")
# What changes a method beside the setting that its name says.
_ADDED = ("--option", "--allocation", "--grid", "--calibrate", "--calibrate-tokens")


def _values(words: Sequence[str], options: Sequence[str]) -> list[str]:
    return [value for option, value in pairwise(words) if option in options]


def _labels(value: str) -> list[str]:
    """Return the methods of ``--methods``, without options: ``fdc,kq:a=1,b=2`` has two."""
    pieces = [piece for piece in value.split(",") if ":" in piece or "=" not in piece]
    return [re.sub(r":\w+=.*", "", piece) for piece in pieces]


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
