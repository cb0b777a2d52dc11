"""The record that a run writes while it runs: one event per line, readable at every moment."""

import contextlib
import errno
import gzip
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from kvprof.errors import FailedError, KvprofError, UsageError
from kvprof.records.event_lines import DamagedLineError, EventReader
from kvprof.records.events import (
    CaseStarted,
    Event,
    LoadRateStarted,
    LoadServer,
    RunFinished,
    RunStarted,
    TelemetrySample,
    Warned,
    event_line,
)
from kvprof.records.files import EVENTS_NAME, ensure_writable, write_bytes_atomic
from kvprof.records.result import to_plain
from kvprof.scratch import open_temporary

__all__ = [
    "EVENTS_NAME",
    "Follower",
    "Journal",
    "Recording",
    "find_events",
    "is_result_of",
    "read_events",
    "remove_other_events",
]

_NO_RECORD = "is not a recorded kvprof run"
# Until one of another kind, nothing was measured.
_UNMEASURED = (
    RunStarted,
    RunFinished,
    CaseStarted,
    LoadServer,
    LoadRateStarted,
    TelemetrySample,
    Warned,
)


class Journal:
    """Keeps events as they happen, in a file and in memory; a context manager.

    Every event is one line, handed to the operating system at once: a run that is killed leaves
    whole lines behind. A file that cannot be written (a full disk) ends no measurement: the rest of
    the events stay in memory, and are tried again at the end. Threads may share a journal.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        #: Replace a file that exists, as soon as something was measured: until then, and if nothing
        #: ever is, it stays. Who still reads the old one keeps it.
        force: bool = False,
        #: Told once, in a line, when events are no longer written.
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        #: Its folder is made if need be. None keeps the events in memory alone.
        self.path = Path(path) if path is not None else None
        #: `time.monotonic` when the run started: now, or when the journal was entered.
        self.start = time.monotonic()
        #: Why the file does not hold every event; final once the journal was left.
        self.failure: str | None = None
        self.measured = False  # whether there was an event of something that was measured
        self._force = force
        self._warn = warn
        self._lock = threading.Lock()
        self._entered = False
        self._lines: list[bytes] = []
        self._file: IO[bytes] | None = None
        self._lies_at: Path | None = None  # where the file lies by now
        self._own_folder = False
        self._carrying = False
        self._unmeasured = 0  # lines before the first of something that was measured
        self._kept = 0  # lines in it
        self._bytes = 0

    def __enter__(self) -> "Journal":
        if self.path is not None:
            ensure_writable(self.path, self._force)
            self._own_folder = not self.path.parent.exists()
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if self._force and os.path.lexists(self.path):
                    self._lies_at, self._file = open_temporary(self.path.parent)
                else:
                    self._lies_at, self._file = self.path, self.path.open("xb", buffering=0)
            except FileExistsError:
                raise UsageError(f"{self.path} exists; --force overwrites it") from None
            except OSError as problem:
                raise FailedError(f"cannot write {self.path}: {_reason(problem)}") from problem
        self._entered = True
        self.start = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._entered = False
            if self._file is None or self.path is None:
                return
            kept = self.measured and not self._carrying
            if self._lines and (self._lies_at == self.path or kept):
                self._finish(self.path)
            empty = not self._lines or (self.failure is not None and self._holds_nothing())
            if self._lies_at != self.path or empty:
                self._remove()
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()

    def now(self) -> float:
        """Seconds since the start of the run; the `time` of an event that happens now."""
        return time.monotonic() - self.start

    def emit(self, event: Event) -> None:
        """Keep an event, and write it as the next line."""
        text = json.dumps(event_line(event), allow_nan=False, ensure_ascii=False)
        failed = None
        with self._lock:
            if not self._entered:
                raise ValueError(f"{self.path}: the journal is not open")
            self._lines.append(text.encode("utf-8") + b"\n")
            if not self.measured and not isinstance(event, _UNMEASURED):
                self.measured, self._unmeasured = True, len(self._lines) - 1
            if self._file is None or self.failure is not None or self.path is None:
                return
            try:
                self._write_on()
            except OSError as problem:
                self.failure = failed = self._failing(problem)
        if failed is not None:
            self._warn(f"{failed}; the measurement continues")

    @contextmanager
    def carrying_over(self) -> Iterator[None]:
        """Keep the file that is replaced until the body's events are all in the new one, on disk.

        For what an earlier run measured: a process that is killed on the way leaves the old file,
        and none that holds a part of it.
        """
        self._carrying = True
        yield
        failed = None
        with self._lock:
            self._carrying = False
            if self._file is None or self.failure is not None:
                return
            try:
                _to_disk(self._file)
                self._write_on()
            except OSError as problem:
                self.failure = failed = self._failing(problem)
        if failed is not None:
            self._warn(f"{failed}; the measurement continues")

    def recording(self) -> "Recording":
        """Return every event, whether or not it could be written."""
        with self._lock:
            return _recording(str(self.path or "the record"), self._lines)

    def _write_on(self) -> None:
        """Write the lines that are not in the file; what was begun and failed is taken back."""
        assert self._file is not None
        assert self._lies_at is not None
        assert self.path is not None
        try:
            while self._kept < len(self._lines):
                line = self._lines[self._kept]
                rest = memoryview(line)
                while rest:
                    rest = rest[self._file.write(rest) :]
                self._kept += 1
                self._bytes += len(line)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._bytes)
                self._file.seek(self._bytes)
            raise
        if self.measured and self._lies_at != self.path and not self._carrying:
            self._lies_at.replace(self.path)
            self._lies_at = self.path

    def _holds_nothing(self) -> bool:
        """Whether no line of what was measured is in the file."""
        return not self.measured or self._kept <= self._unmeasured

    def _failing(self, problem: OSError) -> str:
        if self._lies_at != self.path:
            holds = "an earlier run"
        elif self._holds_nothing():
            holds = "no measurement"
        else:
            holds = "the measurements until then"
        return f"cannot write {self.path}: {_reason(problem)}; it contains {holds}"

    def _finish(self, path: Path) -> None:
        """Write what is left, and find out whether the file is there and holds it."""
        assert self._file is not None
        self.failure = None
        try:
            self._write_on()
            _to_disk(self._file)
            if not _is_at(self._file, path):
                if os.path.lexists(path):
                    self.failure = f"{path} was replaced by another run's while this one measured"
                    return
                # Its folder was removed.
                write_bytes_atomic(path, b"".join(self._lines))
        except OSError as problem:
            self.failure = self._failing(problem)
        except KvprofError as problem:
            self.failure = str(problem)

    def _remove(self) -> None:
        """Leave nothing behind of a run that measured nothing."""
        assert self._file is not None
        assert self._lies_at is not None
        with contextlib.suppress(OSError):
            if _is_at(self._file, self._lies_at):
                self._lies_at.unlink()
            if self._own_folder:
                self._lies_at.parent.rmdir()


@dataclass(frozen=True)
class Recording:
    """What a journal holds."""

    events: list[Event]  # up to the first line that cannot be read
    damage: str | None  # what is wrong with that line, in words and with its number
    #: Whether the last event ends the run: otherwise it was killed, or is still running.
    finished: bool


def find_events(folder: Path) -> Path | None:
    """Return the events of a run's folder, compressed ones too; None where there are none."""
    for name in (EVENTS_NAME, f"{EVENTS_NAME}.gz"):
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    return None


