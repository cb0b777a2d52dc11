"""The figure of a ``jct`` result: parts stacked per method or length; steps, memory by context."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprof.records.cases import Account, accounts
from kvprof.records.parts import ordered_parts, part_of
from kvprof.views.bars import Bar, StackedBars, bar_of
from kvprof.views.figure import draw_curves, new_figure, plain_counts
from kvprof.views.jct_data import (
    Group,
    Sweep,
    detailed,
    memory_curves,
    step_curves,
    sweep_curves,
    sweeps,
)
from kvprof.views.numbers import count, unit_of
from kvprof.views.plot import Series

__all__ = ["bars_figure", "figure"]

_PANEL = (4.8, 3.4)  # inches
_ROW = 2  # panels side by side


def figure(result: Mapping[str, Any]) -> Any:
    """Return a panel of stacked parts per request, or per method of a sweep, then the curves."""
    known = accounts(result["data"])
    swept = [(sweep, method) for sweep in sweeps(result) for method in sweep.methods()]
    shown = detailed(result)
    draws: list[Any] = [
        *((lambda axes, s=sweep: _times(axes, s)) for sweep in sweeps(result)),
        *((lambda axes, s=sweep, m=method: _sweep(axes, s, m, known)) for sweep, method in swept),
        *((lambda axes, g=group: _stacked(axes, g, known)) for group in shown),
    ]
    for group in shown:
        draws += _curve_panels(result, group)
    columns = min(_ROW, max(1, len(draws)))
    lines = max(1, -(-len(draws) // columns))
    drawing = new_figure(_PANEL[0] * columns + 1.6, _PANEL[1] * lines)
    grid = list(drawing.subplots(lines, columns, squeeze=False).flat)
    for draw, axes in zip(draws, grid, strict=False):
        draw(axes)
    for axes in grid[len(draws) :]:
        axes.remove()
    _legend(drawing, ordered_parts(part for own in known.values() for part in own.stack()))
    unfinished = "" if result["complete"] else " (incomplete)"
    drawing.suptitle(f"{result['data']['shape']['name']}{unfinished}", fontsize="medium")
    return drawing


def bars_figure(bars: StackedBars) -> Any:
    """Return a figure of the stacked bars of a report with their notes, without their title."""
    drawing = new_figure(7.2, 1.4 + 0.34 * len(bars.bars))
    axes = drawing.subplots()
    stacks = _stacks(bars.bars, shares=bars.shares)
    positions = list(range(len(stacks)))[::-1]
    _bars(axes.barh, positions, stacks, "left")
    for position, bar, stack in zip(positions, bars.bars, stacks, strict=True):
        end = sum(value for value in stack.values() if value > 0)
        axes.annotate(f" {bar.note.plain}", (end, position), va="center", fontsize="small")
    axes.set_yticks(positions, [bar.label for bar in bars.bars])
    axes.set_xticks([])
    _leave_room(axes, bars.bars, stacks)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    _legend(drawing, ordered_parts([part for stack in stacks for part in stack]), below=True)
    return drawing


def _stacks(
    bars: Sequence[Bar], *, shares: bool = False, factor: float = 1.0
) -> list[dict[str, float]]:
    """Return the heights of the parts of bars: as shares of each, or times `factor`."""
    stacks = []
    for bar in bars:
        whole = bar.drawn if shares else 1.0
        stacks.append(
            {part: factor * value / whole for part, value in bar.parts.items()} if whole else {}
        )
    return stacks


def _stacked(axes: Any, group: Group, known: Mapping[str, Account]) -> None:
    bars = [
        bar_of(name, known[case["case"]])
        for name, case in zip(group.names, group.cases, strict=True)
    ]
    factor, unit = unit_of(known[case["case"]].seconds for case in group.cases)
    positions = list(range(len(bars)))[::-1]  # the first on top
    stacks = _stacks(bars, factor=factor)
    _bars(axes.barh, positions, stacks, "left")
    for position, bar, stack in zip(positions, bars, stacks, strict=True):
        # What does not add up is told in words, which have no room behind a bar of half a figure.
        note = bar.note.plain.replace(", ! ", "\n! ")
        axes.annotate(f" {note}", (sum(stack.values()), position), va="center", fontsize="small")
    axes.set_yticks(positions, group.names)
    _leave_room(axes, bars, stacks)
    axes.set_xlabel(f"job completion time ({unit})")
    axes.set_title(group.name, fontsize="medium")


def _leave_room(axes: Any, bars: Sequence[Bar], stacks: Sequence[Mapping[str, float]]) -> None:
    """End the axis where the notes behind the bars do; a margin would end at the longest bar."""
    ends = [
        sum(stack.values()) * (1.55 if "!" in bar.note.plain else 1.2)
        for bar, stack in zip(bars, stacks, strict=True)
    ]
    axes.set_xlim(0, max(ends, default=0.0) or 1.0)


def _times(axes: Any, sweep: Sweep) -> None:
    curves = sweep_curves(sweep)
    draw_curves(
        axes,
        curves.series,
        title=sweep.name,
        x_label=curves.x_label,
        y_label=f"{curves.what} ({curves.unit})" if curves.unit else curves.what,
        log_x=True,
        log_y=curves.log_y,
    )


def _sweep(axes: Any, sweep: Sweep, method: str, known: Mapping[str, Account]) -> None:
    bars = [
        bar_of(count(sweep.length(group)), known[group.cases[group.names.index(method)]["case"]])
        for group in sweep.members
        if method in group.names
    ]
    positions = list(range(len(bars)))
    _bars(axes.bar, positions, _stacks(bars, shares=True, factor=100), "bottom")
    for position, bar in zip(positions, bars, strict=True):
        if "!" in bar.note.plain:
            axes.annotate(
                bar.note.plain,
                (position, 50),
                rotation=90,
                ha="center",
                va="center",
                fontsize="x-small",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            )
    axes.set_xticks(positions, [bar.label for bar in bars], rotation=45, fontsize="small")
    axes.set_xlabel("input tokens" if sweep.varied == "input_len" else "output tokens")
    axes.set_ylabel("share of the time (%)")
    axes.set_title(f"{method}: {sweep.name}", fontsize="small")


def _bars(
    draw: Any, positions: Sequence[int], stacks: Sequence[Mapping[str, float]], side: str
) -> None:
    ends = [0.0] * len(stacks)
    for part in ordered_parts([part for stack in stacks for part in stack]):
        values = [max(0.0, stack.get(part, 0.0)) for stack in stacks]
        look = part_of(part)
        draw(
            positions,
            values,
            0.72,
            color=look.print,
            hatch=look.hatch,
            edgecolor="black",
            linewidth=0.2,
            **{side: list(ends)},
        )
        ends = [end + value for end, value in zip(ends, values, strict=True)]


def _curve_panels(result: Mapping[str, Any], group: Group) -> list[Any]:
    factor, unit = unit_of(
        row["seconds"] for row in result["data"]["steps"] if row["phase"] == "decode"
    )
    stored, size = memory_curves(result, group)
    panels = (
        (step_curves(result, group, factor), f"time between tokens ({unit})"),
        (stored, f"cache, stored ({size})"),
    )
    return [
        lambda axes, c=curves, y=label: _curves(axes, c, group.name, y)
        for curves, label in panels
        if curves
    ]


def _curves(axes: Any, curves: Sequence[Series], title: str, y_label: str) -> None:
    draw_curves(axes, curves, title=title, x_label="context (tokens)", y_label=y_label)
    plain_counts(axes)


def _legend(drawing: Any, parts: Sequence[str], *, below: bool = False) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(
            facecolor=look.print,
            hatch=look.hatch,
            edgecolor="black",
            linewidth=0.2,
            label=look.name,
        )
        for look in map(part_of, parts)
    ]
    if patches:
        drawing.legend(
            handles=patches,
            loc="outside lower center" if below else "outside right upper",
            ncols=5 if below else 1,
            fontsize="small",
            frameon=False,
        )
