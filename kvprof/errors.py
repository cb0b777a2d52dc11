"""Errors that reach the user as one line, each with the exit code it stands for."""

from enum import IntEnum

__all__ = [
    "ClaimNotMetError",
    "ExitCode",
    "FailedError",
    "KvprofError",
    "LackingError",
    "UsageError",
]


class ExitCode(IntEnum):
    """What a command's exit status means; the same for every command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    LACKING = 3
    CLAIM_NOT_MET = 4
    INTERRUPTED = 130


class KvprofError(Exception):
    """Base of every error that is the user's to see: one line, no traceback.

    Parameters
    ----------
    message : str
        Names the offending value and the way out.
    """

    exit_code: ExitCode = ExitCode.FAILED


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
