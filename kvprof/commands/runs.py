"""``kvprof runs``: the runs that kvprof keeps where nobody named a folder."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvprof import console
from kvprof.commands.run_source import kept_runs, load_run, runs_folder
from kvprof.errors import KvprofError, UsageError
from kvprof.sizes import format_bytes
from kvprof.views.numbers import MISSING
from kvprof.views.tables import Column, DataTable


def runs(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="Where to look. Default: kvprof's data folder.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the runs in kvprof's data folder, the latest first.

    ``kvprof tui`` keeps a run there when it is given no ``--out``. The name in the first column is
    what show, compare, export and tui take.

    Examples
    --------
    kvprof runs
    kvprof runs results/      # the runs in a folder of your own
    kvprof show jct-20261122-101500
    """
    where = folder or runs_folder()
    if folder is not None and not folder.is_dir():
        raise UsageError(f"{folder} is no folder")
    found = kept_runs(where)
    if not found:
        console.note(f"{where} holds no runs; kvprof tui keeps one there")
        return
    console.note(f"in {where}")
    columns = ("run", "written", "of", "state", "size")
    rows = [_row(path) for path in found]
    console.report_console().print(DataTable([Column(name, words=True) for name in columns], rows))


def _row(path: Path) -> tuple[str, ...]:
    """Return what a run is; one that cannot be read says why, and does not hide the others."""
    size = format_bytes(sum(part.stat().st_size for part in path.rglob("*") if part.is_file()))
    try:
        result = load_run(str(path), quiet=True)
    except KvprofError as problem:
        return path.name, MISSING, str(problem).replace(f"{path}/", ""), MISSING, size
    state = "complete" if result["complete"] else result["incomplete_reason"] or "incomplete"
    return path.name, result["created"], _measured(result), state, size


def _measured(result: dict[str, Any]) -> str:
    """Return what a run measured: its kind, on what, and how."""
    inputs = result["inputs"]
    words = [result["kind"], *(inputs[key] for key in ("model", "mode") if inputs.get(key))]
    methods = inputs.get("methods") or inputs.get("method")
    if methods:
        words.append(methods if isinstance(methods, str) else ",".join(map(str, methods)))
    return " ".join(map(str, words))
