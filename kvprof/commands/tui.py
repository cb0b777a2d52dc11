"""``kvprof tui``: a run as it is measured, or one that was."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated

import typer

from kvprof import console
from kvprof.child import Leash, child_environment
from kvprof.commands.output import check_folder
from kvprof.commands.run_source import (
    DEMO,
    checked_report,
    load_run,
    run_files,
    runs_folder,
)
from kvprof.errors import ExitCode, FailedError, UsageError
from kvprof.records.events import CaseStarted
from kvprof.records.files import RESULT_NAME, ensure_writable, read_result, what_was_read
from kvprof.records.journal import EVENTS_NAME, Follower, find_events, read_events
from kvprof.tui.session import Session
from kvprof.tui.sources import Live, NoEvents, Replay
from kvprof.tui.state import state_of
from kvprof.tui.worker import MESSAGES_NAME, PROGRAM, REPORT_NAME, Worker

__all__ = [
    "Watched",
    "missing_terminal",
    "open_run",
    "print_report",
    "run_plainly",
    "tui",
    "watched_command",
]

# --- A measurement that ``kvprof tui`` starts: its command, its folder, its end.


_PATIENCE = 10.0  # seconds for the step in hand, once nobody is watching


@dataclass
class Watched:
    """A command that writes events, and the folder where it writes them.

    Attributes
    ----------
    arguments : tuple of str
        After ``kvprof``, with ``--out``.
    folder : Path
    worker : Worker or None
        Once it was started.
    old : tuple or None
        What tells the events that were there before from those of this run.
    """

    arguments: tuple[str, ...]
    folder: Path
    worker: Worker | None = None
    old: tuple[int, int, int] | None = None

    def start(self) -> Session:
        """Start the command and return the session that watches it."""
        record = self.folder / EVENTS_NAME
        self.old = _identity(record)
        self._make_folder()
        self.worker = Worker(
            [*PROGRAM, *self.arguments],
            self.folder,
            width=get_terminal_size().columns,
            force="--force" in self.arguments,
        )
        self.worker.start()
        # With --force the old run's events lie there until the new one replaces them.
        source = Live(record, wanted=self._recorded)
        return Session(self.folder.name, source, record=record, worker=self.worker)

    def finish(self) -> int | None:
        """Say what became of the measurement, and return its exit code; None while it goes on."""
        worker = self.worker
        assert worker is not None
        if worker.running and worker.released:
            console.note(f"the measurement continues; watch it with: kvprof tui {self.folder}")
            return None
        if worker.running:
            console.note("waiting for the current step …")
            worker.interrupt()
            if not worker.wait(_PATIENCE):
                worker.end()
        code = worker.exit_code or 0
        if report := worker.report():
            console.report_console().out(report, end="", highlight=False)
        if code and code != ExitCode.INTERRUPTED:
            words = worker.last_words().removeprefix("kvprof: ")
            console.error(f"{words} (exit code {code})")
        if self._recorded():
            worker.keep()
            console.note(f"recorded; show it with: kvprof show {self.folder}")
        else:
            worker.clean()
        return code

    def _recorded(self) -> bool:
        """Whether this run's events lie in the folder."""
        return _identity(self.folder / EVENTS_NAME) not in (None, self.old)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise FailedError(f"cannot create {self.folder}: {problem.strerror}") from problem


def watched_command(words: Sequence[str]) -> Watched:
    """Return what is to be run, with a folder of its own where none is named."""
    arguments = tuple(words[1:] if words[0] == "kvprof" else words)
    if not arguments or arguments[0] != "bench" or not {"--jct", "--load"} & set(arguments):
        raise UsageError(
            f"kvprof tui starts bench --jct or bench --load, not {' '.join(words)!r}; or give a "
            "run's folder"
        )
    named = _option(arguments, "--out")
    if named is not None:
        check_folder(Path(named))
        for name in (EVENTS_NAME, REPORT_NAME, MESSAGES_NAME):
            ensure_writable(Path(named) / name, "--force" in arguments)
        return Watched(arguments, Path(named))
    folder = _new_folder("load" if "--load" in arguments else "jct")
    return Watched((*arguments, "--out", str(folder)), folder)


def missing_terminal() -> str | None:
    """Return in words why there can be no live view; None when there can."""
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or not stream.isatty():
            return f"{name} is not a terminal"
    if os.environ.get("TERM") == "dumb":
        return "this terminal (TERM=dumb) cannot draw"
    try:
        if os.tcgetpgrp(sys.stdin.fileno()) != os.getpgrp():
            return "kvprof runs in the background"
    except OSError as problem:
        return f"the terminal does not answer ({problem.strerror})"
    return None


def run_plainly(watched: Watched) -> int:
    """Run the command on these streams, without a view, and return its exit code."""
    command = [*PROGRAM, *watched.arguments]
    leash = Leash()
    with leash.start(command, stdin=subprocess.DEVNULL, env=child_environment()) as process:
        while True:
            try:
                code = process.wait()
            except KeyboardInterrupt as signalled:
                # The terminal's Ctrl-C it got as well. It keeps what it measured.
                if signalled.args:
                    process.terminate()
                continue
            break
    leash.close()
    if (watched.folder / EVENTS_NAME).exists():
        console.note(f"recorded in {watched.folder}")
    return code if code >= 0 else 128 - code


