"""What is drawn in block characters: parts as stacked bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.records.cases import Account
from kvprof.records.parts import ordered_parts, part_of
from kvprof.views.numbers import duration
from kvprof.views.page import flow

__all__ = [
    "BARS",
    "SERIES",
    "Bar",
    "Ink",
    "StackedBars",
    "bar_of",
    "columns",
]

#: A column that grows, in eighths.
BARS = " ▁▂▃▄▅▆▇█"
#: Glyphs of what a bar stacks that are no parts: levels, and bytes.
SERIES = "█▓▒░╱╲║≡"
_LEAST_SLOTS = 12
_ROOM_BESIDE_NAME = 4  # columns of fill that stay beside a part's name inside its segment


# What is no part, on a dark ground and on a light one, all at 4.5:1 or better against it. A colour
# has one meaning: green, red and yellow are verdicts, turquoise and pink are curves of methods, and
# the parts have what is left (`kvprof.records.parts`).
_GOOD, _BAD, _WARN = ("#5fd068", "#1b6b22"), ("#ff6b6b", "#b3121e"), ("#f5e04a", "#6b5d00")
_CURVES = (("#2ee6d0", "#006b66"), ("#ff7ad9", "#b3067f"))


@dataclass(frozen=True)
class Ink:
    """Colours of a ground: `dark` or light, and whether there are any."""

    dark: bool = True
    colour: bool = True

    def part(self, name: str) -> str:
        """Return the style of a part."""
        part = part_of(name)
        return self._of((part.dark, part.light))

    def good(self) -> str:
        """Return the style of what is better than the baseline."""
        return self._of(_GOOD)

    def bad(self) -> str:
        """Return the style of what is worse, or failed."""
        return self._of(_BAD)

    def warn(self) -> str:
        """Return the style of a warning."""
        return self._of(_WARN)

    def curves(self, count: int) -> tuple[str, ...]:
        """Return the styles of so many curves; without one, a curve has its markers alone."""
        found = [self._of(colours) for colours in _CURVES]
        return (*found, *[""] * max(0, count - len(found)))

    def _of(self, colours: tuple[str, str]) -> str:
        return colours[0 if self.dark else 1] if self.colour else ""


@dataclass(frozen=True)
class Bar:
    """One bar."""

    label: str
    parts: Mapping[str, float]
    note: Text = field(default_factory=Text)
    chosen: bool = False
    press: str = ""

    @property
    def drawn(self) -> float:
        """Value of the whole bar."""
        return sum(value for value in self.parts.values() if value > 0)


def bar_of(label: str, account: Account) -> Bar:
    """Return the bar of a request: its time, and beside it whatever its parts do not add up to."""
    time = duration(account.seconds)
    said = [time if account.walls is not None else f"{time} so far"]
    if (misfit := account.misfit()) is not None:
        said.append(f"! {misfit}")
    return Bar(label, account.stack(), Text(", ".join(said)))


@dataclass(frozen=True)
class StackedBars:
    """Rich renderable of bars on one scale: with their legend, or on an axis with names in them."""

    bars: Sequence[Bar]
    title: str = ""
    shares: bool = False
    scale: float | None = None
    ink: Ink | None = None
    airy: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="bold", overflow="fold")
        gutter = max((len(bar.label) for bar in self.bars), default=0) + 1
        behind = max((bar.note.cell_len for bar in self.bars), default=0) + 1
        slots = options.max_width - gutter - behind
        beside = slots >= _LEAST_SLOTS
        if not beside and self.scale is not None:  # the words go on a line of their own
            slots = options.max_width - 2
        most = self.scale or max((bar.drawn for bar in self.bars), default=0.0)
        shown: list[str] = []
        for index, bar in enumerate(self.bars):
            if index and self.airy:
                yield Text()
            if not beside and self.scale is None:
                yield Text.assemble(f"{bar.label}: ", bar.note, overflow="fold")
                continue
            line = Text(no_wrap=True)
            line.append(f"{bar.label:<{gutter}}", style="bold" if bar.chosen else "")
            lengths = columns(bar, bar.drawn if self.shares else most, slots)
            shown += [part for part, length in lengths if length]
            drawn = Text().join(self._segment(*one, options.ascii_only) for one in lengths)
            if beside:
                line.append_text(drawn)
                line.append(" " * max(0, slots + gutter - line.cell_len))
                line.append(" " * (behind - bar.note.cell_len)).append_text(bar.note)
            else:
                line = Text("\n").join([line.append_text(bar.note), Text("  ") + drawn])
            if bar.press:
                line.apply_meta({"press": bar.press})
            line.rstrip()
            yield line
        if self.scale is not None:
            yield _axis(self.scale, slots, gutter if beside else 2)
            return
        entries = [
            Text.assemble(self._segment(part, 2, options.ascii_only), f" {part}")
            for part in ordered_parts(shown)
        ]
        yield from flow(entries, options.max_width)

    def _segment(self, part: str, length: int, ascii_only: bool) -> Text:
        look = part_of(part)
        sign = look.ascii if ascii_only else look.fill
        if self.ink is not None:
            style = self.ink.part(part)
        else:
            style = f"color({look.ansi})" if look.ansi is not None else ""
        rest = length - len(part) - 2
        if self.scale is None or rest < _ROOM_BESIDE_NAME:
            return Text(sign * length, style=style)
        before = rest // 2
        return Text.assemble(
            (sign * before, style),
            (f" {part} ", f"bold {style}".strip()),
            (sign * (rest - before), style),
        )


def _axis(scale: float, width: int, left: int) -> Text:
    line = Text(" " * left, style="dim", no_wrap=True)
    middle, end = f"┴ {duration(scale / 2)}", f"{duration(scale)} ┘"
    drawn = "└ 0".ljust(width // 2)
    if width // 2 + len(middle) + 2 + len(end) <= width:
        drawn += middle
    return line.append(drawn.ljust(width - len(end)) + end)


def columns(bar: Bar, scale: float, slots: int) -> list[tuple[str, int]]:
    """Return how many of `slots` columns each part takes.

    A bar is as long as its sum, and its columns are shared out by largest remainders: rounding
    where parts end would draw one of a thousandth and leave out one of a hundredth beside it.
    """
    drawn = {part: value for part, value in bar.parts.items() if value > 0}
    if not drawn or scale <= 0:
        return []
    whole = sum(drawn.values())
    length = min(slots, round(whole / scale * slots))
    exact = {part: value / whole * length for part, value in drawn.items()}
    found = {part: int(value) for part, value in exact.items()}
    by_remainder = sorted(exact, key=lambda part: found[part] - exact[part])
    for part in by_remainder[: length - sum(found.values())]:
        found[part] += 1
    return list(found.items())
