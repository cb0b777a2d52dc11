"""A child that ends when its parent has gone, also where the parent was killed."""

import contextlib
import os
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvprof.child import child_environment

__all__ = ["Leash", "follow_parent"]

_VARIABLE = "KVPROF_LEASH"
_GRACE_SECONDS = 10.0  # for the step in hand


class Leash:
    """A pipe by which a child notices that this process has ended, however it ended.

    The child calls `follow_parent`, which every kvprof does at its start.
    """

    def __init__(self) -> None:
        self._write = -1

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[Any]":
        """Start the child, as `subprocess.Popen` does with the same options.

        Raises
        ------
        OSError
        """
        theirs, self._write = os.pipe()
        environment = {**child_environment(env), _VARIABLE: str(theirs)}
        try:
            if os.name == "posix":  # elsewhere a child keeps no open files
                options["pass_fds"] = (theirs,)
            return subprocess.Popen(command, env=environment, **options)
        except BaseException:
            self.close()
            raise
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


def follow_parent() -> None:
    """End when the parent that holds this process's `Leash` does; do nothing without one.

    As at SIGTERM at first; what does not end within seconds is killed.
    """
    stated = os.environ.pop(_VARIABLE, "")
    if not stated.isdecimal():
        return
    leash = int(stated)
    try:
        if leash <= 2 or not stat.S_ISFIFO(os.fstat(leash).st_mode):
            return
        os.set_inheritable(leash, False)
    except (OSError, OverflowError):
        return

    def watch() -> None:
        try:
            if os.read(leash, 1):
                return  # released
        except OSError:
            return
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_SECONDS)
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    threading.Thread(target=watch, name="kvprof-leash", daemon=True).start()
