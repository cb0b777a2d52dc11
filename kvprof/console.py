"""The two streams: reports go to stdout, everything else (progress, warnings, errors) to stderr.

This is the only module that owns them. Importing it costs Rich alone.
"""

import os
import sys
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
    """Handle that a long computation advances; see `track`."""

    def __init__(self, progress: Progress | None, task: int | None) -> None:
        self._progress = progress
        self._task = task

    def advance(self, amount: int = 1) -> None:
        """Count `amount` more units as done."""
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, amount)  # type: ignore[arg-type]

    def describe(self, text: str) -> None:
        """Change the words in front of the bar."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=text)  # type: ignore[arg-type]


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
    """Show a progress bar on stderr while the body runs; one plain line without a terminal.

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
        yield Tracker(None, None)
        return
    console = _stderr()
    if not console.is_terminal:
        note(f"{description} …")
        yield Tracker(None, None)
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
        yield Tracker(progress, progress.add_task(description, total=total))
