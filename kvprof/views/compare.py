"""The report of ``kvprof compare``: what got better, what got worse, and is that sure?"""

import re
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprof.sizes import format_bytes
from kvprof.views.numbers import MISSING, count, duration, number, percent, signed_percent
from kvprof.views.page import bullets, framed, heading, paragraph
from kvprof.views.tables import Column, DataTable, key_values

__all__ = ["report", "run_letters"]

_SHOWN = 40  # rows of a table; the others are in the JSON
_LISTED = 12
_NAMED = 4  # inputs, in the first line
_VERDICTS = {
    "better": "better",
    "worse": "worse",
    "changed": "changed",
    "not significant": "not significant",
    "same": "unchanged",
    "better?": "better (no interval)",
    "worse?": "worse (no interval)",
    "changed?": "changed (no interval)",
}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_UNSEEN = 5e-4  # a change that is written as 0.0 %
_COUNTS = ("seq", "tokens", "context", "seq_len_source", "seq_len_target")
_SHARES = ("relative_accuracy", "task_accuracy", "perplexity_ratio")
_INTERVALS = "Change: from A, with a 95 % interval; the range below 15 samples."
_NOISE = "Times: intervals include the drift of control figures between the runs."
_CERTAIN = "Not significant: the interval includes no change."
_UNKNOWN = "Change: from A; without intervals, so measure again to see the noise."
_STEPS = "ITL: its interval covers decode steps of one run, not the noise between runs."


def run_letters(runs: int) -> list[str]:
    """Return what a report calls the runs: A, B, … and then numbers."""
    return [*ascii_uppercase, *(f"run {n}" for n in range(27, runs + 1))][:runs]


def report(
    result: Mapping[str, Any],
    width: int | None = None,
    colour: bool = True,
    *,
    whole: bool = False,
) -> RenderableType:
    """Return the report for people."""
    data = result["data"]
    letters = run_letters(len(data["runs"]))
    parts: list[RenderableType] = [Text()]
    parts += [paragraph(line, "dim") for line in _noise(data, letters)]
    parts.append(
        key_values(
            {
                letter: f"{run['name']}, {data['kind']} of {run['created']}"
                + ("" if run["complete"] else ", INCOMPLETE")
                for letter, run in zip(letters, data["runs"], strict=True)
            }
        )
    )
    headline = [row for row in data["rows"] if row["headline"]]
    others = [row for row in data["rows"] if not row["headline"]]
    components = [row for row in others if "part" in row["key"]]
    others = [row for row in others if "part" not in row["key"]]
    for title, rows in (("Figures", headline), ("Other figures", others), ("Parts", components)):
        if rows:
            parts += _table(title, rows, letters, whole=whole)
    for title, key in (("Environments differ", "environment"), ("Inputs differ", "inputs")):
        if data[key]:
            parts += [heading(title), _differences(data[key], letters)]
    if not data["environment"]:
        parts += [Text(), paragraph("The environments are the same.", "dim")]
    if data["unmatched"]:
        parts += _unmatched(data, letters)
    return framed(
        result,
        parts,
        answer=_answer(data, letters),
        notes=_reading(data),
        repeated=False,
        width=width,
        colour=colour,
    )


def _reading(data: Mapping[str, Any]) -> list[str]:
    known = any(
        change["share_interval"] is not None
        for row in data["rows"]
        for change in row["changes"]
        if change is not None
    )
    found = [_INTERVALS, _CERTAIN] if known else [_UNKNOWN]
    found += [_NOISE] * any(data.get("noise") or ())
    return found + [_STEPS] * (known and data["kind"] == "jct")


def _answer(data: Mapping[str, Any], letters: Sequence[str]) -> str:
    lines = []
    for index, letter in enumerate(letters[1:]):
        changes = [row["changes"][index] for row in data["rows"] if row["headline"]]
        words = [_verdict(change) for change in changes if change is not None]
        said = [
            f"{words.count(word)} {written}" for word, written in _VERDICTS.items() if word in words
        ]
        unlike = _different_inputs(data["inputs"], index + 1)
        lines.append(f"{letter} vs {letters[0]}: {', '.join(said) or 'nothing in common'}{unlike}.")
    if data["fail_over"] is not None:
        lines += _gate(data)
    return "\n".join(lines)


def _different_inputs(inputs: Sequence[Mapping[str, Any]], index: int) -> str:
    """Say beside the verdicts that a run was asked for something else than A, and for what."""
    differing = [one["path"] for one in inputs if one["values"][index] != one["values"][0]]
    names = list(dict.fromkeys(re.split(r"[.\[]", path)[0] for path in differing))
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f", with different inputs ({', '.join(names[:_NAMED])}{more})"


