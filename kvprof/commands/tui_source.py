"""Recorded runs for ``kvprof tui``: opened for the view, or printed where there is no terminal."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvprof import console
from kvprof.commands.run_source import DEMO, checked_report, load_run, run_files
from kvprof.errors import FailedError, UsageError
from kvprof.records.events import CaseStarted, Preview
from kvprof.records.files import RESULT_NAME, read_result, what_was_read
from kvprof.records.journal import EVENTS_NAME, Follower, find_events, read_events

if TYPE_CHECKING:
    from kvprof.tui.session import Session

__all__ = ["open_run", "print_report"]

_DEMO_SECONDS = 20.0
_SEEN = (CaseStarted, Preview)


def open_run(name: str, speed: float | None = None) -> "Session":
    """Return a session that looks at a recorded run, or at one that is being written.

    Parameters
    ----------
    name : str
        A run's folder, its events, its result, or the recorded demo.
    speed : float, optional
        Play it this many times as fast as it happened; without it everything is shown at once,
        but for the demo, which plays in at most 20 seconds from its first case on.

    Raises
    ------
    UsageError
        When it is no run, or one of another kind.
    LackingError
        When the demo is not installed.
    FailedError
        When it is damaged from its first line on, or of a newer kvprof.
    """
    from kvprof.tui.from_result import state_of
    from kvprof.tui.session import Session
    from kvprof.tui.sources import Live, NoEvents, Replay

    found = run_files(name)
    record = found.events
    if record is None and found.result is not None and found.result.name == RESULT_NAME:
        record = find_events(found.result.parent)
    if record is not None:
        _check_start(record)
        start = 0.0
        if name == DEMO and speed is None:
            events = read_events(record).events
            # Before it, a machine is looked at and a layer compiled: nothing to see.
            start = next((event.time for event in events if isinstance(event, _SEEN)), 0.0)
            speed = max(1.0, (events[-1].time - start) / _DEMO_SECONDS)
        source = Live(record) if speed is None else Replay(record, speed, start=start)
        return Session(name, source, record=record)
    assert found.result is not None
    if speed is not None:
        raise UsageError(f"--speed: {name} has no {EVENTS_NAME}, so nothing of it can be played")
    result = read_result(found.result)
    if result["kind"] != "jct":
        raise UsageError(
            f"{name} is a result of kind {result['kind']}, which has no live view; "
            f"kvprof show {name} prints it"
        )
    with what_was_read(found.result):
        state = state_of(result)
    return Session(name, NoEvents(), result=result, state=state)


def print_report(name: str, why: str) -> None:
    """Print the report of a run, as far as it got, and say why it is not the live view."""
    from kvprof.views.kinds import report

    result = load_run(name)
    console.note(f"{why}: here is the report instead of the live view")
    shown = checked_report(name, lambda width, colour: report(result, width, colour))
    terminal = console.report_console()
    terminal.print(shown(terminal.width, not terminal.no_color))


def _check_start(record: Path) -> None:
    """Refuse what is no record of a run, before the screen is taken."""
    follower = Follower(record)
    try:
        first = follower.poll(1)
    finally:
        follower.close()
    if not first and follower.damage is not None:
        raise FailedError(f"{record} is no record of a kvprof run: {follower.damage}")
