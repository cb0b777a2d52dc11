"""What is drawn in block characters: parts as stacked bars, and multiprocessors under load."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.records.cases import Account
from kvprof.records.parts import ordered_parts, part_of
from kvprof.views.numbers import MISSING, duration, percent
from kvprof.views.page import flow

__all__ = [
    "BARS",
    "SERIES",
    "Bar",
    "Ink",
    "LoadLine",
    "StackedBars",
    "Timelines",
    "at_once",
    "bar_of",
    "busy_shares",
    "columns",
    "load_columns",
    "load_scales",
    "longest",
    "makespan_over_mean",
    "relative_loads",
]

# --- What each multiprocessor did during a step: a line per SM, as high as work was running on it.


_FULL = 0.995  # of a slot; what rounding takes from a busy one is no gap


@dataclass(frozen=True)
class _Row:
    name: str
    items: Sequence[tuple[float, float]]
    done: float
    processors: int = 1


@dataclass(frozen=True)
class Timelines:
    """Rich renderable of what each SM did under one schedule.

    Attributes
    ----------
    pieces : sequence of (sm, start, stop)
        Of work, in any unit of time.
    title : str
        Above them.
    until : float or None
        Length of the time axis in that unit, so that schedules can be held against each other;
        None ends it with the last piece.
    """

    pieces: Sequence[Sequence[float]]
    title: str
    until: float | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="bold", overflow="fold")
        pieces = [entry for entry in self.pieces if all(map(math.isfinite, entry))]
        if not pieces:
            yield Text("no piece of work was recorded")
            return
        begin = min(start for _, start, _ in pieces)
        own = max(stop for _, _, stop in pieces) - begin
        until = max(self.until or 0.0, own)
        by_sm: dict[int, list[tuple[float, float]]] = {}
        for sm, start, stop in pieces:
            by_sm.setdefault(int(sm), []).append((start - begin, stop - begin))
        most = max(at_once(items) for items in by_sm.values())
        rows = _chosen(by_sm)
        gutter = max(len(row.name) for row in rows) + 1
        slots = options.max_width - gutter - len("100.0 %") - 2
        bars = _ASCII_BARS if options.ascii_only else BARS
        for row in rows:
            share = percent(row.done / own if own > 0 else None)
            if slots < _LEAST_CELLS:
                yield Text(f"{row.name}: {share}", overflow="fold")
                continue
            line = Text(f"{row.name:<{gutter}}")
            drawn = busy_shares(row.items, until, slots, row.processors * most)
            line.append("".join(_bar(value, bars) for value in drawn), style="cyan")
            line.append(f" {share:>{len('100.0 %')}}")
            yield line


def at_once(items: Sequence[tuple[float, float]]) -> int:
    """Return the largest number of pieces that run at the same time; at least 1.

    Parameters
    ----------
    items : sequence of (start, stop)
    """
    # At the same moment an end comes before a start: one piece follows the other.
    moments = sorted([(stop, -1) for _, stop in items] + [(start, 1) for start, _ in items])
    most = running = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    return max(1, most)


def busy_shares(
    items: Sequence[tuple[float, float]], until: float, slots: int, room: int = 1
) -> list[float]:
    """Return the share of each of `slots` equal times from 0 to `until` that was spent at work.

    Parameters
    ----------
    items : sequence of (start, stop)
    until : float
    slots : int
    room : int
        How many pieces run at once at most.
    """
    if until <= 0:
        return [0.0] * slots
    length = until / slots
    busy = [0.0] * slots
    for start, stop in items:
        first = min(slots - 1, max(0, int(start / length)))
        last = min(slots - 1, max(0, int(stop / length)))
        for slot in range(first, last + 1):
            inside = min(stop, (slot + 1) * length) - max(start, slot * length)
            busy[slot] += max(0.0, inside)
    return [min(1.0, value / length / room) for value in busy]


def _chosen(by_sm: Mapping[int, Sequence[tuple[float, float]]]) -> list[_Row]:
    """Return the first, the median and the last SM to be done, and all of them together."""
    done = {sm: max(stop for _, stop in items) for sm, items in by_sm.items()}
    order = sorted(by_sm, key=lambda sm: (done[sm], sm))
    named = {order[0]: "least loaded"}
    if len(order) > 2:
        named[order[len(order) // 2]] = "median"
    named[order[-1]] = "most loaded"
    rows = [_Row(f"SM {sm}, {words}", by_sm[sm], done[sm]) for sm, words in named.items()]
    if len(order) > 1:
        every = [piece for sm in order for piece in by_sm[sm]]
        mean = sum(done.values()) / len(order)
        rows.append(_Row(f"all {len(order)} with work", every, mean, len(order)))
    return rows


def _bar(share: float, bars: Sequence[str]) -> str:
    if share >= _FULL:
        return bars[-1]
    if share <= 1 - _FULL:
        return bars[0]
    # Never the empty one for some work, never the full one for less than all.
    return bars[1 + min(len(bars) - 3, int(share * (len(bars) - 2)))]


def longest(entries: Sequence[Mapping[str, Any]]) -> float:
    """Return the longest makespan of several schedules; 0 without any."""
    spans = [
        max(stop for _, _, stop in entry["strips"]) - min(start for _, start, _ in entry["strips"])
        for entry in entries
        if entry["strips"]
    ]
    return max(spans, default=0.0)


# --- How schedules load the multiprocessors: a column per SM, as high as its work.


#: A column that grows, in eighths.
BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*#@"
_LEAST_CELLS = 8
_FLATTEST = 0.25  # of a full column, below which columns say nothing


@dataclass(frozen=True)
class LoadLine:
    """Rich renderable of the loads of all SMs, 0 to the largest of the lines it stands among.

    Attributes
    ----------
    label : str
        In front of it.
    loads : sequence of float
        Per multiprocessor.
    most : float
        What a full column stands for.
    """

    label: str
    loads: Sequence[float]
    most: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ratio = makespan_over_mean(self.loads)
        behind = MISSING if ratio is None else f"max/mean {ratio:.3f}"
        slots = options.max_width - len(self.label) - len(behind) - 2
        label = f"{self.label} "
        if slots < _LEAST_CELLS:
            yield Text(self.label.rstrip(), overflow="fold")
            label, slots = "", max(1, options.max_width - len(behind) - 1)
        # Several SMs share a column where there is no room for all: the busiest of them counts.
        each = -(-len(self.loads) // slots)
        tops = [max(self.loads[i : i + each]) for i in range(0, len(self.loads), each)]
        line = Text(label)
        line.append(load_columns(tops, self.most, ascii_only=options.ascii_only)[0], style="cyan")
        line.append(f" {behind}")
        yield line


def load_columns(
    loads: Sequence[float], most: float, rows: int = 1, *, ascii_only: bool = False
) -> list[str]:
    """Return loads as columns of bars, one text per line from top to bottom.

    Parameters
    ----------
    loads : sequence of float
    most : float
        What a full column stands for.
    rows : int
        Lines that a full column takes; a load that is there shows in the lowest.
    ascii_only : bool
    """
    bars = _ASCII_BARS if ascii_only else BARS
    full = len(bars) - 1
    heights = [
        max(int(load > 0), round(load / most * full * rows)) if most > 0 else int(load > 0)
        for load in loads
    ]
    return [
        "".join(bars[min(full, max(0, height - full * row))] for height in heights)
        for row in reversed(range(rows))
    ]


def relative_loads(loads: Sequence[float]) -> list[float]:
    """Return loads relative to their mean; zeros where nothing is loaded."""
    mean = sum(loads) / len(loads) if loads else 0.0
    return [load / mean for load in loads] if mean > 0 else [0.0] * len(loads)


def load_scales(highest: Sequence[float]) -> list[float]:
    """Return what a full column stands for in each of several schedules.

    They share a scale, so that they can be compared, but for those that it would leave flat: these
    have their own.

    Parameters
    ----------
    highest : sequence of float
        The largest load of each schedule.
    """
    most = max(highest, default=0.0)
    return [most if own >= _FLATTEST * most else own for own in highest]


def makespan_over_mean(loads: Sequence[float]) -> float | None:
    """Return the largest load over the mean; None where nothing is loaded."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total > 0 else None


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
    """One bar.

    Attributes
    ----------
    label : str
        In front of it.
    parts : mapping
        Part to value, from left to right; what is not positive is not drawn.
    note : Text
        Behind it.
    chosen : bool
        Whether its label stands out.
    press : str
        What a click on it does: the action under ``press`` in the meta data; empty for none.
    """

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
    """Return the bar of a request: its time, and beside it whatever its parts do not add up to.

    Parameters
    ----------
    label : str
    account : Account
    """
    time = duration(account.seconds)
    said = [time if account.walls is not None else f"{time} so far"]
    if (misfit := account.misfit()) is not None:
        said.append(f"! {misfit}")
    return Bar(label, account.stack(), Text(", ".join(said)))


@dataclass(frozen=True)
class StackedBars:
    """Rich renderable of bars on one scale: with their legend, or on an axis with names in them.

    Attributes
    ----------
    bars : sequence of Bar
    title : str
        Above them; empty for none.
    shares : bool
        Every bar fills the width, so that shares are compared; otherwise the longest one does.
    scale : float or None
        Seconds of the whole width, which an axis below shows; parts are then named inside their
        segments where there is room. None draws no axis, and a legend.
    ink : Ink or None
        None takes the terminal's own palette, which suits its ground.
    airy : bool
        Leave a line between two bars.
    """

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

    Parameters
    ----------
    bar : Bar
    scale : float
        Value of the whole width.
    slots : int
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
