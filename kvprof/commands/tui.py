"""``kvprof tui``: a run as it is measured, or one that was."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvprof import console
from kvprof.commands import completion
from kvprof.commands.run_source import DEMO
from kvprof.commands.tui_run import Watched, missing_terminal, run_plainly, watched_command
from kvprof.commands.tui_source import open_run, print_report
from kvprof.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from kvprof.tui.session import Session

__all__ = ["tui"]

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
            metavar="[RUN | -- bench --jct …]",
            autocompletion=completion.runs,
            help="A run's folder, its events or its result, also one that is being written; or a "
            "measurement to start and watch.",
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
            help="Play RUN this many times as fast as it happened; End jumps to its end. Default: "
            "show all of it at once (--demo: play it from its first case on, within 20 seconds).",
            show_default=False,
        ),
    ] = None,
    light: Annotated[
        bool | None,
        typer.Option(
            "--light/--dark",
            help="For a terminal with a light or a dark background. Default: what COLORFGBG says, "
            "else dark. NO_COLOR leaves the terminal's own.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Watch where the time of a request goes: live, followed or replayed.

    Alone it measures the reference model with full, palu and fdc. Everything that is seen is on
    disk; without a terminal the report is printed instead.

    Examples
    --------
    kvprof tui
    kvprof tui --demo
    kvprof tui jct-run --speed 10
    kvprof tui -- bench --jct --methods full,fdc --input-len 2k --output-len 64
    """
    words = tuple(what or ())
    if demo and words:
        raise UsageError(f"--demo plays the recorded run; leave out {' '.join(words)}")
    if speed is not None and not 0 < speed < float("inf"):
        raise UsageError(f"--speed {speed:g} plays nothing; write 1 for the recorded speed")
    lacking = missing_terminal()
    run = DEMO if demo else _run_named(words)
    if run is not None:
        if lacking is not None:
            print_report(run, lacking)
            return
        raise typer.Exit(_show(open_run(run, speed), light))
    if speed is not None:
        raise UsageError("--speed is for a recorded run; a measurement takes the time it takes")
    watched = watched_command(words or DEFAULT_COMMAND)
    if lacking is not None:
        console.note(f"{lacking}: the command runs without the live view")
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


def _show(session: "Session", light: bool | None) -> int:
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
