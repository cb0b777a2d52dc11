"""What was measured beside what was published: a strip per line of a verdict, all on one axis.

The axis is measured over claimed, so that shares, seconds and counts stand in one picture; it is
logarithmic, so that half and twice are equally far from 1.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.views.figure import new_figure
from kvprof.views.numbers import number

__all__ = ["Beside", "Strip", "beside_figure", "strips_of"]

_LEAST = 24  # columns of a strip
_MOST_LABEL = 28
_NEAR = 1.25
_LEAST_SPAN = 1.1  # the axis reaches at least from 1 / this to this
_COLOURS = {True: "#0072B2", False: "#D55E00", None: "#555555"}
_SAID = {True: "", False: " fails", None: " open"}
_MARKS = {True: "o", False: "X", None: "s"}


@dataclass(frozen=True)
class Strip:
    """A line of a verdict, over its reference.

    Attributes
    ----------
    label : str
    low, high : float
        What was published, 1 or a range around it; the limit where no number is published in the
        measure's unit.
    value : float
    interval : (float, float) or None
    holds : bool or None
        None where that is open.
    stated : bool
        Whether the reference is a published number rather than the recipe's limit.
    """

    label: str
    low: float
    high: float
    value: float
    interval: tuple[float, float] | None
    holds: bool | None
    stated: bool


def strips_of(entry: Mapping[str, Any]) -> list[Strip]:
    """Return the strips of an entry; a line with nothing to be held against has none."""
    known = {one["id"]: one for one in entry["published"]}
    found = []
    for line in entry["lines"]:
        if line["measured"] is None:
            continue
        one = known.get(line["published"])
        ends = (line["limit"][0], line["limit"][-1])
        stated = one is not None and _comparable(one, line)
        if one is not None and stated:
            ends = _ends(one)
        middle = sum(ends) / 2
        # What is not positive has no ratio.
        if min(*ends, line["measured"]) <= 0:
            continue
        bounds = line["interval"]
        found.append(
            Strip(
                line["measure"],
                ends[0] / middle,
                ends[1] / middle,
                line["measured"] / middle,
                (bounds[0] / middle, bounds[1] / middle)
                if bounds is not None and bounds[0] > 0
                else None,
                line["holds"],
                stated,
            )
        )
    return found


def _ends(one: Mapping[str, Any]) -> tuple[float, float]:
    return (one["value"],) * 2 if one["value"] is not None else (one["low"], one["high"])


def _comparable(one: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    """Tell whether a published number is in the measure's unit: 81.9 per cent is no 1.003.

    It is where the recipe says the same unit of both, or where the limit is about the number.
    """
    if line["unit"] is not None:
        return bool(line["unit"] == one["unit"])
    return any(
        end != 0 and 1 / _NEAR <= limit / end <= _NEAR
        for end in _ends(one)
        for limit in line["limit"]
    )


def _span(strips: Sequence[Strip]) -> float:
    """Return how far the axis reaches from 1 to either side, as a factor."""
    values = [v for s in strips for v in (s.low, s.high, s.value, *(s.interval or ()))]
    return max(_LEAST_SPAN, float(max(max(v, 1 / v) for v in values) ** 1.1))


@dataclass(frozen=True)
class Beside:
    """Rich renderable of strips.

    Attributes
    ----------
    strips : sequence of Strip
    title : str
    """

    strips: Sequence[Strip]
    title: str = "Measured over claimed (1 is what the paper says, or the recipe asks for)"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        span = _span(self.strips)
        label = min(_MOST_LABEL, max(len(one.label) for one in self.strips))
        width = max(_LEAST, options.max_width - label - 14)
        yield Text(self.title, style="bold", overflow="fold")
        for one in self.strips:
            line = Text(f"{one.label[:label]:<{label}} ")
            line.append(_drawn(one, span, width, ascii_only=options.ascii_only))
            line.append(f" {number(one.value)}{_SAID[one.holds]}")
            yield line
        ends = f"{number(1 / span)}", f"{number(span)}"
        half = width // 2
        axis = f"{ends[0]:<{half}}1{ends[1]:>{width - half - 1}}"
        yield Text(f"{' ' * (label + 1)}{axis}", style="dim")
        signs = "* measured, o published" if options.ascii_only else "● measured, ◇ published"
        yield Text(f"{signs}, | the recipe's limit", style="dim", overflow="fold")


def _drawn(one: Strip, span: float, width: int, *, ascii_only: bool) -> str:
    marks = "-=o*" if ascii_only else "·━◇●"
    reference = marks[2] if one.stated else "|"

    def column(value: float) -> int:
        share = (math.log(value) / math.log(span) + 1) / 2
        return min(width - 1, max(0, round(share * (width - 1))))

    cells = [marks[0]] * width
    if one.interval is not None:
        for place in range(column(one.interval[0]), column(one.interval[1]) + 1):
            cells[place] = marks[1]
    for end in (one.low, one.high):
        cells[column(end)] = reference
    cells[column(one.value)] = marks[3]
    return "".join(cells)


def beside_figure(beside: Beside) -> Any:
    """Return the strips as a matplotlib figure.

    Raises
    ------
    LackingError
        When matplotlib is not installed.
    """
    strips = beside.strips
    figure = new_figure(6.4, 0.9 + 0.32 * len(strips))
    axes = figure.subplots()
    for row, one in enumerate(strips):
        axes.plot([one.low, one.high], [row, row], color="#999999", linewidth=5, alpha=0.5)
        axes.plot([one.low, one.high], [row, row], "D", color="#777777", markersize=5,
                  fillstyle="none" if one.stated else "left")  # fmt: skip
        if one.interval is not None:
            axes.plot(one.interval, [row, row], color=_COLOURS[one.holds], linewidth=1.6)
        axes.plot([one.value], [row], _MARKS[one.holds], color=_COLOURS[one.holds],
                  markersize=6)  # fmt: skip
    span = _span(strips)
    axes.axvline(1.0, color="#999999", linewidth=0.6)
    axes.set_xscale("log")
    axes.set_xlim(1 / span, span)
    ticks = _ticks(span)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(len(strips) - 0.5, -0.5)
    axes.set_yticks(range(len(strips)), [one.label for one in strips])
    axes.set_xlabel(
        "measured / claimed (diamond: published, half-filled: limit; cross: fails, square: open)"
    )
    axes.grid(visible=True, axis="x", linewidth=0.3, alpha=0.6)
    return figure


def _ticks(span: float) -> list[float]:
    for step in (1.05, 1.1, 1.25, 1.5, 2.0, 5.0, 10.0, 100.0, 1e4):
        count = math.floor(math.log(span) / math.log(step))
        if count <= 3:
            return [float(f"{step**n:.3g}") for n in range(-count, count + 1)]
    return [1.0]
