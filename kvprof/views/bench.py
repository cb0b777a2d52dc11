"""The report of ``kvprof bench``: is the smaller cache faster here, and how near the limit?"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprof.views.bars import Timelines, longest
from kvprof.views.bench_tables import (
    Group,
    baseline_table,
    beside_seconds,
    best_baseline,
    context_curves,
    finite,
    fits,
    groups,
    median_seconds,
    method_table,
    padded,
    rate_unit,
    roofline_points,
    roofline_unit,
    roofs,
    scaled,
    schedule_table,
    speedup_words,
    widths,
)
from kvprof.views.figure import draw_curves, panel_figure, titled
from kvprof.views.numbers import count, number
from kvprof.views.page import bullets, ends, framed, heading, paragraph, tidy_csv, weights_row
from kvprof.views.plot import LinePlot

__all__ = ["figure", "report", "sweeps", "to_csv"]

# --- The figure of a bench result: time against context by phase and batch, and the roofline.


_PANEL = (4.6, 3.5)  # inches
_ROW = 2  # panels side by side


def sweeps(result: Mapping[str, Any]) -> list[list[Group]]:
    """Return the groups of each phase and batch that was run at several contexts.

    Parameters
    ----------
    result : mapping
        Of ``kvprof bench``.
    """
    by_batch = groupby(groups(result), key=lambda group: (group.phase, group.batch))
    members = [[group for group in found if group.rows] for _, found in by_batch]
    return [found for found in members if len(found) > 1]


def figure(result: Mapping[str, Any]) -> Any:
    """Return the roofline, after panels of time against context where there are several.

    Parameters
    ----------
    result : mapping
        Of ``kvprof bench``.

    Returns
    -------
    matplotlib.figure.Figure
        For `kvprof.views.figure.figure_bytes`.

    Raises
    ------
    LackingError
        When matplotlib is not installed.
    """
    swept = sweeps(result)
    return panel_figure(
        [
            *(partial(_draw_times, members=members) for members in swept),
            partial(_draw_roofline, result=result),
        ],
        _PANEL,
        columns=_ROW,
        margin=(0.0 if swept else 1.2, 0.0),
        title=titled(result, result["data"]["shape"]["name"]),
    )


def _draw_times(axes: Any, members: Sequence[Group]) -> None:
    draw_curves(
        axes,
        context_curves(members),
        title=f"{members[0].phase}, batch {members[0].batch}",
        x_label="context (tokens)",
        y_label="time (ms)",
        log_x=True,
        log_y=True,
    )


def _draw_roofline(axes: Any, result: Mapping[str, Any]) -> None:
    points = roofline_points(result)
    factor, unit = roofline_unit(points)
    draw_curves(
        axes,
        [scaled(one, factor) for one in points],
        title="roofline",
        x_label="arithmetic intensity (FLOP per byte moved)",
        y_label=f"reached ({unit})",
        log_x=True,
        log_y=True,
    )
    axes.margins(y=0.12)  # room for the words on a roof
    for roof in roofs(points, result["data"]):
        high = [y * factor for y in roof.y if y is not None]
        axes.plot(roof.x, high, color="#555555", linewidth=0.9, linestyle=":")
        axes.annotate(
            f"{roof.label} ",
            (roof.x[-1], high[-1]),
            fontsize="small",
            color="#555555",
            ha="right",
            va="bottom",
        )


# --- A bench result as one tidy table: the methods' rows and the full-width kernels'.


_STEP = ("method", "phase", "batch", "seq", "dtype", "schedule")
_FIGURES = (
    "bytes_moved",
    "cache_bytes",
    "buffer_bytes",
    "tb_per_s",
    "bandwidth_share",
    "flop_per_s",
    "baseline",
    "speedup",
    "speedup_low",
    "speedup_high",
    "baseline_seconds",
    "error",
    "makespan_over_mean",
)
_WIDTHS = tuple(
    f"{side}_width_{end}" for side in ("keys", "values") for end in ("mean", "least", "most")
)


def to_csv(result: Mapping[str, Any]) -> str:
    """Return one row per method, phase, batch, context and schedule, and per full-width kernel.

    ``kind`` is ``method`` or ``baseline``; a baseline that could not run has no time and a
    ``reason``. ``seconds`` is the median of ``samples`` samples, ``seconds_low`` and
    ``seconds_high`` its 95 % interval; ``baseline_seconds`` is the median of
    the full-width kernel in turn with it. Floats are written in full (`repr`).

    Parameters
    ----------
    result : mapping
        Of ``kvprof bench``.
    """
    columns = (
        "kind",
        *_STEP,
        "rate",
        *_WIDTHS,
        "seconds",
        "seconds_low",
        "seconds_high",
        "samples",
        *_FIGURES,
        "reason",
    )
    return tidy_csv(columns, _rows(result))


def _rows(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for row in result["data"]["rows"]:
        yield {
            "kind": "method",
            **{key: row.get(key) for key in (*_STEP, "rate", *_FIGURES)},
            **ends("speedup", row.get("speedup_interval")),
            "baseline_seconds": beside_seconds(row),
            **_widths(row["ranks"]),
            "seconds": median_seconds(row),
            **ends("seconds", row["seconds_interval"]),
            "samples": len(row["seconds"] or ()),
        }
    for row in result["data"]["baselines"]:
        yield {
            "kind": "baseline",
            "method": row["name"],
            **{key: row[key] for key in ("phase", "batch", "seq", "reason")},
            "seconds": median_seconds(row),
            "samples": len(row["seconds"] or ()),
        }


def _widths(ranks: Mapping[str, Any] | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for side in ("keys", "values"):
        known = ranks[side] if ranks else ()
        if known:
            found |= {
                f"{side}_width_mean": sum(known) / len(known),
                f"{side}_width_least": min(known),
                f"{side}_width_most": max(known),
            }
    return found


_HEIGHT = 14
_RATE = (
    "Rate: the share of the cache's bytes that is saved at the row's context, scales and windows "
    "counted, against full width in {dtype}. Width: what is kept of each head's {full} dimensions, "
    "mean and range over keys and values; / 4 heads: of a latent that 4 KV heads share."
)
_BUFFER = (
    "Cache: what the method stores of the layer. Buffer: the tensor that the kernel reads, with "
    "whole blocks of tokens, and the bits that it has room for."
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
_TIMELINE = (
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
    found = groups(result)
    left = "" if result["complete"] else _unmeasured(result["inputs"], found)
    parts: list[RenderableType] = []
    for group in found:
        parts += _measured(group, result["data"]["shape"], result["data"]["bandwidth"]["tb_per_s"])
    if lines := _absent(found):
        parts += [heading("Full-width kernels that did not run"), bullets(lines)]
    for members in sweeps(result):
        parts += [Text(), _sweep(members)]
    parts += [Text(), *_roofline(result, found)]
    parts += _schedules(result)
    return framed(
        result,
        parts,
        answer=_answer(found),
        cautions=[left] if left else (),
        notes=_notes(result),
        measured_with=_provenance(result),
        width=width,
        colour=colour,
    )


def _answer(found: list[Group]) -> str:
    """Say of each phase, at its longest context and largest batch, what is fastest."""
    lines = []
    for phase in dict.fromkeys(group.phase for group in found):
        group = _judged(found, phase)
        if group is None:
            continue
        best = best_baseline(group)
        timed = fits(group)
        undecided = [row for row in timed if not _decided(row)]
        sure = [row for row in timed if row not in undecided]
        first, *rest = sure if sure and (sure[0]["speedup"] > 1 or not undecided) else undecided
        against = ""
        if best is not None:
            # Of the same rounds as the speed-up, or the two would say different things.
            beside = beside_seconds(first) or best[1]
            against = f" ({best[0]}, {number(beside * 1e3)} ms)"
        where, full = group.name, f"the best full width{against}"
        if first["speedup"] > 1 and first not in undecided:
            line = f"{where}: {first['method']} is {speedup_words(first)} as fast as {full}"
            line += f"; then {_listed(rest[:3])}" if rest else ""
            line += f"; not sure: {_listed(undecided[:3])}" if undecided else ""
        elif undecided:
            line = (
                f"{where}: no verdict, these samples do not tell whether anything is faster than "
                f"{full}: {_listed(undecided[:4])}"
            )
        else:
            line = (
                f"{where}: no method is faster than {full}; {first['method']} comes nearest "
                f"({speedup_words(first)})"
            )
        lines.append(f"{line}.")
    return "\n".join([*lines, _OF]) if lines else "No speed-up was measured."


def _listed(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{row['method']} {speedup_words(row)}" for row in rows)


def _decided(row: Mapping[str, Any]) -> bool:
    """Tell whether a speed-up's whole interval lies on one side of 1; without one it is taken."""
    ends = [finite(end) for end in row.get("speedup_interval") or ()]
    known = [end for end in ends if end is not None]
    return len(known) < 2 or not known[0] <= 1 <= known[1]


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
    found_at: dict[tuple[str, str], list[str]] = {}
    tried: dict[str, int] = {}
    for group in found:
        for row in group.baselines:
            tried[row["name"]] = tried.get(row["name"], 0) + 1
            if row["reason"]:
                where = f"{group.phase} at batch {group.batch}, {count(group.seq)}"
                found_at.setdefault((row["name"], row["reason"]), []).append(where)
    return [
        f"{name}: {reason}" + (f" ({'; '.join(ran)})" if len(ran) < tried[name] else "")
        for (name, reason), ran in found_at.items()
    ]


