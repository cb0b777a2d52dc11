"""The live view: a Textual application that reads events and draws them."""

import asyncio
import gc
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import plotext  # noqa: F401 - takes 0.1 s: before the first frame, not in it
from rich.segment import Segment
from rich.text import Text
from textual.app import App
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.filter import LineFilter
from textual.screen import Screen
from textual.widgets import Input

from kvprof.errors import ExitCode, KvprofError
from kvprof.printable import printable
from kvprof.records.files import write_beside
from kvprof.tui.figures import COLUMNS, Choice
from kvprof.tui.frame import (
    KEYS,
    LOAD_SCREENS,
    REQUEST_SCREENS,
    HelpScreen,
    QuitScreen,
    RunScreen,
)
from kvprof.tui.load_page import LoadScreen
from kvprof.tui.pages import (
    CacheScreen,
    LayersScreen,
    LogScreen,
    OverviewScreen,
)
from kvprof.tui.session import Session, recorded_result
from kvprof.views.bars import Ink

__all__ = ["LiveApp"]

_FRAME = 0.1  # seconds between two drawings; a person reads no faster
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_REST = 0.05  # seconds until the record is looked at again when it held nothing new


class _Printable(LineFilter):
    """What every line passes on its way to the terminal, whatever widget drew it."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments without what a terminal would obey."""
        return [one if one.control else Segment(printable(one.text), one.style) for one in segments]


