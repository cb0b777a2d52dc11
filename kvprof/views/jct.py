"""The report of ``kvprof bench --jct``: where does the time of a request go?"""

from collections.abc import Mapping
from typing import Any

from rich.console import Group as Together
from rich.console import RenderableType
from rich.text import Text

from kvprof.records.cases import Account, accounts
from kvprof.views.durations import change, duration, signed_percent, unit_of
from kvprof.views.jct_bars import StackedBars, bar_of
from kvprof.views.jct_csv import to_csv
from kvprof.views.jct_data import (
    Group,
    Sweep,
    detailed,
    groups,
    memory_curves,
    step_curves,
    sweep_curves,
    sweeps,
)
from kvprof.views.jct_figure import figure
from kvprof.views.jct_notes import notes, provenance
from kvprof.views.jct_strips import BalanceStrip, strip_scales
from kvprof.views.jct_tables import (
    PartTable,
    doubt_table,
    layer_table,
    memory_table,
    summary_table,
    sweep_table,
)
from kvprof.views.jct_telemetry import telemetry_table, throttled
from kvprof.views.loose import loose_parts
from kvprof.views.numbers import count
from kvprof.views.page import Fitted, bullets, heading, incomplete_note, paragraph
from kvprof.views.plot import LinePlot, Series
from kvprof.views.tables import key_values

__all__ = ["figure", "report", "to_csv"]

