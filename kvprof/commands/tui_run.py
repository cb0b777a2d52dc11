"""A measurement that ``kvprof tui`` starts: its command, its folder, its end."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from kvprof import console
from kvprof.child import child_environment
from kvprof.commands.run_source import runs_folder
from kvprof.errors import ExitCode, FailedError, UsageError
from kvprof.leash import Leash
from kvprof.records.files import ensure_writable
from kvprof.records.journal import EVENTS_NAME
from kvprof.tui.worker import MESSAGES_NAME, PROGRAM, REPORT_NAME, Worker

if TYPE_CHECKING:
    from kvprof.tui.session import Session

__all__ = ["Watched", "missing_terminal", "run_plainly", "watched_command"]

_PATIENCE = 10.0  # seconds for the step in hand, once nobody is watching


@dataclass
class Watched:
    """A command that writes events, and the folder where it writes them.

    Attributes
    ----------
    arguments : tuple of str
        After ``kvprof``, with ``--out``.
    folder : Path
    own : bool
        Whether the folder is kvprof's choice; the user's own is never removed.
    worker : Worker or None
        Once it was started.
    old : tuple or None
        What tells the events that were there before from those of this run.
    """

    arguments: tuple[str, ...]
    folder: Path
    own: bool
    worker: Worker | None = None
    old: tuple[int, int, int] | None = None

    def start(self) -> "Session":
        """Start the command and return the session that watches it."""
        from kvprof.tui.session import Session
        from kvprof.tui.sources import Live

        record = self.folder / EVENTS_NAME
        self.old = _identity(record)
        self._make_folder()
        self.worker = Worker(
            [*PROGRAM, *self.arguments],
            self.folder,
            width=get_terminal_size().columns,
            force="--force" in self.arguments,
        )
        self.worker.start()
        # With --force the old run's events lie there until the new one replaces them.
        source = Live(record, wanted=self._recorded)
        return Session(self.folder.name, source, record=record, worker=self.worker)

    def finish(self) -> int | None:
        """Say what became of the measurement, and return its exit code; None while it goes on."""
        worker = self.worker
        assert worker is not None
        if worker.running and worker.released:
            console.note(f"it measures on; kvprof tui {self.folder} watches it again")
            return None
        if worker.running:
            console.note("waiting for the step in hand …")
            worker.interrupt()
            if not worker.wait(_PATIENCE):
                worker.end()
        code = worker.exit_code or 0
        if report := worker.report():
            console.report_console().out(report, end="", highlight=False)
        if code and code != ExitCode.INTERRUPTED:
            words = worker.last_words().removeprefix("kvprof: ")
            console.error(f"{words} (the measurement ended with exit code {code})")
        if self._recorded():
            worker.keep()
            console.note(f"recorded; look again with: kvprof show {self.folder}")
        else:
            worker.clean()
        return code

    def _recorded(self) -> bool:
        """Whether this run's events lie in the folder."""
        return _identity(self.folder / EVENTS_NAME) not in (None, self.old)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise FailedError(f"cannot make {self.folder}: {problem.strerror}") from problem


def watched_command(words: Sequence[str]) -> Watched:
    """Return what is to be run, with a folder of its own where none is named.

    Raises
    ------
    UsageError
        When the command writes no events, or would overwrite some.
    """
    arguments = tuple(words[1:] if words[0] == "kvprof" else words)
    if not arguments or arguments[0] != "bench" or "--jct" not in arguments:
        raise UsageError(
            f"kvprof tui watches kvprof bench --jct, not {' '.join(words)!r}; a recorded run is "
            "named by its folder"
        )
    named = _option(arguments, "--out")
    if named is not None:
        for name in (EVENTS_NAME, REPORT_NAME, MESSAGES_NAME):
            ensure_writable(Path(named) / name, "--force" in arguments)
        return Watched(arguments, Path(named), own=False)
    folder = _new_folder()
    return Watched((*arguments, "--out", str(folder)), folder, own=True)


def missing_terminal() -> str | None:
    """Return in words why there can be no live view; None when there can."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            if stream is None or not stream.isatty():
                return f"{name} is no terminal"
        except ValueError:  # closed
            return f"{name} is closed"
    if os.environ.get("TERM") == "dumb":
        return "this terminal (TERM=dumb) cannot draw"
    try:
        if os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
            return "kvprof runs in the background of its terminal"
    except OSError as problem:
        return f"the terminal does not answer ({problem.strerror})"
    return None


def run_plainly(watched: Watched) -> int:
    """Run the command on these streams, without a view, and return its exit code."""
    command = [*PROGRAM, *watched.arguments]
    leash = Leash()
    with leash.start(command, stdin=subprocess.DEVNULL, env=child_environment()) as process:
        while True:
            try:
                code = process.wait()
            except KeyboardInterrupt as told:
                # The terminal's Ctrl-C it got as well. It keeps what it measured.
                if told.args:
                    process.terminate()
                continue
            break
    leash.close()
    if (watched.folder / EVENTS_NAME).exists():
        console.note(f"recorded in {watched.folder}")
    return code if code >= 0 else 128 - code


def _new_folder() -> Path:
    """Return a folder that does not exist yet, among the user's data."""
    runs = runs_folder()
    stem = datetime.now().strftime("jct-%Y%m%d-%H%M%S")
    number, folder = 1, runs / stem
    while folder.exists():
        number += 1
        folder = runs / f"{stem}-{number}"
    return folder


def _option(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of an option, written in either way; None when it is not there."""
    for index, word in enumerate(arguments):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name and index + 1 < len(arguments):
            return arguments[index + 1]
    return None


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Return what tells a file from the one that was there before under its name."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