def _gate(data: Mapping[str, Any]) -> Iterator[str]:
    """Say what the limit found, and how much of it the intervals leave open."""
    judged = [
        (row["better"], change)
        for row in data["rows"]
        if row["headline"]
        for change in row["changes"]
        if change is not None
    ]
    left = sum(not change.get("gated", True) for _, change in judged)
    if left:
        yield f"{left} of {len(judged)} figures have no interval and are not judged."
    open_ = sum(_may_be_worse(better, change, data["fail_over"]) for better, change in judged)
    limit, failed = f"{100 * data['fail_over']:g} %", data["failed"]
    if failed:
        yield f"{failed} {'figure' if failed == 1 else 'figures'} got worse by more than {limit}."
    elif not open_:
        yield f"No figure got worse by more than {limit}."
    else:
        yield f"No figure got significantly worse by more than {limit}."
    if open_:
        which = f"{open_} more" if failed else f"{open_} of {len(judged) - left}"
        whose = "its interval reaches" if open_ == 1 else "their intervals reach"
        yield f"{which} may have: {whose} further."


def _may_be_worse(better: str | None, change: Mapping[str, Any], limit: float) -> bool:
    """Tell whether a figure that the limit lets pass may have got worse by more than it."""
    interval = change["share_interval"]
    if change["failed"] or not change.get("gated", True) or interval is None or better is None:
        return False
    worst: float = interval[1] if better == "lower" else -interval[0]
    return worst > limit


def _noise(data: Mapping[str, Any], letters: Sequence[str]) -> list[str]:
    found = []
    for letter, noise in zip(letters[1:], data.get("noise") or (), strict=False):
        if noise is not None:
            drift = noise["drift"]
            moved = (
                "as fast as"
                if abs(drift) < _UNSEEN
                else f"{percent(abs(drift))} {'slower' if drift > 0 else 'faster'} than"
            )
            found.append(
                f"Machine: {noise['controls']} control figures in {letter} are {moved} in "
                f"{letters[0]}, varying by up to {percent(noise['spread'])}."
            )
    return found


def _verdict(change: Mapping[str, Any]) -> str:
    verdict: str = change["verdict"]
    if verdict == "same" or change["certain"]:
        return verdict
    if change["certain"] is False:
        return "not significant"
    return "same" if abs(change["share"] or 1.0) < _UNSEEN else f"{verdict}?"


def _table(
    title: str, rows: Sequence[Mapping[str, Any]], letters: Sequence[str], *, whole: bool
) -> list[RenderableType]:
    varying = _varying(rows)
    every = list(rows)
    rows = shown = every if whole else [row for row in every if not _is_same(row)]
    alike = len(every) - len(rows)
    if not rows:
        said = f"All {alike} figures are unchanged." if alike > 1 else "The figure is unchanged."
        return [heading(title), paragraph(f"{said} --all lists them.", "dim")]
    if len(rows) > _SHOWN and not whole:
        # Those that changed most, in their own order.
        most = sorted(range(len(rows)), key=lambda index: -_largest(rows[index]))[:_SHOWN]
        shown = [rows[index] for index in sorted(most)]
    several = len(letters) > 2
    columns = [Column("of", words=True), Column("figure", words=True)]
    columns += [Column(letter) for letter in letters]
    for letter in letters[1:]:
        columns += [
            Column(f"{letter} to {letters[0]}" if several else "change"),
            Column("95 % interval (%)"),
            Column("verdict", words=True),
        ]
    cells = []
    for row in shown:
        line = [
            _key_label(row["key"], varying),
            row["figure"].removesuffix("_seconds").replace("_", " "),
        ]
        line += [_value(row["figure"], value) for value in row["values"]]
        for change in row["changes"]:
            line += _change(row["figure"], change)
        cells.append(line)
    # A column that tells nothing costs room that the others need.
    names = {line[1] for line in cells}
    kept = [
        index
        for index, column in enumerate(columns)
        if (column.title != "95 % interval (%)" or any(line[index] != MISSING for line in cells))
        and (column.title != "figure" or len(names) > 1)
    ]
    parts: list[RenderableType] = [
        heading(title if len(names) > 1 or "seconds" in names else f"{title}: {names.pop()}"),
        DataTable([columns[i] for i in kept], [[line[i] for i in kept] for line in cells]),
    ]
    fixed = {name: value for name, value in rows[0]["key"].items() if name not in varying}
    if any(value is not None for value in fixed.values()):
        parts.append(paragraph(f"all: {_key_label(fixed, list(fixed))}", "dim"))
    if len(shown) < len(rows):
        parts.append(
            paragraph(f"{len(rows) - len(shown)} more changed less; --all lists them", "dim")
        )
    if alike:
        parts.append(paragraph(f"{alike} more are unchanged; --all lists them", "dim"))
    return parts


