"""The tables of a bench report: methods, the full-width kernels they have to beat, schedules."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group as Together
from rich.console import RenderableType
from rich.text import Text

from kvprof.sizes import format_bytes
from kvprof.views.bench_data import (
    Group,
    beside_seconds,
    drift,
    finite,
    median_seconds,
    rate_unit,
    widths,
)
from kvprof.views.numbers import MISSING, count, number, rate_in_bytes, signed_percent
from kvprof.views.tables import Column, DataTable, Ranked, RankedTable, columns

__all__ = ["baseline_table", "method_table", "padded", "schedule_table", "speedup_words"]

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
