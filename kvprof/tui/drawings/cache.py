"""Bytes of the cache: stored, reserved and at most on the device, against full width; levels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.tui.drawings.bars import short
from kvprof.tui.palette import SERIES
from kvprof.tui.state import CaseState
from kvprof.tui.words import share, size
from kvprof.views.jct_bars import Bar, columns
from kvprof.views.numbers import count

__all__ = ["CacheBars", "Levels"]

_BAR = 40
_LEAST = 8


@dataclass(frozen=True)
class CacheBars:
    """Rich renderable of every method's bytes at its newest context.

    Attributes
    ----------
    cases : sequence of CaseState
    chosen : CaseState or None
    peak : str
        What the most memory is of, as `kvprof.views.jct_data.peak_name` has it.
    """

    cases: Sequence[CaseState]
    chosen: CaseState | None
    peak: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        known = [case for case in self.cases if case.memory.last is not None]
        if not known:
            yield Text("no bytes were measured yet", style="italic")
            return
        highest = max(
            max(m.logical, m.allocated, m.full_width)
            for m in (case.memory.last for case in known)
            if m is not None
        )
        for case in known:
            yield from self._case(case, highest, options.max_width)

    def _case(self, case: CaseState, highest: int, width: int) -> RenderResult:
        newest = case.memory.last
        assert newest is not None
        chosen = case is self.chosen
        head = Text(f"{'›' if chosen else ' '} {short(case.method)}", no_wrap=True)
        head.stylize("bold")
        head.append(f" · at {count(newest.context)} tokens", style="not bold")
        if case.peak is not None:
            head.append(f" · {self.peak} {size(case.peak)}", style="not bold")
        head.apply_meta({"press": f"method({case.method!r})"})
        yield head
        rows = (
            ("logical", newest.logical, "█"),
            ("allocated", newest.allocated, "▒"),
            ("full width", newest.full_width, "░"),
        )
        room = min(_BAR if width < 110 else 2 * _BAR, width - 36)
        for name, nbytes, sign in rows:
            line = Text(f"    {name:<11}", no_wrap=True)
            if room >= _LEAST:
                length = round(nbytes / highest * room) if highest > 0 else 0
                line.append((sign * length).ljust(room))
            line.append(f" {size(nbytes):>10}")
            if name != "full width" and newest.full_width > 0:
                line.append(f"  {share(nbytes / newest.full_width):>6}")
            yield line


@dataclass(frozen=True)
class Levels:
    """Rich renderable of the tokens that lie on each level of a cache.

    Attributes
    ----------
    method : str
    levels : mapping of str to int
    """

    method: str
    levels: Mapping[str, int]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        total = sum(self.levels.values())
        yield Text(f"{self.method}: tokens by level", style="bold", overflow="fold")
        if total <= 0:
            yield Text("no token is on a level yet", style="italic")
            return
        stacked = Text("  ", no_wrap=True)
        signs = {name: index % len(SERIES) for index, name in enumerate(self.levels)}
        width = min(2 * _BAR, options.max_width - 4)
        for name, length in columns(Bar("", self.levels), total, width):
            stacked.append(SERIES[signs[name]] * length)
        yield stacked
        widest = max(len(name) for name in self.levels)
        for name, tokens in self.levels.items():
            line = Text("  ", no_wrap=True, overflow="ellipsis")
            line.append(SERIES[signs[name]])
            line.append(f" {name:<{widest}} {count(tokens):>9} tokens {share(tokens / total):>6}")
            yield line
