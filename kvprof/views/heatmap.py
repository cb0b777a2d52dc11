"""Layer × head heat map that says its figures in text; colour only adds.

Where every head's figure fits, it is printed with a bar for its size. Where it does not, each head
is one bar and the row ends in the layer's lowest, mean and highest figure. No layer and no head is
ever left out: rows that are too long continue on the next line.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.report import blocks
from kvprof.views.numbers import MISSING, number
from kvprof.views.page import flow

__all__ = ["DECADES", "HeatMap"]

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
        if not _known(value):
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


def _known(value: float | None) -> TypeGuard[float]:
    return value is not None and not math.isnan(value)


class HeatMap(blocks.HeatMap):
    """Rich renderable of one figure per layer and head."""

    @property
    def write(self) -> Callable[[float], str]:
        """What writes a figure."""
        return self.show or number

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="bold", overflow="fold")
        known = [v for row in self.values for v in row if _known(v)]
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
            printed = self.write(value) if _known(value) else scale.missing
            line.append(f" {printed:>{figure}}")
            line.append_text(scale.bar(value) if _known(value) else Text(" "))
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
        known = [v for v in row if _known(v)]
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
        if any(not _known(v) for row in self.values for v in row):
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
