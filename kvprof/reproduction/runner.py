"""A cell is run as a process of its own: what it does to memory or crashes with ends with it."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvprof.errors import ExitCode
from kvprof.records.schema import validate_result

__all__ = ["Outcome", "Runner", "run_child"]

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


def run_child(words: Sequence[str], should_stop: Callable[[], bool]) -> Outcome:
    """Run ``python -m kvprof WORDS --json -`` and return its result.

    The result comes through a pipe, so that no full disk can lose it.

    Parameters
    ----------
    words : sequence of str
    should_stop : callable
        Asked a few times a second; when it says yes, the process is ended and its work dropped.
    """
    command = [sys.executable, "-m", "kvprof", *words, "--json", "-"]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
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
