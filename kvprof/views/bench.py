"""Report, CSV and figure of ``kvprof bench``: is the smaller cache faster, how near the limit?"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from statistics import median
from typing import Any

from rich.console import Group as Together
from rich.console import RenderableType
from rich.text import Text

from kvprof.analysis.stats import LEAST_SAMPLES
from kvprof.sizes import format_bytes
from kvprof.views.figure import draw_curves, panel_figure, titled
from kvprof.views.numbers import MISSING, count, number, rate_in_bytes, shared, signed_percent, span
from kvprof.views.page import bullets, ends, framed, heading, tidy_csv, weights_row
from kvprof.views.plot import LinePlot, Series
from kvprof.views.tables import Column, DataTable, Ranked, RankedTable, columns

__all__ = [
    "context_curves",
    "figure",
    "groups",
    "median_seconds",
    "report",
    "roofline_points",
    "roofs",
    "sweeps",
    "to_csv",
]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """What was measured at one phase, batch and context."""

    phase: str  # `decode` or `prefill`
    batch: int
    seq: int
    rows: list[Row]  # of `data.rows`
    baselines: list[Row]  # of `data.baselines`: uncompressed kernels, also those that could not run

    @property
    def name(self) -> str:
        """Such as ``Decode, batch 8, 100k tokens``."""
        return f"{self.phase.capitalize()}, batch {self.batch}, {count(self.seq)} tokens"


_HEIGHT = 14
_RATE = "Rate: share of a 16-bit cache's bytes saved, scales included."
_TIME = "Time: attention of {measured}; median of {repeats} samples, {spread}."
_BANDWIDTH = "{unit}: bytes that must move over time. Share: of {limit} ({how})."
_SPEEDUP = "Speed-up: vs the fastest uncompressed kernel, in paired samples ({spread})."
_OF = "One layer's attention only: kvprof bench --jct measures a whole request."


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report for people."""
    found = groups(result)
    left = "" if result["complete"] else _unmeasured(result["inputs"], found)
    parts: list[RenderableType] = []
    for group in found:
        parts += _measured(group, result["data"]["shape"], result["data"]["bandwidth"]["tb_per_s"])
    if lines := _missing_kernel_notes(found):
        parts += [heading("Uncompressed kernels that did not run"), bullets(lines)]
    for members in sweeps(result):
        parts += [Text(), _sweep(members)]
    parts += [Text(), *_roofline(result, found)]
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
        best = _best_baseline(group)
        timed = _fits(group)
        undecided = [row for row in timed if not _is_significant(row)]
        sure = [row for row in timed if row not in undecided]
        first, *rest = sure if sure and (sure[0]["speedup"] > 1 or not undecided) else undecided
        against = "" if best is None else f" ({best[0]})"
        where, full = group.name, f"the fastest uncompressed kernel{against}"
        if first["speedup"] > 1 and first not in undecided:
            line = f"{where}: {first['method']} is {_speedup_words(first)} as fast as {full}"
            line += f"; then {_speedup_list(rest[:3])}" if rest else ""
            line += f"; not significant: {_speedup_list(undecided[:3])}" if undecided else ""
        elif undecided:
            few = _speedup_list(undecided[:4])
            line = f"{where}: no method is significantly faster than {full}: {few}"
        else:
            line = (
                f"{where}: no method beats {full}; closest: {first['method']}, "
                f"{_speedup_words(first)}"
            )
        lines.append(f"{line}.")
    return "\n".join(lines) or "No speed-up was measured."


