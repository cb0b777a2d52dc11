"""Results as pages; a report that Rich prints is taken apart into blocks for them.

Taking apart is for kinds whose report is not made of blocks yet, and goes with the last of them.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvprof.report import blocks, report_of
from kvprof.report.blocks import Block
from kvprof.report.pages import html, markdown
from kvprof.results import KINDS
from kvprof.views.bars import StackedBars
from kvprof.views.kinds import figure_of, report
from kvprof.views.page import Bullet, Fitted, render_text
from kvprof.views.plot import HeatMap, LinePlot
from kvprof.views.recipe import Beside
from kvprof.views.tables import DataTable

__all__ = ["blocks_of", "page_html", "page_markdown", "to_html", "to_markdown"]

_DRAWN = 100  # columns of what stays a drawing
_ROOMY = 10_000  # columns in which no table leaves anything out


def blocks_of(report: RenderableType) -> list[Block]:
    """Return the blocks of a report, in its order."""
    found: list[Block] = []
    for block in _blocks(report):
        if found and isinstance(block, blocks.Drawing) and isinstance(found[-1], blocks.Drawing):
            found[-1] = blocks.Drawing(f"{found[-1].text}\n{block.text}")
        else:
            found.append(block)
    return found


def _blocks(part: RenderableType) -> Iterator[Block]:
    if isinstance(part, Fitted):
        yield from _blocks(part.content)
    elif isinstance(part, Group):
        listed = [one.text.plain for one in part.renderables if isinstance(one, Bullet)]
        if listed and len(listed) == len(part.renderables):
            yield blocks.Notes(listed)
        else:
            for one in part.renderables:
                yield from _blocks(one)
    elif isinstance(part, Text):
        yield from _text(part)
    elif isinstance(part, str):
        yield blocks.Paragraph(part)
    elif isinstance(part, DataTable):
        heads = [
            blocks.Column(index, column.title, words=column.words)
            for index, column in enumerate(part.columns)
        ]
        yield blocks.Table(heads, part.rows, part.title)
    elif isinstance(part, LinePlot | HeatMap):
        yield part
    elif isinstance(part, StackedBars):
        yield blocks.Bars(part)
    elif isinstance(part, Beside):
        yield blocks.Ratios(part)
    elif isinstance(part, Table) and not part.show_header and len(part.columns) == 2:
        names, values = (list(column.cells) for column in part.columns)
        yield blocks.Facts({str(n): str(v) for n, v in zip(names, values, strict=True)})
    else:
        yield from _wide(part)


def _text(text: Text) -> Iterator[Block]:
    if not text.plain.strip():
        return
    bold = "bold" in str(text.style)
    if bold and text.plain.startswith("\n"):
        yield blocks.Heading(text.plain.strip())
    else:
        yield blocks.Paragraph(text.plain.strip("\n"), "verdict" if bold else "")


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
    yield blocks.Drawing(render_text(part, _DRAWN).rstrip("\n"))


def to_html(result: Mapping[str, Any]) -> str:
    """Return the report of a result as a page: no script, no network, plots as inline SVG."""
    title = f"kvprof {result['kind']}"
    name = result["inputs"].get("model")
    written = f"{result['created']}, kvprof {result['kvprof_version']}"
    headline = f"{title}: {name}" if isinstance(name, str) else title
    if result["kind"] in KINDS:
        return html(title, headline, report_of(result).blocks, written)
    return page_html(title, headline, report(result, colour=False), written, figure_of(result))


def page_html(
    title: str,
    headline: str,
    content: RenderableType,
    written: str,
    figure: Callable[[], Any] | None = None,
) -> str:
    """Return any report as a page; a figure stands behind its first table, where no chart is."""
    found = blocks_of(content)
    first = next((i for i, one in enumerate(found) if isinstance(one, blocks.Table)), None)
    drawn = any(isinstance(one, blocks.Chart) for one in found)
    if figure is not None and first is not None and not drawn:  # without a row nothing is drawn
        found.insert(first + 1, blocks.Ready(figure))
    return html(title, headline, found, written)


def to_markdown(result: Mapping[str, Any]) -> str:
    """Return the report of a result as Markdown (GitHub's, which has tables)."""
    title = f"kvprof {result['kind']}"
    if result["kind"] in KINDS:
        return markdown(title, report_of(result).blocks)
    return page_markdown(title, report(result, colour=False))


def page_markdown(title: str, content: RenderableType) -> str:
    """Return any report as Markdown, under a title."""
    return markdown(title, blocks_of(content))
