"""The table of a request's parts, as the report and the live view draw it: parts by cases."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor, log10

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.records.cases import Account, part_times
from kvprof.records.parts import UNATTRIBUTED, part_of
from kvprof.views.bars import Ink
from kvprof.views.numbers import MISSING, percent, unit_of
from kvprof.views.tables import Cell, Column, LineTable, natural_width

__all__ = ["PartColumns", "PartTable"]


@dataclass(frozen=True)
class PartColumns:
    """A case in the table: a column of times, one of shares and, against another, of differences.

    Attributes
    ----------
    name : str
        Above them.
    account : Account
    base : Account or None
        What its parts are held against; None for no column of differences.
    by_difference : frozenset of str
        Parts that are differences of two measured times.
    totals : sequence of (time, difference)
        Of the rows below the parts.
    """

    name: str  # above them
    account: Account
    #: What its parts are held against; None for no column of differences.
    base: Account | None = None
    by_difference: frozenset[str] = frozenset()  # parts that are differences of two measured times
    totals: Sequence[tuple[Cell, Cell]] = ()  # of the rows below the parts

    def columns(self) -> list[Column]:
        """Return what it takes of the table."""
        differs = [Column("differs")] if self.base is not None else []
        return [Column(self.name), Column("share"), *differs]


@dataclass(frozen=True)
class PartTable:
    """Rich renderable: parts as rows, cases side by side, all times in one unit."""

    cases: Sequence[PartColumns]
    #: The parts as rows; None takes the order of `kvprof.records.parts`.
    order: Sequence[str] | None = None
    #: Draws every part's fill in front of its name, as bars have it; None draws none.
    ink: Ink | None = None
    #: Parts of at most this share of every shown case stand together in one row, which can be
    #: clicked; None keeps all apart.
    small: float | None = None
    totals: Sequence[str] = ()  # names of rows below the parts
    #: Which cases to show, the first of them first; what does not fit is left out. None shows all:
    #: those that do not fit follow below.
    wanted: Sequence[int] | None = None
    left_out: str = ""  # said behind the number of the cases that were left out

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not (self.cases and (self._times or self.totals)):
            yield Text("No part was timed yet.", style="dim", overflow="fold")
            return
        chunks = self._chunks(options.max_width)
        for index, shown in enumerate(chunks):
            if index:
                yield Text()
            yield self._table(shown)
        if any(self.cases[index].by_difference for shown in chunks for index in shown):
            yield Text("* a difference of two measured times", style="dim", overflow="fold")
        if left := len(self.cases) - sum(map(len, chunks)):
            yield Text(f"{left} more{self.left_out}", style="dim", overflow="fold")

    @property
    def width(self) -> int:
        """Columns that it takes with all cases side by side."""
        return self._label_width + sum(map(self._width, range(len(self.cases))))

    @cached_property
    def _times(self) -> dict[str, list[float | None]]:
        """Seconds of each part, case by case, in the order of the rows."""
        times = dict(part_times(case.account for case in self.cases))
        return {part: times[part] for part in self.order or times}

    @cached_property
    def _unit(self) -> tuple[float, str, int]:
        """What times are multiplied with, their unit, and decimals.

        The largest figure has four digits or more; fixed, so that the points stand below each
        other and a difference is as precise as its terms.
        """
        known = [value for row in self._times.values() for value in row if value is not None]
        factor, unit = unit_of(known)
        most = max((abs(value) * factor for value in known), default=0.0)
        return factor, unit, min(6, max(0, 3 - floor(log10(most)))) if most > 0 else 0

    @property
    def _head(self) -> str:
        return f"part ({self._unit[1]})"

    @property
    def _indent(self) -> str:
        return "  " if self.ink is not None else ""

    @property
    def _label_width(self) -> int:
        return len(self._indent) + max(map(len, (self._head, *self.totals, *self._times)))

    def _width(self, index: int) -> int:
        rows = [self._figures(index, part, row[index]) for part, row in self._times.items()]
        rows += [self._total(index, number) for number in range(len(self.totals))]
        return natural_width(self.cases[index].columns(), rows)

    def _chunks(self, room: int) -> list[list[int]]:
        """Return which cases stand side by side: one list that fits, or all, list below list."""
        chunks: list[list[int]] = [[]]
        used = self._label_width
        for index in self.wanted if self.wanted is not None else range(len(self.cases)):
            used += (width := self._width(index))
            if chunks[-1] and used > room:
                if self.wanted is not None:
                    break
                chunks.append([])
                used = self._label_width + width
            chunks[-1].append(index)
        return [sorted(chunk) for chunk in chunks]

    def _table(self, shown: Sequence[int]) -> LineTable:
        columns = [Column(self._indent + self._head, words=True)]
        for index in shown:
            columns += self.cases[index].columns()
        rows: list[Sequence[Cell]] = []
        small: list[list[float | None]] = []
        for part, times in self._times.items():
            if self._is_small(part, times, shown):
                small.append(times)
                continue
            row = [cell for index in shown for cell in self._figures(index, part, times[index])]
            # A part that none of these cases has is of others.
            if any(cell != MISSING for cell in row):
                rows.append([self._label(part), *row])
        if small:
            rows.append(self._small_parts_row(small, shown))
        if self.totals:
            rows.append([""] * len(columns))
        for number, name in enumerate(self.totals):
            cells = (cell for index in shown for cell in self._total(index, number))
            rows.append([self._indent + name, *cells])
        return LineTable(columns, rows)

    def _label(self, part: str) -> Cell:
        if self.ink is None:
            return part
        return Text.assemble((part_of(part).fill, self.ink.part(part)), f" {part}")

    def _figures(self, index: int, part: str, seconds: float | None) -> list[Cell]:
        """Return a part's cells of a case: its time, its share and by how much it differs."""
        case = self.cases[index]
        share = None if seconds is None else case.account.share(seconds)
        star = "*" * (part in case.by_difference)
        cells: list[Cell] = [self._time(seconds) + star, percent(share).replace("-", "−")]
        if case.base is not None:
            own = case.base.by_part().get(part)
            known = seconds is not None or own is not None
            cells.append(self._time((seconds or 0.0) - (own or 0.0), "+") if known else MISSING)
        return cells

    def _time(self, seconds: float | None, plus: str = "") -> str:
        if seconds is None:
            return MISSING
        factor, _, decimals = self._unit
        text = f"{abs(seconds) * factor:,.{decimals}f}"
        if not any(digit in text for digit in "123456789"):
            return text
        return f"{'−' if seconds < 0 else plus}{text}"

    def _total(self, index: int, number: int) -> list[Cell]:
        case = self.cases[index]
        return [*case.totals[number], *([""] if case.base is not None else [])]

    def _is_small(self, part: str, times: Sequence[float | None], shown: Sequence[int]) -> bool:
        if self.small is None or part == UNATTRIBUTED:
            return False
        known = [index for index in shown if times[index] is not None]
        return bool(known) and all(
            (times[index] or 0.0) <= self.small * self.cases[index].account.seconds
            for index in known
        )

    def _small_parts_row(
        self, small: Sequence[Sequence[float | None]], shown: Sequence[int]
    ) -> Sequence[Cell]:
        """Return the row of small parts, which a click on it takes apart."""
        row: list[Cell] = [f"▸ {len(small)} small part{'s' if len(small) > 1 else ''}"]
        for index in shown:
            row += self._figures(index, "", sum(times[index] or 0.0 for times in small))
        pressed: list[Text] = [Text(cell) if isinstance(cell, str) else cell for cell in row]
        for cell in pressed:
            cell.apply_meta({"press": "small_parts()"})
        return pressed
