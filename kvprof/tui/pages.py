"""The four screens: overview, layers, cache and log."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import Container, Vertical, VerticalScroll
from textual.events import Resize
from textual.widgets import Input, RichLog, Static

from kvprof.tui.drawings import (
    CacheBars,
    LayerTable,
    Levels,
    Telemetry,
    layer_head,
    part_table,
    stacked_bars,
)
from kvprof.tui.figures import (
    LayerFilter,
    LayerRow,
    bars,
    clock,
    itl_curve,
    layer_rows,
    request_words,
    share,
    shown_parts,
)
from kvprof.tui.frame import RunScreen
from kvprof.tui.state import LOG_LINES, CaseState, LogLine
from kvprof.views.jct_data import byte_unit, peak_name
from kvprof.views.page import bullets, wrap
from kvprof.views.plot import HeatMap, LinePlot, Series

__all__ = ["CacheScreen", "LayersScreen", "LogScreen", "OverviewScreen"]

# --- Overview: where the time of a request goes, per method; time between tokens; the machine.


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
        small = None if choice.small_parts else _SMALL[self.has_class("short")]
        table = part_table(cases, shown_parts(state, choice), base, chosen, app.ink, small)
        room = self.size.width - 6
        beside = table.width + 3 + _LEAST_CURVE <= room
        self.mark("figures", "beside", beside)
        if (wide := f"width: {table.width if beside else '100%'};") != self._parts_style:
            self._parts_style = wide  # setting a style lays the screen out, changed or not
            if (target := self.widget("parts")) is not None:
                target.set_styles(wide)
        airy = self.size.height >= (_TALL if beside else 2 * _TALL)
        steps = tuple((case.name, case.steps.count, case.steps.last) for case in cases)
        known = "bars" in self._drawn
        curved = self.put(
            "curve", (steps, self.size, beside), lambda: self._curve(cases, beside), every=app.calm
        )
        if curved and known and app.calm > 0:
            return  # a curve fills a frame; all else is drawn in the next
        self.put("title", (*seen, len(state.requests())), self._title)
        self.put("bars", (seen, airy), lambda: stacked_bars(bars(state, choice), app.ink, airy))
        progress = app.session.progress()
        self.mark("progress", "shown", bool(progress))
        self.put("progress", (progress,), lambda: Text(progress, style="dim", overflow="fold"))
        self.put("parts", (seen, small), lambda: table)
        self.put("notes", seen, lambda: self._notes(cases))
        devices = tuple((name, device.count) for name, device in state.devices.items())
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
            words.append(f"against {base}" + ("" if found else ", not measured"))
        return title.append(f" · {' · '.join(words)}", style="not bold")

    def _curve(self, cases: list[CaseState], beside: bool) -> RenderableType:
        series = []
        for case in cases:
            contexts, seconds = itl_curve(case, _POINTS)
            series.append(Series(case.method, contexts, [1e3 * value for value in seconds]))
        if not cases:
            return Text()
        title = "Time between tokens"
        if not any(len(one.x) > 0 for one in series):
            waiting = Text("no token generated yet", style="italic")
            return Group(Text(title, style="bold"), waiting)
        rows = self.size.height - (15 + 2 * len(cases) if beside else 34 + len(cases))
        height = max(_CURVE_ROWS[0], min(_CURVE_ROWS[1], rows))
        return LinePlot(
            series,
            title,
            "tokens in the cache",
            "ms",
            height=height,
            colours=self.live.ink.curves(len(series)),
        )

    def _notes(self, cases: list[CaseState]) -> RenderableType:
        """Return what a reader must know before believing the bars."""
        caveats: list[RenderableType] = []
        lines: list[str] = []
        labels: dict[str, list[str]] = {}
        for case in cases:
            for what, words in case.started.labels.items():
                labels.setdefault(f"{what.replace('_', ' ')}: {words}", []).append(case.method)
            if (caveat := case.account.caveat()) is not None:
                words = f"! {case.method}: {caveat}"
                caveats.append(Text(words, style=self.live.ink.warn(), overflow="fold"))
        lines += [f"{', '.join(methods)}: {words}" for words, methods in labels.items()]
        return Group(*caveats, bullets(lines, "dim"))


# --- Layers: what each layer costs and keeps, as a table, with a map of the ranks by head.


_UNTIMED = "a composed run times one layer for all"


class LayersScreen(RunScreen):
    """The chosen method's layers."""

    called = "layers"
    AUTO_FOCUS = "#rows"

    def __init__(self) -> None:
        super().__init__()
        self._wrong = ""  # with the filter as it is written

    def compose_body(self) -> ComposeResult:
        """Return the widgets, from top to bottom."""
        yield Static(id="layers-top")
        yield Input(placeholder="0-7,12  or  k<64,ms>=2", id="filter")
        with Container(id="layer-body"):
            with Vertical(id="table"):
                yield Static(id="head")
                with VerticalScroll(id="rows"):
                    yield Static(id="lines")
            with VerticalScroll(id="maps"):
                yield Static(id="keys-map")
                yield Static(id="values-map")

    def draw(self) -> None:
        """Fill the widgets."""
        app, choice = self.live, self.live.choice
        case = choice.shown_case(app.session.state)
        chosen = (
            case.name if case is not None else None,
            case.version if case is not None else 0,
            choice.sort,
            choice.descending,
            choice.layers,
            app.dark,
        )
        rows = (
            layer_rows(case, sort=choice.sort, descending=choice.descending, shown=choice.layers)
            if case is not None
            else []
        )
        untimed = case is not None and case.finished is not None and not _timed(case)
        top = (*chosen[:1], *chosen[2:], untimed)
        self.put("layers-top", top, lambda: self._top(case, rows, untimed))
        self.put("head", chosen[2:4], lambda: layer_head(choice.sort, choice.descending))
        self.put("lines", chosen, lambda: LayerTable(rows))
        in_order = sorted(rows, key=lambda row: row.layer)
        shown = (chosen[0], tuple(row.layer for row in in_order), app.dark)
        self.put("keys-map", shown, lambda: _map("Rank of keys", in_order, keys=True))
        self.put("values-map", shown, lambda: _map("Rank of values", in_order, keys=False))

    def ask_filter(self) -> None:
        """Open the line in which a filter is written."""
        self._wrong = ""
        entry = self.query_one("#filter", Input)
        entry.value = self.live.choice.layers.text
        entry.add_class("shown")
        entry.focus()
        self.refresh_all()

    def footer_text(self) -> Text | None:
        """Return what Enter and Escape do while a filter is written."""
        if not self.query("#filter.shown"):
            return None
        if self._wrong:
            return Text(f"! {self._wrong}", style=self.live.ink.bad(), overflow="fold")
        keep, drop = ("Enter", "bold"), ("Esc", "bold")
        return Text.assemble(keep, " keep the filter  ", drop, " all layers")

    @on(Input.Changed, "#filter")
    def _typed(self, event: Input.Changed) -> None:
        """Apply a filter as it is written; while it is no filter, the last one stays."""
        try:
            self.live.choice.layers = LayerFilter.parse(event.value)
            self._wrong = ""
        except ValueError as wrong:
            self._wrong = str(wrong)
        self.refresh_all()

    @on(Input.Submitted, "#filter")
    def _entered(self) -> None:
        if not self._wrong:
            self._close_filter()

    def key_escape(self) -> None:
        """Show all layers again."""
        self.live.choice.layers = LayerFilter()
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).remove_class("shown")
        self.query_one("#rows").focus()
        self.refresh_all()

    def _top(self, case: CaseState | None, rows: Sequence[LayerRow], untimed: bool) -> Text:
        choice = self.live.choice
        title = Text("Layers", style="bold", overflow="fold")
        if case is None:
            return title.append(" · no case has started", style="not bold")
        words = [case.method, request_words(case.request)]
        if case.started.rate:
            words.append(f"saves {share(case.started.rate)}")
        if choice.layers.text:
            words.append(f"filter {choice.layers.text}: {len(rows)} of {len(case.layers)}")
        title.append(f" · {' · '.join(words)}", style="not bold")
        if not case.layers:
            title.append("\nthis run does not record layers", style="not bold italic")
        elif untimed:
            title.append(f"\n{_UNTIMED}", style="not bold italic")
        return title


