"""Tables that stay readable in a narrow terminal."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kvprof.views.numbers import MISSING, interval, number

__all__ = ["Column", "DataTable", "claims_table", "key_values"]

_GAP = 2  # columns between two columns
_LEAST_WORDS = 10  # columns that running text needs to be read


@dataclass(frozen=True)
class Column:
    """One column of a `DataTable`.

    Attributes
    ----------
    title : str
        Wraps at blanks.
    words : bool
        Text that is left-aligned and may wrap; otherwise a figure, which never does.
    """

    title: str
    words: bool = False

    def least_width(self, cells: Sequence[str]) -> int:
        """Columns below which the title or a cell would break inside a word or a figure."""
        pieces = self.title.split()
        for cell in cells:
            pieces += cell.split() if self.words else [cell]
        longest = max((len(piece) for piece in pieces), default=1)
        widest = max((len(cell) for cell in (self.title, *cells)), default=1)
        return max(longest, min(_LEAST_WORDS, widest)) if self.words else longest


class DataTable:
    """A table whose figures are never cut: where it is too wide, each row becomes a block.

    Parameters
    ----------
    columns : sequence of Column
        The first one names the row.
    rows : sequence of sequence of str
        As they are to be printed, each as long as `columns`.
    title : str
        Above the table; empty for none.
    lines : bool
        Draw a line between rows, for cells that wrap.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[str]],
        *,
        title: str = "",
        lines: bool = False,
    ) -> None:
        self.columns = columns
        self.rows = rows
        self.title = title
        self._lines = lines

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
            show_lines=self._lines,
        )
        for column, size in zip(self.columns, sizes, strict=True):
            justify: Literal["left", "right"] = "left" if column.words else "right"
            table.add_column(Text(column.title), justify=justify, overflow="fold", width=size)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
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
                yield Text(f"{column.title}: {cell}", overflow="fold")


def key_values(pairs: Mapping[str, str]) -> RenderableType:
    """Return names and what they stand for, the names aligned."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for key, value in pairs.items():
        grid.add_row(Text(key), Text(value))
    return grid


def claims_table(claims: Sequence[Mapping[str, Any]], *, title: str = "Claims") -> DataTable:
    """Return a table of claims, each with what was measured and the verdict in words.

    Parameters
    ----------
    claims : sequence of mapping
        ``data.claims[]``: ``claim`` (str), ``threshold`` and ``measured`` (float, str or None),
        ``verdict`` (str), and optionally ``interval`` (lower and upper end of `measured`).
    title : str
        Above the table.
    """
    rows = [
        (
            str(claim["claim"]),
            _figure(claim["threshold"]),
            _figure(claim["measured"], claim.get("interval")),
            str(claim["verdict"]),
        )
        for claim in claims
    ]
    columns = (
        Column("claim", words=True),
        Column("threshold", words=True),
        Column("measured", words=True),
        Column("verdict", words=True),
    )
    return DataTable(columns, rows, title=title, lines=True)


def _figure(value: float | str | None, bounds: Sequence[float] | None = None) -> str:
    if value is None:
        return MISSING
    if isinstance(value, str):
        return value if bounds is None else f"{value} [{number(bounds[0])}, {number(bounds[1])}]"
    return interval(value, bounds)