_HEIGHT = 14
_EXTRA = {
    "requests": "Requests of a trace",
    "capacity": "Memory and capacity",
    "check": "A real and a composed run of the same case",
}


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report for people.

    Parameters
    ----------
    result : mapping
        A result of kind ``jct``.
    width : int or None
        Columns at most; None takes the console's.
    colour : bool
        False leaves out every escape code.
    """
    data = result["data"]
    parts: list[RenderableType] = []
    if not result["complete"]:
        parts += [
            incomplete_note(),
            paragraph(f"{_sentence(result['incomplete_reason'])}."),
            Text(),
        ]
    found, shown = groups(result), detailed(result)
    parts.append(paragraph(_answer(shown), "bold"))
    known = accounts(data)
    for sweep in sweeps(result):
        parts += _swept(sweep, known)
    for group in shown:
        parts += _measured(result, group, known)
    if len(shown) < len(found):
        parts += [
            Text(),
            paragraph(
                f"{len(found) - len(shown)} more requests were measured; "
                "kvprof export --to csv has their parts.",
                "dim",
            ),
        ]
    for key, title in _EXTRA.items():
        if extra := list(loose_parts(data[key])):
            parts += [heading(title), *extra]
    if curves := _throughput(data["capacity"]):
        title = "Throughput of decoding, up to the batch that fills the memory"
        parts += [
            Text(),
            LinePlot(curves, title, "sequences", "tokens/s", _HEIGHT, log_x=True, log_y=True),
        ]
    if table := telemetry_table(data["telemetry"]):
        parts += [heading("Telemetry"), table, *throttled(data["telemetry"])]
    parts += [heading("How to read this"), bullets(notes(result))]
    parts += [heading("Measured with"), key_values(provenance(result))]
    if result["warnings"]:
        parts += [heading("Warnings"), bullets(result["warnings"], "yellow")]
    if not result["complete"]:
        parts += [Text(), incomplete_note()]
    return Fitted(Together(*parts), width=width, colour=colour)


def _answer(shown: list[Group]) -> str:
    lines = []
    for group in shown:
        done = [
            (case["jct_seconds"], name, case)
            for name, case in zip(group.names, group.cases, strict=True)
            if case["jct_seconds"] is not None
        ]
        if not done:
            continue
        base = group.baseline
        said = []
        for total, name, case in sorted(done, key=lambda entry: entry[0]):
            if base is None or case is base:
                said.append(f"{name} {duration(total)}")
                continue
            than = _than(change(total, base["jct_seconds"]))
            if ends := group.apart(case):
                than += f" [{', '.join(signed_percent(end) for end in ends)}]"
            said.append(f"{name} {duration(total)} ({than})")
        against = f", against {group.against()}" if base is not None and len(done) > 1 else ""
        lines.append(f"{_sentence(group.name)}{against}: {'; '.join(said)}.")
    return "\n".join(lines) or "No request was measured to its end."


def _than(share: float | None) -> str:
    if share is None:
        return "not comparable"
    if abs(share) < 0.0005:
        return "the same"
    return f"{abs(share):.1%} {'more' if share > 0 else 'less'}".replace("%", " %")


def _measured(
    result: Mapping[str, Any], group: Group, known: Mapping[str, Account]
) -> list[RenderableType]:
    parts: list[RenderableType] = [heading(_sentence(group.name))]
    bars = [
        bar_of(name, known[case["case"]])
        for name, case in zip(group.names, group.cases, strict=True)
    ]
    parts += [StackedBars(bars, "Job completion time in parts"), Text(), summary_table(group)]
    if table := doubt_table(group, known):
        parts += [Text(), table]
    parts += [Text(), PartTable(group, known, _apart(result))]
    factor, unit = unit_of(
        row["seconds"] for row in result["data"]["steps"] if row["phase"] == "decode"
    )
    if curves := step_curves(result, group, factor):
        title = "Time between tokens against context"
        parts += [Text(), LinePlot(curves, title, "context in tokens", unit, height=_HEIGHT)]
    if table := memory_table(result, group):
        parts += [Text(), table]
    curves, unit = memory_curves(result, group, "logical")
    if curves:
        title = "What the cache stores, against context"
        parts += [Text(), LinePlot(curves, title, "context in tokens", unit, height=_HEIGHT)]
    if table := layer_table(result, group):
        parts += [Text(), table]
    return [*parts, *_balance(result, group)]


def _apart(result: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    marked: dict[str, set[str]] = {}
    for row in result["data"]["parts"]:
        if row["by_difference"]:
            marked.setdefault(row["case"], set()).add(row["part"])
    return {case: frozenset(parts) for case, parts in marked.items()}


def _balance(result: Mapping[str, Any], group: Group) -> list[RenderableType]:
    own = {case["case"]: name for name, case in zip(group.names, group.cases, strict=True)}
    strips: list[tuple[str, list[float]]] = []
    schedules: list[tuple[str, str, str]] = []  # of each strip
    for row in result["data"]["balance"]:
        if row["case"] not in own:
            continue
        for what in ("predicted", "measured"):
            if row[what]:
                loads = row[what]
                mean = sum(loads) / len(loads)
                relative = [load / mean for load in loads] if mean > 0 else loads
                label = f"{own[row['case']]}, {row['phase']}, {row['schedule']}, {what}"
                strips.append((label, relative))
                schedules.append((row["case"], row["phase"], row["schedule"]))
    if not strips:
        return []
    room = max(len(label) for label, _ in strips)
    # What was predicted and what was measured of one schedule have one scale.
    highest: dict[tuple[str, str, str], float] = {}
    for schedule, (_, loads) in zip(schedules, strips, strict=True):
        highest[schedule] = max(highest.get(schedule, 0.0), *loads)
    scales = dict(zip(highest, strip_scales(list(highest.values())), strict=True))
    title = "Work per multiprocessor, relative to the mean"
    if len(set(scales.values())) > 1:
        title += "; schedules that one scale would flatten have their own"
    return [
        Text(),
        Text(title, style="bold", overflow="fold"),
        *(
            BalanceStrip(f"{label:<{room}}", loads, scales[schedule])
            for schedule, (label, loads) in zip(schedules, strips, strict=True)
        ),
    ]


def _swept(sweep: Sweep, known: Mapping[str, Account]) -> list[RenderableType]:
    parts: list[RenderableType] = [heading(_sentence(sweep.name)), sweep_table(sweep)]
    curves = sweep_curves(sweep)
    parts += [
        Text(),
        LinePlot(
            curves.series, curves.what, curves.x_label, curves.unit, height=_HEIGHT, log_x=True,
            log_y=curves.log_y,
        ),
    ]  # fmt: skip
    for method in sweep.methods():
        bars = [
            bar_of(count(sweep.length(group)), known[case["case"]])
            for group in sweep.members
            for name, case in zip(group.names, group.cases, strict=True)
            if name == method
        ]
        title = f"{method}: shares of the parts, by {curves.x_label}"
        parts += [Text(), StackedBars(bars, title, shares=True)]
    return parts


def _throughput(capacity: Any) -> list[Series]:
    rows = capacity.get("throughput", ()) if isinstance(capacity, Mapping) else ()
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        points.setdefault(row["method"], []).append((row["batch"], row["tokens_per_s"]))
    return [
        Series(method, [x for x, _ in sorted(own)], [y for _, y in sorted(own)])
        for method, own in points.items()
    ]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
