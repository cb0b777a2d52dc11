"""Cells: run as processes, and their results kept."""

import contextlib
import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvprof.child import Leash, child_environment, module_command
from kvprof.environment import collect_environment
from kvprof.errors import ExitCode, KvprofError
from kvprof.records.files import read_result, write_result
from kvprof.records.schema import validate_result

__all__ = [
    "CellCommand",
    "CellRun",
    "CellStore",
    "Outcome",
    "Pool",
    "Runner",
    "cell_key",
    "code_version",
    "one_by_one",
    "run_child",
]

# --- Results of cells on disk, each under its key.


def code_version() -> str:
    """Return kvprof's version, with its commit where it runs from a checkout."""
    own = collect_environment()["kvprof"]
    return f"{own['version']}+{own['git']['commit']}" if own["git"] else str(own["version"])


def cell_key(words: Sequence[str], version: str) -> str:
    """Return what a cell's result is known by: its command line and `code_version`."""
    return hashlib.sha256(json.dumps([version, *words]).encode()).hexdigest()[:24]


class CellStore:
    """Results of cells in a folder; what cannot be written is kept for this run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, dict[str, Any]] = {}

    def get(self, key: str) -> dict[str, Any] | None:
        """Return a result, or None; a damaged file is measured again."""
        if key in self._known:
            return self._known[key]
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            result = read_result(path)
        except KvprofError:
            return None
        self._known[key] = result
        return result

    def put(self, key: str, result: dict[str, Any]) -> None:
        """Keep a result."""
        self._known[key] = result
        if result["complete"]:
            write_result(self._path(key), result, force=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


# --- A cell is run as a process of its own: what it does to memory or crashes with ends with
# it.


_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5.0
_LAST = 300  # characters of what a process said before it died


@dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    result: dict[str, Any] | None  # valid, if it is there
    code: int  # of the process
    message: str = ""  # why there is no result, in one line

    @property
    def lacking(self) -> bool:
        """Whether the machine lacks what the cell needs, rather than that it failed."""
        return self.result is None and self.code == ExitCode.LACKING


@dataclass(frozen=True)
class CellRun:
    """What became of a cell in this run."""

    outcome: Outcome
    seconds: float | None = None  # none where the result was there already


#: Takes a cell's words and whether to stop; returns what became of it.
Runner = Callable[[Sequence[str], Callable[[], bool]], Outcome]


class CellCommand(Protocol):
    """What a pool has to know of a cell; see `kvprof.reproduction.resolve.Cell`."""

    @property
    def words(self) -> tuple[str, ...]:
        """The command."""

    @property
    def gpus(self) -> int:
        """How many it needs."""


#: Runs cells by their keys, asking whether to stop; yields each one's key and end as it ends.
Pool = Callable[[Mapping[str, CellCommand], Callable[[], bool]], Iterator[tuple[str, CellRun]]]


def one_by_one(runner: Runner) -> Pool:
    """Return the pool of one machine: a cell has it for itself."""

    def run_all(
        cells: Mapping[str, CellCommand], should_stop: Callable[[], bool]
    ) -> Iterator[tuple[str, CellRun]]:
        for key, cell in cells.items():
            if should_stop():
                return
            start = time.monotonic()
            outcome = runner(cell.words, should_stop)
            yield key, CellRun(outcome, time.monotonic() - start)

    return run_all


def run_child(words: Sequence[str], should_stop: Callable[[], bool]) -> Outcome:
    """Run ``kvprof WORDS --json -`` and return its result.

    The result comes through a pipe, so that no full disk can lose it.
    """
    command = [*module_command("kvprof"), *words, "--json", "-"]
    leash = Leash()
    try:
        process = leash.start(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(),
        )
    except OSError as problem:
        return Outcome(None, int(ExitCode.FAILED), f"cannot be started: {problem.strerror}")
    try:
        while True:
            try:
                out, err = process.communicate(timeout=_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if should_stop():
                    _end(process)
                    return Outcome(None, int(ExitCode.INTERRUPTED), "interrupted")
    except BaseException:
        _end(process)
        raise
    finally:
        leash.close()
    if should_stop():
        # The terminal's Ctrl-C reached the process as well; what it has is no whole result.
        return Outcome(None, int(ExitCode.INTERRUPTED), "interrupted")
    return _read(process.returncode, out, err.decode("utf-8", "replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_GRACE_SECONDS)
        return
    process.kill()
    process.communicate()


def _read(code: int, out: bytes, err: str) -> Outcome:
    # A claim that a command was told to fail on is a result like any other.
    if code in (ExitCode.DONE, ExitCode.CLAIM_NOT_MET):
        try:
            result = json.loads(out)
            validate_result(result)
        except ValueError as problem:
            return Outcome(None, int(ExitCode.FAILED), f"its result is invalid: {problem}")
        return Outcome(result, code)
    said = [line for line in err.splitlines() if line.startswith("kvprof: ")]
    if said:
        return Outcome(None, code, said[-1].removeprefix("kvprof: "))
    last = " ".join(err.split())[-_LAST:]
    ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return Outcome(None, code, f"{ended}{': ' + last if last else ''}")
