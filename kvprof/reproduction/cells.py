"""Cells: run as processes, and their results kept under a digest of what determines them."""

import contextlib
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvprof.child import child_environment, child_python, module_command
from kvprof.errors import ExitCode, KvprofError
from kvprof.leash import Leash
from kvprof.records.files import read_result, write_result
from kvprof.records.schema import validate_result
from kvprof.reproduction.find import PACKAGE
from kvprof.requirements import SMOLLM2_VARIABLE
from kvprof.version import __version__

__all__ = [
    "WHOLE_BYTES",
    "CellCommand",
    "CellRun",
    "CellStore",
    "Ended",
    "OneByOne",
    "Outcome",
    "Pool",
    "Runner",
    "cell_digest",
    "code_version",
    "known_content",
    "named_files",
    "run_child",
]

# --- Results of cells on disk, each under a digest of what determines it.


_FORMAT = "kvprof-cell/1"
# What shows and compares figures; it changes none.
_NO_FIGURES = ("views", "tui", "reproduction", "recipes")
#: Files up to here are read; larger ones are known by size and time.
WHOLE_BYTES = 64 << 20
_SHORT = 24


@cache
def code_version() -> str:
    """Return kvprof's version with a digest of the code and data that figures come from."""
    root = PACKAGE
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        inner = path.relative_to(root)
        if (
            inner.parts[0] in _NO_FIGURES
            or inner.name.startswith("recipe")
            or "__pycache__" in inner.parts
            or not path.is_file()
        ):
            continue
        digest.update(f"{inner.as_posix()}\0".encode())
        digest.update(_content(path).encode())
    return f"{__version__}+{digest.hexdigest()[:12]}"


def _content(path: Path) -> str:
    stat = path.stat()
    if stat.st_size > WHOLE_BYTES:
        return f"{stat.st_size}:{stat.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def cell_digest(words: Sequence[str], device: str, version: str) -> str:
    """Return what a cell's result is known by.

    Parameters
    ----------
    words : sequence of str
        The resolved command. The contents of files and of a model's folder that it names count too.
    device : str
        That it runs on.
    version : str
        From `code_version`.
    """
    files = named_files(words)
    stated = os.environ.get(SMOLLM2_VARIABLE)
    if stated and any("smollm2" in _pieces(word) for word in words):
        # Another file by that name is another model.
        path = Path(stated).expanduser()
        named = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
        files[SMOLLM2_VARIABLE] = [known_content(one) for one in named]
    # Equal options in the same order make the same command; kvprof reads no meaning into them.
    known = {
        "format": _FORMAT,
        "words": list(words),
        "files": files,
        "device": device,
        "version": version,
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:_SHORT]


def named_files(words: Sequence[str], folder: Path = Path()) -> dict[str, Any]:
    """Return the files and models' folders that a command names, each with its `known_content`.

    Parameters
    ----------
    words : sequence of str
    folder : Path
        In which the command is run.
    """
    files: dict[str, Any] = {}
    for word in words:
        for piece in _pieces(word):
            if piece and (found := known_content(folder / piece)) is not None:
                files[piece] = found
    return files


def _pieces(word: str) -> set[str]:
    """Return what a word of a command may name: itself, an option's value, a list's entries."""
    return {word, word.partition("=")[2], *word.split(",")}


def known_content(path: Path) -> Any:
    """Return what the content of a file or of a model's folder is known by; None for neither."""
    try:
        if path.is_file():
            return _content(path)
        # A folder counts only where it looks like a model's: `reference` may be a folder's name.
        if path.is_dir() and ((path / "config.json").is_file() or any(path.glob("*.gguf"))):
            return {one.name: _content(one) for one in sorted(path.iterdir()) if one.is_file()}
    except OSError:  # a name that is too long for a file
        pass
    return None


class CellStore:
    """Results of cells in a folder; what cannot be written is kept for this run.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, dict[str, Any]] = {}

    def get(self, digest: str) -> dict[str, Any] | None:
        """Return a result, or None; a damaged file is measured again."""
        if digest in self._known:
            return self._known[digest]
        path = self._path(digest)
        if not path.is_file():
            return None
        try:
            result = read_result(path)
        except KvprofError:
            return None
        self._known[digest] = result
        return result

    def put(self, digest: str, result: dict[str, Any]) -> None:
        """Keep a result.

        Raises
        ------
        FailedError
            When it cannot be written (a full disk); `get` has it nevertheless.
        """
        self._known[digest] = result
        if result["complete"]:
            write_result(self._path(digest), result, force=True)

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.json"


# --- A cell is run as a process of its own: what it does to memory or crashes with ends with
# it.


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


@dataclass(frozen=True)
class CellRun:
    """What became of a cell in this run.

    Attributes
    ----------
    outcome : Outcome
    seconds : float or None
        None where the result was there already.
    """

    outcome: Outcome
    seconds: float | None = None


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
