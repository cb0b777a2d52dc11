"""Cache: bytes stored, reserved and at most on the device, against full width; tokens by level."""

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from kvprof.tui.case_state import CaseState
from kvprof.tui.drawings.cache import CacheBars, Levels
from kvprof.tui.screens.base import RunScreen
from kvprof.tui.words import request_words
from kvprof.views.jct_data import byte_unit, peak_name
from kvprof.views.plot import LinePlot, Series

__all__ = ["CacheScreen"]

_POINTS = 60
_ROWS = (8, 16)


class CacheScreen(RunScreen):
    """Every method's bytes at the shown request."""

    called = "cache"

    def compose_body(self) -> ComposeResult:
        """Return the widgets, from top to bottom."""
        with VerticalScroll(id="body"):
            yield Static(id="title")
            yield Static(id="bytes")
            yield Static(id="levels")
            yield Static(id="growth")

    def draw(self) -> None:
        """Fill the widgets."""
        app, state, choice = self.live, self.live.session.state, self.live.choice
        cases, chosen = choice.shown_cases(state), choice.shown_case(state)
        seen = (
            tuple((case.name, case.memory.count) for case in cases),
            chosen.name if chosen is not None else None,
            app.dark,
        )
        peak = peak_name(state.run.inputs if state.run is not None else {})
        self.put("title", seen, self._title)
        self.put("bytes", seen, lambda: CacheBars(cases, chosen, peak))
        self.put("levels", seen, lambda: self._levels(cases))
        self.put("growth", (seen[0], self.size), lambda: self._growth(cases), every=app.calm)

    def _title(self) -> Text:
        title = Text("Cache", style="bold", overflow="fold")
        request = self.live.choice.shown_request(self.live.session.state)
        if request is None:
            return title.append(" · no case was started yet", style="not bold")
        return title.append(f" · {request_words(request)}\n", style="not bold")

    def _levels(self, cases: list[CaseState]) -> RenderableType:
        shown: list[RenderableType] = []
        for case in cases:
            newest = case.memory.last
            if newest is not None and newest.levels:
                shown += [Text(), Levels(case.method, newest.levels)]
        return Group(*shown)

    def _colours(self, series: list[Series]) -> tuple[str, ...]:
        """Return the methods' colours, those of Overview; full width is none of them."""
        added = bool(series) and series[0].label == "full width"
        return ("",) * added + self.live.ink.curves(len(series) - added)

    def _growth(self, cases: list[CaseState]) -> RenderableType:
        series: list[Series] = []
        widest: dict[int, int] = {}
        sizes = [max(s.logical, s.full_width) for case in cases for s in case.memory]
        factor, unit = byte_unit(max(sizes, default=0))
        for case in cases:
            samples = sorted(case.memory, key=lambda sample: sample.context)
            widest |= {sample.context: sample.full_width for sample in samples}
            kept = samples[:: max(1, -(-len(samples) // _POINTS))]
            contexts = [float(sample.context) for sample in kept]
            series.append(Series(case.method, contexts, [s.logical / factor for s in kept]))
        if not any(len(one.x) > 1 for one in series):
            return Text()
        if not any(all(s.logical == s.full_width for s in case.memory) for case in cases):
            full = sorted(widest.items())[:: max(1, -(-len(widest) // _POINTS))]
            values = [nbytes / factor for _, nbytes in full]
            series.insert(0, Series("full width", [float(context) for context, _ in full], values))
        height = max(_ROWS[0], min(_ROWS[1], self.size.height - 8 - 4 * len(cases)))
        plot = LinePlot(
            series, "Logical bytes", "tokens in the cache", unit, height=height,
            colours=self._colours(series),
        )  # fmt: skip
        return Group(Text(), plot)
