"""Log: what happened, warnings, and what the measurement says."""

from rich.text import Text
from textual.app import ComposeResult
from textual.events import Resize
from textual.widgets import RichLog

from kvprof.tui.screens.base import RunScreen
from kvprof.tui.state import LOG_LINES, LogLine
from kvprof.tui.words import clock
from kvprof.views.page import wrap

__all__ = ["LogScreen"]

_LOUD = ("warning", "failed", "damage")
_GUTTER = 18  # columns of the time and the kind
_LEAST_TEXT = 20


class LogScreen(RunScreen):
    """The log's newest lines; it scrolls along as long as its end is in sight."""

    called = "log"

    def __init__(self) -> None:
        super().__init__()
        self._written = 0

    def compose_body(self) -> ComposeResult:
        """Return the widget."""
        yield RichLog(id="log", wrap=True, max_lines=LOG_LINES, min_width=20)

    def draw(self) -> None:
        """Write the lines that are new."""
        state = self.live.session.state
        log = self.query_one(RichLog)
        new = min(state.logged - self._written, len(state.log))
        if new <= 0:
            return
        width = max(_LEAST_TEXT, self.size.width - 4 - _GUTTER)
        for line in list(state.log)[-new:]:
            # Without it the log measures lines by the width of the console that the view began in.
            log.write(self._line(line, width), width=_GUTTER + width)
        self._written = state.logged

    def on_resize(self, event: Resize) -> None:
        """Write every line again, wrapped for the new width."""
        self._written = 0
        for log in self.query(RichLog):
            log.clear()
        super().on_resize(event)

    def _line(self, line: LogLine, width: int) -> Text:
        """Return a line; what does not fit `width` columns hangs below its beginning."""
        loud = line.kind in _LOUD
        text = Text(f"{clock(line.time):>7} ", style="dim")
        style = self.live.ink.warn() if loud else ""
        text.append(f"{'!' if loud else ' '} {line.kind:<8}", style=f"not dim bold {style}".strip())
        for index, piece in enumerate(wrap(Text(line.text, style="not dim"), width)):
            text.append(("\n" + " " * _GUTTER) * (index > 0))
            text.append_text(piece)
        return text
