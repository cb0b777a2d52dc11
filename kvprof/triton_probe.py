"""Whether Triton works here, found out by compiling a small kernel; no GPU is needed for that.

The attempt runs in a process of its own: it must not see ``TRITON_INTERPRET``, nor leave anything
in the user's kernel cache, and a compiler that crashes must not take kvprof with it.
"""

import os
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from tempfile import TemporaryDirectory

from kvprof.child import child_environment, module_command
from kvprof.environment import package_version

__all__ = ["TritonState", "probe_triton"]

_SECONDS = 60


@dataclass(frozen=True)
class TritonState:
    """What Triton can do here."""

    version: str | None  # none when it is not installed
    compiles: bool  # whether a kernel compiled for compute capability 9.0
    interpreted: bool  # whether `TRITON_INTERPRET` asks for kernels to be interpreted
    problem: str | None  # why it does not compile, in one line


def probe_triton() -> TritonState:
    """Return Triton's state; takes about a second."""
    version = package_version("triton")
    interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")
    if version is None or find_spec("triton") is None:
        return TritonState(version, False, interpreted, "Triton is not installed")
    with TemporaryDirectory(prefix="kvprof-triton-") as cache:
        settings = child_environment()
        settings.pop("TRITON_INTERPRET", None)
        settings["TRITON_CACHE_DIR"] = cache
        try:
            done = subprocess.run(
                module_command("kvprof.triton_probe_kernel"),
                env=settings,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            problem = f"compiling a small kernel took more than {_SECONDS} seconds"
            return TritonState(version, False, interpreted, problem)
    if done.returncode == 0:
        return TritonState(version, True, interpreted, None)
    said = done.stderr.strip().splitlines() or [f"the compiler exited with code {done.returncode}"]
    return TritonState(version, False, interpreted, said[-1])
