"""The table of parts: every part's time and share for each method, then the request's own times."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.tui.drawings.bars import PROVISIONAL, short
from kvprof.tui.palette import Ink, fill
from kvprof.tui.state import CaseState
from kvprof.tui.words import difference, duration, share

__all__ = ["PartTable", "table_width"]

_FIGURE = 18  # columns of a method: time, share, and what keeps them apart
_TOTALS: tuple[tuple[str, Callable[[CaseState], float | None]], ...] = (
    ("first token", CaseState.ttft_seconds),
    ("between tokens", CaseState.tbt_seconds),
    ("completion", lambda case: case.jct_seconds() if case.finished is not None else None),
)


@dataclass(frozen=True)
class PartTable:
    """Rich renderable of the parts of every method that there is room for.

    Attributes
    ----------
    cases : sequence of CaseState
    rows : sequence of (part, seconds per case)
    baseline : CaseState or None
        What the request's times are held against.
    chosen : CaseState or None
    ink : Ink
    small : float or None
        Parts below this share of every shown method stand in one row; None keeps all apart.
    """

    cases: Sequence[CaseState]
    rows: Sequence[tuple[str, list[float | None]]]
    baseline: CaseState | None
    chosen: CaseState | None
    ink: Ink
    small: float | None = 0.01

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.cases:
            return
        label = _label([part for part, _ in self.rows])
        columns = self._columns(max(1, (options.max_width - label) // _FIGURE))
        head = Text(f"{'  part':<{label}}", style="bold", no_wrap=True)
        for index in columns:
            case = self.cases[index]
            sign = PROVISIONAL * case.provisional
            name = short(case.method, _FIGURE - 2 - len(sign))
            head.append(f"{sign + name:>{_FIGURE}}")
        yield head
        small: list[list[float | None]] = []
        for part, seconds in self.rows:
            if (
                self.small is not None
                and part != "unattributed"
                and all(
                    (seconds[index] or 0.0) <= self.small * self.cases[index].jct_seconds()
                    for index in columns
                )
            ):
                small.append(seconds)
                continue
            line = Text(no_wrap=True)
            line.append(fill(part), style=self.ink.part(part))
            line.append(f" {part:<{label - 2}}")
            yield self._figures(line, columns, seconds)
        if small:
            sums = [sum(column[i] or 0.0 for column in small) for i in range(len(self.cases))]
            word = f"{len(small)} small part{'s' if len(small) > 1 else ''}"
            line = Text(f"▸ {word:<{label - 2}}", no_wrap=True)
            line.apply_meta({"press": "small_parts()"})
            yield self._figures(line, columns, sums)
        yield Text("  " + "─" * (label + _FIGURE * len(columns) - 2), style="dim", no_wrap=True)
        for name, figure in _TOTALS:
            yield self._total(name, figure, label, columns)
        if left := len(self.cases) - len(columns):
            yield Text(f"  {left} more: m shows the next method", style="dim", overflow="fold")

    def _columns(self, fitting: int) -> list[int]:
        """Return which cases to show: all, or the baseline, the chosen one and its neighbours."""
        everything = range(len(self.cases))
        if fitting >= len(self.cases):
            return list(everything)

        def rank(index: int) -> tuple[bool, bool, int]:
            case = self.cases[index]
            return case is not self.chosen, case is not self.baseline, index

        return sorted(sorted(everything, key=rank)[:fitting])

    def _figures(
        self,
        line: Text,
        columns: Sequence[int],
        seconds: Sequence[float | None],
    ) -> Text:
        for index in columns:
            value = seconds[index]
            found = None if value is None else self.cases[index].account.share(value)
            part = "" if found is None else share(found)
            line.append(f"{duration(value):>{_FIGURE - 7}}")
            line.append(f"{part:>7}")
        return line

    def _total(
        self,
        name: str,
        figure: Callable[[CaseState], float | None],
        label: int,
        columns: Sequence[int],
    ) -> Text:
        line = Text(f"  {name:<{label - 2}}", no_wrap=True)
        base = self.baseline
        done = base is not None and base.finished is not None
        against = figure(base) if base is not None and done else None
        for index in columns:
            case = self.cases[index]
            value = figure(case)
            # Until it has finished: of one run of the request, or of the short pass.
            known = "bold" if case.finished is not None else ""
            line.append(f"{duration(value):>{_FIGURE - 7}}", style=known)
            if case is base or case.finished is None or value is None or against is None:
                line.append(" " * 7)
                continue
            words = difference(value, against)
            better = value < against
            line.append(f"{words:>7}", style=self.ink.good() if better else self.ink.bad())
        return line


def table_width(parts: Sequence[str], cases: int) -> int:
    """Return the columns of a table of these parts for so many cases."""
    return _label(parts) + _FIGURE * cases


def _label(parts: Sequence[str]) -> int:
    return 2 + max(len(part) for part in ("between tokens", *parts))