def is_result_of(result: Mapping[str, Any], events: Path) -> bool:
    """Whether a result was made of these events, rather than of another run into the same folder.

    No clock is asked which of two runs is the newer one: it may have been set back between them.
    """
    follower = Follower(events)
    try:
        first = follower.poll(at_most=1)
    finally:
        follower.close()
    if not first or not isinstance(first[0], RunStarted):
        return False
    started = first[0]
    return (result["kind"], result["created"], result["inputs"]) == (
        started.kind,
        started.created,
        to_plain(started.inputs),
    )


def remove_other_events(folder: Path, result: Mapping[str, Any]) -> None:
    """Remove the events of an earlier run from a folder that holds a result by now."""
    while (found := find_events(folder)) is not None:
        try:
            if is_result_of(result, found):
                return
        except FailedError:
            pass  # damaged: no run's that anybody will read
        try:
            found.unlink()
        except OSError as problem:
            raise FailedError(
                f"cannot remove {found} of an earlier run: {_reason(problem)}"
            ) from problem


def read_events(path: Path) -> Recording:
    """Read the events of a run, finished or not, up to the first damage."""
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name its {EVENTS_NAME}")
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    try:
        return _recording(str(path), _lines(path))
    except OSError as problem:
        raise FailedError(f"cannot read {path}: {_reason(problem)}") from problem


def _recording(name: str, lines: Iterable[bytes]) -> Recording:
    reader = EventReader(name)
    events: list[Event] = []
    damage = None
    try:
        for line in lines:
            events.append(reader.read(line))
    except DamagedLineError as wrong:
        damage = str(wrong)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        damage = f"the compressed file is damaged or cut off after line {len(events)}"
    if damage is not None and not events:
        raise FailedError(f"{name} {_NO_RECORD}: {damage}")
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
        """Return the events of the whole lines that were added since the last call."""
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
        # Where the run's folder was deleted, what was read stays.
        if self._path.exists() and not _is_at(self._file, self._path):
            raise FailedError(f"{self._path} was replaced by another run; open it again")


def _to_disk(file: IO[bytes]) -> None:
    try:
        os.fsync(file.fileno())
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):  # nothing to sync there
            raise


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is the one that lies at a path now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _lines(path: Path) -> Iterator[bytes]:
    with _opened(path) as file:
        yield from file


def _opened(path: Path) -> IO[bytes]:
    file = gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # noqa: SIM115 - the caller closes
    return cast(IO[bytes], file)


def _reason(problem: OSError) -> str:
    return os.strerror(problem.errno) if problem.errno else str(problem)
