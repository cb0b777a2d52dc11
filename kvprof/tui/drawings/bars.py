"""Stacked bars: a method's job completion time in parts, on a scale that all methods share."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from kvprof.tui.figures import Bar, nice_scale
from kvprof.tui.palette import Ink, fill
from kvprof.tui.words import difference, duration
from kvprof.views import jct_bars

__all__ = ["PROVISIONAL", "Bars", "short"]

#: In front of what the first, short pass says.
PROVISIONAL = "≈"

_LONGEST_NAME = 18
_LEAST_BAR = 12
_ROOM_FOR_NAME = 4  # columns of fill that stay beside a part's name inside its segment


@dataclass(frozen=True)
class Bars:
    """Rich renderable of a bar per method, with its time and its difference from the baseline.

    Attributes
    ----------
    bars : sequence of Bar
    ink : Ink
    airy : bool
        Leave a line between two bars.
    """

    bars: Sequence[Bar]
    ink: Ink
    airy: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.bars:
            yield Text("nothing was measured yet", style="italic")
            return
        names = [short(bar.case.method) for bar in self.bars]
        ends = [self._end(bar) for bar in self.bars]
        left = max(len(name) for name in names) + 3
        right = max(end.cell_len for end in ends) + 1
        longest = max(max(bar.seconds, sum(bar.parts.values())) for bar in self.bars)
        scale = nice_scale(longest)
        width = options.max_width - left - right
        beside = width >= _LEAST_BAR
        if not beside:  # the words go on a line of their own
            width = options.max_width - 2
        for index, (bar, name, end) in enumerate(zip(self.bars, names, ends, strict=True)):
            if index and self.airy:
                yield Text()
            line = Text(f"{'›' if bar.chosen else ' '} {name:<{left - 3}} ", no_wrap=True)
            line.stylize("bold" if bar.chosen else "", 0)
            drawn = self._bar(bar, scale, width)
            if beside:
                line.append_text(drawn)
                line.append(" " * (1 + right - 1 - end.cell_len))
                line.append_text(end)
            else:
                line.append_text(end)
                line = Text("\n").join([line, Text("  ").append_text(drawn)])
            line.apply_meta({"press": f"method({bar.case.method!r})"})
            yield line
        if longest > 0:
            yield _axis(scale, width, left if beside else 2)

    def _bar(self, bar: Bar, scale: float, width: int) -> Text:
        drawn = Text(no_wrap=True)
        for part, columns in jct_bars.columns(jct_bars.Bar("", bar.parts), scale, width):
            drawn.append_text(self._segment(part, columns))
        drawn.append(" " * (width - drawn.cell_len))
        return drawn

    def _segment(self, part: str, columns: int) -> Text:
        style = Style.parse(self.ink.part(part) or "none")
        sign = fill(part)
        if columns < len(part) + 2 + _ROOM_FOR_NAME:
            return Text(sign * columns, style=style)
        before = (columns - len(part) - 2) // 2
        after = columns - len(part) - 2 - before
        return Text.assemble(
            (sign * before, style), (f" {part} ", style + Style(bold=True)), (sign * after, style)
        )

    def _end(self, bar: Bar) -> Text:
        text = Text(f"{duration(bar.seconds):>8}")
        if bar.case.provisional:
            return Text(f"{PROVISIONAL + duration(bar.seconds):>8} provisional")
        if not bar.measured:
            return text.append(" so far")
        if bar.is_baseline:
            text.append(" baseline")
        elif bar.baseline is not None:
            words = difference(bar.seconds, bar.baseline)
            style = self.ink.good() if bar.seconds < bar.baseline else self.ink.bad()
            text.append(f" {words:>8}", style=style)
        if (misfit := bar.case.account.misfit()) is not None:
            text.append(f" ! {misfit}", style=self.ink.warn())
        return text


def short(name: str, longest: int = _LONGEST_NAME) -> str:
    """Cut a name that is too long for a column, and show that it was."""
    return name if len(name) <= longest else name[: longest - 1] + "…"


def _axis(scale: float, width: int, left: int) -> Text:
    line = Text(" " * left, style="dim", no_wrap=True)
    middle, end = f"┴ {duration(scale / 2)}", f"{duration(scale)} ┘"
    drawn = "└ 0".ljust(width // 2)
    if width // 2 + len(middle) + 2 + len(end) <= width:
        drawn += middle
    return line.append(drawn.ljust(width - len(end)) + end)
