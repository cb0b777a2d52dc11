"""Multiprocessors as strips of bars: what a schedule gave each of them, and what they took."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.tui.figures import Strip
from kvprof.views.jct_bars import strip_scales
from kvprof.views.numbers import number

__all__ = ["Strips"]

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_GUTTER = 11
_WIDEST = 3  # columns of a multiprocessor where there are few
_ROWS = 3  # lines of a bar: an imbalance of a few per cent must show


@dataclass(frozen=True)
class Strips:
    """Rich renderable of schedules, one column per multiprocessor.

    They share a scale, but for those that it would leave flat.

    Attributes
    ----------
    strips : sequence of Strip
    by_load : bool
        Sort the multiprocessors by their load instead of by their number.
    """

    strips: Sequence[Strip]
    by_load: bool

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        scales = strip_scales([strip.highest() for strip in self.strips])
        order = "by load" if self.by_load else "by number"
        for index, (strip, scale) in enumerate(zip(self.strips, scales, strict=True)):
            if index:
                yield Text()
            head = Text(no_wrap=True, overflow="ellipsis")
            head.append(f"{strip.schedule}", style="bold")
            count = len(strip.predicted)
            head.append(f" · {strip.phase} · {count} multiprocessors {order}")
            if len(set(scales)) > 1:
                head.append(f" · a full column is {number(scale)}×")
            yield head
            for name, values in (("predicted", strip.predicted), ("measured", strip.measured)):
                yield from self._strip(name, values, scale, options.max_width)

    def _strip(self, name: str, values: list[float], highest: float, width: int) -> RenderResult:
        if not values:
            yield Text(f"  {name}: no", style="dim")
            return
        most = max(range(len(values)), key=values.__getitem__)
        words = f"  {name}: at most {number(values[most])}× the mean (SM {most})"
        idle = sum(1 for value in values if value == 0)
        yield Text(words + (f", {idle} idle" if idle else ""), overflow="fold")
        drawn = sorted(values, reverse=True) if self.by_load else values
        room = max(8, width - _GUTTER)
        columns = max(1, min(_WIDEST, room // len(drawn)))
        # Lines of equal length, so that the last one is no stub.
        per_line = math.ceil(len(drawn) / math.ceil(len(drawn) / room))
        for first in range(0, len(drawn), per_line):
            yield from self._rows(drawn[first : first + per_line], first, highest, columns)

    def _rows(self, values: list[float], first: int, highest: float, columns: int) -> RenderResult:
        levels = [round(value / highest * 8 * _ROWS) if highest > 0 else 0 for value in values]
        for row in reversed(range(_ROWS)):
            label = "" if row else f"{'rank' if self.by_load else 'SM'} {first}"
            line = Text(no_wrap=True)
            line.append(f"{label:>{_GUTTER - 1}} ", style="dim")
            bars = "".join(_EIGHTHS[min(8, max(0, level - 8 * row))] * columns for level in levels)
            line.append(bars)
            yield line
