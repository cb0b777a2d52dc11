"""A bench result as its report needs it: rows by phase, batch and context, curves, and the tables.

The tables are those of methods, of the full-width kernels they have to beat, and of schedules.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from rich.console import Group as Together
from rich.console import RenderableType
from rich.text import Text

from kvprof.sizes import format_bytes
from kvprof.views.numbers import MISSING, count, number, rate_in_bytes, shared, signed_percent, span
from kvprof.views.plot import Series
from kvprof.views.tables import Column, DataTable, Ranked, RankedTable, columns

__all__ = [
    "Group",
    "baseline_table",
    "beside_seconds",
    "best_baseline",
    "context_curves",
    "drift",
    "finite",
    "fits",
    "groups",
    "label",
    "median_seconds",
    "method_table",
    "padded",
    "rate_unit",
    "roofline_points",
    "roofline_unit",
    "roofs",
    "scaled",
    "schedule_table",
    "speedup_words",
    "widths",
]

Row = Mapping[str, Any]
_DRIFT = 0.05  # of the baseline beside a row, from which on it is told there
_LEAST_TERA = 0.5  # from which on rates are written in tera


@dataclass(frozen=True)
class Group:
    """What was measured at one phase, batch and context.

    Attributes
    ----------
    phase : str
        ``decode`` or ``prefill``.
    batch, seq : int
    rows : list of mapping
        Of ``data.rows``.
    baselines : list of mapping
        Of ``data.baselines``: full-width kernels, also those that could not run.
    """

    phase: str
    batch: int
    seq: int
    rows: list[Row]
    baselines: list[Row]

    @property
    def name(self) -> str:
        """Such as ``Decode, batch 8, 100k tokens``."""
        return f"{self.phase.capitalize()}, batch {self.batch}, {count(self.seq)} tokens"

    @property
    def schedules(self) -> list[str]:
        """How work was cut, each way once; empty where nothing was."""
        return list(dict.fromkeys(row["schedule"] for row in self.rows if row["schedule"]))


def finite(value: float | None) -> float | None:
    """Return a figure, or None for one that is missing, NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def median_seconds(row: Row) -> float | None:
    """Return the median of a row's samples; None where there are none."""
    samples = [value for value in row["seconds"] or () if finite(value) is not None]
    return median(samples) if samples else None


def groups(result: Mapping[str, Any]) -> list[Group]:
    """Return what was measured by phase, batch and context, in the order of the run.

    Parameters
    ----------
    result : mapping
        Of ``kvprof bench``.
    """
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


def rate_unit(values: Iterable[float | None], of: str = "B") -> tuple[float, str]:
    """Return what to multiply rates in tera with and their unit, by the largest of them.

    A CPU's memory gives some hundredths of a TB/s, its arithmetic of a TFLOP/s.

    Parameters
    ----------
    values : iterable of float or None
    of : str
        ``B`` or ``FLOP``.
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    return (1e3, f"G{of}/s") if known and max(known) < _LEAST_TERA else (1.0, f"T{of}/s")


def best_baseline(group: Group) -> tuple[str, float] | None:
    """Return the name and the median of the fastest full-width kernel; None where none ran."""
    known = [
        (seconds, row["name"])
        for row in group.baselines
        if (seconds := median_seconds(row)) is not None
    ]
    if not known:
        return None
    seconds, name = min(known)
    return name, seconds


def fits(group: Group) -> list[Row]:
    """Return the fastest row of each compressed method that has a speed-up, the fastest first."""
    found: dict[str, Row] = {}
    for row in group.rows:
        speedup = finite(row["speedup"])
        if row["method"] != "full" and speedup is not None:
            known = found.get(row["method"])
            if known is None or speedup > known["speedup"]:
                found[row["method"]] = row
    return sorted(found.values(), key=lambda row: (-row["speedup"], row["method"]))


def beside_seconds(row: Row) -> float | None:
    """Return the median time of the baseline in turn with a row; None where it was not kept."""
    samples = [value for value in row.get("baseline_seconds") or () if finite(value) is not None]
    return median(samples) if samples else None


def drift(group: Group, row: Row) -> float | None:
    """Return by how much the baseline beside a row differs from when it was timed alone.

    None where it does so by less than a twentieth, or nothing tells.
    """
    best, beside = best_baseline(group), beside_seconds(row)
    if best is None or beside is None or best[0] != row["baseline"]:
        return None
    change = beside / best[1] - 1
    return change if abs(change) > _DRIFT else None


def label(row: Row, *, schedules: bool) -> str:
    """Name a row: its method, and its schedule where several were run."""
    return f"{row['method']}, {row['schedule']}" if schedules and row["schedule"] else row["method"]


def widths(ranks: Mapping[str, Any] | None, heads: int | None = None) -> str:
    """Write the widths that are kept: ``64 (32–112)``, their mean and their range; or the one.

    Parameters
    ----------
    ranks : mapping or None
        ``keys`` and ``values``, a width per stored head each.
    heads : int or None
        KV heads of the shape; where fewer are stored, several share each: ``256 / 4 heads``.
    """
    if ranks is None:
        return MISSING
    known = [float(width) for name in ("keys", "values") for width in ranks[name]]
    if not known:
        return MISSING
    mean = number(sum(known) / len(known), 3 if max(known) < 1000 else 4)
    text = mean if min(known) == max(known) else f"{mean} ({span(known)})"
    return shared(text, heads, len(ranks["keys"]))


def context_curves(members: Sequence[Group]) -> list[Series]:
    """Return the time in milliseconds against the context, a curve per method and full width.

    Parameters
    ----------
    members : sequence of Group
        Of one phase and batch, by growing context.
    """
    several = any(len(group.schedules) > 1 for group in members)
    curves: dict[str, dict[int, tuple[float | None, Sequence[float | None]]]] = {}
    for group in members:
        best = best_baseline(group)
        if best is not None:
            at = curves.setdefault("best full width", {})
            at[group.seq] = (best[1] * 1e3, (None, None))
        for row in group.rows:
            seconds = median_seconds(row)
            ends = [finite(end) for end in row["seconds_interval"] or (None, None)]
            curves.setdefault(label(row, schedules=several), {})[group.seq] = (
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

    Parameters
    ----------
    result : mapping
        Of ``kvprof bench``.
    """
    longest: dict[tuple[str, int], Group] = {}
    for group in groups(result):
        longest[group.phase, group.batch] = group
    points: dict[str, list[tuple[float, float]]] = {}
    for group in longest.values():
        for row in group.rows:
            rate, moved = finite(row["flop_per_s"]), finite(row["tb_per_s"])
            if rate and moved and rate > 0 and moved > 0:
                found = points.setdefault(row["method"], [])
                found.append((rate / (moved * 1e12), rate / 1e12))
    return [_apart(name, sorted(found)) for name, found in points.items()]