def _sweep(members: list[Group]) -> LinePlot:
    return LinePlot(
        context_curves(members),
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
    steps = dict.fromkeys((entry["phase"], entry["batch"], entry["seq"]) for entry in entries)
    drawn = False
    for step in steps:
        members = [
            entry
            for entry in entries
            if (entry["phase"], entry["batch"], entry["seq"]) == step and entry["strips"]
        ]
        until = longest(members)
        for entry in members:
            phase, batch, seq = step
            title = f"{entry['schedule']} ({phase}, batch {batch}, {count(seq)} tokens)"
            parts += [Text(), Timelines(entry["strips"], title, until)]
            drawn = True
    if drawn:
        parts += [Text(), paragraph(_TIMELINE, "dim")]
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
    if padded(rows):
        notes.append(_BUFFER)
    return [*notes, _SPEEDUP, _ERROR]


def _provenance(result: Mapping[str, Any]) -> dict[str, Any]:
    inputs, data, environment = result["inputs"], result["data"], result["environment"]
    ranks = data["ranks"]
    packages = environment.get("packages", {})
    return {
        "shape": _shape(data["shape"]),
        **weights_row(data["shape"]),
        "ranks": f"{ranks['source']}: keys {widths({'keys': ranks['keys'], 'values': []})}, "
        f"values {widths({'keys': [], 'values': ranks['values']})}"
        if ranks
        else None,
        "device": _device(inputs["device"], environment),
        "torch": packages.get("torch"),
        "Triton": packages.get("triton"),
        "seed": inputs["seed"],
    }


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
