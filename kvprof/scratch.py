"""Scratch folders and half-written files: gone after a run, also after one that was killed.

Whoever uses one holds a lock on it, which the system gives back when a process ends in whatever
way. So what nobody holds is left over, and the next start removes it.
"""

import contextlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from kvprof.leftovers import to_remove

__all__ = [
    "ScratchFolder",
    "alone_in",
    "new_temporary",
    "open_temporary",
    "sweep",
    "sweep_folder",
]

_PREFIX = "kvprof-"
#: In a scratch folder, and what says that it is one of ours.
_OWNER = ".kvprof-owner"
_TEMPORARY = re.compile(r"\.kvprof-[0-9a-f]{12}\.tmp")
_ATTEMPTS = 10
# Windows has none; there nothing is removed but by its owner.
fcntl: Any = import_module("fcntl") if os.name == "posix" else None


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder that the next start removes when this process could not.

    Parameters
    ----------
    what : str
        For its name.
    """

    def __init__(self, what: str) -> None:
        super().__init__(prefix=f"{_PREFIX}{what}-")
        self._owner = Path(self.name, _OWNER).open("xb")  # noqa: SIM115 - held as long as the folder
        _lock(self._owner.fileno())
        to_remove[id(self)] = partial(shutil.rmtree, self.name, ignore_errors=True)

    def cleanup(self) -> None:
        """Remove it now."""
        to_remove.pop(id(self), None)
        super().cleanup()
        self._owner.close()


@contextlib.contextmanager
def new_temporary(folder: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """Make a new file in a folder, to become another one; it is removed where that did not happen.

    Parameters
    ----------
    folder : Path

    Yields
    ------
    tuple of (Path, file)
        The file is open for writing, and locked until then.

    Raises
    ------
    OSError
    """
    path, file = open_temporary(folder)
    try:
        with file:
            yield path, file
    finally:
        path.unlink(missing_ok=True)


def open_temporary(folder: Path) -> tuple[Path, IO[bytes]]:
    """Make a new file as `new_temporary` does, unbuffered; whoever asks removes it.

    Raises
    ------
    OSError
    """
    for _ in range(_ATTEMPTS):
        # Short, because the file's later name may be as long as the file system allows.
        path = folder / f".kvprof-{secrets.token_hex(6)}.tmp"
        file = path.open("xb", buffering=0)
        _lock(file.fileno())
        # Between the two lines somebody who cleans up may have taken it for a left over one.
        if _is_at(file, path):
            return path, file
        file.close()
    raise FileNotFoundError(f"{folder}: files vanish there as soon as they are made")


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let one process at a time into the body, of those that name the same folder; it exists."""
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        _lock(descriptor, wait=True)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def sweep() -> list[Path]:
    """Remove scratch folders of processes that are gone, and return what was removed."""
    removed = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(tempfile.gettempdir()):
            if not entry.name.startswith(_PREFIX):
                continue
            with contextlib.suppress(OSError):
                if _is_own(entry) and entry.is_dir(follow_symlinks=False):
                    with _left_over(Path(entry.path, _OWNER)) as free:
                        if free:
                            shutil.rmtree(entry.path, ignore_errors=True)
                            removed.append(Path(entry.path))
    return removed


def sweep_folder(folder: Path, *, deep: bool = False) -> list[Path]:
    """Remove the files that writers who are gone left half written in a folder.

    Parameters
    ----------
    folder : Path
        It need not exist.
    deep : bool
        Look into its folders too.

    Returns
    -------
    list of Path
        What was removed.
    """
    removed: list[Path] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                if deep and entry.is_dir(follow_symlinks=False):
                    removed += sweep_folder(Path(entry.path), deep=True)
                elif _TEMPORARY.fullmatch(entry.name) and _is_own(entry):
                    with _left_over(Path(entry.path)) as free:
                        if free:
                            Path(entry.path).unlink()
                            removed.append(Path(entry.path))
    return removed


def _is_own(entry: "os.DirEntry[str]") -> bool:
    return not hasattr(os, "getuid") or entry.stat(follow_symlinks=False).st_uid == os.getuid()


@contextlib.contextmanager
def _left_over(path: Path) -> Iterator[bool]:
    """Tell whether nobody holds a file; while the body runs, this process does."""
    if fcntl is None:
        yield False
        return
    # Not through a link, and without waiting for a pipe's other side.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held, or a file system without locks
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, wait: bool = False) -> None:
    """Hold an open file or folder; nothing happens on a file system without locks."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
