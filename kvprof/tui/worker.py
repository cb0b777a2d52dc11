"""The measurement that the view started: a process of its own, whose words and exit code count."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from kvprof.child import Leash, child_environment, module_command
from kvprof.errors import ExitCode, FailedError
from kvprof.scratch import open_temporary

__all__ = ["MESSAGES_NAME", "PROGRAM", "REPORT_NAME", "Worker"]

#: How kvprof is run as a process of its own.
PROGRAM = tuple(module_command("kvprof"))

#: In the run's folder: what the measurement wrote to stdout and to stderr.
REPORT_NAME = "report.txt"
MESSAGES_NAME = "messages.txt"

_LAST_WORDS = 3
_PATIENCE = 5.0  # seconds for a process that was told to end


class Worker:
    """Runs a command in the background.

    Its streams are files, so that it neither waits for a reader nor dies with one, and it has a
    session of its own, so that Ctrl-C and a closed terminal reach only the view.
    """

    def __init__(
        self,
        command: Sequence[str],  # the program and its arguments
        folder: Path,
        *,
        width: int = 100,  # columns of the report that the measurement prints at its end
        #: Replace an earlier run's streams, once the process has measured something; see `keep`.
        force: bool = False,
    ) -> None:
        self.folder = folder  # the run's folder; it exists
        self._force = force
        # Where the streams lie by now, by their names in the folder.
        self._streams: dict[str, Path] = {}
        self._leash = Leash()
        self._command = list(command)
        self._width = width
        self._process: subprocess.Popen[bytes] | None = None
        self._messages: IO[bytes] | None = None
        self._rest = b""
        #: Whether it was asked to end.
        self.stopping = False
        #: Whether it goes on when the view is left.
        self.released = False

    def start(self) -> None:
        """Start the process."""
        environment = child_environment() | {"COLUMNS": str(self._width)}
        try:
            with self._stream(REPORT_NAME) as report, self._stream(MESSAGES_NAME) as messages:
                self._process = self._leash.start(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=report,
                    stderr=messages,
                    env=environment,
                    start_new_session=True,
                )
            self._messages = self._streams[MESSAGES_NAME].open("rb")
        except OSError as problem:
            self.clean()
            raise FailedError(f"cannot start the measurement: {problem}") from problem

    def _stream(self, name: str) -> IO[bytes]:
        path = self.folder / name
        if self._force and os.path.lexists(path):
            self._streams[name], file = open_temporary(self.folder)
            return file
        file = path.open("xb", buffering=0)
        self._streams[name] = path
        return file

    def keep(self) -> None:
        """Put the streams in the place of an earlier run's, where there was one."""
        for name, path in self._streams.items():
            if path.name != name:
                with contextlib.suppress(OSError):  # then the earlier run's stays
                    self._streams[name] = path.replace(self.folder / name)

    def release(self) -> None:
        """Let the process go on when the view is left."""
        self.released = True
        self.keep()
        self._leash.release()

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How the process ended; None while it runs. Ended by a signal: 128 and its number."""
        code = self._process.poll() if self._process is not None else None
        if code is None or code >= 0:
            return code
        return int(ExitCode.INTERRUPTED) if -code == signal.SIGINT else 128 - code

    def new_messages(self) -> list[str]:
        """Return the lines that the process wrote to stderr since the last call."""
        if self._messages is None:
            return []
        self._rest += self._messages.read()
        lines = self._rest.split(b"\n")
        self._rest = b"" if not self.running else lines.pop()
        return [text for line in lines if (text := line.decode("utf-8", "replace").strip())]

    def last_words(self) -> str:
        """Return the last lines that the process wrote to stderr, or how it ended."""
        code = self._process.poll() if self._process is not None else None
        try:
            text = self._streams[MESSAGES_NAME].read_text("utf-8", "replace")
        except (OSError, KeyError):
            text = ""
        lines = [line.strip() for line in text.splitlines() if line.strip()][-_LAST_WORDS:]
        # kvprof says in one line why it stops; what is around it is progress.
        lines = [line for line in lines if line.startswith("kvprof: ")][-1:] or lines
        if code is not None and code < 0:
            lines.append(f"ended by {signal.Signals(-code).name}")
        return " / ".join(lines) or "no message"

    def report(self) -> str:
        """Return what the process wrote to stdout."""
        try:
            return self._streams[REPORT_NAME].read_text("utf-8", "replace")
        except (OSError, KeyError):
            return ""

    def interrupt(self) -> None:
        """Ask the process to end after the step in hand; it keeps what it measured."""
        self.stopping = True
        if self.running and self._process is not None:
            self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """End the process now; its events stay on disk."""
        self.stopping = True
        if self._process is None:
            return
        for stop in (self._process.terminate, self._process.kill):
            if self._process.poll() is not None:
                return
            stop()
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                continue

    def wait(self, seconds: float) -> bool:
        """Wait for the process to end; return whether it did."""
        if self._process is None:
            return True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def clean(self) -> None:
        """Remove what the process wrote to its streams, and the folder where nothing else is."""
        for path in self._streams.values():
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()