def _timed(case: CaseState) -> bool:
    return any(layer.seconds is not None for layer in case.layers.values())


def _map(title: str, rows: Sequence[LayerRow], *, keys: bool) -> RenderableType:
    values = [row.key_ranks if keys else row.value_ranks for row in rows]
    kept = [(row, own) for row, own in zip(rows, values, strict=True) if own]
    if not kept:
        return Text()
    return HeatMap(
        [own for _, own in kept],
        title,
        show=lambda value: f"{value:.0f}",
        layers=[str(row.layer) for row, _ in kept],
    )


# --- Cache: bytes stored, reserved and at most on the device, against uncompressed; tokens by
# level.


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
            return title.append(" · no case has started", style="not bold")
        return title.append(f" · {request_words(request)}\n", style="not bold")

    def _levels(self, cases: list[CaseState]) -> RenderableType:
        shown: list[RenderableType] = []
        for case in cases:
            newest = case.memory.last
            if newest is not None and newest.levels:
                shown += [Text(), Levels(case.method, newest.levels)]
        return Group(*shown)

    def _colours(self, series: list[Series]) -> tuple[str, ...]:
        """Return the methods' colours, those of Overview; uncompressed is none of them."""
        added = bool(series) and series[0].label == "uncompressed"
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
            series.insert(
                0, Series("uncompressed", [float(context) for context, _ in full], values)
            )
        height = max(_ROWS[0], min(_ROWS[1], self.size.height - 8 - 4 * len(cases)))
        plot = LinePlot(
            series,
            "Stored bytes",
            "tokens in the cache",
            unit,
            height=height,
            colours=self._colours(series),
        )
        return Group(Text(), plot)


# --- Log: what happened, warnings, and what the measurement says.


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
