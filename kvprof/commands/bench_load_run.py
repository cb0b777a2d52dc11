"""The run of ``kvprof bench --load``: into a journal, shown, kept; one cut off goes on."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprof import console
from kvprof.commands.output import Outputs
from kvprof.environment import collect_environment
from kvprof.errors import FailedError, KvprofError, UsageError
from kvprof.interrupt import graceful_interrupt
from kvprof.records.events import Event, LoadRequest, RunFinished, RunStarted
from kvprof.records.fold import fold
from kvprof.records.journal import Journal, find_events, read_events
from kvprof.records.result import to_plain
from kvprof.version import __version__

if TYPE_CHECKING:
    from kvprof.serving.load.sweep import SweepOptions
    from kvprof.serving.load.target import LoadTarget

__all__ = ["measure_and_show"]


def measure_and_show(
    options: "SweepOptions",
    targets: "Sequence[LoadTarget]",
    inputs: dict[str, Any],
    outputs: Outputs,
    *,
    mode: str,
    more: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Run into a journal, and show and keep what was measured, also where something failed.

    Parameters
    ----------
    options : SweepOptions
    targets : sequence of LoadTarget
    inputs : dict
        Of the result; by them an interrupted run of the same load is known again.
    outputs : Outputs
    mode : str
        Of the run, as its first event has it.
    more : callable, optional
        Given the result's data, returns what else belongs into them.

    Raises
    ------
    UsageError
        When the folder holds the interrupted run of another load, or a file is there already.
    KvprofError
        What ended the run before anything was measured.
    """
    path = outputs.events
    earlier = _earlier(outputs, inputs)
    if earlier is not None:
        # What is there is an unfinished run's: it is carried over, and then replaced.
        replace(outputs, out=None).check()
        outputs = replace(outputs, force=True)
        console.note(f"{outputs.out}: an interrupted run of the same load goes on")
    else:
        outputs.check([path] if path is not None else [])
    with graceful_interrupt() as stop:
        journal, problems = _measured(
            options, targets, inputs, path, outputs.force, mode, earlier or [], stop, more
        )
        if not journal.measured:
            _leave_nothing(path, journal)
        outputs.end_recorded(journal, problem=problems[0] if problems else None, interrupted=stop())


def _leave_nothing(path: Path | None, journal: Journal) -> None:
    """Remove the events of a run in which nothing was measured, so that the next one finds none."""
    if path is None or not path.exists():
        return
    with suppress(OSError, FailedError):
        if read_events(path).events == journal.recording().events:
            path.unlink()
            path.parent.rmdir()


def _earlier(outputs: Outputs, inputs: Mapping[str, Any]) -> list[Event] | None:
    """Return the events of an interrupted run of the same load in the folder; None without one.

    Raises
    ------
    UsageError
        When the folder holds the interrupted run of another load.
    """
    if outputs.out is None or outputs.force or (found := find_events(outputs.out)) is None:
        return None
    try:
        events = read_events(found).events
    except FailedError:
        return None
    started, last = events[0], events[-1]
    if not isinstance(started, RunStarted) or started.kind != "load":
        return None
    if isinstance(last, RunFinished) and last.complete:
        return None
    if not any(isinstance(event, LoadRequest) for event in events):
        return []  # it was killed before anything was measured
    own, theirs = to_plain(inputs), started.inputs
    assert isinstance(own, dict)
    # An option that an older version did not have was not given to it.
    names = dict.fromkeys((*own, *theirs))
    if differing := [name for name in names if own.get(name) != theirs.get(name)]:
        raise UsageError(
            f"{outputs.out} holds an interrupted load with other options ({', '.join(differing)}); "
            "--force measures anew"
        )
    return events


def _measured(
    options: "SweepOptions",
    targets: "Sequence[LoadTarget]",
    inputs: dict[str, Any],
    path: Path | None,
    force: bool,
    mode: str,
    earlier: Sequence[Event],
    stop: Any,
    more: Callable[[dict[str, Any]], dict[str, Any]] | None,
) -> tuple[Journal, list[KvprofError]]:
    from kvprof.serving.load.sweep import run_sweep

    journal = Journal(path, force=force, warn=console.warn)
    problems: list[KvprofError] = []
    with journal:
        journal.emit(
            RunStarted(
                journal.now(),
                datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
                __version__,
                "load",
                ("kvprof", *_command(sys.argv[1:])),
                mode,
                inputs,
                collect_environment(),
                {"name": inputs["model"] or "the served model"},
                tuple(inputs["methods"]),
                inputs["baseline"],
            )
        )
        try:
            complete, problems = run_sweep(
                targets, options, journal, stop=stop, earlier=earlier, progress=console.note
            )
        except KvprofError as problem:
            complete, problems = False, [problem]
        reason = None
        if not complete:
            reason = "interrupted" if stop() or not problems else str(problems[0])
        extra = {}
        if more is not None and journal.measured:
            extra = more(fold(journal.recording().events))
        journal.emit(RunFinished(journal.now(), complete, reason, extra))
    return journal, problems


def _command(arguments: Sequence[str]) -> list[str]:
    """Return the command line without the addresses that it names."""
    found: list[str] = []
    for word in arguments:
        if found and found[-1] == "--url":
            word = "…"
        found.append("--url=…" if word.startswith("--url=") else word)
    return found