class LiveApp(App[int]):
    """Shows a run; returns the exit code of the measurement behind it.

    Parameters
    ----------
    session : Session
    save_to : Path
        Folder for what `x` and `e` save.
    light : bool
        For a terminal with a light background.
    """

    CSS_PATH = "app.tcss"
    TITLE = "kvprof tui"
    ENABLE_COMMAND_PALETTE = False
    MODES: ClassVar[dict[str, Callable[[], Screen[Any]]]] = {  # type: ignore[assignment]
        "overview": OverviewScreen,
        "layers": LayersScreen,
        "cache": CacheScreen,
        "load": LoadScreen,
        "log": LogScreen,
    }
    DEFAULT_MODE = "overview"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(n), f"screen({n})", f"screen {n}") for n in range(1, 5)),
        # What scrolls takes End for itself, unless the key comes here first.
        *(Binding(k.key, k.action, k.word, priority=k.action == "jump") for k in KEYS),
        Binding("N", "request(-1)", "the request before", show=False),
        Binding("ctrl+c", "leave", "quit", show=False, priority=True),
    ]

    def __init__(self, session: Session, *, save_to: Path, light: bool = False) -> None:
        # Without colour the terminal's own ground and ink are the only ones sure to fit.
        no_colour = "NO_COLOR" in os.environ
        super().__init__(ansi_color=True if no_colour else None)
        kind = "ansi" if no_colour else "textual"
        self.theme = f"{kind}-{'light' if light else 'dark'}"
        self.session = session
        self.choice = Choice()
        self._save_to = save_to
        #: Seconds between two drawings of a curve, which costs most and changes least.
        self.calm = 1.0

    @property
    def dark(self) -> bool:
        """Whether the ground is dark."""
        return self.current_theme.dark

    @property
    def ink(self) -> Ink:
        """What figures are drawn with."""
        return Ink(dark=self.dark, colour=not self.no_color)

    @property
    def screens(self) -> tuple[str, ...]:
        """Names of the screens that the run has, in the order of their keys."""
        return LOAD_SCREENS if self.session.state.is_load else REQUEST_SCREENS

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return Textual's own filters, and the one that keeps names from being obeyed."""
        return [*super().get_line_filters(), _PRINTABLE]

    def on_mount(self) -> None:
        """Begin to read, and to draw."""
        # What is loaded by now stays; a collection that looks through it costs several frames.
        gc.freeze()
        self.run_worker(self._read(), name="read")
        self.set_interval(_FRAME, self.draw)
        # Killed without it, the view would leave the terminal in its own mode.
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._end_asked)

    def on_unmount(self) -> None:
        """Give the signals back."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def _end_asked(self) -> None:
        """Leave; a measurement that nobody watches or awaits any more ends after its step."""
        if self.session.worker is not None:
            self.session.worker.interrupt()
        self.exit(int(ExitCode.INTERRUPTED))

    async def _read(self) -> None:
        """Read events for as long as the view is open, and never long enough to miss a key."""
        while True:
            busy = self.session.advance()
            worker = self.session.worker
            if worker is not None and worker.stopping and not worker.running:
                self.exit(self.session.exit_code)
                return
            await asyncio.sleep(0 if busy else _REST)

    def draw(self) -> None:
        """Draw the current screen, also below a question."""
        screens = self.screens
        # What kind of run it is, its first event says.
        if self.current_mode not in screens and isinstance(self.screen, RunScreen):
            self.switch_mode(screens[0])
        for screen in self.screen_stack:
            if isinstance(screen, RunScreen):
                screen.refresh_all()

    def status_line(self, width: int) -> Text:
        """Return what is looked at, and how far it is."""
        run, status = self.session.state.run, self.session.status()
        words = [self.session.name]
        if run is not None:
            name = str(run.shape.get("name", "")) or str(run.inputs.get("model", ""))
            words += [name] if name else []
            words += [f"{run.mode} run"] if run.mode else []
        if count := len(self.session.state.warnings):
            key = len(self.screens)
            status = f"! {count} warning{'s' if count > 1 else ''}: key {key} · {status}"
        left = Text(" · ".join(words), no_wrap=True, overflow="ellipsis")
        left.truncate(max(0, width - len(status) - 2), overflow="ellipsis")
        left.append(" " * max(1, width - left.cell_len - len(status)))
        return left.append(status, style="bold")

    def hidden_keys(self) -> frozenset[str]:
        """Return the keys that would do nothing now."""
        hidden = set()
        if not self.session.source.playing:
            hidden.add("end")
        state = self.session.state
        if max(len(state.requests()), len(state.load.cases)) < 2:
            hidden.add("n")
        return frozenset(hidden)

    def key_words(self) -> dict[str, str]:
        """Return what keys are called now, where that changes."""
        words = {"space": "resume"} if self.session.paused else {}
        if self.session.state.is_load:
            words["n"] = "rate"
        return words | ({"p": "fold parts"} if self.choice.small_parts else {})

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave a key to others where it has nothing to do, or a question is open."""
        if action in _OWN and not isinstance(self.screen, RunScreen):
            return False
        if action == "jump":
            return self.session.source.playing and not isinstance(self.focused, Input)
        return True

    def action_screen(self, number: int) -> None:
        """Go to a screen by its key."""
        if number <= len(self.screens):
            self.action_show(self.screens[number - 1])

    def action_show(self, name: str) -> None:
        """Go to a screen."""
        self.switch_mode(name)

    def action_method(self, name: str | None = None) -> None:
        """Choose a method, the next one when none is named."""
        state = self.session.state
        if name is not None and state.is_load:
            self.choice.choose_load(state, name)
        elif name is not None:
            self.choice.method = name
        elif (
            self.choice.next_load_method(state) if state.is_load else self.choice.next_method(state)
        ) is None:
            self._say("no method has started")
        self.draw()

    def action_baseline(self) -> None:
        """Hold the others against the next method."""
        if self.choice.next_baseline(self.session.state) is None:
            self._say("no method has started")
        self.draw()

    def action_request(self, by: int) -> None:
        """Go to another batch and lengths, or another rate of a load."""
        state = self.session.state
        if state.is_load:
            self.choice.move_load(state, by)
        else:
            self.choice.move_request(state, by)
        self.draw()

    def action_sort(self) -> None:
        """Change the order of what the screen lists."""
        screen = self.screen
        if isinstance(screen, LayersScreen):
            columns = list(COLUMNS)
            following = columns[(columns.index(self.choice.sort) + 1) % len(columns)]
            self.choice.sort, self.choice.descending = following, following != "layer"
        elif isinstance(screen, OverviewScreen):
            self.choice.parts_by_size = not self.choice.parts_by_size
        self.draw()

    def action_small_parts(self) -> None:
        """Show the parts of little time one by one, or fold them again."""
        self.choice.small_parts = not self.choice.small_parts
        self.draw()

    def action_sort_by(self, column: str) -> None:
        """Sort layers by a column; a second time, the other way round."""
        same = self.choice.sort == column
        self.choice.descending = not self.choice.descending if same else column != "layer"
        self.choice.sort = column
        self.draw()

    def action_filter(self) -> None:
        """Write a filter for layers."""
        if isinstance(self.screen, LayersScreen):
            self.screen.ask_filter()

    def action_pause(self) -> None:
        """Hold the view still, or let it go on; the measurement never notices."""
        self.session.paused = not self.session.paused
        self.draw()

    def action_jump(self) -> None:
        """Play the rest of a replay at once."""
        self.session.source.jump()

    def action_help(self) -> None:
        """Show every key."""
        self.push_screen(HelpScreen())

    def action_save_svg(self) -> None:
        """Save the screen as an SVG file."""
        name = self.screen.called if isinstance(self.screen, RunScreen) else "screen"
        drawn = self.export_screenshot(title=f"kvprof tui · {self.session.name}")
        try:
            path = write_beside(self._save_to / f"kvprof-{name}.svg", drawn.encode("utf-8"))
        except KvprofError as problem:
            self._say(str(problem), wrong=True)
        else:
            self._say(f"saved {path}")

    async def action_export(self) -> None:
        """Write the result, as far as it is measured."""
        self.run_worker(self._export(), name="export")

    async def _export(self) -> None:
        session = self.session
        try:
            # A long record takes seconds to fold; the view goes on meanwhile.
            text = await asyncio.to_thread(recorded_result, session.record, session.result)
            path = write_beside(self._save_to / "kvprof-result.json", text.encode("utf-8"))
        except KvprofError as problem:
            self._say(str(problem), wrong=True)
        else:
            whole = json.loads(text)["complete"]
            self._say(f"exported {path}" + ("" if whole else " (incomplete)"))

    async def action_quit(self) -> None:
        """Leave, as `q` does."""
        self.action_leave()

    def action_leave(self) -> None:
        """Leave; ask first while a measurement of the view's own is running."""
        if isinstance(self.screen, QuitScreen):
            return
        worker = self.session.worker
        if worker is None or not worker.running:
            self.exit(self.session.exit_code)
            return
        self.push_screen(QuitScreen(str(worker.folder), worker.stopping), self._answered)

    def _answered(self, answer: str | None) -> None:
        worker = self.session.worker
        if worker is None or answer in (None, "stay"):
            return
        if answer == "finish":
            worker.release()
            self.exit(self.session.exit_code)
        elif worker.stopping:
            # It may take seconds to die; the view goes on meanwhile.
            self.run_worker(asyncio.to_thread(worker.end), name="end")
        else:
            worker.interrupt()
        self.draw()

    def _say(self, words: str, *, wrong: bool = False) -> None:
        self.notify(words, severity="error" if wrong else "information", markup=False, timeout=4)


_PRINTABLE = _Printable()
# What needs a screen of the run: below a question or the help these keys do nothing.
_OWN = frozenset(
    (
        "show",
        "screen",
        "method",
        "baseline",
        "request",
        "sort",
        "small_parts",
        "filter",
        "pause",
        "save_svg",
        "export",
        "help",
        "jump",
    )
)
