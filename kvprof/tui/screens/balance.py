"""Balance: how schedules load the multiprocessors, predicted and measured."""

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from kvprof.tui.case_state import CaseState
from kvprof.tui.drawings.balance import Strips
from kvprof.tui.figures import strips
from kvprof.tui.screens.base import RunScreen
from kvprof.tui.words import request_words

__all__ = ["BalanceScreen"]


class BalanceScreen(RunScreen):
    """The chosen method's schedules."""

    called = "balance"

    def compose_body(self) -> ComposeResult:
        """Return the widgets."""
        with VerticalScroll(id="body"):
            yield Static(id="title")
            yield Static(id="strips")

    def draw(self) -> None:
        """Fill the widgets."""
        app = self.live
        case = app.choice.shown_case(app.session.state)
        seen = (
            case.name if case is not None else None,
            case.balances if case is not None else 0,
            app.choice.processors_by_load,
            app.dark,
        )
        self.put("title", seen, lambda: _title(case))
        elsewhere = any(other.balance for other in app.choice.shown_cases(app.session.state))
        self.put("strips", (*seen, elsewhere), lambda: self._strips(case, elsewhere))

    def _strips(self, case: CaseState | None, elsewhere: bool) -> Strips | Text:
        if case is None:
            return Text()
        found = strips(case)
        if not found:
            words = f"no balance of {case.method} was recorded"
            if elsewhere:
                words += "; m goes on to a method that has one"
            elif self.live.session.state.on_cpu():
                words += " (a CPU has no multiprocessors to load)"
            return Text(f"\n{words}", style="italic", overflow="fold")
        return Strips(found, self.live.choice.processors_by_load)


def _title(case: CaseState | None) -> Text:
    title = Text("Balance", style="bold", overflow="fold")
    if case is None:
        return title.append(" · no case was started yet", style="not bold")
    words = f" · {case.method} · {request_words(case.request)}"
    title.append(f"{words} · work per multiprocessor against their mean\n", style="not bold")
    return title