def roofline_unit(points: Iterable[Series]) -> tuple[float, str]:
    """Return what to multiply the points' rates with, and their unit."""
    return rate_unit([y for one in points for y in one.y], "FLOP")


def scaled(one: Series, factor: float) -> Series:
    """Return a curve with another unit on its y axis."""
    return replace(one, y=[None if y is None else y * factor for y in one.y])


def roofs(points: Iterable[Series], data: Row) -> list[Series]:
    """Return what memory allows at each intensity and what arithmetic does, as far as measured.

    They end where they meet, or a little over the best that was reached.

    Parameters
    ----------
    points : iterable of Series
        From `roofline_points`; without a point there are no roofs.
    data : mapping
        Of the result.
    """
    drawn = [(x, y) for one in points for x, y in zip(one.x, one.y, strict=True) if y is not None]
    bandwidth = finite(data["bandwidth"]["tb_per_s"])
    rate = finite((data.get("compute") or {}).get("flop_per_s"))
    top = rate / 1e12 if rate else None
    if not drawn:
        return []
    start, most = min(x for x, _ in drawn) / 1.25, 1.25 * max(x for x, _ in drawn)
    ridge = top / bandwidth if top and bandwidth else None
    found = []
    if bandwidth:
        end = min(most, 1.5 * max(y for _, y in drawn) / bandwidth) if ridge is None else ridge
        ends = [min(start, end / 2), end]
        factor, unit = rate_unit([bandwidth])
        name = f"memory, {number(bandwidth * factor)} {unit}"
        found.append(Series(name, ends, [x * bandwidth for x in ends]))
    if top:
        factor, unit = rate_unit([top], "FLOP")
        begin = start if ridge is None else ridge
        ends = [begin, max(most, 2 * begin)]
        found.append(Series(f"arithmetic, {number(top * factor)} {unit}", ends, [top, top]))
    return found


def _apart(name: str, points: Sequence[tuple[float, float]]) -> Series:
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


