"""Results of cells on disk, each under a digest of what determines it."""

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kvprof.errors import KvprofError
from kvprof.records.files import read_result, write_result
from kvprof.reproduction.find import PACKAGE
from kvprof.version import __version__

__all__ = [
    "WHOLE_BYTES",
    "CellStore",
    "cell_digest",
    "code_version",
    "known_content",
    "named_files",
]

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
        for piece in {word, word.partition("=")[2], *word.split(",")}:
            if piece and (found := known_content(folder / piece)) is not None:
                files[piece] = found
    return files


def known_content(path: Path) -> Any:
    """Return what the content of a file or of a model's folder is known by; None for neither."""
    try:
        if path.is_file():
            return _content(path)
        # A folder counts only where it looks like a model's: `reference` may be a folder's name.
        if path.is_dir() and (path / "config.json").is_file():
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
