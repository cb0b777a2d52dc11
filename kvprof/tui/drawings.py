"""What the screens draw, as Rich renderables that ask the console for its width."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from kvprof.records.cases import Series
from kvprof.records.events import TelemetrySample
from kvprof.tui.figures import (
    COLUMNS,
    LayerRow,
    MethodBar,
    difference,
    duration,
    nice_scale,
    share,
    size,
)
from kvprof.tui.state import CaseState
from kvprof.views.bars import (
    BARS,
    SERIES,
    Bar,
    Ink,
    StackedBars,
    columns,
)
from kvprof.views.jct_data import QUANTITIES
from kvprof.views.numbers import MISSING, count, number, span
from kvprof.views.part_table import PartColumns, PartTable

__all__ = [
    "TABLE_WIDTH",
    "CacheBars",
    "LayerTable",
    "Levels",
    "Telemetry",
    "layer_head",
    "part_table",
    "short",
    "spark",
    "stacked_bars",
]

# --- Stacked bars: a method's job completion time in parts, on a scale that all methods share.


_LONGEST_NAME = 18


def stacked_bars(bars: Sequence[MethodBar], ink: Ink, airy: bool = False) -> RenderableType:
    """Return a bar per method, with its time and its difference from the baseline."""
    if not bars:
        return Text("nothing measured yet", style="italic")
    drawn = [
        Bar(
            f"{'›' if bar.chosen else ' '} {short(bar.case.method)}",
            bar.parts,
            _end(bar, ink),
            bar.chosen,
            f"method({bar.case.method!r})",
        )
        for bar in bars
    ]
    longest = max(max(bar.seconds, sum(bar.parts.values())) for bar in bars)
    return StackedBars(drawn, scale=nice_scale(longest), ink=ink, airy=airy)


def _end(bar: MethodBar, ink: Ink) -> Text:
    text = Text(f"{duration(bar.seconds):>8}")
    if not bar.measured:
        return text.append(" so far")
    if bar.is_baseline:
        text.append(" baseline")
    elif bar.baseline is not None:
        words = difference(bar.seconds, bar.baseline)
        text.append(f" {words:>8}", ink.good() if bar.seconds < bar.baseline else ink.bad())
    if (misfit := bar.case.account.misfit()) is not None:
        text.append(f" ! {misfit}", style=ink.warn())
    return text


def short(name: str, longest: int = _LONGEST_NAME) -> str:
    """Cut a name that is too long for a column, and show that it was."""
    return name if len(name) <= longest else name[: longest - 1] + "…"


# --- The table of parts: every part's time and share for each method, then the request's own
# times.


_TOTALS: dict[str, Callable[[CaseState], float | None]] = {
    "TTFT": CaseState.ttft_seconds,
    "ITL": CaseState.itl_seconds,
    "completion": lambda case: case.account.seconds if case.finished is not None else None,
}
_LONGEST_METHOD = 16  # in the table of parts, where several stand side by side


def part_table(
    cases: Sequence[CaseState],
    order: Sequence[str],
    baseline: CaseState | None,
    chosen: CaseState | None,
    ink: Ink,
    small: float | None = 0.01,
) -> PartTable:
    """Return the parts of every method that there is room for, and the request's own times."""

    def wanted(index: int) -> tuple[bool, bool, int]:
        return cases[index] is not chosen, cases[index] is not baseline, index

    return PartTable(
        [
            PartColumns(
                short(case.method, _LONGEST_METHOD),
                case.account,
                totals=[_total(case, figure, baseline, ink) for figure in _TOTALS.values()],
            )
            for case in cases
        ],
        order=order,
        ink=ink,
        small=small,
        totals=list(_TOTALS),
        wanted=sorted(range(len(cases)), key=wanted),
        left_out=": m shows the next method",
    )


