"""What a report is laid out with: headings, paragraphs, and one that fits a width and a terminal.

Every renderable here asks the console for its width and its encoding when it is drawn, so the same
report reflows from 120 to 60 columns.
"""

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from kvprof.analysis.stats import LEAST_SEQUENCES
from kvprof.console import PrintableConsole
from kvprof.records.result import RECORD_DAMAGED, RECORD_ENDS
from kvprof.results.base import ends, tidy_csv
from kvprof.views.tables import key_values

__all__ = [
    "NO_INTERVAL",
    "Bullet",
    "Fitted",
    "bullets",
    "capitalised",
    "ends",
    "flow",
    "framed",
    "heading",
    "how_to_read",
    "listed",
    "paragraph",
    "render_text",
    "tidy_csv",
    "to_ascii",
    "warned",
    "weights_row",
    "wrap",
]

NO_INTERVAL = f"{LEAST_SEQUENCES} sequences or more give an interval."


# One character for one, so that nothing shifts. Braille and shades are replaced where they are
# drawn, because there the replacement has to keep a meaning.
_ASCII = str.maketrans(
    "–—−×·…µ§≤≥≈∞σΣδε₁√┌┐└┘├┤┬┴┼─│━╭╮╰╯╴╶╷╵",
    "---x..uS<>~8sSde1/+++++++++-|=++++--||",
)


def to_ascii(text: str) -> str:
    """Replace what a terminal without Unicode cannot show, character for character."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def heading(text: str) -> RenderableType:
    """Return a section's heading with an empty line before it."""
    return Text(f"\n{text}", style="bold")


def capitalised(text: str) -> str:
    """Return a text with a large first letter, as a sentence begins."""
    return text[:1].upper() + text[1:]


def listed(names: Sequence[str]) -> str:
    """Return names, one at least, as a sentence has them: ``a``, ``a and b``, ``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def paragraph(text: str, style: str = "") -> Text:
    """Return a paragraph that wraps at words; `text` is taken literally (no markup)."""
    return Text(text, style=style, overflow="fold")


def bullets(lines: Iterable[str], style: str = "") -> RenderableType:
    """Return each line as a paragraph of its own, the wrapped rest indented."""
    return Group(*(Bullet(Text(line, style=style, overflow="fold")) for line in lines))


def flow(entries: Iterable[Text], width: int, *, gap: int = 3) -> list[Text]:
    """Put entries next to each other, as many as fit a line; none is broken unless it must be."""
    lines: list[Text] = []
    for entry in entries:
        if lines and lines[-1].cell_len + gap + entry.cell_len <= width:
            lines[-1].append(" " * gap)
            lines[-1].append_text(entry)
        else:
            lines += wrap(entry, width)
    return lines


def wrap(text: Text, width: int) -> list[Text]:
    """Break a text at words into lines of at most `width` columns, without trailing blanks."""
    lines = list(text.wrap(_WRAPPER, width, overflow="fold")) if text.plain else []
    for line in lines:
        line.rstrip()
    return lines


class Bullet:
    """A line that starts with a dash and hangs the rest below its text."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self.text.wrap(console, max(1, options.max_width - 2), overflow="fold")
        for index, line in enumerate(lines):
            yield Text("- " if index == 0 else "  ") + line


# --- The frame that every kind's report stands in.


def _incomplete(reason: str | None) -> str:
    named = (one for one in (RECORD_DAMAGED, RECORD_ENDS) if (reason or "").startswith(one))
    told = next(named, "the run stopped before its end")
    return f"INCOMPLETE: {told}; figures cover the completed measurements."


def weights_row(described: Mapping[str, Any]) -> dict[str, str]:
    """Return the row that says which GGUF file a model was read from, and how it is rounded."""
    gguf = described.get("gguf")
    return {} if not gguf else {"weights": f"{gguf['file']}, {gguf['quantisation']}"}


def framed(
    result: Mapping[str, Any],
    body: Iterable[RenderableType],
    *,
    answer: str = "",
    cautions: Iterable[str] = (),
    notes: Iterable[str] = (),
    measured_with: Mapping[str, Any] | None = None,
    why: str = "",
    spaced: bool = True,
    repeated: bool = True,
    width: int | None = None,
    colour: bool = True,
) -> "Fitted":
    """Return a report: its head, what a kind has of its own, and its tail.

    From top to bottom: that the run stopped, where it did; the answer; what limits it; the body;
    how to read it; what it was measured with, and when; warnings; and again that the run stopped.
    """
    incomplete = _incomplete(result.get("incomplete_reason"))
    stopped = [] if result["complete"] else [paragraph(incomplete, "bold red")]
    parts: list[RenderableType] = [*stopped]
    if stopped:
        parts += [paragraph(why)] * bool(why) + [Text()] * spaced
    if answer:
        parts.append(paragraph(answer, "bold"))
    parts += [paragraph(line, "yellow") for line in cautions]
    parts += body
    parts += how_to_read(notes)
    if measured_with is not None:
        known = {**measured_with, "written": result.get("created")}
        pairs = {name: str(value) for name, value in known.items() if value is not None}
        parts += [heading("Measured with"), key_values(pairs)]
    parts += warned(result)
    if stopped and repeated:
        parts += [Text(), *stopped]
    return Fitted(Group(*parts), width=width, colour=colour)


def how_to_read(notes: Iterable[str]) -> list[RenderableType]:
    """Return the part that says what the words of a report mean; nothing without a note."""
    lines = list(notes)
    return [heading("Notes"), bullets(lines)] if lines else []


def warned(result: Mapping[str, Any]) -> list[RenderableType]:
    """Return a result's warnings as a report's part; nothing without one."""
    warnings = result["warnings"]
    return [heading("Warnings"), bullets(warnings, "yellow")] if warnings else []


# Text.wrap asks a console for nothing but the styles that a markup names.
_WRAPPER = Console(file=io.StringIO(), width=80, force_terminal=False, _environ={})


class Fitted:
    """Draw something at most `width` columns wide, in colour or without any escape code."""

    def __init__(
        self, content: RenderableType, *, width: int | None = None, colour: bool = True
    ) -> None:
        self.content = content
        self._width = width
        self._colour = colour

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self._width or options.max_width, options.max_width)
        segments: Iterable[Segment] = console.render(self.content, options.update(width=width))
        if not self._colour:
            segments = Segment.strip_styles(segments)
        if options.ascii_only:
            segments = (Segment(to_ascii(s.text), s.style, s.control) for s in segments)
        yield from segments


def render_text(content: RenderableType, width: int = 100, *, colour: bool = False) -> str:
    """Return what `content` looks like as text, for a file or a test."""
    console = PrintableConsole(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as capture:
        console.print(Fitted(content, width=width, colour=colour))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"
