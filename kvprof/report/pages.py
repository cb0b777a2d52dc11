"""A report as one HTML page that needs nothing else, and as Markdown (GitHub's, with tables)."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from kvprof.printable import printable
from kvprof.report.blocks import (
    Bars,
    Block,
    Chart,
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
from kvprof.report.figure import drawn
from kvprof.report.terminal import renderable
from kvprof.views.figure import figure_bytes
from kvprof.views.page import render_text

__all__ = ["html", "markdown"]

# --- HTML: plots are drawn inside it.

_PROLOGUE = re.compile(r"^.*?(?=<svg)", re.DOTALL)


def html(title: str, headline: str, blocks: Sequence[Block], written: str) -> str:
    """Return blocks as a page: no script, no network, plots as inline SVG."""
    shown = []
    for block in blocks:
        figure = _inline(drawn(block)) if isinstance(block, Chart) else ""
        shown.append((type(block).__name__, block, figure))
    text: str = _template().render(title=title, headline=headline, blocks=shown, written=written)
    return text


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader

    known = Environment(loader=PackageLoader("kvprof.report", "."), autoescape=True)
    known.filters["printable"] = printable
    return known.get_template("page.html")


def _inline(figure: Any) -> Any:
    """Return a figure's SVG element alone: no XML declaration, no document type."""
    from markupsafe import Markup

    return Markup(_PROLOGUE.sub("", figure_bytes(figure, "svg").decode("utf-8"), count=1).strip())


# --- Markdown: plots are text.

_WIDTH = 90  # columns of a plot
_SPECIAL = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_{}[]<>#|~&$"})
# What begins a list, a line or a heading, and what a page makes a link of unasked.
_BEGINS = re.compile(r"^(\d*)([-+=.)])(?=[\s=-]|$)")
_ADDRESS = re.compile(r"(?<=\w)(:)(?=//)|(?<=\bwww)(\.)|(@)(?=\w)", re.IGNORECASE)


def markdown(title: str, blocks: Sequence[Block]) -> str:
    """Return blocks as Markdown (GitHub's, which has tables), under a title."""
    parts = [f"# {_line(title)}"]
    for block in blocks:
        parts.append("\n".join(_lines(block)))
    return "\n\n".join(parts) + "\n"


def _lines(block: Block) -> Iterator[str]:
    match block:
        case Heading(text):
            yield f"## {_line(text)}"
        case Paragraph(text):
            # Two blanks keep a line break.
            lines = [_beginning(line) for line in text.splitlines() if line.strip()]
            yield "  \n".join(f"**{line}**" if block.strong else line for line in lines)
        case Notes(lines):
            yield from (f"- {_beginning(line)}" for line in lines)
        case Table(columns, _, title):
            if title:
                yield f"**{_line(title)}**\n"
            words = [column.words for column in columns]
            yield from _table([column.title for column in columns], words, block.cells())
        case Facts(pairs):
            yield from _table(["", ""], [True, True], list(pairs.items()))
        case Curves() | HeatMap() | Bars() | Ratios():
            yield from _fenced(render_text(renderable(Report([block])), _WIDTH))
        case Drawing(text):
            yield from _fenced(text)


def _table(
    columns: Sequence[str], words: Sequence[bool], rows: Sequence[Sequence[str]]
) -> Iterator[str]:
    yield _row(columns)
    yield _row([":--" if word else "--:" for word in words], escape=False)
    yield from (_row(row) for row in rows)


def _row(cells: Sequence[str], *, escape: bool = True) -> str:
    shown = [_line(cell) if escape else cell for cell in cells]
    return f"| {' | '.join(shown)} |"


def _fenced(text: str) -> Iterator[str]:
    # No text of ours holds more than three backticks in a row, but a model's may.
    fence = "```"
    while fence in text:
        fence += "`"
    yield f"{fence}text"
    yield printable(text).strip("\n")
    yield fence


def _beginning(text: str) -> str:
    """Return text that stands at the beginning of a line."""
    return _BEGINS.sub(r"\1\\\2", _line(text))


def _line(text: str) -> str:
    """Return text that stays on its line, and what it is."""
    signs = " ".join(printable(text).split()).translate(_SPECIAL)
    return _ADDRESS.sub(r"\\\g<0>", signs)
