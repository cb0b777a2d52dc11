"""Errors that reach the user as one line, each with the exit code it stands for.

Messages name what was given as the command line spells it, ``--seq-len``; `as_parameters` makes of
that what a Python user wrote, ``seq_len``. An error is told in Python's spelling unless a command
is running (`options_named`).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

__all__ = [
    "ClaimNotMetError",
    "ExitCode",
    "FailedError",
    "Interrupted",
    "KvprofError",
    "LackingError",
    "UsageError",
    "as_parameters",
    "no_memory",
    "options_named",
    "usage_message",
]

# A command that is cited, ``kvprof plan --save`` or ``pip install --no-deps``, stays as typed.
_CITED = re.compile(
    r"(?:(?:kvprof|pip) [a-z]+[^,;:()'\"]*)|(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)"
)
_NO_MEMORY = re.compile(
    "MemoryError|DefaultCPUAllocator|bad_alloc|failed to map segment|an(no|')t allocate memory|"
    "not enough memory|"
    "can't start new thread|thread.*Resource temporarily unavailable"
)
_at_command_line = False


def as_parameters(message: str) -> str:
    """Return a message with its options as names of parameters."""
    return _CITED.sub(
        lambda found: found[1].replace("-", "_") if found[1] is not None else found[0], message
    )


@contextmanager
def options_named() -> Iterator[None]:
    """Let errors name options, as long as the body (a command) runs; in every thread."""
    global _at_command_line
    before, _at_command_line = _at_command_line, True
    try:
        yield
    finally:
        _at_command_line = before


def usage_message(problem: Any) -> str:
    """Return what is wrong with a command line, as Typer found it, with the value given."""
    message: str = problem.format_message().rstrip(".")
    # Typer's validation says what it wanted but not what it got; the cause (pydantic's) knows.
    errors = getattr(problem.__cause__, "errors", None)
    if callable(errors) and (details := errors()):
        message += f", not {details[0]['input']!r}"
    return message


def no_memory(problem: BaseException | None) -> bool:
    """Recognise that memory, addresses or a thread was not to be had, also as another's cause."""
    if problem is None or isinstance(problem, LackingError):  # which has said so itself
        return False
    said = f"{type(problem).__mro__} {'' if isinstance(problem, KvprofError) else problem}"
    return bool(_NO_MEMORY.search(said)) or no_memory(problem.__cause__ or problem.__context__)


class ExitCode(IntEnum):
    """What a command's exit status means; the same for every command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    LACKING = 3
    CLAIM_NOT_MET = 4
    INTERRUPTED = 130


class Interrupted(KeyboardInterrupt):
    """The user asked for the end, and what was in hand is dropped."""


class KvprofError(Exception):
    """Base of every error that is the user's to see: one line, no traceback.

    Parameters
    ----------
    message : str
        Names the offending value and the way out, options as the command line spells them.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __str__(self) -> str:
        """Return the message, in the spelling of whoever reads it."""
        message = super().__str__()
        return message if _at_command_line else as_parameters(message)


class FailedError(KvprofError):
    """The work could not be done (a damaged file, NaN in the weights, a full disk)."""


class UsageError(KvprofError):
    """The command was asked for something that makes no sense; nothing was run."""

    exit_code = ExitCode.USAGE


class LackingError(KvprofError):
    """The machine lacks something (a GPU, memory, an optional package)."""

    exit_code = ExitCode.LACKING


class ClaimNotMetError(KvprofError):
    """A claim or a limit that the user asked to be enforced does not hold."""

    exit_code = ExitCode.CLAIM_NOT_MET
