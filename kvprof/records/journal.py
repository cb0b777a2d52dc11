"""The record that a run writes while it runs: one event per line, readable at every moment."""

import contextlib
import gzip
import json
import os
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, cast

from kvprof.errors import FailedError, UsageError
from kvprof.records.event_lines import DamagedLineError, EventReader
from kvprof.records.events import Event, RunFinished, event_line
from kvprof.records.files import ensure_writable

__all__ = ["EVENTS_NAME", "Follower", "Journal", "Recording", "find_events", "read_events"]

#: Name of the events inside a run's folder (``--out``); a recording that ships ends in ``.gz``.
EVENTS_NAME = "events.jsonl"
_NO_RECORD = "is no record of a kvprof run"


class Journal:
    """Writes events to a file as they happen; a context manager.

    Every event is one line, handed to the operating system at once: a run that is killed leaves
    whole lines behind. Threads may share a journal.

    Parameters
    ----------
    path : Path
        Its folder is made if need be.
    force : bool
        Replace a file that exists. Who still reads the old one keeps it.

    Attributes
    ----------
    path : Path
    start : float
        `time.monotonic` when the run started: now, or when the journal was entered.

    Raises
    ------
    UsageError
        On entering, when the file exists and `force` is not given.
    FailedError
        On entering, when nothing can be written there.
    """

    def __init__(self, path: Path, *, force: bool = False) -> None:
        self.path = Path(path)
        self.start = time.monotonic()
        self._force = force
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._written = 0
        self._failure: str | None = None

    def __enter__(self) -> "Journal":
        ensure_writable(self.path, self._force)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._force:
                self.path.unlink(missing_ok=True)
            self._file = self.path.open("xb", buffering=0)
        except FileExistsError:
            raise UsageError(f"{self.path} exists; --force overwrites it") from None
        except OSError as problem:
            raise FailedError(f"cannot write {self.path}: {_reason(problem)}") from problem
        self.start = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                with contextlib.suppress(OSError):  # a pipe has nothing to sync
                    os.fsync(file.fileno())
                file.close()

    def now(self) -> float:
        """Seconds since the start of the run; the `time` of an event that happens now."""
        return time.monotonic() - self.start

    def emit(self, event: Event) -> None:
        """Write an event as the next line.

        Raises
        ------
        FailedError
            When it cannot be written (a full disk). The file ends with the last whole line, and
            this and every later event raises the same.
        ValueError
            When a number of the event is not finite, or the journal is closed.
        """
        text = json.dumps(event_line(event), allow_nan=False, ensure_ascii=False)
        line = text.encode("utf-8") + b"\n"
        with self._lock:
            if self._failure is not None:
                raise FailedError(self._failure)
            if self._file is None:
                raise ValueError(f"{self.path}: the journal is not open")
            try:
                self._put(line)
            except OSError as problem:
                self._failure = (
                    f"cannot write {self.path}: {_reason(problem)}; it holds what was measured "
                    "until then"
                )
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), self._written)
                raise FailedError(self._failure) from problem

    def _put(self, line: bytes) -> None:
        assert self._file is not None
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._written += len(line)


@dataclass(frozen=True)
class Recording:
    """What a journal holds.

    Attributes
    ----------
    events : list of Event
        Up to the first line that cannot be read.
    damage : str or None
        What is wrong with that line, in words and with its number.
    finished : bool
        Whether the last event ends the run: otherwise it was killed, or is still running.
    """

    events: list[Event]
    damage: str | None
    finished: bool


def find_events(folder: Path) -> Path | None:
    """Return the events of a run's folder, compressed ones too; None where there are none."""
    for name in (EVENTS_NAME, f"{EVENTS_NAME}.gz"):
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    return None


def read_events(path: Path) -> Recording:
    """Read the events of a run, finished or not, up to the first damage.

    Parameters
    ----------
    path : Path
        A file of events; one that ends in ``.gz`` is decompressed.

    Raises
    ------
    UsageError
        When there is no such file, or it is a folder.
    FailedError
        When it cannot be read, is no record of a run, or is of a newer kvprof.
    """
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name its {EVENTS_NAME}")
    if not path.exists():
        raise UsageError(f"{path}: there is no such file")
    reader = EventReader(str(path))
    events: list[Event] = []
    damage = None
    try:
        for line in _lines(path):
            events.append(reader.read(line))
    except DamagedLineError as wrong:
        damage = str(wrong)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        damage = f"the compressed file is damaged or cut off after line {len(events)}"
    except OSError as problem:
        raise FailedError(f"cannot read {path}: {_reason(problem)}") from problem
    if damage is not None and not events:
        raise FailedError(f"{path} {_NO_RECORD}: {damage}")
    return Recording(events, damage, reader.finished)


class Follower:
    """Reads a journal while another process writes it; each follower for itself.

    Parameters
    ----------
    path : Path
        It may not exist yet. One that ends in ``.gz`` is a finished recording.

    Attributes
    ----------
    damage : str or None
        What is wrong with the line at which reading ended; nothing is read after it.
    finished : bool
        Whether the run's last event was read.
    """

    def __init__(self, path: Path) -> None:
        self._path = Path(path)
        self._reader = EventReader(str(path))
        self._file: IO[bytes] | None = None
        self._rest = b""
        self._any = False
        self.damage: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the run's last event was read."""
        return self._reader.finished

    def poll(self, at_most: int | None = None) -> list[Event]:
        """Return the events of the whole lines that were added since the last call.

        Parameters
        ----------
        at_most : int, optional
            Events to return; the others come with the next call.

        Raises
        ------
        FailedError
            When the file cannot be read, is no record of a run, is of a newer kvprof, or was
            replaced by another run's.
        """
        events: list[Event] = []
        while self.damage is None and (at_most is None or len(events) < at_most):
            try:
                line = self._next()
            except (EOFError, zlib.error, gzip.BadGzipFile):
                self.damage = "the compressed file is damaged or cut off"
                break
            except OSError as problem:
                raise FailedError(f"cannot read {self._path}: {_reason(problem)}") from problem
            if line is None:
                break
            try:
                event = self._reader.read(line)
            except DamagedLineError as wrong:
                self.damage = str(wrong)
                if not self._any:
                    raise FailedError(f"{self._path} {_NO_RECORD}: {wrong}") from None
                break
            self._any = True
            events.append(event)
            if isinstance(event, RunFinished):
                break
        return events

    def close(self) -> None:
        """Give the file back."""
        if self._file is not None:
            self._file.close()

    def _next(self) -> bytes | None:
        """Return the next whole line, or None where none is there yet."""
        if self._file is None:
            if not self._path.is_file():
                return None
            self._file = _opened(self._path)
        line = self._rest + self._file.readline()
        if line.endswith(b"\n"):
            self._rest = b""
            return line
        self._rest = line
        self._check_replaced()
        return None

    def _check_replaced(self) -> None:
        assert self._file is not None
        own = os.fstat(self._file.fileno())
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return  # the run's folder was deleted; what was read stays
        if (own.st_dev, own.st_ino) != (there.st_dev, there.st_ino):
            raise FailedError(f"{self._path} was replaced by another run's; open it again")


def _lines(path: Path) -> Iterator[bytes]:
    with _opened(path) as file:
        yield from file


def _opened(path: Path) -> IO[bytes]:
    file = gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # noqa: SIM115 - the caller closes
    return cast(IO[bytes], file)


def _reason(problem: OSError) -> str:
    return os.strerror(problem.errno) if problem.errno else str(problem)
