"""What every screen has: tabs, status, keys, the help, and the question before leaving."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.css.query import NoMatches
from textual.events import Click, Resize
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Static

from kvprof.tui.figures import Choice
from kvprof.tui.session import Session
from kvprof.views.bars import Ink
from kvprof.views.page import bullets

__all__ = [
    "KEYS",
    "LEAST_COLUMNS",
    "LEAST_ROWS",
    "LOAD_SCREENS",
    "REQUEST_SCREENS",
    "SCREENS",
    "HelpScreen",
    "Key",
    "QuitScreen",
    "RunScreen",
    "footer",
    "tabs",
    "text_lines",
]

# --- Rich renderables that consist of lines of text, as those lines.


def text_lines(content: RenderableType, console: Console, width: int) -> list[Text]:
    """Return what `content` draws as lines, which Textual paints fastest."""
    if isinstance(content, str):
        content = Text(content)
    if isinstance(content, Text):
        return list(content.split("\n", allow_blank=True))
    if isinstance(content, Group):
        return [line for one in content.renderables for line in text_lines(one, console, width)]
    draw = getattr(content, "__rich_console__", None)
    if draw is None:
        raise TypeError(f"a {type(content).__name__} is not text")
    options = console.options.update(width=width)
    return [line for one in draw(console, options) for line in text_lines(one, console, width)]


# --- The keys of the view: what they are called, what they do, and where they are shown.


#: Name of a screen to its title.
SCREENS = {
    "overview": "Overview",
    "layers": "Layers",
    "cache": "Cache",
    "load": "Load",
    "log": "Log",
}

#: Screens of a run, in the order of the keys from 1 on: of a request, and of servers under load.
REQUEST_SCREENS = ("overview", "layers", "cache", "log")
LOAD_SCREENS = ("load", "log")


@dataclass(frozen=True)
class Key:
    """One key."""

    key: str  # as Textual calls it
    sign: str  # as a person calls it
    word: str  # in the footer; empty leaves it out
    action: str  # of the app
    help: str
    screens: tuple[str, ...] = ()  # where the footer shows it; empty is everywhere


#: In the order of the footer.
KEYS = (
    Key("m", "m", "method", "method", "next method (in Layers, Cache, Load)"),
    Key("b", "b", "baseline", "baseline", "next baseline"),
    Key("n", "n", "request", "request(1)", "next batch and lengths, or rate (N: previous)"),
    Key(
        "s",
        "s",
        "sort",
        "sort",
        "sort parts by size, layers by next column",
        ("overview", "layers"),
    ),
    Key(
        "p",
        "p",
        "small parts",
        "small_parts",
        "show or hide small parts",
        ("overview",),
    ),
    Key("slash", "/", "filter", "filter", "filter layers: 0-7,12 or k<64", ("layers",)),
    Key("space", "space", "pause", "pause", "pause display"),
    Key("end", "End", "jump", "jump", "jump to the end of a replay"),
    Key("x", "x", "save svg", "save_svg", "save this screen as SVG"),
    Key("e", "e", "export", "export", "export the result so far"),
    Key("question_mark", "?", "help", "help", "this help"),
    Key("q", "q", "quit", "leave", "quit (confirms if a measurement is running)"),
)


def tabs(active: str, screens: Sequence[str] = REQUEST_SCREENS) -> Text:
    """Return the line of screens; the active one is in brackets.

    What can be clicked carries the action of the app under ``press`` in its meta data.
    """
    line = Text("kvprof ", no_wrap=True, style="bold")
    for number, name in enumerate(screens, 1):
        title, chosen = SCREENS[name], name == active
        word = Text(f"[{number} {title}]" if chosen else f" {number} {title} ")
        word.stylize(Style(bold=True, reverse=True) if chosen else "")
        word.apply_meta({"press": f"show({name!r})"})
        line.append_text(word)
    return line


def footer(
    screen: str,
    *,
    hidden: frozenset[str],
    words: dict[str, str],
    width: int,
    screens: Sequence[str] = REQUEST_SCREENS,
) -> Text:
    """Return the keys that do something here, on as many lines as they need."""
    entries = [Text.assemble((f"1–{len(screens)}", "bold"), " screens")]
    for key in KEYS:
        if not key.word or key.key in hidden or (key.screens and screen not in key.screens):
            continue
        entry = Text.assemble((key.sign, "bold"), f" {words.get(key.key, key.word)}")
        call = key.action if "(" in key.action else f"{key.action}()"
        entry.apply_meta({"press": call})
        entries.append(entry)
    lines: list[Text] = []
    for entry in entries:
        if lines and lines[-1].cell_len + 2 + entry.cell_len <= width:
            lines[-1].append("  ")
            lines[-1].append_text(entry)
        else:
            lines.append(entry)
    return Text("\n").join(lines)


# --- What every screen has: tabs, status, keys, and a line where there is too little room.


LEAST_COLUMNS, LEAST_ROWS = 60, 12
_SHORT = 30  # rows below which no line stays empty for its looks


class Shown(Protocol):
    """What screens read of the app that shows them (`kvprof.tui.app.LiveApp`)."""

    session: Session  # what runs, and its state
    choice: Choice  # what the person at the screen looks at
    calm: float  # seconds between two drawings of a curve

    @property
    def is_running(self) -> bool:
        """Whether the app has begun and not ended."""

    @property
    def dark(self) -> bool:
        """Whether the ground is dark."""

    @property
    def ink(self) -> Ink:
        """What figures are drawn with."""

    @property
    def screens(self) -> tuple[str, ...]:
        """Names of the screens that the run has, in the order of their keys."""

    def status_line(self, width: int) -> Text:
        """Return what the last line says."""

    def hidden_keys(self) -> frozenset[str]:
        """Return the keys that would do nothing now."""

    def key_words(self) -> dict[str, str]:
        """Return what keys are called now, where that changes."""


class RunScreen(Screen[None]):
    """A screen that shows a run.

    A subclass composes its own widgets in `compose_body` and fills them in `draw`, through `put`,
    which draws only what has changed.
    """

    #: Name of the screen, as `SCREENS` has it.
    called: ClassVar[str] = ""
    #: Columns from which on `-wide` is set.
    HORIZONTAL_BREAKPOINTS = [(0, "-slim"), (115, "-wide")]  # noqa: RUF012 - as Textual has it

    def __init__(self) -> None:
        super().__init__()
        self._composed = False
        self._drawn: dict[str, Hashable] = {}
        self._drawn_at: dict[str, float] = {}
        self._shapes: dict[str, tuple[int, list[int]]] = {}

    @property
    def live(self) -> Shown:
        """The app, as screens know it."""
        return cast(Shown, self.app)

    def compose(self) -> ComposeResult:
        """Put the widgets of every screen around the screen's own."""
        # One below the other: Textual lays widgets that dock to one edge over each other.
        for name in ("tabs", "status", "banner", "narrow"):
            yield Static(id=name)
        yield from self.compose_body()
        yield Static(id="keys")

    def compose_body(self) -> ComposeResult:
        """Return the screen's own widgets."""
        raise NotImplementedError

    def draw(self) -> None:
        """Fill the screen's own widgets from the state."""
        raise NotImplementedError

    def footer_text(self) -> Text | None:
        """Return what stands in the footer instead of the keys; None for the keys."""
        return None

    def on_mount(self) -> None:
        """Draw as soon as there is a layout."""
        self._composed = True
        self._refresh_soon()

    def on_screen_resume(self) -> None:
        """Draw what happened while another screen was shown."""
        self._refresh_soon()

    def on_resize(self, event: Resize) -> None:
        """Say so where there is too little room; draw again for the new width otherwise."""
        size = event.size
        small = size.width < LEAST_COLUMNS or size.height < LEAST_ROWS
        self.set_class(small, "too-small")
        self.set_class(size.height < _SHORT, "short")
        self._drawn.clear()
        # What a widget was laid out for at another width is not known to be its height here.
        self._shapes.clear()
        self._refresh_soon()

    def _refresh_soon(self) -> None:
        """Draw when the widgets have their widths.

        Of two updates before a layout Textual forgets the second one's height, and the screen would
        keep that of the old width.
        """
        self.call_after_refresh(self.refresh_all)

    async def on_click(self, event: Click) -> None:
        """Do what the clicked word stands for."""
        action = event.style.meta.get("press")
        if action is not None:
            await self.app.run_action(f"app.{action}")

    def refresh_all(self) -> None:
        """Draw everything that has changed."""
        app = self.live
        # An app that ends takes its widgets away while its timer still ticks.
        if not self._composed or not app.is_running or not self.size.width:
            return
        width = self.size.width
        screens = app.screens
        self.put("tabs", (app.dark, screens), lambda: tabs(self.called, screens))
        status = app.status_line(width - 2)
        self.put("status", (status,), lambda: status)
        banner = app.session.banner()
        self.put("banner", (banner,), lambda: Text(f"! {banner}", style=app.ink.bad()))
        self.mark("banner", "shown", banner is not None)
        own, hidden, words = self.footer_text(), app.hidden_keys(), app.key_words()
        self.put(
            "keys",
            (own, hidden, tuple(words.items()), screens),
            lambda: (
                own
                or footer(self.called, hidden=hidden, words=words, width=width - 2, screens=screens)
            ),
        )
        if self.has_class("too-small"):
            line = (
                f"kvprof tui needs {LEAST_COLUMNS} columns and {LEAST_ROWS} rows; this terminal "
                f"has {width} and {self.size.height}. Enlarge it, or quit with q and use kvprof "
                "show."
            )
            self.put("narrow", (line,), lambda: Text(line))
            return
        self.draw()

    def widget(self, name: str) -> Widget | None:
        """Return a widget by its id; None while the screen is being taken down.

        A query would look at every widget there is, each time that anything is drawn.
        """
        try:
            return self.query_one(f"#{name}")
        except NoMatches:
            return None

    def mark(self, widget: str, name: str, on: bool) -> None:
        """Let a widget have a class of the style sheet, or not."""
        if (target := self.widget(widget)) is not None:
            target.set_class(on, name)

    def put(
        self,
        widget: str,
        key: tuple[Any, ...],
        make: Callable[[], RenderableType],
        *,
        every: float = 0.0,
    ) -> bool:
        """Fill a widget with what `make` returns, unless `key` is what it was filled for."""
        target = self.widget(widget)
        if not isinstance(target, Static):
            return False
        # Before the first layout a widget has no width; it is drawn again when it has.
        width = target.size.width or self.size.width
        known, before = (width, _hashable(key)), self._drawn.get(widget)
        if before == known:
            return False
        now = time.monotonic()
        same_width = isinstance(before, tuple) and before[0] == width
        if same_width and now - self._drawn_at.get(widget, now) < every:
            return False
        self._drawn[widget], self._drawn_at[widget] = known, now
        lines = text_lines(make(), self.app.console, width)
        # Laying the screen out costs as much as painting it, and most figures change in place.
        shape = (width, [max(1, -(-line.cell_len // width)) for line in lines])
        reshaped = self._shapes.get(widget) != shape
        target.update(Text("\n").join(lines), layout=reshaped)
        self._shapes[widget] = shape
        if reshaped:
            target.call_after_refresh(self._lay_out_again, target, sum(shape[1]))
        return True

    @staticmethod
    def _lay_out_again(target: Static, height: int) -> None:
        """Ask for another layout where a widget has not the height of its lines.

        While a layout is waited for, Textual takes an update for no reason for another one, and
        keeps the height of what was there before.
        """
        if target.size.height != height:
            target.refresh(layout=True)


def _hashable(key: tuple[Any, ...]) -> Hashable:
    return tuple(
        (entry.plain, tuple(entry.spans)) if isinstance(entry, Text) else entry for entry in key
    )


# --- Help: every key, and how to read the screens.


_READING = (
    "A bar is one request's time by part; ? is unattributed. Until a case finishes, it shows "
    "what is measured so far.",
    "Shares are of the method's own time.",
    "A pass is one run of a request; a point is one context length of a composed run.",
    "Differences are from the baseline. › marks the chosen method.",
    "ITL is the time of a decode step. A TTFT that is not bold is from a single run.",
    "Colours mark parts, methods, or better, worse and doubtful.",
    "A running rate shows finished requests only. ▲ the queue grows, ▽ the server sheds "
    "requests, ! requests fail, × too few meet the SLO.",
    "A layer's ms are its attention and cache work over the whole request.",
    "Several views can watch one run.",
)


class HelpScreen(ModalScreen[None]):
    """Closes with any of ?, q, Escape and Enter."""

    BINDINGS: ClassVar[list[BindingType]] = [
        (key, "dismiss", "close") for key in ("question_mark", "q", "escape", "enter", "space")
    ]

    def compose(self) -> ComposeResult:
        """Return the page."""
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        table.add_row("1–4", "screens (with --load: Load and Log)")
        for key in KEYS:
            table.add_row(key.sign, key.help)
        table.add_row("↑ ↓", "scroll; the mouse works too")
        with VerticalScroll(classes="box"):
            yield Static(
                Group(
                    Text("Keys", style="bold"),
                    table,
                    Text(),
                    Text("Notes", style="bold"),
                    bullets(_READING),
                    Text(),
                    Text("? or Escape closes this help", style="italic"),
                )
            )


# --- The question before leaving while a measurement of the view's own is running.


class QuitScreen(ModalScreen[str]):
    """Asks what becomes of the measurement; returns ``finish``, ``stop`` or ``stay``.

    Parameters
    ----------
    folder : str
        Where the run is recorded.
    stopping : bool
        Whether it was already asked to stop.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        ("f", "dismiss('finish')", "finish"),
        ("s", "dismiss('stop')", "stop"),
        ("escape,c,q", "dismiss('stay')", "stay"),
    ]

    def __init__(self, folder: str, stopping: bool) -> None:
        super().__init__()
        self._folder = folder
        self._stopping = stopping

    def compose(self) -> ComposeResult:
        """Return the question."""
        stop = (
            "stop now; recorded events stay on disk"
            if self._stopping
            else "stop after the current step and quit; save the measurements"
        )
        lines = [Text("The measurement is still running.", style="bold"), Text()]
        for key, text in (
            ("f", "quit, and let it finish in the background"),
            ("s", stop),
            ("c", "keep watching (Escape)"),
        ):
            line = Text.assemble((f" {key} ", "bold reverse"), f"  {text}", overflow="fold")
            answer = {"f": "finish", "s": "stop", "c": "stay"}[key]
            line.apply_meta({"answer": answer})
            lines.append(line)
        lines += [Text(), Text(f"Recorded in {self._folder}", overflow="fold")]
        with VerticalScroll(classes="box"):
            yield Static(Group(*lines))

    def on_click(self, event: Click) -> None:
        """Take the answer that was clicked."""
        answer = event.style.meta.get("answer")
        if answer is not None:
            self.dismiss(answer)
