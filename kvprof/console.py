"""The two streams: reports go to stdout, everything else (progress, warnings, errors) to stderr.

This is the only module that owns them. Importing it costs Rich alone.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["Tracker", "error", "note", "report_console", "status", "track", "warn"]

MIN_WIDTH = 40
_PIPED_WIDTH = 100
_BETWEEN_LINES = 15.0  # seconds


def report_console() -> Console:
    """Return the console for reports on stdout.

    Without a terminal the width is ``COLUMNS`` or 100, so that a piped report does not depend on
    where it was run; colour follows ``NO_COLOR`` and whether stdout is a terminal.
    """
    stated = os.environ.get("COLUMNS", "")
    terminal = sys.stdout is not None and sys.stdout.isatty()
    piped = None if terminal else int(stated) if stated.isdecimal() else _PIPED_WIDTH
    console = Console(width=piped, highlight=False, soft_wrap=False, emoji=False)
    if console.width < MIN_WIDTH:
        console.width = MIN_WIDTH
    return console


def _stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


def note(message: str) -> None:
    """Say something in passing on stderr."""
    _stderr().print(message, style="dim", markup=False)


def warn(message: str) -> None:
    """Warn on stderr in one line; the caller also puts the warning into the result."""
    _stderr().print(f"warning: {message}", style="yellow", markup=False)


def error(message: str) -> None:
    """Say in one line on stderr why the command stops."""
    line = " ".join(message.split())
    _stderr().print(f"kvprof: {line}", style="red", markup=False)


class Tracker:
    """Handle that a long computation advances; see `track`. This one shows nothing."""

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


class _Lines(Tracker):
    """In a log: a line now and then, and none where the whole takes less."""

    def __init__(self, description: str, total: int) -> None:
        self._words, self._done, self._total = description, 0, total
        self._start = self._told = time.monotonic()

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._told >= _BETWEEN_LINES and self._done < self._total:
            self._told = now
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
    with console.status(f"{description} …"):
        yield


@contextmanager
def track(description: str, total: int, *, quiet: bool = False) -> Iterator[Tracker]:
    """Show a progress bar on stderr while the body runs; without a terminal a line now and then.

    Parameters
    ----------
    description : str
        What is being done.
    total : int
        Number of units the body will `advance`.
    quiet : bool
        Show nothing.
    """
    if quiet:
        yield Tracker()
        return
    console = _stderr()
    if not console.is_terminal:
        note(f"{description} …")
        yield _Lines(description, total)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        yield _Bar(progress, description, total)
