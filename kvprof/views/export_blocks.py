"""A report taken apart into headings, paragraphs, tables and plots, for pages that are no terminal.

Only what `kvprof.views` itself lays out is known; anything else stays a drawing in text.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvprof.views.jct_bars import StackedBars
from kvprof.views.page import Bullet, Fitted, render_text
from kvprof.views.plot import LinePlot
from kvprof.views.recipe_plot import Beside
from kvprof.views.tables import DataTable

__all__ = [
    "Bars", "Block", "Bullets", "Drawing", "Heading", "Pairs", "Paragraph", "Plot", "Rows",
    "Strips", "blocks_of",
]  # fmt: skip

_DRAWN = 100  # columns of what stays a drawing
_ROOMY = 10_000  # columns in which no table leaves anything out


@dataclass(frozen=True)
class Heading:
    """A section's heading."""

    text: str


@dataclass(frozen=True)
class Paragraph:
    """Running text; `strong` is what a reader should see first."""

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Bullets:
    """Lines of a list."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Rows:
    """A table; `words` says which columns hold text rather than figures."""

    title: str
    columns: Sequence[str]
    words: Sequence[bool]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Pairs:
    """Names and what they stand for."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Plot:
    """Curves."""

    plot: LinePlot


@dataclass(frozen=True)
class Bars:
    """Stacked bars."""

    bars: StackedBars


@dataclass(frozen=True)
class Strips:
    """What was measured beside what was published."""

    beside: Beside


@dataclass(frozen=True)
class Drawing:
    """What only a terminal's characters can show."""

    text: str


Block = Heading | Paragraph | Bullets | Rows | Pairs | Plot | Bars | Strips | Drawing


def blocks_of(report: RenderableType) -> list[Block]:
    """Return the blocks of a report, in its order.

    Parameters
    ----------
    report : RenderableType
        From `kvprof.views.kinds.report`.
    """
    found: list[Block] = []
    for block in _blocks(report):
        if found and isinstance(block, Drawing) and isinstance(found[-1], Drawing):
            found[-1] = Drawing(f"{found[-1].text}\n{block.text}")
        else:
            found.append(block)
    return found


def _blocks(part: RenderableType) -> Iterator[Block]:
    if isinstance(part, Fitted):
        yield from _blocks(part.content)
    elif isinstance(part, Group):
        listed = [one.text.plain for one in part.renderables if isinstance(one, Bullet)]
        if listed and len(listed) == len(part.renderables):
            yield Bullets(listed)
        else:
            for one in part.renderables:
                yield from _blocks(one)
    elif isinstance(part, Text):
        yield from _text(part)
    elif isinstance(part, str):
        yield Paragraph(part)
    elif isinstance(part, DataTable):
        yield Rows(
            part.title,
            [column.title for column in part.columns],
            [column.words for column in part.columns],
            part.rows,
        )
    elif isinstance(part, LinePlot):
        yield Plot(part)
    elif isinstance(part, StackedBars):
        yield Bars(part)
    elif isinstance(part, Beside):
        yield Strips(part)
    elif isinstance(part, Table) and not part.show_header and len(part.columns) == 2:
        names, values = (list(column.cells) for column in part.columns)
        yield Pairs([(str(n), str(v)) for n, v in zip(names, values, strict=True)])
    else:
        yield from _wide(part)


def _text(text: Text) -> Iterator[Block]:
    if not text.plain.strip():
        return
    bold = "bold" in str(text.style)
    if bold and text.plain.startswith("\n"):
        yield Heading(text.plain.strip())
    else:
        yield Paragraph(text.plain.strip("\n"), strong=bold)


def _wide(part: RenderableType) -> Iterator[Block]:
    """Yield the tables of what lays out tables by the room it has; of anything else a drawing."""
    draw = getattr(part, "__rich_console__", None)
    if draw is not None:
        console = Console(file=io.StringIO(), width=_ROOMY, force_terminal=False, _environ={})
        made = list(draw(console, console.options))
        if any(isinstance(one, DataTable) for one in made):
            for one in made:
                yield from _blocks(one)
            return
    yield Drawing(render_text(part, _DRAWN).rstrip("\n"))
