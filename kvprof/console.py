"""The two streams: reports go to stdout, everything else (progress, warnings, errors) to stderr.

This is the only module that owns them. Importing it costs Rich alone.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from kvprof.printable import printable
from kvprof.progress import nested

__all__ = [
    "PrintableConsole",
    "Tracker",
    "error",
    "note",
    "report_console",
    "status",
    "track",
    "warn",
]

MIN_WIDTH = 40
_PIPED_WIDTH = 100
_BETWEEN_LINES = 15.0  # seconds
_LONGEST_WORD = 256  # letters: a path, not a name or a number of thousands


class PrintableConsole(Console):
    """A console that shows what others wrote and never obeys it.

    No text holds markup, and whatever is written passes `printable`, also to a file or a pipe,
    behind which a terminal may be; only Rich's own codes reach it.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Return the segments of what is drawn, each of them printable."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            clean = text if control else printable(text)
            yield segment if clean is text else Segment(clean, style)

    def out(self, *objects: Any, sep: str = " ", end: str = "\n", **style: Any) -> None:
        """Write text without wrapping."""
        if self.is_terminal:
            super().out(*objects, sep=sep, end=end, **style)
        else:
            self.file.write(printable(sep.join(map(str, objects)) + end))


def report_console() -> PrintableConsole:
    """Return the console for reports on stdout.

    Without a terminal the width is ``COLUMNS`` or 100, so that a piped report does not depend on
    where it was run; colour follows ``NO_COLOR`` and whether stdout is a terminal.
    """
    stated = os.environ.get("COLUMNS", "")
    console = PrintableConsole(soft_wrap=False)
    if not console.is_terminal:
        console.width = int(stated) if stated.isdecimal() else _PIPED_WIDTH
    if console.width < MIN_WIDTH:
        console.width = MIN_WIDTH
    return console


def _stderr() -> PrintableConsole:
    return PrintableConsole(stderr=True, soft_wrap=True)


def note(message: str) -> None:
    """Say something in passing on stderr."""
    _stderr().print(message, style="dim")


def warn(message: str) -> None:
    """Warn on stderr in one line; the caller also puts the warning into the result."""
    _stderr().print(f"warning: {_one_line(message)}", style="yellow")


def error(message: str) -> None:
    """Say in one line on stderr why the command stops."""
    _stderr().print(f"kvprof: {_one_line(message)}", style="red")


def _one_line(message: str) -> str:
    """Return a message without line breaks, and of what nobody reads to its end both ends."""
    return " ".join(
        word if len(word) <= _LONGEST_WORD else f"{word[:200]}…{word[-20:]}"
        for word in message.split()
    )


class Tracker:
    """Handle that a long computation advances; see `track`."""

    def advance(self, amount: int = 1) -> None:
        """Count `amount` more units as done."""

    def describe(self, text: str) -> None:
        """Change the words in front of the count."""


class _Bar(Tracker):
    """On a terminal."""

    def __init__(self, progress: Progress, description: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(description, total=total)

    def advance(self, amount: int = 1) -> None:
        self._progress.advance(self._task, amount)

    def describe(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def remove(self) -> None:
        """Show it no more."""
        self._progress.remove_task(self._task)


class _Lines(Tracker):
    """In a log: a line now and then, and none where the whole takes less."""

    def __init__(self, description: str, total: int) -> None:
        self._words, self._done, self._total = description, 0, total
        self._start = self._last_line = time.monotonic()

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._last_line >= _BETWEEN_LINES and self._done < self._total:
            self._last_line = now
            note(f"{self._words}: {self._done} of {self._total} after {now - self._start:.0f} s")

    def describe(self, text: str) -> None:
        self._words = text


@contextmanager
def status(description: str) -> Iterator[None]:
    """Say on stderr what is going on while the body runs; nothing is left of it afterwards."""
    console = _stderr()
    if not console.is_terminal:
        yield
        return
    # Rich reads markup in a status that is no Text, whatever the console says.
    with console.status(Text(f"{description} …")):
        yield


@contextmanager
def track(description: str, total: int) -> Iterator[Tracker]:
    """Show a progress bar on stderr while the body runs; without a terminal a line now and then."""
    console = _stderr()
    if not console.is_terminal:
        note(f"{description} …")
        with _showing(track):
            yield _Lines(description, total)
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:

        @contextmanager
        def bar_below(description: str, total: int) -> Iterator[Tracker]:
            # In the same display: two would draw over each other.
            below = _Bar(progress, description, total)
            try:
                yield below
            finally:
                below.remove()

        with _showing(bar_below):
            yield _Bar(progress, description, total)


@contextmanager
def _showing(stages: Callable[..., Any]) -> Iterator[None]:
    """Have `stages` show what begins by itself while the body runs."""
    before = nested.set(stages)
    try:
        yield
    finally:
        nested.reset(before)
