"""What a machine of a cluster is asked to do.

These functions travel to it by value, and import kvprof inside only: they must be able to say that
a machine has none, or another one.
"""

import contextlib
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["describe", "run_cell"]


def describe(version: str, extras: list[str], weights: list[str], folder: str) -> dict[str, Any]:
    """Return what the machine has.

    Parameters
    ----------
    version : str
        From `kvprof.reproduction.cells.code_version`, where the run was started.
    extras, weights : list of str
        Asked for.
    folder : str
        In which the run was started.

    Returns
    -------
    dict
        ``problem``, which is None where the code is the same, or ``cpu``, ``gpus``, ``extras`` and
        ``weights``.
    """
    if (problem := _difference(version)) is not None:
        return {"problem": problem}
    from kvprof.reproduction.machine import has_extra, has_weights, this_machine

    machine = this_machine()
    return {
        "problem": None,
        "cpu": machine.cpu,
        "gpus": list(machine.gpus),
        "extras": [name for name in extras if has_extra(name)],
        "weights": [name for name in weights if Path(folder, name).is_dir() or has_weights(name)],
    }


def _difference(version: str) -> str | None:
    """Return in words how the code here differs from where the run was started."""
    try:
        from kvprof.reproduction.cells import code_version
    except ImportError as problem:
        return f"has no kvprof that runs recipes ({problem}); install kvprof {version} there"
    own = code_version()
    if own != version:
        return f"has kvprof {own}, and this one {version}; install the same on both"
    return None


def run_cell(task: Mapping[str, Any]) -> dict[str, Any]:
    """Run a cell as `kvprof.reproduction.cells.run_child` does.

    Parameters
    ----------
    task : mapping
        ``words``; ``program``; ``version``; ``folder``, where the run was started; ``files``, by
        name with what their content is known by; ``contents``, those that can travel, as a list of
        one reference each; ``environment``, variables to set, or to unset with None.

    Returns
    -------
    dict
        ``result``, ``code``, ``message``, ``seconds``, ``host``.
    """
    host = platform.node()

    def lacking(message: str) -> dict[str, Any]:
        from_here = {"result": None, "code": 3, "message": message}
        return {**from_here, "seconds": None, "host": host}

    if (problem := _difference(task["version"])) is not None:
        return lacking(f"a machine of the cluster {problem}")
    from kvprof.reproduction.cells import run_child

    environment = {**os.environ, **{k: v for k, v in task["environment"].items() if v is not None}}
    for name in (key for key, value in task["environment"].items() if value is None):
        environment.pop(name, None)
    with _folder(task) as folder:
        if isinstance(folder, str):
            return lacking(folder)
        start = time.monotonic()
        done = run_child(
            task["words"],
            lambda: False,
            program=task["program"],
            folder=folder,
            environment=environment,
        )
        seconds = time.monotonic() - start
    return {
        "result": done.result,
        "code": int(done.code),
        "message": done.message,
        "seconds": seconds,
        "host": host,
    }


@contextlib.contextmanager
def _folder(task: Mapping[str, Any]) -> Iterator[Path | str]:
    """Find or make a folder where the cell's files are what they were; else say why not."""
    from kvprof.reproduction.cells import known_content

    own = Path(task["folder"])
    other = [name for name, known in task["files"].items() if known_content(own / name) != known]
    if own.is_dir() and not other:  # the same machine, or a file system that they share
        yield own
        return
    for name in task["files"]:
        absolute = Path(name).is_absolute()
        if absolute and name in other:
            yield (
                f"{name} is not the same on the machine that ran the cell; put it there, or name a "
                "file below the folder in which kvprof is run, which travels"
            )
            return
        if not absolute and name not in task["contents"]:
            yield (
                f"{name} does not travel to other machines (only files below the folder in which "
                "kvprof is run, up to 64 MiB): give its full path, and put it there on each"
            )
            return
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="kvprof-cell-") as made:
        for name, (reference,) in task["contents"].items():
            import ray

            path = Path(made, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(ray.get(reference))
        yield Path(made)
