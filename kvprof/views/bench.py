"""The report of ``kvprof bench``: is the smaller cache faster here, and how near the limit?"""

from collections.abc import Mapping
from typing import Any

from rich.console import Group as Together
from rich.console import RenderableType
from rich.text import Text

from kvprof.views.bench_csv import to_csv
from kvprof.views.bench_data import (
    Group,
    beside_seconds,
    best_baseline,
    fits,
    groups,
    rate_unit,
    roofline_points,
    roofline_unit,
    roofs,
    scaled,
    widths,
)
from kvprof.views.bench_data import context_curves as curves
from kvprof.views.bench_figure import figure, sweeps
from kvprof.views.bench_strips import Strips, longest
from kvprof.views.bench_tables import baseline_table, method_table, schedule_table, speedup_words
from kvprof.views.numbers import count, number
from kvprof.views.page import Fitted, bullets, heading, incomplete_note, paragraph
from kvprof.views.plot import LinePlot
from kvprof.views.tables import key_values

__all__ = ["figure", "report", "to_csv"]

_HEIGHT = 14
_RATE = (
    "Rate: the share of the cache's bytes that is saved at the row's context, scales and windows "
    "counted, against full width in {dtype}. Width: what is kept of each head's {full} dimensions, "
    "mean and range over keys and values; / 4 heads: of a latent that 4 KV heads share."
)
_TIME = (
    "Time: the attention of {measured}, the merge of partial results included; the median of "
    "{repeats} samples and the 95 % bootstrap interval of that median."
)
_BANDWIDTH = (
    "{unit}: each byte that has to be read or written, once, over the time. Share: of {limit} that "
    "memory gives here ({how})."
)
_SPEEDUP = (
    "Speed-up: against the fastest full-width kernel of this machine in this run, not against "
    "kvprof's own: its time beside over the row's, with the 95 % bootstrap over pairs. Beside: "
    "that kernel's median in turn with the row; ! and by how much it differs from when it was "
    "timed alone."
)
_OF = (
    "This is the attention of one layer alone. A whole request gains less, or loses: "
    "kvprof bench --jct measures one."
)
_ERROR = (
    "Error: of the output, on a sample of its heads, against the same computation in float64 "
    "(relative Frobenius norm). What compression itself costs is the question of kvprof eval."
)
_STRIP = (
    "A strip runs from the step's start to the end of the slowest schedule, as high as pieces of "
    "work run at once on the SM (full height: the most on any). Behind it, when the SM's last "
    "piece ends, as a share of the schedule's own step."
)


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report for people.

    Parameters
    ----------
    result : mapping
        A result of kind ``bench``.
    width : int or None
        Columns at most; None takes the console's.
    colour : bool
        False leaves out every escape code.
    """
    parts: list[RenderableType] = []
    if not result["complete"]:
        parts += [incomplete_note(), Text()]
    found = groups(result)
    parts.append(paragraph(_answer(found), "bold"))
    if not result["complete"] and (left := _unmeasured(result["inputs"], found)):
        parts.append(paragraph(left, "yellow"))
    for group in found:
        parts += _measured(group, result["data"]["shape"], result["data"]["bandwidth"]["tb_per_s"])
    if lines := _absent(found):
        parts += [heading("Full-width kernels that did not run"), bullets(lines)]
    for members in sweeps(result):
        parts += [Text(), _sweep(members)]
    parts += [Text(), *_roofline(result, found)]
    parts += _schedules(result)
    parts += [heading("How to read this"), bullets(_notes(result))]
    parts += [heading("Measured with"), key_values(_provenance(result))]
    if result["warnings"]:
        parts += [heading("Warnings"), bullets(result["warnings"], "yellow")]
    if not result["complete"]:
        parts += [Text(), incomplete_note()]
    return Fitted(Together(*parts), width=width, colour=colour)


def _answer(found: list[Group]) -> str:
    """Say of each phase, at its longest context and largest batch, what is fastest."""
    lines = []
    for phase in dict.fromkeys(group.phase for group in found):
        group = _judged(found, phase)
        if group is None:
            continue
        best = best_baseline(group)
        first, *rest = fits(group)
        name, said = first["method"], speedup_words(first)
        against = ""
        if best is not None:
            # Of the same rounds as the speed-up, or the two would say different things.
            beside = beside_seconds(first) or best[1]
            against = f" ({best[0]}, {number(beside * 1e3)} ms)"
        if first["speedup"] <= 1:
            lines.append(
                f"{group.name}: no method is faster than the best full width{against}; {name} "
                f"comes nearest ({said})."
            )
            continue
        line = f"{group.name}: {name} is {said} as fast as the best full width{against}"
        others = [f"{other['method']} {speedup_words(other)}" for other in rest[:3]]
        lines.append(f"{line}{'; then ' if others else ''}{', '.join(others)}.")
    return "\n".join([*lines, _OF]) if lines else "No speed-up was measured."


def _judged(found: list[Group], phase: str) -> Group | None:
    """Return the longest context and largest batch of a phase that has a speed-up."""
    members = [group for group in found if group.phase == phase and fits(group)]
    return max(members, key=lambda one: (one.seq, one.batch), default=None)


def _unmeasured(inputs: Mapping[str, Any], found: list[Group]) -> str:
    """Say what the answer of a run that stopped leaves out, although it was asked for."""
    left = []
    for phase in inputs["phases"]:
        group = _judged(found, phase)
        if group is None:
            left.append(f"{phase}: all")
            continue
        seen = {row["method"] for row in group.rows}
        missing = [name for name in inputs["methods"] if name not in seen]
        longer = [f"{count(seq)} tokens" for seq in inputs["seqs"] if seq > group.seq]
        larger = [f"batch {batch}" for batch in inputs["batches"] if batch > group.batch]
        if missing or longer or larger:
            left.append(f"{phase}: {', '.join([*missing, *longer, *larger])}")
    return f"Not measured: {'; '.join(left)}." if left else ""


def _measured(
    group: Group, shape: Mapping[str, Any], tb_per_s: float | None
) -> list[RenderableType]:
    parts: list[RenderableType] = [heading(group.name)]
    if group.rows:
        parts.append(method_table(group, shape, tb_per_s))
    against = {row["baseline"] for row in group.rows if row["baseline"]}
    if len(against) == 1:
        parts.append(Text(f"speed-up against {against.pop()}", style="dim", overflow="fold"))
    table = baseline_table(group)
    if table is not None:
        parts += [Text(), table]
    return parts


def _absent(found: list[Group]) -> list[str]:
    """Say which full-width kernels did not run and why, each reason once."""
    where: dict[tuple[str, str], list[str]] = {}
    tried: dict[str, int] = {}
    for group in found:
        for row in group.baselines:
            tried[row["name"]] = tried.get(row["name"], 0) + 1
            if row["reason"]:
                place = f"{group.phase} at batch {group.batch}, {count(group.seq)}"
                where.setdefault((row["name"], row["reason"]), []).append(place)
    return [
        f"{name}: {reason}" + (f" ({'; '.join(places)})" if len(places) < tried[name] else "")
        for (name, reason), places in where.items()
    ]


def _sweep(members: list[Group]) -> LinePlot:
    return LinePlot(
        curves(members),
        f"{members[0].phase.capitalize()}, batch {members[0].batch}: time against context",
        "context in tokens",
        "ms",
        height=_HEIGHT,
        log_x=True,
        log_y=True,
    )


def _roofline(result: Mapping[str, Any], found: list[Group]) -> list[RenderableType]:
    points = roofline_points(result)
    if not points:
        return []
    factor, unit = roofline_unit(points)
    limits = [scaled(roof, factor) for roof in roofs(points, result["data"])]
    points = [scaled(one, factor) for one in points]
    sequences = {group.phase: group.seq for group in found}
    where = ", ".join(f"{phase} at {count(seq)} tokens" for phase, seq in sequences.items())
    return [
        LinePlot(
            [*limits, *points],
            f"Roofline ({where}, every batch): what was reached, and what memory and arithmetic "
            "allow",
            "FLOP per byte moved",
            unit,
            height=_HEIGHT,
            log_x=True,
            log_y=True,
        )
    ]


def _schedules(result: Mapping[str, Any]) -> list[RenderableType]:
    entries = result["data"]["schedules"]
    if not entries:
        return []
    parts: list[RenderableType] = [
        heading("Schedules: makespan over the mean of all SMs"),
        schedule_table(entries),
    ]
    places = dict.fromkeys((entry["phase"], entry["batch"], entry["seq"]) for entry in entries)
    drawn = False
    for place in places:
        members = [
            entry
            for entry in entries
            if (entry["phase"], entry["batch"], entry["seq"]) == place and entry["strips"]
        ]
        until = longest(members)
        for entry in members:
            phase, batch, seq = place
            title = f"{entry['schedule']} ({phase}, batch {batch}, {count(seq)} tokens)"
            parts += [Text(), Strips(entry["strips"], title, until)]
            drawn = True
    if drawn:
        parts += [Text(), paragraph(_STRIP, "dim")]
    return parts


def _notes(result: Mapping[str, Any]) -> list[str]:
    data, inputs = result["data"], result["inputs"]
    rows = data["rows"]
    limit = data["bandwidth"]
    samples = sorted({len(row["seconds"] or ()) for row in rows}) or [0]
    repeats = "–".join(f"{value}" for value in dict.fromkeys((samples[0], samples[-1])))
    dtypes = " and ".join(dict.fromkeys(row["dtype"] for row in rows)) or inputs["dtype"]
    notes = [
        _RATE.format(dtype=dtypes, full=data["shape"]["head_dim"]),
        _TIME.format(measured=data["shape"]["measured"], repeats=repeats),
    ]
    if limit["tb_per_s"] is not None:
        factor, unit = rate_unit([limit["tb_per_s"]])
        reached = f"{number(limit['tb_per_s'] * factor)} {unit}"
        notes.append(_BANDWIDTH.format(unit=unit, limit=reached, how=limit["what"]))
    return [*notes, _SPEEDUP, _ERROR]


def _provenance(result: Mapping[str, Any]) -> dict[str, str]:
    inputs, data, environment = result["inputs"], result["data"], result["environment"]
    ranks = data["ranks"]
    packages = environment.get("packages", {})
    shown = {
        "shape": _shape(data["shape"]),
        "ranks": f"{ranks['source']}: keys {widths({'keys': ranks['keys'], 'values': []})}, "
        f"values {widths({'keys': [], 'values': ranks['values']})}"
        if ranks
        else None,
        "device": _device(inputs["device"], environment),
        "torch": packages.get("torch"),
        "Triton": packages.get("triton"),
        "seed": inputs["seed"],
        "written": result.get("created"),
    }
    return {key: str(value) for key, value in shown.items() if value is not None}


def _shape(shape: Mapping[str, Any]) -> str:
    return (
        f"{shape['name']}: {shape['num_heads']} query heads on {shape['num_kv_heads']} KV heads of "
        f"{shape['head_dim']}"
    )


def _device(device: str, environment: Mapping[str, Any]) -> str:
    if not device.startswith("cuda"):
        cpu = environment["cpu"]
        return f"{cpu['model']}, {cpu['threads']} threads"
    index = int(device.partition(":")[2] or 0)
    gpus = environment["gpus"]
    return f"{gpus[index]['name']} ({device})" if index < len(gpus) else device
