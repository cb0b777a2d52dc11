"""A cell is run as a process of its own: what it does to memory or crashes with ends with it."""

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvprof.child import child_environment, child_python, module_command
from kvprof.errors import ExitCode
from kvprof.leash import Leash
from kvprof.records.schema import validate_result

__all__ = ["CellCommand", "Ended", "OneByOne", "Outcome", "Pool", "Runner", "run_child"]

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5.0
_LAST = 300  # characters of what a process said before it died


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes
    ----------
    result : dict or None
        Valid, if it is there.
    code : int
        Of the process.
    message : str
        Why there is no result, in one line.
    """

    result: dict[str, Any] | None
    code: int
    message: str = ""

    @property
    def lacking(self) -> bool:
        """Whether the machine lacks what the cell needs, rather than that it failed."""
        return self.result is None and self.code == ExitCode.LACKING


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


@dataclass(frozen=True)
class Ended:
    """A cell's end.

    Attributes
    ----------
    digest : str
    outcome : Outcome
    seconds : float or None
        None where it was not run.
    """

    digest: str
    outcome: Outcome
    seconds: float | None


@runtime_checkable
class Pool(Protocol):
    """Runs many cells, in whatever order and at once where it can."""

    def run_all(
        self,
        cells: Mapping[str, CellCommand],
        tell: Callable[[str, str], None],
        should_stop: Callable[[], bool],
    ) -> Iterator[Ended]:
        """Run cells and yield each one's end, every cell's once.

        Parameters
        ----------
        cells : mapping
            By digest.
        tell : callable
            Takes a digest and words about it, and says so once per cell.
        should_stop : callable
        """


class OneByOne:
    """The pool of one machine: a cell has it for itself.

    Parameters
    ----------
    runner : callable
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def run_all(
        self,
        cells: Mapping[str, CellCommand],
        tell: Callable[[str, str], None],
        should_stop: Callable[[], bool],
    ) -> Iterator[Ended]:
        """Run cells in their order; see `Pool`."""
        for digest, cell in cells.items():
            if should_stop():
                outcome = Outcome(None, int(ExitCode.INTERRUPTED), "interrupted before it ran")
                yield Ended(digest, outcome, None)
                continue
            tell(digest, "")
            start = time.monotonic()
            outcome = self._runner(cell.words, should_stop)
            yield Ended(digest, outcome, time.monotonic() - start)


def run_child(
    words: Sequence[str],
    should_stop: Callable[[], bool],
    *,
    program: Sequence[str] | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run ``kvprof WORDS --json -`` and return its result.

    The result comes through a pipe, so that no full disk can lose it.

    Parameters
    ----------
    words : sequence of str
    should_stop : callable
        Asked a few times a second; when it says yes, the process is ended and its work dropped.
    program : sequence of str, optional
        What Python is given before the words; this kvprof when not given.
    folder : Path, optional
        To run in; this process's when not given.
    environment : mapping, optional
        Of the process; this one's when not given.
    """
    start = module_command("kvprof") if program is None else child_python(*program)
    command = [*start, *words, "--json", "-"]
    leash = Leash()
    try:
        process = leash.start(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=child_environment(environment),
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
            return Outcome(None, int(ExitCode.FAILED), f"its result is none: {problem}")
        return Outcome(result, code)
    said = [line for line in err.splitlines() if line.startswith("kvprof: ")]
    if said:
        return Outcome(None, code, said[-1].removeprefix("kvprof: "))
    last = " ".join(err.split())[-_LAST:]
    ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return Outcome(None, code, f"{ended}{': ' + last if last else ''}")