def _is_same(row: Mapping[str, Any]) -> bool:
    """Tell whether a figure is the same in every run that has it."""
    known = [change for change in row["changes"] if change is not None]
    return all(_verdict(change) == "same" for change in known) and len(known) == len(row["changes"])


def _varying(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row["key"])
    found = [name for name in names if len({str(row["key"].get(name)) for row in rows}) > 1]
    return found or list(names)


def _key_label(key: Mapping[str, Any], names: Sequence[str]) -> str:
    said = []
    for name in names:
        value = key.get(name)
        if value is None:
            continue
        if isinstance(value, str):
            said.append(f"{name} {value}" if name == "target" and value[:1].isdigit() else value)
        elif name in _COUNTS:
            said.append(
                f"{count(value)} tokens"
                if name in ("tokens", "seq")
                else f"{name.replace('_', ' ')} {count(value)}"
            )
        else:
            shown = f"{value:g}" if isinstance(value, float) else f"{value:,}"
            said.append(f"{name.replace('_', ' ')} {shown}")
    return ", ".join(said) or MISSING


def _largest(row: Mapping[str, Any]) -> float:
    shares = [abs(change["share"] or 0.0) for change in row["changes"] if change is not None]
    return max(shares, default=0.0)


def _value(name: str, value: float | None) -> str:
    if value is None:
        return MISSING
    if name.endswith(("seconds", "_s")) and not name.endswith("per_s"):
        return duration(value)
    if name.endswith("bytes"):
        return format_bytes(value)
    if name in _SHARES or name.endswith("share"):
        return percent(value, 2)
    return f"{value:,}" if isinstance(value, int) else number(value, 4)


def _change(name: str, change: Mapping[str, Any] | None) -> list[str]:
    if change is None:
        return [MISSING, MISSING, "not measured"]
    interval = change["share_interval"]
    verdict = _verdict(change)
    if change["failed"]:
        verdict = verdict.replace("worse", "TOO MUCH WORSE")
    share = change["share"]
    return [
        _value(name, change["difference"]) if share is None else signed_percent(share),
        MISSING
        if interval is None
        else f"[{signed_percent(interval[0])[:-2]}, {signed_percent(interval[1])[:-2]}]",
        verdict,
    ]


def _differences(entries: Sequence[Mapping[str, Any]], letters: Sequence[str]) -> DataTable:
    columns = [Column("what", words=True), *(Column(letter, words=True) for letter in letters)]
    rows = [
        [entry["path"], *(_value_text(value) for value in entry["values"])]
        for entry in entries[:_SHOWN]
    ]
    return DataTable(columns, rows)


def _value_text(value: Any) -> str:
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    text = MISSING if value is None else str(value)
    if _COMMIT.fullmatch(text):
        return text[:12]
    return text if len(text) <= 60 else f"{text[:57]}…"


def _unmatched(data: Mapping[str, Any], letters: Sequence[str]) -> list[RenderableType]:
    named = {run["name"]: letter for run, letter in zip(data["runs"], letters, strict=True)}
    common = {_first(row["key"]) for row in data["rows"]}
    found: dict[tuple[str, str], int] = {}
    for entry in data["unmatched"]:
        held = " and ".join(named[name] for name in entry["in"])
        key = entry["key"]
        # Of a method or a case that is missing altogether, its name says all.
        whole = _first(key) not in common
        which = (
            _key_label(key, list(key)[:1])
            if whole
            else f"{_key_label(key, list(key))}: {entry['figure']}"
        )
        found[which, held] = found.get((which, held), 0) + 1
    lines = [
        f"only in {held}: {which}" + (f" ({figures} figures)" if figures > 1 else "")
        for (which, held), figures in found.items()
    ]
    parts: list[RenderableType] = [heading("In some runs only"), bullets(lines[:_LISTED])]
    if len(lines) > _LISTED:
        parts.append(paragraph(f"and {len(lines) - _LISTED} more; --json has them", "dim"))
    return parts


def _first(key: Mapping[str, Any]) -> Any:
    return next(iter(key.values()), None)