def _speedup_list(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{row['method']} {_speedup_words(row)}" for row in rows)


def _is_significant(row: Mapping[str, Any]) -> bool:
    """Tell whether a speed-up's whole interval lies on one side of 1; without one it is taken."""
    known = _finite_of(row.get("speedup_interval"))
    return len(known) < 2 or not known[0] <= 1 <= known[1]


def _judged(found: list[Group], phase: str) -> Group | None:
    """Return the longest context and largest batch of a phase that has a speed-up."""
    members = [group for group in found if group.phase == phase and _fits(group)]
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
        parts.append(_method_table(group, shape, tb_per_s))
    against = {row["baseline"] for row in group.rows if row["baseline"]}
    if len(against) == 1:
        parts.append(Text(f"speed-up vs {against.pop()}", style="dim", overflow="fold"))
    table = _baseline_table(group)
    if table is not None:
        parts += [Text(), table]
    return parts


def _missing_kernel_notes(found: list[Group]) -> list[str]:
    """Say which uncompressed kernels did not run and why, each reason once."""
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
        f"{members[0].phase.capitalize()}, batch {members[0].batch}: time by context",
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
    factor, unit = _roofline_unit(points)
    limits = [_in_unit(roof, factor) for roof in roofs(points, result["data"])]
    points = [_in_unit(one, factor) for one in points]
    sequences = {group.phase: group.seq for group in found}
    where = ", ".join(f"{phase} at {count(seq)} tokens" for phase, seq in sequences.items())
    return [
        LinePlot(
            [*limits, *points],
            f"Roofline ({where}, every batch)",
            "FLOP per byte moved",
            unit,
            height=_HEIGHT,
            log_x=True,
            log_y=True,
        )
    ]


def _notes(result: Mapping[str, Any]) -> list[str]:
    data = result["data"]
    rows = data["rows"]
    limit = data["bandwidth"]
    samples = sorted({len(row["seconds"] or ()) for row in rows}) or [0]
    repeats = "–".join(f"{value}" for value in dict.fromkeys((samples[0], samples[-1])))
    spread = _spread_name(rows)
    notes = [
        _RATE,
        _TIME.format(
            measured=data["shape"]["measured"],
            repeats=repeats,
            spread="95 % bootstrap interval"
            if spread != "range"
            else f"range ({LEAST_SAMPLES} give an interval)",
        ),
    ]
    if limit["tb_per_s"] is not None:
        factor, unit = _rate_unit([limit["tb_per_s"]])
        reached = f"{number(limit['tb_per_s'] * factor)} {unit}"
        notes.append(_BANDWIDTH.format(unit=unit, limit=reached, how=limit["what"]))
    return [*notes, _SPEEDUP.format(spread=spread), _OF]


def _provenance(result: Mapping[str, Any]) -> dict[str, Any]:
    inputs, data, environment = result["inputs"], result["data"], result["environment"]
    ranks = data["ranks"]
    packages = environment.get("packages", {})
    return {
        "shape": _shape(data["shape"]),
        **weights_row(data["shape"]),
        "ranks": f"{ranks['source']}: keys {_widths({'keys': ranks['keys'], 'values': []})}, "
        f"values {_widths({'keys': [], 'values': ranks['values']})}"
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


# --- Rows by phase, batch and context, and what is read from them.

_DRIFT = 0.05  # of the baseline beside a row, from which on it is told there
_LEAST_TERA = 0.5  # from which on rates are written in tera


def _finite(value: float | None) -> float | None:
    """Return a figure, or None for one that is missing, NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def _finite_of(values: Sequence[float | None] | None) -> list[float]:
    return [value for value in values or () if value is not None and math.isfinite(value)]


def _median(samples: Sequence[float | None] | None) -> float | None:
    known = _finite_of(samples)
    return median(known) if known else None


def median_seconds(row: Row) -> float | None:
    """Return the median of a row's samples; None where there are none."""
    return _median(row["seconds"])


def groups(result: Mapping[str, Any]) -> list[Group]:
    """Return what was measured by phase, batch and context, in the order of the run."""
    data = result["data"]
    found: dict[tuple[str, int, int], Group] = {}
    for name in ("rows", "baselines"):
        for row in data[name]:
            key = (row["phase"], row["batch"], row["seq"])
            group = found.setdefault(key, Group(*key, [], []))
            getattr(group, name).append(row)
    # Contexts of one phase and batch stand together, however the run took them.
    order = {key[:2]: index for index, key in reversed(list(enumerate(found)))}
    return sorted(found.values(), key=lambda group: (order[group.phase, group.batch], group.seq))


def sweeps(result: Mapping[str, Any]) -> list[list[Group]]:
    """Return the groups of each phase and batch that was run at several contexts."""
    by_batch = groupby(groups(result), key=lambda group: (group.phase, group.batch))
    members = [[group for group in found if group.rows] for _, found in by_batch]
    return [found for found in members if len(found) > 1]


def _rate_unit(values: Iterable[float | None], of: str = "B") -> tuple[float, str]:
    """Return what to multiply rates in tera with and their unit, by the largest of them.

    A CPU's memory gives some hundredths of a TB/s, its arithmetic of a TFLOP/s.
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    return (1e3, f"G{of}/s") if known and max(known) < _LEAST_TERA else (1.0, f"T{of}/s")


def _best_baseline(group: Group) -> tuple[str, float] | None:
    """Return the name and the median of the fastest uncompressed kernel; None where none ran."""
    known = [
        (seconds, row["name"])
        for row in group.baselines
        if (seconds := median_seconds(row)) is not None
    ]
    if not known:
        return None
    seconds, name = min(known)
    return name, seconds


def _fits(group: Group) -> list[Row]:
    """Return the fastest row of each compressed method that has a speed-up, the fastest first."""
    found: dict[str, Row] = {}
    for row in group.rows:
        speedup = _finite(row["speedup"])
        if row["method"] != "full" and speedup is not None:
            known = found.get(row["method"])
            if known is None or speedup > known["speedup"]:
                found[row["method"]] = row
    return sorted(found.values(), key=lambda row: (-row["speedup"], row["method"]))


def _beside_seconds(row: Row) -> float | None:
    """Return the median time of the baseline in turn with a row; None where it was not kept."""
    return _median(row.get("baseline_seconds"))


def _drift(group: Group, row: Row) -> float | None:
    """Return by how much the baseline beside a row differs from when it was timed alone.

    None where it does so by less than a twentieth, or nothing tells.
    """
    best, beside = _best_baseline(group), _beside_seconds(row)
    if best is None or beside is None or best[0] != row["baseline"]:
        return None
    change = beside / best[1] - 1
    return change if abs(change) > _DRIFT else None


def _widths(ranks: Mapping[str, Any] | None, heads: int | None = None) -> str:
    """Write the widths that are kept: ``64 (32–112)``, their mean and their range; or the one."""
    if ranks is None:
        return MISSING
    known = [float(width) for name in ("keys", "values") for width in ranks[name]]
    if not known:
        return MISSING
    mean = number(sum(known) / len(known), 3 if max(known) < 1000 else 4)
    text = mean if min(known) == max(known) else f"{mean} ({span(known)})"
    return shared(text, heads, len(ranks["keys"]))


# --- The curves of plots and of the figure.


def context_curves(members: Sequence[Group]) -> list[Series]:
    """Return the time in milliseconds against the context, a curve per method and uncompressed."""
    curves: dict[str, dict[int, tuple[float | None, Sequence[float | None]]]] = {}
    for group in members:
        best = _best_baseline(group)
        if best is not None:
            at = curves.setdefault("fastest uncompressed", {})
            at[group.seq] = (best[1] * 1e3, (None, None))
        for row in group.rows:
            seconds = median_seconds(row)
            ends = [_finite(end) for end in row["seconds_interval"] or (None, None)]
            curves.setdefault(row["method"], {})[group.seq] = (
                None if seconds is None else seconds * 1e3,
                [None if end is None else end * 1e3 for end in ends],
            )
    return [
        Series(
            name,
            list(at),
            [value for value, _ in at.values()],
            [ends[0] for _, ends in at.values()],
            [ends[1] for _, ends in at.values()],
        )
        for name, at in curves.items()
    ]


def roofline_points(result: Mapping[str, Any]) -> list[Series]:
    """Return arithmetic intensity (FLOP per byte) against the rate reached (TFLOP/s), by method.

    Of each phase and batch the longest context; a gap between two points keeps plots from joining
    what is no curve.
    """
    longest: dict[tuple[str, int], Group] = {}
    for group in groups(result):
        longest[group.phase, group.batch] = group
    points: dict[str, list[tuple[float, float]]] = {}
    for group in longest.values():
        for row in group.rows:
            rate, moved = _finite(row["flop_per_s"]), _finite(row["tb_per_s"])
            if rate and moved and rate > 0 and moved > 0:
                found = points.setdefault(row["method"], [])
                found.append((rate / (moved * 1e12), rate / 1e12))
    return [_point_series(name, sorted(found)) for name, found in points.items()]


def _roofline_unit(points: Iterable[Series]) -> tuple[float, str]:
    """Return what to multiply the points' rates with, and their unit."""
    return _rate_unit([y for one in points for y in one.y], "FLOP")


def _in_unit(one: Series, factor: float) -> Series:
    """Return a curve with another unit on its y axis."""
    return replace(one, y=[None if y is None else y * factor for y in one.y])


def roofs(points: Iterable[Series], data: Row) -> list[Series]:
    """Return what memory allows at each intensity and what arithmetic does, as far as measured.

    They end where they meet, or a little over the best that was reached.
    """
    drawn = [(x, y) for one in points for x, y in zip(one.x, one.y, strict=True) if y is not None]
    bandwidth = _finite(data["bandwidth"]["tb_per_s"])
    rate = _finite((data.get("compute") or {}).get("flop_per_s"))
    top = rate / 1e12 if rate else None
    if not drawn:
        return []
    start, most = min(x for x, _ in drawn) / 1.25, 1.25 * max(x for x, _ in drawn)
    ridge = top / bandwidth if top and bandwidth else None
    found = []
    if bandwidth:
        end = min(most, 1.5 * max(y for _, y in drawn) / bandwidth) if ridge is None else ridge
        ends = [min(start, end / 2), end]
        factor, unit = _rate_unit([bandwidth])
        name = f"memory, {number(bandwidth * factor)} {unit}"
        found.append(Series(name, ends, [x * bandwidth for x in ends]))
    if top:
        factor, unit = _rate_unit([top], "FLOP")
        begin = start if ridge is None else ridge
        ends = [begin, max(most, 2 * begin)]
        found.append(Series(f"arithmetic, {number(top * factor)} {unit}", ends, [top, top]))
    return found


def _point_series(name: str, points: Sequence[tuple[float, float]]) -> Series:
    x: list[float] = []
    y: list[float | None] = []
    for intensity, rate in points:
        if x:
            x.append(intensity)
            y.append(None)
        x.append(intensity)
        y.append(rate)
    return Series(name, x, y)


# --- The tables of the report.

_PADDED = 1.01  # times what is stored; a larger buffer has a column of its own
_BASELINES = 4  # in a table; torch alone has a dozen forms
_SECONDS_FROM = 10.0  # a table whose times reach this many seconds is not written in milliseconds


def _method_table(
    group: Group, shape: Mapping[str, Any], tb_per_s: float | None = None
) -> RankedTable:
    """Return one row per method at one phase, batch and context."""
    rows = group.rows
    medians = [median_seconds(row) for row in rows]
    scale, unit = _unit(medians)
    kept = [
        str(shape["head_dim"])
        if row["method"] == "full" and row["ranks"] is None
        else _widths(row["ranks"], shape["num_kv_heads"])
        for row in rows
    ]
    baselines = list(dict.fromkeys(row["baseline"] for row in rows if row["baseline"]))
    columns = [
        Ranked(Column("method", words=True), [row["method"] for row in rows]),
        Ranked(Column("rate"), [rate_in_bytes(_finite(row["rate"])) for row in rows]),
        Ranked(Column("rank (range)"), kept, 1),
        Ranked(Column(f"time ({unit})"), [_scaled(value, scale) for value in medians]),
        Ranked(
            Column(_spread_name(rows)), [_span(row["seconds_interval"], scale) for row in rows], 3
        ),
        *_reached(group, tb_per_s),
        # Where it moved, the row's time alone would belie the speed-up.
        Ranked(
            Column(f"paired baseline ({unit})"),
            [_paired_baseline(group, row, scale) for row in rows],
            0 if any(_drift(group, row) for row in rows) else 2,
        ),
        Ranked(Column("speed-up"), [_speedup_words(row) for row in rows]),
        Ranked(Column("error vs float64"), [number(_finite(row["error"]), 2) for row in rows], 6),
        Ranked(Column("cache"), [_bytes(row["cache_bytes"]) for row in rows], 7),
    ]
    if _padded(rows):
        buffers = [_bytes(row.get("buffer_bytes")) for row in rows]
        columns.append(Ranked(Column("kernel buffer"), buffers, 8))
    if len(baselines) > 1:
        cells = [row["baseline"] or MISSING for row in rows]
        columns.append(Ranked(Column("against", words=True), cells))
    return RankedTable(columns)


def _spread_name(rows: Sequence[Mapping[str, Any]]) -> str:
    """Name what a row's ends are: of few samples no interval."""
    few = any(len(row["seconds"] or ()) < LEAST_SAMPLES for row in rows)
    return "range" if few else "95 % interval"


def _padded(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a kernel's buffer is larger than what its method stores, by more than a hundredth."""
    return any(
        row.get("buffer_bytes")
        and row["cache_bytes"]
        and row["buffer_bytes"] > _PADDED * row["cache_bytes"]
        for row in rows
    )


def _reached(group: Group, tb_per_s: float | None) -> list[Ranked]:
    """Return the columns that a reader holds against the hardware.

    Decode is bound by memory; prefill by arithmetic, where the share of the bandwidth says nothing.
    """
    if group.phase == "prefill":
        done = [_finite(row["flop_per_s"]) for row in group.rows]
        tera = [None if one is None else one / 1e12 for one in done]
        factor, unit = _rate_unit(tera, "FLOP")
        return [
            Ranked(Column(unit), [number(None if one is None else one * factor) for one in tera])
        ]
    own = [_finite(row["tb_per_s"]) for row in group.rows]
    factor, unit = _rate_unit([tb_per_s, *own])
    return [
        Ranked(Column(unit), [MISSING if one is None else number(one * factor) for one in own], 4),
        Ranked(Column("share (%)"), [_percent(row["bandwidth_share"]) for row in group.rows], 1),
    ]


def _speedup_words(row: Mapping[str, Any]) -> str:
    """Write a row's speed-up with its interval: ``1.69× [1.55, 1.82]``."""
    known = _finite_of(row.get("speedup_interval"))
    if _finite(row["speedup"]) is None or len(known) < 2:
        return _times(row["speedup"])
    return f"{_times(row['speedup'])} [{number(known[0])}, {number(known[1])}]"


def _paired_baseline(group: Group, row: Mapping[str, Any], scale: float) -> str:
    beside, by = _beside_seconds(row), _drift(group, row)
    return _scaled(beside, scale) + ("" if by is None else f" (drift {signed_percent(by)})")


def _baseline_table(group: Group) -> Together | None:
    """Return the fastest uncompressed kernels of this machine; the others in a line below.

    None where none ran.
    """
    timed = [(median_seconds(row), row["name"]) for row in group.baselines]
    known = sorted((seconds, name) for seconds, name in timed if seconds is not None)
    if not known:
        return None
    scale, unit = _unit([seconds for seconds, _ in known[:_BASELINES]])
    heads = columns("uncompressed kernel", figures=(f"time ({unit})", "vs fastest"))
    best = known[0][0]
    rows = [
        [name, _time(seconds * scale), _times(best / seconds)]
        for seconds, name in known[:_BASELINES]
    ]
    parts: list[RenderableType] = [DataTable(heads, rows)]
    if slower := known[_BASELINES:]:
        named = ", ".join(f"{name} {_times(best / seconds)}" for seconds, name in slower)
        parts.append(Text(f"slower: {named}", style="dim", overflow="fold"))
    return Together(*parts)


def _unit(seconds: Sequence[float | None]) -> tuple[float, str]:
    known = [value for value in seconds if value is not None]
    return (1.0, "s") if known and max(known) >= _SECONDS_FROM else (1e3, "ms")


def _scaled(value: float | None, scale: float) -> str:
    return MISSING if value is None else _time(value * scale)


def _time(value: float) -> str:
    # Medians of two good kernels differ by less than a hundredth; below 0.1 ms no timer tells that.
    return number(value, 4 if value >= 0.1 else 3)


def _span(bounds: Sequence[float | None] | None, scale: float) -> str:
    known = [end * scale for end in _finite_of(bounds)]
    return f"{_time(known[0])}–{_time(known[1])}" if len(known) == 2 else MISSING


def _percent(value: float | None) -> str:
    known = _finite(value)
    return MISSING if known is None else f"{100 * known:.1f}"


def _times(value: float | None) -> str:
    known = _finite(value)
    return MISSING if known is None else f"{number(known)}×"


def _bytes(value: float | None) -> str:
    known = _finite(value)
    return MISSING if known is None else format_bytes(known)


# --- A bench result as one tidy table: the methods' rows and the uncompressed kernels'.

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
    """Return one row per method, phase, batch and context, and per uncompressed kernel.

    ``kind`` is ``method`` or ``baseline``; a baseline that could not run has no time and a
    ``reason``. ``seconds`` is the median of ``samples`` samples, ``seconds_low`` and
    ``seconds_high`` its 95 % interval; ``baseline_seconds`` is the median of
    the uncompressed kernel in turn with it. Floats are written in full (`repr`).
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
            "baseline_seconds": _beside_seconds(row),
            **_width_columns(row["ranks"]),
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


def _width_columns(ranks: Mapping[str, Any] | None) -> dict[str, float]:
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


# --- The figure: time against context by phase and batch, and the roofline.

_PANEL = (4.6, 3.5)  # inches
_ROW = 2  # panels side by side


def figure(result: Mapping[str, Any]) -> Any:
    """Return the roofline, after panels of time against context where there are several."""
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
    factor, unit = _roofline_unit(points)
    draw_curves(
        axes,
        [_in_unit(one, factor) for one in points],
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
