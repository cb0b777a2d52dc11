"""Overview: where the time of a request goes, per method; time between tokens; the machine."""

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container, VerticalScroll
from textual.widgets import Static

from kvprof.tui.case_state import CaseState
from kvprof.tui.drawings.bars import PROVISIONAL, Bars
from kvprof.tui.drawings.parts import PartTable, table_width
from kvprof.tui.drawings.telemetry import Telemetry
from kvprof.tui.figures import bars, part_rows, tbt_curve
from kvprof.tui.screens.base import RunScreen
from kvprof.tui.words import request_words, share
from kvprof.views.page import bullets
from kvprof.views.plot import LinePlot, Series

__all__ = ["OverviewScreen"]

_SMALL = (0.01, 0.03)  # share below which a part has no row of its own; where there are few rows
_POINTS = 60  # of a curve; more do not fit its columns
_LEAST_CURVE = 40  # columns beside the table
_TALL = 32  # rows from which on bars are kept apart
_CURVE_ROWS = (8, 20)


class OverviewScreen(RunScreen):
    """Stacked bars, the table of parts, the curve of time between tokens, telemetry."""

    called = "overview"

    def __init__(self) -> None:
        super().__init__()
        self._parts_style = ""

    def compose_body(self) -> ComposeResult:
        """Return the widgets, from top to bottom."""
        with VerticalScroll(id="body"):
            yield Static(id="title")
            yield Static(id="bars")
            yield Static(id="progress")
            with Container(classes="side", id="figures"):
                yield Static(id="parts")
                yield Static(id="curve")
            yield Static(id="notes")
        yield Static(id="telemetry")

    def draw(self) -> None:
        """Fill the widgets."""
        app, state, choice = self.live, self.live.session.state, self.live.choice
        cases = choice.shown_cases(state)
        base, chosen = choice.baseline_case(state), choice.shown_case(state)
        seen = (
            tuple((case.name, case.version) for case in cases),
            base.name if base is not None else None,
            chosen.name if chosen is not None else None,
            choice.parts_by_size,
            app.dark,
        )
        rows = part_rows(state, choice)
        room = self.size.width - 6
        table = table_width([part for part, _ in rows], len(cases))
        beside = table + 3 + _LEAST_CURVE <= room
        self.query("#figures").set_class(beside, "beside")
        if (wide := f"width: {table if beside else '100%'};") != self._parts_style:
            self._parts_style = wide  # setting a style lays the screen out, changed or not
            self.query("#parts").set_styles(wide)
        airy = self.size.height >= (_TALL if beside else 2 * _TALL)
        steps = tuple((case.name, case.steps.count) for case in cases)
        known = "bars" in self._drawn
        curved = self.put(
            "curve", (steps, self.size, beside), lambda: self._curve(cases, beside), every=app.calm
        )
        if curved and known and app.calm > 0:
            return  # a curve fills a frame; all else is drawn in the next
        self.put("title", (*seen, len(state.requests())), self._title)
        self.put("bars", (seen, airy), lambda: Bars(bars(state, choice), app.ink, airy))
        progress = app.session.progress()
        self.query("#progress").set_class(bool(progress), "shown")
        self.put("progress", (progress,), lambda: Text(progress, style="dim", overflow="fold"))
        small = None if choice.small_parts else _SMALL[self.has_class("short")]
        self.put(
            "parts", (seen, small), lambda: PartTable(cases, rows, base, chosen, app.ink, small)
        )
        self.put("notes", seen, lambda: self._notes(cases))
        devices = tuple((name, device.history.count) for name, device in state.devices.items())
        self.put("telemetry", (devices, app.dark), lambda: Telemetry(state.devices, app.ink))

    def _title(self) -> Text:
        state, choice = self.live.session.state, self.live.choice
        request, requests = choice.shown_request(state), state.requests()
        title = Text("Job completion time", style="bold", overflow="fold")
        if request is None:
            return title
        words = [request_words(request)]
        if len(requests) > 1:
            words.append(f"request {requests.index(request) + 1} of {len(requests)}")
        if (base := choice.baseline_method(state)) is not None:
            found = choice.baseline_case(state) is not None
            words.append(f"against {base}" + ("" if found else ", not measured here"))
        return title.append(f" · {' · '.join(words)}", style="not bold")

    def _curve(self, cases: list[CaseState], beside: bool) -> RenderableType:
        series = []
        for case in cases:
            contexts, seconds = tbt_curve(case, _POINTS)
            series.append(Series(case.method, contexts, [1e3 * value for value in seconds]))
        if not cases:
            return Text()
        title = "Time between tokens"
        if not any(len(one.x) > 0 for one in series):
            waiting = Text("no token was generated yet", style="italic")
            return Group(Text(title, style="bold"), waiting)
        rows = self.size.height - (15 + 2 * len(cases) if beside else 34 + len(cases))
        height = max(_CURVE_ROWS[0], min(_CURVE_ROWS[1], rows))
        return LinePlot(
            series, title, "tokens in the cache", "ms", height=height,
            colours=self.live.ink.curves(len(series)),
        )  # fmt: skip

    def _notes(self, cases: list[CaseState]) -> RenderableType:
        """Return what a reader must know before believing the bars."""
        doubts: list[RenderableType] = []
        lines: list[str] = []
        labels: dict[str, list[str]] = {}
        overheads = []
        for case in cases:
            for what, words in case.started.labels.items():
                labels.setdefault(f"{what.replace('_', ' ')}: {words}", []).append(case.method)
            if (doubt := case.account.doubt()) is not None:
                words = f"! {case.method}: {doubt}"
                doubts.append(Text(words, style=self.live.ink.warn(), overflow="fold"))
            if (overhead := case.overhead()) is not None:
                overheads.append(f"{case.method} {share(overhead)}")
        if early := [case.method for case in cases if case.provisional]:
            lines.append(
                f"{PROVISIONAL} {', '.join(early)}: provisional, by a first, short pass; no result "
                "has it"
            )
        lines += [f"{', '.join(methods)}: {words}" for words, methods in labels.items()]
        if overheads:
            lines.append(f"timing the parts cost {', '.join(overheads)}; bars are without it")
        return Group(*doubts, bullets(lines, "dim"))
