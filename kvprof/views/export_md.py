"""A report as Markdown: tables as tables, plots as text."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from kvprof.printable import printable
from kvprof.views.export_blocks import (
    Bars,
    Block,
    Bullets,
    Drawing,
    Heading,
    Pairs,
    Paragraph,
    Plot,
    Rows,
    Strips,
    blocks_of,
)
from kvprof.views.kinds import report
from kvprof.views.page import render_text

__all__ = ["page_markdown", "to_markdown"]

_WIDTH = 90  # columns of a plot
_SPECIAL = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_{}[]<>#|~&$"})
# What begins a list, a line or a heading, and what a page makes a link of unasked.
_BEGINS = re.compile(r"^(\d*)([-+=.)])(?=[\s=-]|$)")
_ADDRESS = re.compile(r"(?<=\w)(:)(?=//)|(?<=\bwww)(\.)|(@)(?=\w)", re.IGNORECASE)


def to_markdown(result: Mapping[str, Any]) -> str:
    """Return the report of a result as Markdown (GitHub's, which has tables).

    Parameters
    ----------
    result : mapping
        Of any kind.
    """
    return page_markdown(f"kvprof {result['kind']}", report(result, colour=False))


def page_markdown(title: str, content: RenderableType) -> str:
    """Return any report as Markdown, under a title."""
    parts = [f"# {_line(title)}"]
    for block in blocks_of(content):
        parts.append("\n".join(_lines(block)))
    return "\n\n".join(parts) + "\n"


def _lines(block: Block) -> Iterator[str]:
    match block:
        case Heading(text):
            yield f"## {_line(text)}"
        case Paragraph(text, strong):
            # Two blanks keep a line break.
            lines = [_beginning(line) for line in text.splitlines() if line.strip()]
            yield "  \n".join(f"**{line}**" if strong else line for line in lines)
        case Bullets(lines):
            yield from (f"- {_beginning(line)}" for line in lines)
        case Rows(title, columns, words, rows):
            if title:
                yield f"**{_line(title)}**\n"
            yield from _table(columns, words, rows)
        case Pairs(pairs):
            yield from _table(["", ""], [True, True], pairs)
        case Plot(drawn) | Bars(drawn) | Strips(drawn):
            yield from _fenced(render_text(drawn, _WIDTH))
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
