"""A report in a terminal, drawn by Rich and plotext at any width, with or without colour."""

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvprof.report.blocks import (
    Bars,
    Block,
    Curves,
    Drawing,
    Facts,
    Heading,
    HeatMap,
    Notes,
    Paragraph,
    Ratios,
    Report,
    Table,
)
from kvprof.views.page import Fitted, bullets, heading, paragraph
from kvprof.views.plot import HeatMap as HeatMapPlot
from kvprof.views.plot import LinePlot
from kvprof.views.tables import Column, DataTable, Ranked, RankedTable, key_values

__all__ = ["renderable"]

_STYLES = {"verdict": "bold", "stopped": "bold red", "caution": "yellow", "aside": "dim"}


def renderable(report: Report, width: int | None = None, colour: bool = True) -> RenderableType:
    """Return a report as Rich prints it."""
    parts = [part for block in report.blocks for part in _drawn(block)]
    return Fitted(Group(*parts), width=width, colour=colour)


def _drawn(block: Block) -> Iterator[RenderableType]:
    match block:
        case Heading(text):
            yield heading(text)
        case Paragraph(text, role):
            yield paragraph(text, _STYLES.get(role, ""))
        case Notes(lines, caution):
            yield bullets(lines, "yellow" if caution else "")
        case Facts(pairs):
            yield key_values(pairs)
        case Table():
            yield _table(block)
        case Curves():
            yield Text()
            yield LinePlot(**vars(block))
        case HeatMap():
            yield Text()
            yield HeatMapPlot(**vars(block))
        case Bars(drawn) | Ratios(drawn):
            yield Text()
            yield drawn
        case Drawing(text):
            yield Text(text)


def _table(table: Table) -> Any:
    heads = [Column(one.title, words=one.words) for one in table.columns]
    rows = table.cells()
    if not any(one.goes for one in table.columns):
        return DataTable(heads, rows, title=table.title)
    ranked = [
        Ranked(head, [row[index] for row in rows], one.goes)
        for index, (head, one) in enumerate(zip(heads, table.columns, strict=True))
    ]
    return RankedTable(ranked)