def method_table(
    group: Group, shape: Mapping[str, Any], tb_per_s: float | None = None
) -> RankedTable:
    """Return one row per method and schedule at one phase, batch and context.

    Parameters
    ----------
    group : Group
        With at least one row.
    shape : mapping
        ``data.shape``: what full width keeps, of how many heads.
    tb_per_s : float, optional
        What memory gives here: it decides the unit.
    """
    rows = group.rows
    medians = [median_seconds(row) for row in rows]
    scale, unit = _unit(medians)
    kept = [
        str(shape["head_dim"])
        if row["method"] == "full" and row["ranks"] is None
        else widths(row["ranks"], shape["num_kv_heads"])
        for row in rows
    ]
    baselines = list(dict.fromkeys(row["baseline"] for row in rows if row["baseline"]))
    columns = [
        Ranked(Column("method", words=True), [row["method"] for row in rows]),
        Ranked(Column("rate"), [rate_in_bytes(finite(row["rate"])) for row in rows]),
        Ranked(Column("width (range)"), kept, 1),
        Ranked(Column(f"time ({unit})"), [_scaled(value, scale) for value in medians]),
        Ranked(Column("95 % interval"), [_span(row["seconds_interval"], scale) for row in rows], 3),
        *_reached(group, tb_per_s),
        # Where it moved, the row's time alone would belie the speed-up.
        Ranked(
            Column(f"beside ({unit})"),
            [_beside(group, row, scale) for row in rows],
            0 if any(drift(group, row) for row in rows) else 2,
        ),
        Ranked(Column("speed-up"), [speedup_words(row) for row in rows]),
        Ranked(Column("error"), [number(finite(row["error"]), 2) for row in rows], 6),
        Ranked(Column("cache"), [_bytes(row["cache_bytes"]) for row in rows], 7),
    ]
    if padded(rows):
        buffers = [_bytes(row.get("buffer_bytes")) for row in rows]
        columns.append(Ranked(Column("buffer"), buffers, 8))
    if len(group.schedules) > 1:
        cells = [row["schedule"] or MISSING for row in rows]
        columns.insert(1, Ranked(Column("schedule", words=True), cells))
    if len(baselines) > 1:
        cells = [row["baseline"] or MISSING for row in rows]
        columns.append(Ranked(Column("against", words=True), cells))
    return RankedTable(columns)


def padded(rows: Sequence[Mapping[str, Any]]) -> bool:
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
        done = [finite(row["flop_per_s"]) for row in group.rows]
        tera = [None if one is None else one / 1e12 for one in done]
        factor, unit = rate_unit(tera, "FLOP")
        return [
            Ranked(Column(unit), [number(None if one is None else one * factor) for one in tera])
        ]
    own = [finite(row["tb_per_s"]) for row in group.rows]
    factor, unit = rate_unit([tb_per_s, *own])
    return [
        Ranked(Column(unit), [MISSING if one is None else number(one * factor) for one in own], 4),
        Ranked(Column("share (%)"), [_percent(row["bandwidth_share"]) for row in group.rows], 1),
    ]


def speedup_words(row: Mapping[str, Any]) -> str:
    """Write a row's speed-up with its interval: ``1.69× [1.55, 1.82]``."""
    ends = [finite(end) for end in row.get("speedup_interval") or ()]
    known = [end for end in ends if end is not None]
    if finite(row["speedup"]) is None or len(known) < 2:
        return _times(row["speedup"])
    return f"{_times(row['speedup'])} [{number(known[0])}, {number(known[1])}]"


def _beside(group: Group, row: Mapping[str, Any], scale: float) -> str:
    beside, by = beside_seconds(row), drift(group, row)
    return _scaled(beside, scale) + ("" if by is None else f" ! {signed_percent(by)}")


def baseline_table(group: Group) -> Together | None:
    """Return the fastest full-width kernels of this machine; the others in a line below.

    None where none ran.

    Parameters
    ----------
    group : Group
    """
    timed = [(median_seconds(row), row["name"]) for row in group.baselines]
    known = sorted((seconds, name) for seconds, name in timed if seconds is not None)
    if not known:
        return None
    scale, unit = _unit([seconds for seconds, _ in known[:_BASELINES]])
    heads = columns("full width, by", figures=(f"time ({unit})", "against the best"))
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


def schedule_table(entries: Sequence[Mapping[str, Any]]) -> DataTable:
    """Return the makespan over the mean of each schedule, predicted and measured.

    Parameters
    ----------
    entries : sequence of mapping
        Of ``data.schedules``.
    """
    rows = [
        (
            entry["schedule"],
            f"{entry['phase']}, batch {entry['batch']}, {count(entry['seq'])}",
            _ratio(entry["predicted"]),
            _ratio(entry["measured"]),
        )
        for entry in entries
    ]
    return DataTable(columns("schedule", "of", figures=("predicted", "measured")), rows)


def _unit(seconds: Sequence[float | None]) -> tuple[float, str]:
    known = [value for value in seconds if value is not None]
    return (1.0, "s") if known and max(known) >= _SECONDS_FROM else (1e3, "ms")


def _scaled(value: float | None, scale: float) -> str:
    return MISSING if value is None else _time(value * scale)


def _time(value: float) -> str:
    # Medians of two good kernels differ by less than a hundredth; below 0.1 ms no timer tells that.
    return number(value, 4 if value >= 0.1 else 3)


def _span(bounds: Sequence[float | None] | None, scale: float) -> str:
    ends = [finite(end) for end in bounds or ()]
    known = [end * scale for end in ends if end is not None]
    return f"{_time(known[0])}–{_time(known[1])}" if len(known) == 2 else MISSING


def _percent(value: float | None) -> str:
    known = finite(value)
    return MISSING if known is None else f"{100 * known:.1f}"


def _times(value: float | None) -> str:
    known = finite(value)
    return MISSING if known is None else f"{number(known)}×"


def _ratio(value: float | None) -> str:
    known = finite(value)
    return MISSING if known is None else f"{known:.3f}"


def _bytes(value: float | None) -> str:
    known = finite(value)
    return MISSING if known is None else format_bytes(known)
