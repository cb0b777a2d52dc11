"""Runs the live view without a terminal, on events of a run that never happened."""

import asyncio
import io
from collections.abc import Awaitable, Callable, Hashable, Sequence
from copy import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from textual.pilot import Pilot

from kvprof.records.events import Event
from kvprof.tui.app import LiveApp
from kvprof.tui.frame import RunScreen
from kvprof.tui.session import Session
from kvprof.tui.sources import Live
from tests.records.streams import stream, write

Steps = Callable[[LiveApp, "Pilot[int]"], Awaitable[None]]
_PATIENCE = 60.0  # seconds until a test is given up; what is waited for takes a part of one


def _short() -> list[Event]:
    return stream(steps=8)


@cache
def _journal(events: Callable[[], Sequence[Event]]) -> bytes:
    """Write a journal once for all tests that look at it."""
    with TemporaryDirectory() as folder:
        return write(Path(folder) / "events.jsonl", events()).read_bytes()


def recorded(
    folder: Path, events: Sequence[Event] | Callable[[], Sequence[Event]] = _short
) -> Session:
    """Return a session that looks at a record of `events`, or of what makes them."""
    record = folder / "events.jsonl"
    if callable(events):
        folder.mkdir(parents=True, exist_ok=True)
        record.write_bytes(_journal(events))
    else:
        write(record, events)
    return Session("a run", Live(record), record=record)


def show(
    session: Session,
    folder: Path,
    steps: Steps,
    *,
    size: tuple[int, int] = (100, 40),
    light: bool = False,
    everything: bool = True,
) -> int | None:
    """Show a session, do `steps` once all events are read, and return the view's exit code.

    What is there is read before the view opens: on a busy machine, a view that draws while it reads
    takes as long as it likes.
    """
    if everything:
        while session.advance():
            pass

    async def run() -> int | None:
        app = LiveApp(session, save_to=folder, light=light)
        app.calm = 0.0
        async with app.run_test(size=size, notifications=True) as pilot:
            if everything:
                await until(app, pilot, lambda: session.caught_up)
            await settle(app, pilot)
            await steps(app, pilot)
        return app.return_value

    return asyncio.run(run())


async def until(app: LiveApp, pilot: "Pilot[int]", what: Callable[[], bool]) -> None:
    """Wait for something that the view does by itself."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _PATIENCE
    while not what():
        assert loop.time() < end, f"waited in vain; the screen is\n{text(app)}"
        await pilot.pause(0.02)


async def settle(app: LiveApp, pilot: "Pilot[int]") -> None:
    """Let the view draw, and lay out, until a further drawing for the widths of that adds nothing.

    A curve that is drawn by itself, and what the widths of a table change, take three at most.
    """
    for _ in range(3):
        app.draw()
        await pilot.pause(0.005)
        before = _drawn(app)
        app.draw()
        if _drawn(app) == before:
            break


async def resize(app: LiveApp, pilot: "Pilot[int]", size: tuple[int, int]) -> None:
    """Give the terminal another size, and go on when the screen has it: a busy machine is late."""
    await pilot.resize_terminal(*size)
    for _ in range(200):
        if tuple(app.screen.size) == size:
            break
        await pilot.pause(0.01)
    await settle(app, pilot)


def _drawn(app: LiveApp) -> list[dict[str, Hashable]]:
    return [dict(one._drawn) for one in app.screen_stack if isinstance(one, RunScreen)]


async def press(app: LiveApp, pilot: "Pilot[int]", *keys: str) -> str:
    """Press keys one after the other, and return what the screen then shows."""
    for key in keys:
        await pilot.press(key)
        await settle(app, pilot)
    return text(app)


def text(app: LiveApp) -> str:
    """Return what is on the screen."""
    width, height = app.size
    console = Console(
        width=width,
        height=height,
        file=io.StringIO(),
        record=True,
        force_terminal=True,
        legacy_windows=False,
    )
    console.print(app.screen._compositor.render_update(full=True))
    return console.export_text()


def whole_text(app: LiveApp, widget: str) -> str:
    """Return everything that a widget holds, in sight or not."""
    found = app.screen.query_one(f"#{widget}")
    return str(found.render())


def keys(
    folder: Path,
    *pressed: str,
    events: Sequence[Event] | Callable[[], Sequence[Event]] = _short,
    size: tuple[int, int] = (100, 40),
) -> dict[str, Any]:
    """Return the app's ``choice``, its ``mode`` and the screen's ``text`` after some keys."""
    return in_turn(folder, pressed, events=events, size=size)[0]


def in_turn(
    folder: Path,
    *turns: Sequence[str],
    events: Sequence[Event] | Callable[[], Sequence[Event]] = _short,
    size: tuple[int, int] = (100, 40),
) -> list[dict[str, Any]]:
    """Return what `keys` does after each of several turns of keys, all in one view."""
    found: list[dict[str, Any]] = []

    async def steps(app: LiveApp, pilot: "Pilot[int]") -> None:
        for pressed in turns:
            shown = await press(app, pilot, *pressed)
            found.append({"text": shown, "choice": copy(app.choice), "mode": app.current_mode})

    show(recorded(folder, events), folder, steps, size=size)
    return found
