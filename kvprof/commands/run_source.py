"""A run as the user names it: a folder, a result, the events of a run, or the recorded demo."""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from platformdirs import user_data_path
from rich.console import RenderableType
from rich.segment import Segments

from kvprof import console
from kvprof.commands.output import Report
from kvprof.errors import FailedError, LackingError, UsageError
from kvprof.records.events import Event
from kvprof.records.files import RESULT_NAME, read_result, what_was_read
from kvprof.records.fold import result_of
from kvprof.records.journal import EVENTS_NAME, find_events, is_result_of, read_events
from kvprof.records.schema import validate_result
from kvprof.views.kinds import report

__all__ = [
    "DEMO",
    "RUN_HELP",
    "checked_report",
    "events_of",
    "kept_runs",
    "load_run",
    "run_files",
    "runs_folder",
]

#: The name of the recorded run that ships with kvprof.
DEMO = "demo"
_WHAT = f"a run's folder (--out), a result .json, an {EVENTS_NAME}, or {DEMO}"


#: What a run can be named by, for ``--help``.
RUN_HELP = f"{_WHAT[0].upper()}{_WHAT[1:]}."


@dataclass(frozen=True)
class RunFiles:
    """Where a run lies."""

    result: Path | None
    events: Path | None


def runs_folder() -> Path:
    """Return where runs are kept that nobody named a folder for."""
    return user_data_path("kvprof", appauthor=False) / "runs"


def kept_runs() -> list[Path]:
    """Return the folders of `runs_folder` that hold a run, the latest first."""
    folder = runs_folder()
    found = [path for path in folder.iterdir() if holds_run(path)] if folder.is_dir() else []
    return sorted(found, key=lambda path: (path.stat().st_mtime, path.name), reverse=True)


def holds_run(folder: Path) -> bool:
    """Tell whether a folder is one that ``--out`` made: a result, or the events of one."""
    return (folder / RESULT_NAME).is_file() or find_events(folder) is not None


def run_files(name: str) -> RunFiles:
    """Return the files that a run's name stands for.

    The name of a run in `runs_folder` stands for that run where no file is called so.
    """
    path = Path(name)
    if name == DEMO:
        path = Path(str(files("kvprof") / "assets" / DEMO))
        if not path.is_dir():
            raise LackingError(f"{DEMO}: the recorded run is missing from this installation")
    elif not path.exists() and path.name == name and (runs_folder() / name).is_dir():
        path = runs_folder() / name
    if path.is_dir():
        result = path / RESULT_NAME
        found = RunFiles(result if result.is_file() else None, find_events(path))
        if found.result is None and found.events is None:
            raise UsageError(f"{name} has neither {RESULT_NAME} nor {EVENTS_NAME}; give {_WHAT}")
        return found
    if not path.exists():
        raise UsageError(f"{name}: no such file; give {_WHAT} (kvprof show lists recorded runs)")
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return RunFiles(None, path)
    return RunFiles(path, None)


def load_run(name: str, *, quiet: bool = False) -> dict[str, Any]:
    """Return the result of a run; one that was killed or still runs is folded from its events.

    What is damaged is read up to the damage, and a warning on stderr says so unless `quiet`.
    """
    found = run_files(name)
    if found.result is not None:
        result = read_result(found.result)
        # Other events are a later run's, which --force began in this folder: a result that is
        # written removes those of earlier ones.
        if found.events is None or is_result_of(result, found.events):
            return result
    assert found.events is not None
    recording = read_events(found.events)
    if recording.damage is not None and not quiet:
        console.warn(f"{found.events}: {recording.damage}; showing what precedes it")
    with what_was_read(found.events):
        result = result_of(recording.events, damage=recording.damage)
    try:
        validate_result(result)
    except ValueError as problem:
        raise FailedError(f"{found.events} does not give a valid result: {problem}") from None
    return result


def checked_report(name: str, make: Report = report) -> Report:
    """Return what draws the report of a run that was read: all of it, or an error in one line."""

    def draw(result: dict[str, Any], width: int, colour: bool) -> RenderableType:
        with what_was_read(name):
            return Segments(list(console.report_console().render(make(result, width, colour))))

    return draw


def events_of(name: str) -> list[Event]:
    """Return the events of a run."""
    found = run_files(name)
    if found.events is None:
        raise UsageError(f"{name} has no {EVENTS_NAME}; kvprof bench --jct --out records one")
    recording = read_events(found.events)
    if recording.damage is not None:
        console.warn(f"{found.events}: {recording.damage}; writing what precedes it")
    return recording.events