def _new_folder(kind: str) -> Path:
    """Return a folder that does not exist yet, among the user's data."""
    runs = runs_folder()
    stem = datetime.now().strftime(f"{kind}-%Y%m%d-%H%M%S")
    number, folder = 1, runs / stem
    while folder.exists():
        number += 1
        folder = runs / f"{stem}-{number}"
    return folder


def _option(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of an option, written in either way; None when it is not there."""
    for index, word in enumerate(arguments):
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
        if word == name and index + 1 < len(arguments):
            return arguments[index + 1]
    return None


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Return what tells a file from the one that was there before under its name."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


# --- Recorded runs for ``kvprof tui``: opened for the view, or printed where there is no
# terminal.


_DEMO_SECONDS = 20.0


def open_run(name: str, speed: float | None = None) -> Session:
    """Return a session that looks at a recorded run, or at one that is being written."""
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
            start = next((event.time for event in events if isinstance(event, CaseStarted)), 0.0)
            speed = max(1.0, (events[-1].time - start) / _DEMO_SECONDS)
        source = Live(record) if speed is None else Replay(record, speed, start=start)
        return Session(name, source, record=record)
    assert found.result is not None
    if speed is not None:
        raise UsageError(f"--speed: {name} has no {EVENTS_NAME} to replay")
    result = read_result(found.result)
    if result["kind"] not in ("jct", "load"):
        raise UsageError(
            f"{name}: {result['kind']} results have no live view; use kvprof show {name}"
        )
    with what_was_read(found.result):
        state = state_of(result)
    return Session(name, NoEvents(), result=result, state=state)


def print_report(name: str, why: str) -> None:
    """Print the report of a run, as far as it got, and say why it is not the live view."""
    result = load_run(name)
    console.note(f"{why}: showing the report instead of the live view")
    terminal = console.report_console()
    terminal.print(checked_report(name)(result, terminal.width, not terminal.no_color))


def _check_start(record: Path) -> None:
    """Refuse what is no record of a run, before the screen is taken."""
    follower = Follower(record)
    try:
        first = follower.poll(1)
    finally:
        follower.close()
    if not first and follower.damage is not None:
        raise FailedError(f"{record} is not a recorded kvprof run: {follower.damage}")


#: What `kvprof tui` alone measures.
DEFAULT_COMMAND = (
    "bench",
    "--jct",
    "--model",
    "reference",
    "--real",
    "--methods",
    "full,palu,fdc",
)


def tui(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN | -- bench --jct|--load …]",
            help="Run to show, also while it is written: a folder, events or a result; or a "
            "measurement to start.",
            show_default=False,
        ),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Play the recorded run that ships with kvprof.")
    ] = False,
    speed: Annotated[
        float | None,
        typer.Option(
            "--speed",
            metavar="TIMES",
            help="Replay RUN at this multiple of its speed; End jumps to the end.  [default: "
            "show the end; --demo takes 20 s]",
            show_default=False,
        ),
    ] = None,
    light: Annotated[
        bool | None,
        typer.Option(
            "--light/--dark",
            help="Colours for a light or dark background.  [default: from COLORFGBG, else dark]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Watch a request's latency or servers under load: live or replayed.

    Without arguments it measures the reference model with full, palu and fdc. Every run is
    recorded. Without a terminal it prints the report.

    Examples
    --------
    kvprof tui
    kvprof tui --demo
    kvprof tui jct-run --speed 10
    kvprof tui -- bench --jct --methods full,fdc --input-len 2k --output-len 64
    """
    words = tuple(what or ())
    if demo and words:
        raise UsageError(f"--demo cannot be combined with {' '.join(words)}")
    if speed is not None and not 0 < speed < float("inf"):
        raise UsageError(f"--speed {speed:g} is not above 0; 1 is the recorded speed")
    lacking = missing_terminal()
    run = DEMO if demo else _run_named(words)
    if run is not None:
        if lacking is not None:
            print_report(run, lacking)
            return
        raise typer.Exit(_show(open_run(run, speed), light))
    if speed is not None:
        raise UsageError("--speed requires a recorded RUN")
    watched = watched_command(words or DEFAULT_COMMAND)
    if lacking is not None:
        console.note(f"{lacking}: running without the live view")
        raise typer.Exit(run_plainly(watched))
    raise typer.Exit(_measure(watched, light))


def _run_named(words: tuple[str, ...]) -> str | None:
    """Return the recorded run that is meant; None when a measurement is."""
    if len(words) != 1:
        return None
    # A word that is no path of anything may be a command that lacks its options.
    is_command = words[0] in ("bench", "kvprof") and not Path(words[0]).exists()
    return None if is_command else words[0]


def _measure(watched: Watched, light: bool | None) -> int:
    """Start the command, show it, and do what was asked with it at the end."""
    session = watched.start()
    try:
        code = _show(session, light)
    finally:
        ended = watched.finish()
    return ended if ended is not None else code


def _show(session: Session, light: bool | None) -> int:
    from kvprof.tui.app import LiveApp

    app = LiveApp(session, save_to=Path.cwd(), light=_is_light() if light is None else light)
    code = app.run()
    if code is None:  # it broke, and Textual has said why
        raise typer.Exit(app.return_code or ExitCode.FAILED)
    return code


def _is_light() -> bool:
    """Tell a light background by COLORFGBG, which some terminals set: ``0;15``."""
    ground = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return ground in ("7", "15")
