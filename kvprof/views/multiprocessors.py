"""What each multiprocessor did during a step: a line per SM, as high as work was running on it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.views.numbers import percent

__all__ = ["Timelines", "at_once", "busy_shares", "longest"]

_BARS = " ▁▂▃▄▅▆▇█"
_ASCII_BARS = " .:-=+*#@"
_LEAST_SLOTS = 8
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
        bars = _ASCII_BARS if options.ascii_only else _BARS
        for row in rows:
            share = percent(row.done / own if own > 0 else None)
            if slots < _LEAST_SLOTS:
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
