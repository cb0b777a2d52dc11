"""A child that ends when its parent has gone, also where the parent was killed."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvprof.child import child_environment

__all__ = ["Leash", "die_with_parent"]

_VARIABLE = "KVPROF_LEASH"
_GRACE_SECONDS = 10.0  # for the step in hand


class Leash:
    """A pipe by which a child that calls `die_with_parent` notices that this process has ended."""

    def __init__(self) -> None:
        self._write = -1

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[Any]":
        """Start the child, as `subprocess.Popen` does with the same options."""
        theirs, self._write = os.pipe()
        if os.name == "posix":  # elsewhere a child keeps no open files
            options["pass_fds"] = (theirs,)
        environment = {**child_environment(env), _VARIABLE: str(theirs)}
        try:
            return subprocess.Popen(command, env=environment, **options)
        finally:
            os.close(theirs)

    def release(self) -> None:
        """Let the child go on when this process ends."""
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._write, b"!")

    def close(self) -> None:
        """Give the pipe back; a child that still runs, and was not released, ends."""
        if self._write >= 0:
            os.close(self._write)
            self._write = -1


def die_with_parent() -> None:
    """End when the parent that holds this process's `Leash` does; do nothing without one.

    As at SIGTERM at first; what does not end within seconds is killed.
    """
    if (stated := os.environ.pop(_VARIABLE, None)) is None:
        return
    leash = int(stated)
    os.set_inheritable(leash, False)

    def watch() -> None:
        if os.read(leash, 1):
            return  # released
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_SECONDS)
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    threading.Thread(target=watch, name="kvprof-leash", daemon=True).start()
