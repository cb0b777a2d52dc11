"""``kvprof show``: a result again, or which runs there are."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvprof import console
from kvprof.commands.output import ForceOption, JsonOption, Outputs
from kvprof.commands.run_source import RUN_HELP, checked_report, kept_runs, load_run, runs_folder
from kvprof.errors import KvprofError, UsageError
from kvprof.views.numbers import MISSING
from kvprof.views.tables import DataTable, columns


def show(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help=f"{RUN_HELP} Without it, list the runs that kvprof tui recorded.",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = None,
    force: ForceOption = False,
) -> None:
    """Show a recorded result, or list the runs that kvprof tui recorded, latest first.

    An interrupted or running measurement is shown as far as it is recorded.

    Examples
    --------
    kvprof show                  # list runs
    kvprof show demo
    kvprof show result.json --json -
    """
    if run is not None:
        outputs = Outputs(json=json, force=force)
        outputs.check(read=[run])
        outputs.finish(load_run(run), checked_report(run))
        return
    if json is not None:
        raise UsageError("--json requires a RUN")
    found = kept_runs()
    console.note(f"in {runs_folder()}" if found else f"{runs_folder()} has no runs")
    if found:
        table = DataTable(columns("run", "written", "of", "state"), [_row(path) for path in found])
        console.report_console().print(table)


def _row(path: Path) -> tuple[str, ...]:
    """Return what a run is; one that cannot be read says why, and does not hide the others."""
    try:
        result = load_run(str(path), quiet=True)
    except KvprofError as problem:
        return path.name, MISSING, str(problem).replace(f"{path}/", ""), MISSING
    state = "complete" if result["complete"] else result["incomplete_reason"] or "incomplete"
    return path.name, result["created"], _measured(result), state


def _measured(result: dict[str, Any]) -> str:
    """Return what a run measured: its kind, on what, and how."""
    inputs = result["inputs"]
    words = [result["kind"], *(inputs[key] for key in ("model", "mode") if inputs.get(key))]
    methods = inputs.get("methods") or inputs.get("method") or ()
    words.append(methods if isinstance(methods, str) else ",".join(map(str, methods)))
    return " ".join(map(str, words)).rstrip()
