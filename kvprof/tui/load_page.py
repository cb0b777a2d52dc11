"""The screen *Load*: the queue, what runs and the cache over time; latency by rate, per method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container, VerticalScroll
from textual.widgets import Static

from kvprof.records.load import SHED, LoadCase
from kvprof.records.load_names import baseline_of
from kvprof.records.load_served import ATTAINED
from kvprof.tui.drawings import Telemetry, short
from kvprof.tui.figures import difference, duration, share
from kvprof.tui.frame import RunScreen
from kvprof.tui.load_figures import SAMPLED, RateBrief, binned, brief_of, by_rate, rate_words
from kvprof.views.bars import BARS, Ink
from kvprof.views.numbers import MISSING, number
from kvprof.views.page import bullets
from kvprof.views.plot import LinePlot, Series

__all__ = ["LoadScreen", "QueueLines", "RateTable"]

_LABEL = 12  # columns in front of a line or row
_FIGURE = 19  # columns of a method: latency, a sign, its difference from the baseline
_WORDS = 27  # columns behind a line: now, and the most
_LEAST_CURVE = 40  # columns beside the table
_CURVE_ROWS = (5, 16)
_OVER_ROWS = 8
_LOG = 10.0  # from this ratio of the largest to the smallest latency on, the axis is logarithmic
_GROWS, _SHEDS, _FAILS, _MISSES = "▲", "▽", "!", "×"
_LOW = 30  # rows, of a screen that would cut a plot's legend off


class LoadScreen(RunScreen):
    """The chosen method at the chosen rate, and all of them in a table."""

    called = "load"

    def __init__(self) -> None:
        super().__init__()
        self._width = ""

    def compose_body(self) -> ComposeResult:
        """Return the widgets, from top to bottom."""
        with VerticalScroll(id="body"):
            yield Static(id="title")
            yield Static(id="queue")
            with Container(classes="side", id="figures"):
                yield Static(id="rates")
                yield Static(id="curve")
            yield Static(id="over")
            yield Static(id="notes")
        yield Static(id="telemetry")

    def draw(self) -> None:
        """Fill the widgets."""
        app, state, choice = self.live, self.live.session.state, self.live.choice
        case = choice.shown_load(state)
        objective = state.objective
        briefs = list(state.briefs.values())
        running = state.load.cases.get(state.current or "")
        every = app.calm if running is not None else 0.0
        chosen = case.started.case if case is not None else None
        seen = (chosen, len(case.samples) if case is not None else 0, app.dark)
        ended = len(case.requests) if case is not None else 0
        under_way = len(running.requests) if running is not None else None
        self.put("title", (chosen, ended, len(briefs), app.dark), lambda: self._title(case))
        self.put("queue", seen, lambda: QueueLines(case, app.ink))
        room = self.size.width - 6
        known = dict.fromkeys(one.started.method for one in state.load.cases.values())
        methods = max(1, len(known))
        table = _LABEL + _FIGURE * methods
        beside = table + 3 + _LEAST_CURVE <= room
        self.mark("figures", "beside", beside)
        if (width := f"width: {table if beside else '100%'};") != self._width:
            self._width = width  # setting a style lays the screen out, changed or not
            if (target := self.widget("rates")) is not None:
                target.set_styles(width)
        base, method = choice.baseline_method(state), case.started.method if case else None
        rates = (len(briefs), chosen, under_way, base, app.dark)
        self.put(
            "rates",
            rates,
            lambda: RateTable(
                [*briefs, *([brief_of(running, objective)] if running is not None else [])],
                base,
                chosen,
                objective,
                app.ink,
            ),
            every=every,
        )
        curve = (len(briefs), self.size, beside, app.dark)
        self.put("curve", curve, lambda: self._curve(briefs, beside))
        self.put("over", (*seen, self.size), lambda: self._over(case), every=every)
        self.put("notes", (len(briefs), chosen, method), self._notes)
        devices = tuple((name, device.count) for name, device in state.devices.items())
        self.put(
            "telemetry",
            (devices, app.dark),
            lambda: Telemetry(state.devices, app.ink) if state.devices else Text(),
        )

    def _title(self, case: LoadCase | None) -> Text:
        title = Text("Load", style="bold", overflow="fold")
        if case is None:
            return title.append(" · no rate has started", style="not bold")
        state = self.live.session.state
        brief = state.briefs.get(case.started.case)
        words = [f"{case.started.method} at {rate_words(case.started.rate)}"]
        if brief is None:
            words.append(f"{len(case.requests):,} of {case.started.requests:,} requests ended")
        else:
            words.append(f"{brief.ended:,} requests" + ("" if brief.complete else ", abandoned"))
        if brief is not None:
            failed, shed = brief.failed, brief.shed
        else:
            shed = sum(one.failure in SHED for one in case.requests)
            failed = sum(one.failure is not None for one in case.requests) - shed
        if failed:
            words.append(f"{failed:,} failed")
        if shed:
            words.append(f"{shed:,} shed")
        names = list(state.load.cases)
        if len(names) > 1:
            words.append(f"rate {names.index(case.started.case) + 1} of {len(names)}")
        return title.append(f" · {' · '.join(words)}", style="not bold")

    def _curve(self, briefs: Sequence[RateBrief], beside: bool) -> RenderableType:
        series = []
        for method in dict.fromkeys(one.method for one in briefs):
            own = sorted(
                (one.rate, one.latency)
                for one in briefs
                if one.method == method and one.complete and one.latency is not None
            )
            series.append(Series(method, [rate for rate, _ in own], [y * 1e3 for _, y in own]))
        values = [value for one in series for value in one.y if value]
        if not any(len(one.x) > 1 for one in series):
            return Text()
        free = self.size.height - 14 - (0 if beside else 5)
        plot = LinePlot(
            series,
            "Latency per token",
            "req/s",
            "ms",
            height=max(_CURVE_ROWS[0], min(_CURVE_ROWS[1], free)),
            log_y=max(values) > _LOG * min(values),
            colours=self.live.ink.curves(len(series)),
            legend_above=self.size.height < _LOW,
        )
        return plot if beside else Group(Text(), plot)

    def _over(self, case: LoadCase | None) -> RenderableType:
        """Return requests over time: what waits and what runs."""
        if case is None or len(case.samples) < 3:
            return Text()
        columns = max(20, self.size.width // 2)
        times = [one.at for one in case.samples]
        step = (times[-1] or 1.0) / columns
        middles = [step * (index + 0.5) for index in range(columns)]
        series = []
        for name in ("waiting", "running"):
            values = binned(times, [getattr(one, name) for one in case.samples], columns)
            if any(value is not None for value in values):
                known = [(x, y) for x, y in zip(middles, values, strict=True) if y is not None]
                series.append(Series(name, [x for x, _ in known], [y for _, y in known]))
        if not series:
            return Text()
        plot = LinePlot(
            series,
            f"Requests over time, {case.started.method} at {rate_words(case.started.rate)}",
            "s",
            "requests",
            height=_OVER_ROWS,
            colours=("", ""),
            legend_above=self.size.height < _LOW,
        )
        return Group(Text(), plot)

    def _notes(self) -> RenderableType:
        state = self.live.session.state
        lines = []
        if state.is_simulated:
            lines.append("simulated from measured step times")
        lines.append(
            "latency per token: from arrival to the last token, per output token; mean of "
            "counted requests"
        )
        return Group(Text(), bullets(lines, "dim"))


@dataclass(frozen=True)
class QueueLines:
    """Rich renderable of what waits, runs and is used of the cache, a line each over time."""

    case: LoadCase | None
    ink: Ink

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        case = self.case
        if case is None:
            return
        if not case.samples:
            yield Text("no queue data yet", style="italic")
            return
        room = max(8, options.max_width - _LABEL - _WORDS)
        times = [one.at for one in case.samples]
        untold = []
        for name, called in SAMPLED.items():
            values = [getattr(one, name) for one in case.samples]
            known = [value for value in values if value is not None]
            if not known:
                untold.append(called)
                continue
            # The cache on the scale of the whole, so that what is free shows.
            most = 1.0 if name == "cache" else max(known)
            line = Text(f"{called:<{_LABEL}}", no_wrap=True)
            line.append(_columns(binned(times, values, room), most))
            over = case.finished is not None
            mean = sum(known) / len(known)
            first = f"{_amount(name, mean)} mean" if over else f"{_amount(name, known[-1])} now"
            line.append(f" {first:>13}, {_amount(name, max(known))} most")
            yield line
        last = case.samples[-1]
        if last.preemptions is not None:
            words = f"{'preempted':<{_LABEL}}{last.preemptions:,}"
            yield Text(words, style=self.ink.warn() if last.preemptions else "")
        if untold:
            yield Text(f"{'untold':<{_LABEL}}{', '.join(untold)}", style="dim", overflow="fold")


def _amount(name: str, value: float) -> str:
    if name == "cache":
        return share(value)
    return f"{value:,.0f}" if value >= 9.95 or value == int(value) else f"{value:.1f}"


def _columns(values: Sequence[float | None], highest: float) -> str:
    """Return bars from 0 to a highest value; where nothing was seen, the last one is held."""
    steps, drawn, last = len(BARS) - 1, "", " "
    for value in values:
        if value is not None:
            share_of = value / highest if highest > 0 else 0.0
            last = BARS[max(1, min(steps, round(share_of * steps)))]
        drawn += last
    return drawn


@dataclass(frozen=True)
class RateTable:
    """Rich renderable of latency per token: a row per rate, methods beside each other."""

    briefs: Sequence[RateBrief]
    baseline: str | None  # the method that the others are held against, at the same rate
    chosen: str | None  # the case that is shown
    objective: Mapping[str, float]
    ink: Ink

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.briefs:
            yield Text("no rate has finished", style="italic")
            return
        every = list(dict.fromkeys(one.method for one in self.briefs))
        methods = self._fitting(every, max(1, (options.max_width - _LABEL) // _FIGURE))
        head = Text(f"{'requests/s':<{_LABEL}}", style="bold", no_wrap=True)
        for method in methods:
            title = Text(f"{short(method, _FIGURE - 2):>11}".ljust(_FIGURE))
            title.apply_meta({"press": f"method({method!r})"})
            head.append_text(title)
        yield head
        for rate, row in by_rate(self.briefs).items():
            line = Text(f"{number(rate):<{_LABEL}}", no_wrap=True)
            for method in methods:
                line.append_text(self._cell(row.get(method), row.get(self._held(method))))
            yield line
        if signs := self._signs(methods):
            yield Text(", ".join(signs), style="dim", overflow="fold")
        if left := len(every) - len(methods):
            yield Text(f"{left} more: m shows the next method", style="dim", overflow="fold")

    def _held(self, method: str) -> str:
        return baseline_of(method, self.baseline or "")

    def _fitting(self, every: list[str], count: int) -> list[str]:
        """Return as many methods as fit: the baseline, the chosen one, and the first others."""
        if count >= len(every):
            return every
        chosen = next((one.method for one in self.briefs if one.case == self.chosen), None)
        held = self.baseline if chosen is None else self._held(chosen)
        ranked = sorted(every, key=lambda m: (m != chosen, m != held, every.index(m)))
        return sorted(ranked[:count], key=every.index)

    @property
    def _least(self) -> float:
        return self.objective.get("share", ATTAINED)

    def _sign(self, one: RateBrief) -> str:
        if one.grows:
            return _GROWS
        if one.sheds:
            return _SHEDS
        if one.fails:
            return _FAILS
        return _MISSES if one.attained is not None and one.attained < self._least else " "

    def _signs(self, methods: Sequence[str]) -> list[str]:
        """Return what the signs in the table mean, of those that are there."""
        there = {self._sign(one) for one in self.briefs if one.method in methods}
        words = {
            _GROWS: "the queue grows",
            _SHEDS: "the server sheds requests",
            _FAILS: "requests fail",
            _MISSES: f"fewer than {share(self._least)} of the requests meet the SLO",
        }
        return [f"{sign} {said}" for sign, said in words.items() if sign in there]

    def _cell(self, one: RateBrief | None, base: RateBrief | None) -> Text:
        cell = Text(no_wrap=True)
        if one is None:
            return cell.append(f"{MISSING:>11}{'':8}", style="dim")
        mark = "›" if one.case == self.chosen else " "
        cell.append(f"{mark}{duration(one.latency):>10}", style="bold" if one.over else "")
        sign = self._sign(one)
        cell.append(sign, style=self.ink.warn() if sign != " " else "")
        if not one.over:
            return cell.append(" so far")
        if base is None or one is base or one.latency is None or base.latency is None:
            return cell.append(" " * 7)
        better = one.latency < base.latency
        words = difference(one.latency, base.latency)
        return cell.append(f"{words:>7}", style=self.ink.good() if better else self.ink.bad())
