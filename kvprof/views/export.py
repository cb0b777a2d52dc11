"""A report taken apart into headings, paragraphs, tables and plots, for pages that are no terminal.

Only what `kvprof.views` itself lays out is known; anything else stays a drawing in text.
"""

import html
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvprof.printable import printable
from kvprof.views.bars import StackedBars
from kvprof.views.figure import curves_figure, figure_bytes
from kvprof.views.jct_figure import bars_figure, plain_counts
from kvprof.views.kinds import figure_of, report
from kvprof.views.page import Bullet, Fitted, render_text
from kvprof.views.plot import LinePlot
from kvprof.views.recipe import Beside, beside_figure
from kvprof.views.tables import DataTable

__all__ = [
    "Bars",
    "Block",
    "Bullets",
    "Drawing",
    "Heading",
    "Pairs",
    "Paragraph",
    "Plot",
    "Ratios",
    "Rows",
    "blocks_of",
    "page_html",
    "page_markdown",
    "to_html",
    "to_markdown",
]

# --- A report taken apart into headings, paragraphs, tables and plots, for pages that are no
# terminal.


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
class Ratios:
    """What was measured beside what was published."""

    beside: Beside


@dataclass(frozen=True)
class Drawing:
    """What only a terminal's characters can show."""

    text: str


Block = Heading | Paragraph | Bullets | Rows | Pairs | Plot | Bars | Ratios | Drawing


def blocks_of(report: RenderableType) -> list[Block]:
    """Return the blocks of a report, in its order."""
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
            [[str(cell) for cell in row] for row in part.rows],
        )
    elif isinstance(part, LinePlot):
        yield Plot(part)
    elif isinstance(part, StackedBars):
        yield Bars(part)
    elif isinstance(part, Beside):
        yield Ratios(part)
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


# --- A report as one HTML page that needs nothing else: its plots are drawn inside it.


# As wide as a window of 1,280 pixels; whatever is wider scrolls in itself, and on paper, which does
# not scroll, it is set smaller and breaks its words. Paper is light whatever the window is.
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --ground: #fff; --dim: #5c5c5c; --line: #888; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --ground: #121212; --dim: #a6a6a6; --line: #777; }
  /* Figures are drawn on white: light and dark change places, and hues stay. */
  svg { filter: invert(1) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--ground); overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p, ul { max-width: 62rem; }
table { border-collapse: collapse; margin: .8rem 0; display: block; overflow-x: auto; }
caption { text-align: left; font-weight: 600; }
th, td { padding: .15rem .7rem .15rem 0; text-align: right; font-variant-numeric: tabular-nums;
  vertical-align: top; white-space: nowrap; overflow-wrap: normal; }
