"""Line plots and heat maps in a terminal, legible without colour.

plotext rasterises lines; axes are computed here, because its own ticks on a log scale are not where
people look for them (and given ones are logged twice, plotext 6.1).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeGuard

from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.report import blocks
from kvprof.report.blocks import Curves, Series, colours_of
from kvprof.sizes import format_count
from kvprof.views.numbers import MISSING, axis_number, number
from kvprof.views.page import flow, to_ascii, wrap

__all__ = [
    "DECADES",
    "Axis",
    "HeatMap",
    "LinePlot",
    "Series",
    "line_plot",
    "linear_ticks",
    "log2_ticks",
    "log10_ticks",
]

# --- Where an axis puts its ticks and what it writes there; the same for terminal and paper.


@dataclass(frozen=True)
class Axis:
    """One direction of a plot: from data to position, and its ticks."""

    low: float
    high: float
    position: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]


def linear_ticks(values: Sequence[float], at_most: int = 6) -> Axis:
    """Return a linear axis over `values` with ticks at 1, 2 or 5 times powers of ten."""
    low, high = min(values), max(values)
    if low == high:
        # A constant curve runs through the middle, not along an edge.
        pad = abs(low) / 2 or 0.5
        low, high = low - pad, high + pad
    # The widest spacing that fits may leave a single tick, which gives no scale: then a finer one.
    step = (high - low) / max(1, at_most - 1)
    for finer in (1, 2, 4, 8):
        ticks = _multiples(low, high, _round_up(step / finer))
        if len(ticks) >= 2:
            break
    return Axis(low, high, float, ticks)


def _multiples(low: float, high: float, step: float) -> tuple[tuple[float, str], ...]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [i * step for i in range(first, last + 1)]
    # Clamped, because 0.1 * 3 may lie outside an axis that ends at 0.3.
    return tuple((min(max(value, low), high), axis_number(value)) for value in values)


def _round_up(step: float) -> float:
    scale = 10.0 ** math.floor(math.log10(step))
    return next(m * scale for m in (1, 2, 5, 10, 20) if m * scale >= step * (1 - 1e-9))


def log10_ticks(values: Sequence[float], at_most: int = 6) -> Axis:
    """Return a log axis with ticks at powers of ten, and at 2 and 5 times them where few fit."""
    low, high = math.log10(min(values)), math.log10(max(values))
    if high - low < 0.1:
        low, high = low - 0.35, high + 0.35
    decades = range(math.floor(low), math.ceil(high) + 1)
    candidates: list[list[float]] = [[d + math.log10(m) for d in decades for m in (1, 2, 5)]]
    candidates += [[float(d) for d in decades if d % every == 0] for every in range(1, 20)]
    inside = [[p for p in positions if low - 1e-9 <= p <= high + 1e-9] for positions in candidates]
    # The densest set that fits; the all-but-empty ones at the end always do.
    chosen = next((p for p in inside if len(p) <= at_most), [])
    if len(chosen) < 2:
        # Less than a factor of two or so: round numbers, as on a linear axis.
        linear = linear_ticks([10.0**low, 10.0**high], at_most)
        chosen = [math.log10(value) for value, _ in linear.ticks if value > 0]
    return Axis(low, high, math.log10, tuple((p, axis_number(10.0**p)) for p in chosen))


def log2_ticks(values: Sequence[float], at_most: int = 6) -> Axis:
    """Return a log axis for counts, with ticks as people write them (``1k``, ``2k``, ``4k``)."""
    low, high = math.log2(min(values)), math.log2(max(values))
    if low == high:
        low, high = low - 0.5, high + 0.5
        positions = [math.log2(values[0])]
    else:
        powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
        every = max(1, math.ceil(len(powers) / max(1, at_most)))
        positions = [float(p) for p in powers if (powers[-1] - p) % every == 0]
        if len(positions) < 2:
            # Less than a factor of two or so: round numbers, as on a linear axis.
            linear = linear_ticks([2.0**low, 2.0**high], at_most)
            positions = [math.log2(value) for value, _ in linear.ticks if value > 0]
    return Axis(low, high, math.log2, tuple((p, _count(2.0**p)) for p in positions))


def _count(value: float) -> str:
    whole = round(value)
    if whole >= 1 and math.isclose(whole, value, rel_tol=1e-9):
        return format_count(whole)
    return axis_number(value)


_MARKERS = "●▲■◆○△□◇"
_ASCII_MARKERS = "ox+*#@%&"
_FURTHER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# The terminal's own palette (cyan, magenta, green, yellow, blue, red): it suits the background.
_COLOURS = tuple(f"color({number})" for number in (6, 5, 2, 3, 4, 1))
_MARK_EVERY = 12  # columns between two markers of one dense curve

# plotext has one figure per process.
_LOCK = Lock()


@dataclass(frozen=True)
class LinePlot(Curves):
    """Rich renderable of `line_plot` that takes width, colour and encoding from the console."""

    colours: Sequence[str] = _COLOURS
    legend_above: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield line_plot(**vars(self), width=options.max_width, ascii_only=options.ascii_only)


def line_plot(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    width: int,
    height: int = 16,
    log_x: bool = False,
    log_y: bool = False,
    x_ticks: Sequence[float] = (),
    colours: Sequence[str] = _COLOURS,
    colour: bool = True,
    ascii_only: bool = False,
    legend_above: bool = False,
) -> Text:
    """Draw curves; each has markers of its own, so that they can be told apart without colour."""
    curves = [_points(s, log_x=log_x, log_y=log_y) for s in series]
    xs = [p[0] for curve in curves for part in curve for p in part]
    ys = [p[1] for curve in curves for part in curve for p in part]
    head = wrap(Text(title, style="bold" if colour else ""), width)
    if not xs:
        what = "positive values" if log_y or log_x else "values"
        labels = ", ".join(s.label for s in series) or "no series"
        return Text("\n").join(
            [*head, *wrap(Text(f"nothing to plot: no {what} ({labels})"), width)]
        )
    y_axis = (log10_ticks if log_y else linear_ticks)(ys, max(2, (height - 2) // 3))
    gutter = max(len(label) for _, label in y_axis.ticks) + 1
    columns = max(1, width - gutter)
    x_axis = (log2_ticks if log_x else linear_ticks)(xs, max(2, columns // 9))
    if x_ticks and not log_x:
        ticks = tuple((float(x), f"{x:g}") for x in x_ticks if x_axis.low <= x <= x_axis.high)
        x_axis = Axis(x_axis.low, x_axis.high, float, ticks)
    colours = colours_of(series, colours, "") if colours else ()
    signs = (_ASCII_MARKERS if ascii_only else _MARKERS) + _FURTHER
    canvas = _raster(
        curves,
        (x_axis, y_axis),
        (width, height),
        signs,
        columns,
        line="." if ascii_only else "braille",
        colours=colours if colour else (),
    )
    legend = _legend(series, curves, signs, width, colours if colour else ())
    return Text("\n").join(
        [
            *head,
            *(legend if legend_above else ()),
            *wrap(Text(y_label + (" (log)" if log_y else "")), width),
            *canvas,
            *_centred(Text(x_label + (" (log 2)" if log_x else "")), width),
            *(() if legend_above else legend),
        ]
    )


_Curve = list[list[tuple[float, float]]]


def _points(series: Series, *, log_x: bool, log_y: bool) -> _Curve:
    """Split a series into runs of drawable points; what cannot be drawn separates two runs."""
    runs: _Curve = [[]]
    for x, y in zip(series.x, series.y, strict=True):
        drawable = (
            y is not None
            and math.isfinite(y)
            and math.isfinite(x)
            and not (log_y and y <= 0)
            and not (log_x and x <= 0)
        )
        if drawable:
            assert y is not None
            runs[-1].append((float(x), float(y)))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _marked(
    points: list[tuple[float, float]], axis: Axis, columns: int, phase: float
) -> list[tuple[float, float]]:
    """Choose the points that carry a marker: all of a few, else one in every few columns."""
    if len(points) <= max(2, columns // 4):
        return points
    chosen = []
    extent = axis.high - axis.low
    following = axis.low + phase * _MARK_EVERY / columns * extent
    for x, y in points:
        if axis.position(x) >= following:
            chosen.append((x, y))
            following += _MARK_EVERY / columns * extent
    # A curve shorter than its phase would have none.
    return chosen or [points[-1]]


def _raster(
    curves: list[_Curve],
    axes: tuple[Axis, Axis],
    size: tuple[int, int],
    signs: str,
    columns: int,
    *,
    line: str,
    colours: Sequence[str],
) -> list[Text]:
    import plotext  # costs 0.1 s and asks the terminal for its size

    x_axis, y_axis = axes
    with _LOCK:
        figure: Any = plotext.figure
        plotext.terminal.limit(False, False)
        figure.clear()
        try:
            figure.theme("colorless")
            figure.plot_size(*size)
            for side in ("upper", "right"):
                figure.axes(False, axis="x" if side == "upper" else "y", side=side)
            for name, axis in (("x", x_axis), ("y", y_axis)):
                ruler = figure.ruler(name)
                ruler.lim(axis.low, axis.high)
                ruler.ticks([p for p, _ in axis.ticks], labels=[text for _, text in axis.ticks])

            def draw(points: list[tuple[float, float]], sign: str, index: int, lines: bool) -> None:
                marker = plotext.marker(sign, _pixel(colours, index))
                x = [x_axis.position(p[0]) for p in points]
                y = [y_axis.position(p[1]) for p in points]
                figure.draw(figure.signal(x, y, marker=marker).lines(lines))

            for index, curve in enumerate(curves):
                for run in curve:
                    if len(run) > 1:
                        draw(run, line, index, True)
            # Markers last, so that no line of another curve hides them.
            for index, curve in enumerate(curves):
                points = [p for run in curve for p in run]
                if points:
                    marked = _marked(points, x_axis, columns, index / len(curves))
                    draw(marked, signs[index % len(signs)], index, False)
            drawn: str = figure.build().string(colorless=not colours)
        finally:
            figure.clear()
            plotext.terminal.limit()
    if line == ".":
        drawn = to_ascii(drawn)
    lines = [Text.from_ansi(row) if colours else Text(row) for row in drawn.splitlines()]
    for row in lines:
        row.rstrip()
    return [row for row in lines if row.plain]


def _pixel(colours: Sequence[str], index: int) -> int | tuple[int, int, int] | None:
    """Return a curve's colour as plotext takes it; None for the terminal's own."""
    name = colours[index % len(colours)] if colours else ""
    if not name:
        return None
    colour = Color.parse(name)
    if colour.triplet is None:
        return colour.number
    red, green, blue = colour.triplet
    return red, green, blue


def _legend(
    series: Sequence[Series], curves: list[_Curve], signs: str, width: int, colours: Sequence[str]
) -> list[Text]:
    entries = []
    for index, (one, curve) in enumerate(zip(series, curves, strict=True)):
        style = colours[index % len(colours)] if colours else ""
        entry = Text(signs[index % len(signs)], style=style)
        entry = Text.assemble(entry, f" {one.label}" + ("" if curve else " (nothing to draw)"))
        entries.append(entry)
    return flow(entries, width)


def _centred(text: Text, width: int) -> list[Text]:
    lines = wrap(text, width)
    for line in lines:
        line.pad_left((width - line.cell_len) // 2)
    return lines


# --- Layer × head heat map that says its figures in text; colour only adds.


#: Of a scale of powers.
DECADES = 4

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = ".:-=+*#@"
# From low to high in the terminal's own palette, which suits its background.
_STYLES = ("blue", "blue", "cyan", "cyan", "green", "yellow", "red", "red")
_GAP = 3  # columns between two blocks of layers
_MANY = 16  # layers from which on blocks are put side by side
_SUMMARY = ("min", "mean", "max")


@dataclass(frozen=True)
class _Scale:
    """Which bar stands for a figure."""

    low: float
    high: float
    bars: str
    missing: str
    whole: bool
    log: bool

    def level(self, value: float) -> int:
        if self.high == self.low:
            return len(self.bars) // 2
        if self.log and value <= self.low:
            return 0
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        share = (at - low) / (high - low)
        return min(len(self.bars) - 1, int(share * len(self.bars)))

    def bar(self, value: float | None) -> Text:
        if not _is_number(value):
            return Text(self.missing)
        level = self.level(value)
        return Text(self.bars[level], style=_STYLES[level])

    def lower_end(self, level: int) -> float:
        """Return the lowest figure that gets this bar, as exact as it will be printed."""
        share = level / len(self.bars)
        if self.log:
            return self.low * math.pow(self.high / self.low, share)
        end = self.low + share * (self.high - self.low)
        return math.ceil(end) if self.whole else end


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and not math.isnan(value)


class HeatMap(blocks.HeatMap):
    """Rich renderable of one figure per layer and head."""

    @property
    def write(self) -> Callable[[float], str]:
        """What writes a figure."""
        return self.show or number

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="bold", overflow="fold")
        known = [v for row in self.values for v in row if _is_number(v)]
        if not known:
            yield Text("nothing measured")
            return
        scale = self._scale(known, options.ascii_only)
        names = list(self.layers) or [str(index) for index in range(len(self.values))]
        label = max(len("layer"), *(len(name) for name in names))
        heads = max(len(row) for row in self.values)
        titles = list(self.names) or [str(index) for index in range(heads)]
        figure = max(*(len(title) for title in titles), *(len(self.write(v)) for v in known))
        yield Text(f"{'':{label}} {self.columns}", style="dim")
        if label + heads * (figure + 2) <= options.max_width:
            head = Text(f"{'layer':>{label}}" + "".join(f" {one:>{figure}} " for one in titles))
            lines = [
                self._with_figures(name, row, (label, heads, figure), scale)
                for name, row in zip(names, self.values, strict=True)
            ]
        else:
            head, lines = self._folded(names, label, heads, scale, options.max_width)
        head.stylize("dim")
        yield from _side_by_side(head, lines, options.max_width)
        yield from self._legend(scale, options.max_width)

    def _scale(self, known: Sequence[float], ascii_only: bool) -> _Scale:
        low = min(known) if self.low is None else min(self.low, *known)
        high = max(known) if self.high is None else max(self.high, *known)
        log = self.log and high > 0
        if log:
            stated = [self.low] if self.low is not None else []
            least = min(v for v in (*known, *stated, high) if v > 0)
            low = max(least, high / 10**DECADES)
        return _Scale(
            low,
            high,
            _ASCII_BARS if ascii_only else _BARS,
            "-" if ascii_only else MISSING,
            all(float(v).is_integer() for v in known),
            log,
        )

    def _with_figures(
        self,
        name: str,
        row: Sequence[float | None],
        widths: tuple[int, int, int],
        scale: _Scale,
    ) -> Text:
        label, heads, figure = widths
        line = Text(f"{name:>{label}}")
        for value in row:
            printed = self.write(value) if _is_number(value) else scale.missing
            line.append(f" {printed:>{figure}}")
            line.append_text(scale.bar(value) if _is_number(value) else Text(" "))
        line.append(" " * (figure + 2) * (heads - len(row)))
        return line

    def _folded(
        self, names: Sequence[str], label: int, heads: int, scale: _Scale, width: int
    ) -> tuple[Text, list[Text]]:
        """One bar per head; a row continues on a line labelled with its first head."""
        summaries = [self._summary(row, scale) for row in self.values]
        figure = max(len("mean"), *(len(text) for row in summaries for text in row))
        # All three figures if a layer then still fits one line, else its mean, else none; a layer
        # that does not fit at all continues on lines of equal length.
        room = width - label - 1
        tails: list[tuple[int, ...]] = [(0, 1, 2), (1,), ()]
        tail = next((t for t in tails if heads + len(t) * (figure + 1) <= room), tails[0])
        per_line = max(1, room - len(tail) * (figure + 1))
        per_line = math.ceil(heads / math.ceil(heads / per_line))
        # An index every eight heads, where the next one does not touch it.
        index = "".join(f"{h:<8}" for h in range(0, per_line, 8))[:per_line]
        head = Text(f"{'layer':>{label}} {index:<{per_line}}")
        head.append("".join(f" {_SUMMARY[part]:>{figure}}" for part in tail))
        lines = []
        for name, row, summary in zip(names, self.values, summaries, strict=True):
            for start in range(0, max(1, len(row)), per_line):
                line = Text(f"{name if start == 0 else f'+{start}':>{label}} ")
                cells = row[start : start + per_line]
                for value in cells:
                    line.append_text(scale.bar(value))
                line.append(" " * (per_line - len(cells)))
                texts = [summary[part] if start == 0 else "" for part in tail]
                line.append("".join(f" {text:>{figure}}" for text in texts))
                lines.append(line)
        return head, lines

    def _summary(self, row: Sequence[float | None], scale: _Scale) -> tuple[str, ...]:
        known = [v for v in row if _is_number(v)]
        if not known:
            return (scale.missing,) * 3
        return tuple(self.write(v) for v in (min(known), sum(known) / len(known), max(known)))

    def _legend(self, scale: _Scale, width: int) -> list[Text]:
        if scale.low == scale.high:
            return [Text(f"all {self.write(scale.low)}", style="dim")]
        # A lowest bar of powers stands for all that is less, too.
        entries = [
            Text.assemble("log scale: below ", self.write(scale.lower_end(1)), " ")
            + Text(scale.bars[0], style=_STYLES[0])
            if scale.log
            else Text("from")
        ]
        for level, bar in enumerate(scale.bars):
            if scale.log and level == 0:
                continue
            last = level == len(scale.bars) - 1
            if scale.whole and not last and scale.lower_end(level) == scale.lower_end(level + 1):
                continue  # no whole number gets this bar
            lower_end = f" {self.write(scale.lower_end(level))}"
            entries.append(Text.assemble((bar, _STYLES[level]), lower_end))
        entries.append(Text(f"to {self.write(scale.high)}"))
        if any(not _is_number(v) for row in self.values for v in row):
            entries.append(Text(f"{scale.missing} not measured"))
        return flow(entries, width, gap=2)


def _side_by_side(head: Text, lines: list[Text], width: int) -> Iterator[Text]:
    """Put the rows of many layers into as many blocks as fit next to each other."""
    block = max(head.cell_len, *(line.cell_len for line in lines))
    fitting = max(1, (width + _GAP) // (block + _GAP))
    blocks = fitting if len(lines) > _MANY else 1
    per_block = math.ceil(len(lines) / blocks)
    blocks = math.ceil(len(lines) / per_block)
    gap = Text(" " * _GAP)
    yield gap.join([head] * blocks)
    for row in range(per_block):
        # Columns first: layers read downwards.
        yield gap.join(lines[row::per_block])
