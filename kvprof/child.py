"""How kvprof starts Python processes: with its own code, and nothing from the folder they run in.

``python -m`` puts the working folder first on the path, so that a ``yaml.py`` lying there is run.
A child runs this very file instead, by its path: it takes kvprof from where its parent has it, and
everything else from where Python is installed.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

__all__ = [
    "Leash",
    "child_environment",
    "child_python",
    "die_with_parent",
    "module_command",
]

# Python's own switches: no folder of a script or of the shell on the path, of children's too.
_SAFE_FLAG = "-P"
_SAFE_VARIABLE = "PYTHONSAFEPATH"


def child_python(*words: str) -> list[str]:
    """Return the command that gives these words to Python, the working folder off its path."""
    return [sys.executable, _SAFE_FLAG, *words]


def module_command(module: str, *words: str) -> list[str]:
    """Return the command that runs a module of this kvprof, wherever it was imported from."""
    return child_python(str(Path(__file__).resolve()), module, *words)


def child_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a child's environment, in which its own children are as safe as it is."""
    given = os.environ if environment is None else environment
    return {**given, _SAFE_VARIABLE: "1"}


def _run(module: str) -> None:
    """Run a module of the kvprof that this file belongs to; the path of modules stays as it is."""
    package = Path(__file__).resolve().parent
    spec = spec_from_file_location("kvprof", package / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["kvprof"] = own = module_from_spec(spec)
    spec.loader.exec_module(own)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


# --- A child that ends when its parent has gone, also where the parent was killed.


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


if __name__ == "__main__":
    del sys.argv[0]
    _run(sys.argv[0])
