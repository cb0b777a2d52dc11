"""Files that become another one when they are whole, and one process at a time in a folder."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any

__all__ = ["alone_in", "new_temporary", "open_temporary"]

# Windows has none.
fcntl: Any = import_module("fcntl") if os.name == "posix" else None


@contextlib.contextmanager
def new_temporary(folder: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """Make a new file in a folder, to become another one; it is removed if that fails."""
    path, file = open_temporary(folder)
    try:
        with file:
            yield path, file
    finally:
        path.unlink(missing_ok=True)


def open_temporary(folder: Path) -> tuple[Path, IO[bytes]]:
    """Make a new file as `new_temporary` does, unbuffered; whoever asks removes it."""
    # Short, because the file's later name may be as long as the file system allows.
    path = folder / f".kvprof-{secrets.token_hex(6)}.tmp"
    return path, path.open("xb", buffering=0)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Let one process at a time into the body, of those that name the same folder; it exists."""
    with contextlib.ExitStack() as held:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                descriptor = os.open(folder, os.O_RDONLY)
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