th { white-space: normal; vertical-align: bottom; }
th.w, td.w { text-align: left; white-space: normal; min-width: 6rem; }
thead th { border-bottom: 1px solid var(--line); }
.plain td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.plain td:first-child { color: var(--dim); padding-right: 1.2rem; overflow-wrap: normal; }
figure { margin: 1rem 0; } figcaption { font-weight: 600; }
svg { max-width: 100%; height: auto; background: #fff; }
pre { overflow-x: auto; line-height: 1.2; } .strong { font-weight: 600; }
footer { margin-top: 3rem; color: var(--dim); font-size: .85rem; }
@page { margin: 12mm; }
@media print {
  :root { color-scheme: light; }
  body { max-width: none; margin: 0; padding: 0; font-size: 9pt; }
  table { display: table; overflow: visible; font-size: 7pt; max-width: 100%; }
  /* Cells break between words: "anywhere" would let a narrow column cut them. */
  th, td { padding: .1rem .35rem .1rem 0; white-space: normal; overflow-wrap: break-word; }
  th.w, td.w { min-width: 0; }
  thead { display: table-header-group; }
  tr, figure { break-inside: avoid; } h2 { break-after: avoid; }
  pre { white-space: pre-wrap; font-size: 6pt; overflow: visible; }
}
"""
_PROLOGUE = re.compile(r"^.*?(?=<svg)", re.DOTALL)


def to_html(result: Mapping[str, Any]) -> str:
    """Return the report of a result as a page: no script, no network, plots as inline SVG."""
    title = f"kvprof {result['kind']}"
    name = result["inputs"].get("model")
    written = f"{result['created']}, kvprof {result['kvprof_version']}"
    headline = f"{title}: {name}" if isinstance(name, str) else title
    return page_html(title, headline, report(result, colour=False), written, figure_of(result))


def page_html(
    title: str,
    headline: str,
    content: RenderableType,
    written: str,
    figure: Callable[[], Any] | None = None,
) -> str:
    """Return any report as a page; see `to_html`."""
    blocks = blocks_of(content)
    body = [list(_html(block)) for block in blocks]
    if figure is not None and not any(isinstance(one, Plot | Bars | Ratios) for one in blocks):
        first = next((i for i, one in enumerate(blocks) if isinstance(one, Rows)), None)
        if first is not None:  # without a row there is nothing to draw
            body[first].append(_figure(figure(), ""))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_escaped(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{_escaped(headline)}</h1>",
            *(piece for pieces in body for piece in pieces),
            f"<footer>{_escaped(written)}</footer>",
            "</body></html>\n",
        ]
    )


def _escaped(text: str) -> str:
    """Return text as a page shows it, whatever it holds."""
    return html.escape(printable(text))


def _html(block: Block) -> Iterator[str]:
    match block:
        case Heading(text):
            yield f"<h2>{_escaped(text)}</h2>"
        case Paragraph(text, strong):
            kind = ' class="strong"' if strong else ""
            yield f"<p{kind}>{_escaped(text).replace(chr(10), '<br>')}</p>"
        case Bullets(lines):
            yield f"<ul>{''.join(f'<li>{_escaped(line)}</li>' for line in lines)}</ul>"
        case Rows(title, columns, words, rows):
            caption = f"<caption>{_escaped(title)}</caption>" if title else ""
            head = "".join(_cells("th", columns, words))
            lines = "\n".join(f"<tr>{''.join(_cells('td', row, words))}</tr>" for row in rows)
            yield f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>\n{lines}</tbody></table>"
        case Pairs(pairs):
            lines = "\n".join(
                f"<tr><td>{_escaped(key)}</td><td>{_escaped(value)}</td></tr>"
                for key, value in pairs
            )
            yield f'<table class="plain">{lines}</table>'
        case Plot(plot):
            drawn = curves_figure(
                plot.series,
                title="",
                x_label=plot.x_label,
                y_label=plot.y_label,
                log_x=plot.log_x,
                log_y=plot.log_y,
            )
            if _counts(plot):
                plain_counts(drawn.axes[0])
            yield _figure(drawn, plot.title)
        case Bars(bars):
            yield _figure(bars_figure(bars), bars.title)
        case Ratios(beside):
            yield _figure(beside_figure(beside), beside.title)
        case Drawing(text):
            yield f"<pre>{_escaped(text)}</pre>"


def _counts(plot: LinePlot) -> bool:
    """Tell whether a linear x axis counts something, of which there are no halves."""
    every = [x for one in plot.series for x in one.x]
    return not plot.log_x and bool(every) and all(float(x).is_integer() for x in every)


def _cells(tag: str, cells: Sequence[str], words: Sequence[bool]) -> Iterator[str]:
    for cell, word in zip(cells, words, strict=True):
        yield f"<{tag}{' class=w' if word else ''}>{_escaped(cell)}</{tag}>"


def _figure(drawn: Any, title: str) -> str:
    svg = figure_bytes(drawn, "svg").decode("utf-8")
    # A page takes the element alone: no XML declaration, no document type.
    inline = _PROLOGUE.sub("", svg, count=1)
    caption = f"<figcaption>{_escaped(title)}</figcaption>" if title else ""
    return f"<figure>{caption}{inline.strip()}</figure>"


# --- A report as Markdown: tables as tables, plots as text.


_WIDTH = 90  # columns of a plot
_SPECIAL = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_{}[]<>#|~&$"})
# What begins a list, a line or a heading, and what a page makes a link of unasked.
_BEGINS = re.compile(r"^(\d*)([-+=.)])(?=[\s=-]|$)")
_ADDRESS = re.compile(r"(?<=\w)(:)(?=//)|(?<=\bwww)(\.)|(@)(?=\w)", re.IGNORECASE)


def to_markdown(result: Mapping[str, Any]) -> str:
    """Return the report of a result as Markdown (GitHub's, which has tables)."""
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
        case Plot(drawn) | Bars(drawn) | Ratios(drawn):
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
