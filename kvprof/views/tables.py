"""Tables that stay readable in a narrow terminal."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kvprof.views.numbers import MISSING

__all__ = [
    "Cell",
    "Column",
    "DataTable",
    "LineTable",
    "Ranked",
    "RankedTable",
    "SplitTable",
    "columns",
    "key_values",
    "least_width",
    "natural_width",
]

#: What stands in a table: words as they are, or with styles and what a click does.
Cell = str | Text

_GAP = 2  # columns between two columns
_LEAST_WORDS = 10  # columns that running text needs to be read


@dataclass(frozen=True)
class Column:
    """One column of a `DataTable`."""

    title: str
    words: bool = False

    def least_width(self, cells: Sequence[Cell]) -> int:
        """Columns below which the title or a cell would break inside a word or a figure."""
        pieces = self.title.split()
        for cell in cells:
            pieces += str(cell).split() if self.words else [str(cell)]
        longest = max((len(piece) for piece in pieces), default=1)
        widest = max((len(cell) for cell in (self.title, *cells)), default=1)
        return max(longest, min(_LEAST_WORDS, widest)) if self.words else longest


def columns(*words: str, figures: Iterable[str] = ()) -> list[Column]:
    """Return columns by their titles: those of words, then those of figures."""
    return [*(Column(title, words=True) for title in words), *map(Column, figures)]


def least_width(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> int:
    """Return the columns below which a `DataTable` with these cells of each column breaks."""
    least = [one.least_width(own) for one, own in zip(columns, cells, strict=True)]
    return sum(least) + _GAP * (len(least) - 1)


def natural_width(columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> int:
    """Return what columns take beside others, with the gaps before them, where nothing wraps."""
    cells = list(zip(*rows, strict=True)) or [()] * len(columns)
    return sum(
        _GAP + max(len(text) for text in (column.title, *own))
        for column, own in zip(columns, cells, strict=True)
    )


class DataTable:
    """A table whose figures are never cut: where it is too wide, each row becomes a block."""

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[Cell]],
        *,
        title: str = "",
    ) -> None:
        self.columns = columns
        self.rows = rows
        self.title = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="bold", overflow="fold")
        sizes = self._widths(options.max_width)
        if sizes is None:
            yield from self._blocks()
            return
        table = Table(
            box=box.SIMPLE_HEAD,
            padding=(0, _GAP - 1, 0, 0),  # the box adds one column itself
            pad_edge=False,
            show_edge=False,
        )
        for column, size in zip(self.columns, sizes, strict=True):
            justify: Literal["left", "right"] = "left" if column.words else "right"
            table.add_column(Text(column.title), justify=justify, overflow="fold", width=size)
        for row in self.rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
        yield table

    def _widths(self, room: int) -> list[int] | None:
        """Return the columns' widths in `room`, or None when a figure would have to be cut.

        Rich's own collapsing shrinks a wide column of figures before one of words.
        """
        cells = [[row[index] for row in self.rows] for index in range(len(self.columns))]
        least = [c.least_width(own) for c, own in zip(self.columns, cells, strict=True)]
        sizes = [
            max(len(text) for text in (column.title, *own))
            for column, own in zip(self.columns, cells, strict=True)
        ]
        room -= _GAP * (len(sizes) - 1)
        if sum(least) > room:
            return None
        while sum(sizes) > room:
            slack = [i for i, size in enumerate(sizes) if size > least[i]]
            sizes[max(slack, key=sizes.__getitem__)] -= 1
        return sizes

    def _blocks(self) -> Iterator[Text]:
        for index, row in enumerate(self.rows):
            if index:
                yield Text()
            for column, cell in zip(self.columns, row, strict=True):
                yield Text.assemble(f"{column.title}: ", cell, overflow="fold")


class LineTable(DataTable):
    """A `DataTable` in which nothing wraps, drawn as lines of text, which the live view takes."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = [column.title for column in self.columns]
        sizes = [max(map(len, column)) for column in zip(head, *self.rows, strict=True)]
        whole = sum(sizes) + _GAP * (len(sizes) - 1)
        if whole > options.max_width:
            yield from self._blocks()
            return
        yield self._line(head, sizes, "bold")
        yield Text("─" * whole, no_wrap=True)
        for row in self.rows:
            yield self._line(row, sizes)

    def _line(self, row: Sequence[Cell], sizes: Sequence[int], style: str = "") -> Text:
        line = Text(style=style, no_wrap=True)
        for index, (column, cell, size) in enumerate(zip(self.columns, row, sizes, strict=True)):
            line.append(" " * (_GAP * (index > 0)))
            blank = " " * (size - len(cell))
            line.append("" if column.words else blank)
            line.append_text(Text(cell) if isinstance(cell, str) else cell)
            line.append(blank if column.words else "")
        return line


class SplitTable:
    """One table where it fits; else as many as it takes, each with the names of the rows."""

    def __init__(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str]], groups: Sequence[int]
    ) -> None:
        self._columns = columns
        self._rows = rows
        self._groups = groups

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for index, part in enumerate(self._parts(options.max_width)):
            if index:
                yield Text()
            yield DataTable(
                [self._columns[index] for index in part],
                [[row[index] for index in part] for row in self._rows],
            )

    def _parts(self, room: int) -> list[list[int]]:
        """Put groups of columns next to each other as long as they fit."""
        parts: list[list[int]] = [[0]]
        start = 1
        for size in self._groups:
            group = list(range(start, start + size))
            start += size
            wider = [*parts[-1], *group]
            least = least_width(
                [self._columns[index] for index in wider],
                [[row[index] for row in self._rows] for index in wider],
            )
            if least <= room or len(parts[-1]) == 1:
                parts[-1] = wider
            else:
                parts.append([0, *group])
        return parts


@dataclass(frozen=True)
class Ranked:
    """A column, what it holds, and how early it goes when room is short (0: never)."""

    column: Column
    cells: Sequence[str]
    goes: int = 0


def _least_ranked(ranked: Sequence[Ranked]) -> int:
    return least_width([one.column for one in ranked], [one.cells for one in ranked])


class RankedTable:
    """A table that leaves out its least important columns where it is too wide, and says which."""

    def __init__(self, ranked: Sequence[Ranked]) -> None:
        # A column without a single figure tells nothing.
        self._ranked = [
            one for one in ranked if not one.goes or any(cell != MISSING for cell in one.cells)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = list(self._ranked)
        dropped: list[str] = []
        while any(one.goes for one in shown) and _least_ranked(shown) > options.max_width:
            least = max(shown, key=lambda one: one.goes)
            shown.remove(least)
            dropped.append(least.column.title)
        yield DataTable(
            [one.column for one in shown],
            list(zip(*(one.cells for one in shown), strict=True)),
        )
        if dropped:
            names = ", ".join(name for name in reversed(dropped))
            said = f"Columns hidden at this width: {names} (see --csv)"
            yield Text(said, style="dim", overflow="fold")


def key_values(pairs: Mapping[str, str]) -> RenderableType:
    """Return names and what they stand for, the names aligned."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for key, value in pairs.items():
        grid.add_row(Text(key), Text(value))
    return grid
