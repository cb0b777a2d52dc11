"""Help: every key, and how to read the screens."""

from typing import ClassVar

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from kvprof.tui.keys import KEYS
from kvprof.views.page import bullets

__all__ = ["HelpScreen"]

_READING = (
    "A bar is the time of one request, in parts; what no part explains is its own part (?). Until "
    "a case has finished it is what was measured so far, afterwards the time without "
    "instrumentation.",
    "Shares are of the method's own time; until its case has finished, of what is in parts so far.",
    "≈ is provisional: what a first, short pass says until parts are measured. No result has it.",
    "A case runs its request several times, without marks and with them: a pass each. A composed "
    "run measures one layer at several lengths: its points.",
    "Differences are against the baseline, once both are measured. › marks the chosen method.",
    "Time between tokens is of decode steps; first token and completion are without "
    "instrumentation. A first token that is not bold is of a single run so far.",
    "A colour means one thing: a part, the curve of a method, or better, worse and doubtful.",
    "A layer's ms are its attention and what the method adds, over the whole request.",
    "The view reads the run's events and changes nothing: several may watch one run.",
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
        table.add_row("1–5", "the screens")
        for key in KEYS:
            table.add_row(key.sign, key.help)
        table.add_row("↑ ↓", "scroll; the mouse works, too: tabs, keys, methods, columns")
        with VerticalScroll(classes="box"):
            yield Static(
                Group(
                    Text("Keys", style="bold"), table, Text(),
                    Text("How to read it", style="bold"), bullets(_READING), Text(),
                    Text("? or Escape closes this page", style="italic"),
                )
            )  # fmt: skip
