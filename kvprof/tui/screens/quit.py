"""The question before leaving while a measurement of the view's own is running."""

from typing import ClassVar

from rich.console import Group
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.events import Click
from textual.screen import ModalScreen
from textual.widgets import Static

__all__ = ["QuitScreen"]


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
            "stop it now; what is on disk stays"
            if self._stopping
            else "stop after the step in hand and leave; what is measured stays"
        )
        lines = [Text("The measurement is still running.", style="bold"), Text()]
        for key, text in (
            ("f", "leave, and let it finish in the background"),
            ("s", stop),
            ("c", "continue to watch (Escape)"),
        ):
            line = Text.assemble((f" {key} ", "bold reverse"), f"  {text}", overflow="fold")
            answer = {"f": "finish", "s": "stop", "c": "stay"}[key]
            line.apply_meta({"answer": answer})
            lines.append(line)
        lines += [Text(), Text(f"Its record: {self._folder}", overflow="fold")]
        with VerticalScroll(classes="box"):
            yield Static(Group(*lines))

    def on_click(self, event: Click) -> None:
        """Take the answer that was clicked."""
        answer = event.style.meta.get("answer")
        if answer is not None:
            self.dismiss(answer)