def _total(
    case: CaseState,
    figure: Callable[[CaseState], float | None],
    base: CaseState | None,
    ink: Ink,
) -> tuple[Text, Text]:
    """Return one of the request's own times, and its difference from the baseline's."""
    value = figure(case)
    # Until it has finished: of one run of the request.
    time = Text(duration(value), style="bold" if case.finished is not None else "")
    against = figure(base) if base is not None and base.finished is not None else None
    if case is base or case.finished is None or value is None or against is None:
        return time, Text()
    style = ink.good() if value < against else ink.bad()
    return time, Text(difference(value, against), style=style)


# --- Bytes of the cache: stored, reserved and at most on the device, against uncompressed;
# levels.


_CACHE_BAR = 40
_LEAST = 8


@dataclass(frozen=True)
class CacheBars:
    """Rich renderable of every method's bytes at its newest context."""

    cases: Sequence[CaseState]
    chosen: CaseState | None
    peak: str  # what the most memory is of, as `kvprof.views.jct_data.peak_name` has it

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        known = [case for case in self.cases if case.memory.last is not None]
        if not known:
            yield Text("no bytes measured yet", style="italic")
            return
        highest = max(
            max(m.logical, m.allocated, m.full_width)
            for m in (case.memory.last for case in known)
            if m is not None
        )
        for case in known:
            yield from self._case(case, highest, options.max_width)

    def _case(self, case: CaseState, highest: int, width: int) -> RenderResult:
        newest = case.memory.last
        assert newest is not None
        chosen = case is self.chosen
        head = Text(f"{'›' if chosen else ' '} {short(case.method)}", no_wrap=True)
        head.stylize("bold")
        head.append(f" · at {count(newest.context)} tokens", style="not bold")
        if case.peak is not None:
            head.append(f" · {self.peak} {size(case.peak)}", style="not bold")
        head.apply_meta({"press": f"method({case.method!r})"})
        yield head
        rows = (
            ("logical", newest.logical, "█"),
            ("allocated", newest.allocated, "▒"),
            ("uncompressed", newest.full_width, "░"),
        )
        room = min(_CACHE_BAR if width < 110 else 2 * _CACHE_BAR, width - 36)
        for name, nbytes, sign in rows:
            line = Text(f"    {name:<11}", no_wrap=True)
            if room >= _LEAST:
                length = round(nbytes / highest * room) if highest > 0 else 0
                line.append((sign * length).ljust(room))
            line.append(f" {size(nbytes):>10}")
            if name != "uncompressed" and newest.full_width > 0:
                line.append(f"  {share(nbytes / newest.full_width):>6}")
            yield line


@dataclass(frozen=True)
class Levels:
    """Rich renderable of the tokens that lie on each level of a cache."""

    method: str
    levels: Mapping[str, int]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        total = sum(self.levels.values())
        yield Text(f"{self.method}: tokens by level", style="bold", overflow="fold")
        if total <= 0:
            yield Text("no tokens on any level yet", style="italic")
            return
        stacked = Text("  ", no_wrap=True)
        signs = {name: index % len(SERIES) for index, name in enumerate(self.levels)}
        width = min(2 * _CACHE_BAR, options.max_width - 4)
        for name, length in columns(Bar("", self.levels), total, width):
            stacked.append(SERIES[signs[name]] * length)
        yield stacked
        widest = max(len(name) for name in self.levels)
        for name, tokens in self.levels.items():
            line = Text("  ", no_wrap=True, overflow="ellipsis")
            line.append(SERIES[signs[name]])
            line.append(f" {name:<{widest}} {count(tokens):>9} tokens {share(tokens / total):>6}")
            yield line


# --- The table of layers as lines of text, and what stands above its columns.


_TITLES = {
    "layer": "layer",
    "ms": "ms",
    "bytes": "bytes",
    "K": "K rank",
    "V": "V rank",
}
_WIDTHS = {"layer": 7, "ms": 9, "bytes": 11, "K": 14, "V": 14}
_BAR = 10  # columns of a layer's time as a bar, where there is room

