"""How kvprof starts Python processes: with its own code, and nothing from the folder they run in.

``python -m`` puts the working folder first on the path, so that a ``yaml.py`` lying there is run.
A child runs this very file instead, by its path: it takes kvprof from where its parent has it, and
everything else from where Python is installed.
"""

import os
import runpy
import sys
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

__all__ = ["child_environment", "child_python", "module_command"]

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


if __name__ == "__main__":
    del sys.argv[0]
    _run(sys.argv[0])