#: Columns of the table without its bars.
TABLE_WIDTH = sum(_WIDTHS.values())


def layer_head(sort: str, descending: bool) -> Text:
    """Return the titles; a click on one sorts by it, and an arrow shows the order."""
    line = Text(no_wrap=True)
    for name in COLUMNS:
        arrow = (" ▼" if descending else " ▲") if name == sort else ""
        title = Text(f"{_TITLES[name]}{arrow}".rjust(_WIDTHS[name]), style="bold")
        title.apply_meta({"press": f"sort_by({name!r})"})
        line.append_text(title)
    return line


@dataclass(frozen=True)
class LayerTable:
    """Rich renderable of the rows, each with a bar of its time beside it where there is room."""

    rows: Sequence[LayerRow]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        most = max((row.seconds or 0.0 for row in self.rows), default=0.0)
        room = min(_BAR, options.max_width - TABLE_WIDTH - 2)
        lines = Text(no_wrap=True)
        for index, row in enumerate(self.rows):
            lines.append("\n" * (index > 0) + _layer_words(row))
            if room > 0 and most > 0:
                lines.append("  " + "━" * round((row.seconds or 0.0) / most * room))
        yield lines


def _layer_words(row: LayerRow) -> str:
    texts = {
        "layer": str(row.layer),
        "ms": number(row.figure("ms")),
        "bytes": size(row.nbytes),
        "K": _rank(row.key_ranks),
        "V": _rank(row.value_ranks),
    }
    return "".join(text.rjust(_WIDTHS[name]) for name, text in texts.items())


def _rank(values: list[float]) -> str:
    """Write the mean of the heads and their range: ``48 (40–56)``."""
    if not values:
        return MISSING
    mean = f"{sum(values) / len(values):.0f}"
    return mean if min(values) == max(values) else f"{mean} ({span(values)})"


# --- A line per device: clocks, power, temperature, memory, load, and whether it was slowed
# down.


_SPARK = 16  # columns of the history
# What the history shows: the first that is there.
_HISTORY = {"power_w": "power", "utilisation": "busy", "load": "busy", "memory_bytes": "memory"}


@dataclass(frozen=True)
class Telemetry:
    """Rich renderable of the newest samples."""

    devices: Mapping[str, Series[TelemetrySample]]
    ink: Ink

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.devices:
            yield Text("no telemetry yet", style="dim")
        for name, device in self.devices.items():
            yield self._line(name, device, options.max_width)

    def _line(self, name: str, device: Series[TelemetrySample], width: int) -> Text:
        newest = device.last
        assert newest is not None
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{name:<6}", style="bold")
        if newest.throttled:
            line.append(f" ▼ throttled: {', '.join(newest.throttled)}", style=self.ink.bad())
        words = [
            quantity.figure(newest.values[key])
            for key, quantity in QUANTITIES.items()
            if key in newest.values
        ]
        if name == "cpu":  # the one busy of the machine, the other of the measurement
            words = [
                word.replace("% busy", "% of all cores busy").replace("used", "in this process")
                for word in words
            ]
        for index, word in enumerate(words):
            text = f"{' ·' if index or newest.throttled else ''} {word}"
            if line.cell_len + len(text) > width:
                break
            line.append(text)
        shown = next((key for key in _HISTORY if key in newest.values), None)
        if shown is not None:
            values = [one.values[shown] for one in device if shown in one.values]
            drawn = f"  {_HISTORY[shown]} {spark(values, _SPARK)}"
            if line.cell_len + len(drawn) <= width:
                line.append(drawn)
        return line


def spark(values: list[float], width: int) -> str:
    """Return the newest `width` values as bars from their lowest to their highest."""
    newest = values[-width:]
    if not newest:
        return ""
    low, high = min(newest), max(newest)
    if high <= low:
        return BARS[4] * len(newest)
    steps = len(BARS) - 2  # an empty column would be no value
    return "".join(BARS[1 + round((value - low) / (high - low) * steps)] for value in newest)
