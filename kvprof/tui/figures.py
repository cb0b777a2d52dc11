"""What the screens show of a run's state, before it is drawn: what was chosen, rows, words."""

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvprof.records.cases import mean, part_times
from kvprof.records.load import LoadCase
from kvprof.sizes import format_bytes
from kvprof.tui.state import CaseState, RunState
from kvprof.views.numbers import MISSING, change, count, duration

__all__ = [
    "COLUMNS",
    "Choice",
    "LayerFilter",
    "LayerRow",
    "MethodBar",
    "bars",
    "clock",
    "difference",
    "duration",
    "itl_curve",
    "layer_rows",
    "nice_scale",
    "request_words",
    "share",
    "shown_parts",
    "size",
]

# --- Figures as the screens write them: short, with their unit, readable at a glance.


def share(value: float | None) -> str:
    """Write a share without digits that nobody reads: ``34 %``, ``0.4 %``."""
    if value is None:
        return MISSING
    size = abs(value) * 100
    text = f"{size:.0f}" if size >= 9.95 else f"{size:.1f}"
    return f"−{text} %" if value < 0 and float(text) else f"{text} %"


def difference(value: float | None, base: float | None) -> str:
    """Write how `value` differs from `base`: ``−34 %``, ``+2.1 %``, ``same``."""
    by = change(value, base)
    if by is None:
        return MISSING
    text = share(by)
    if float(text.removeprefix("−").removesuffix(" %")) == 0:
        return "same"
    return text if by < 0 else f"+{text}"


def size(nbytes: float | None) -> str:
    """Write bytes with a binary prefix."""
    return MISSING if nbytes is None else format_bytes(nbytes)


def clock(seconds: float) -> str:
    """Write a time of the run: ``02:31``, ``1:02:31``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def request_words(request: tuple[int, int, int]) -> str:
    """Write a request: ``batch 1 · 2k in · 64 out``."""
    batch, inputs, outputs = request
    return f"batch {batch} · {count(inputs)} in · {count(outputs)} out"


# --- The table of layers: its rows, their order, and which of them a filter lets through.


#: Columns in the order of the table, each with what it is called in a filter.
COLUMNS = {"layer": "layer", "ms": "ms", "bytes": "bytes", "K": "k", "V": "v"}

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_COMPARISON = re.compile(r"([a-zA-Z]+)\s*(<=|>=|<|>|=)\s*([0-9][0-9.eE+-]*)")
_RANGE = re.compile(r"([0-9]{1,5})(?:\s*[-–]\s*([0-9]{1,5}))?")
_HOW = "give layers (0-7, 12) or a comparison (k<64, ms>=2, bytes>1e6)"


@dataclass(frozen=True)
class LayerRow:
    """One layer's figures; None was not measured."""

    layer: int
    seconds: float | None
    nbytes: int | None
    key_ranks: list[float]  # per KV head
    value_ranks: list[float]

    def figure(self, column: str) -> float | None:
        """Return what a column sorts and filters by; ranks by their mean."""
        match column:
            case "ms":
                return self.seconds * 1e3 if self.seconds is not None else None
            case "bytes":
                return self.nbytes
            case "K":
                return mean(self.key_ranks)
            case "V":
                return mean(self.value_ranks)
        return self.layer


@dataclass(frozen=True)
class LayerFilter:
    """Which layers to show."""

    text: str = ""  # as it was written; empty shows all
    #: Layers, ends included; any of them lets a row through. Empty is no condition.
    ranges: tuple[tuple[int, int], ...] = ()
    #: Every one of them must hold; what was not measured holds none.
    comparisons: tuple[tuple[str, str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "LayerFilter":
        """Read a filter: ``0-7,12``, ``k<64``, or both, joined by commas."""
        ranges, comparisons = [], []
        called = {name: column for column, name in COLUMNS.items()}
        for entry in filter(None, (part.strip() for part in text.split(","))):
            if match := _RANGE.fullmatch(entry):
                first = int(match[1])
                ranges.append((first, int(match[2] or first)))
            elif (match := _COMPARISON.fullmatch(entry)) and match[1].lower() in called:
                value = _number(match[3])
                if value is None:
                    raise ValueError(f"{match[3]!r} is not a number: {_HOW}")
                comparisons.append((called[match[1].lower()], match[2], value))
            else:
                raise ValueError(f"{entry!r} is not a filter: {_HOW}")
        return cls(text.strip(), tuple(ranges), tuple(comparisons))

    def lets(self, row: LayerRow) -> bool:
        """Tell whether a row is shown."""
        if self.ranges and not any(first <= row.layer <= last for first, last in self.ranges):
            return False
        for column, sign, value in self.comparisons:
            figure = row.figure(column)
            if figure is None or not _OPERATORS[sign](figure, value):
                return False
        return True


def _figures(values: Any) -> list[float]:
    """Return the numbers of a list; a record may hold anything there."""
    if not isinstance(values, Sequence):
        return []
    return [value for value in values if isinstance(value, int | float)]


def layer_rows(
    case: CaseState, *, sort: str, descending: bool, shown: LayerFilter
) -> list[LayerRow]:
    """Return the rows of a case in order; what was not measured comes last either way."""
    rows = [
        LayerRow(
            number,
            layer.seconds,
            layer.nbytes if isinstance(layer.nbytes, int) else None,
            _figures(layer.key_ranks),
            _figures(layer.value_ranks),
        )
        for number, layer in sorted(case.layers.items())
    ]
    rows = [row for row in rows if shown.lets(row)]
    sign = -1 if descending else 1

    def key(row: LayerRow) -> tuple[bool, float]:
        figure = row.figure(sort)
        return (True, 0.0) if figure is None else (False, sign * figure)

    return sorted(rows, key=key)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# --- What the person at the screen has chosen to look at; nothing of it changes the
# measurement.


Request = tuple[int, int, int]


@dataclass
class Choice:
    """The chosen request, method, baseline, order and filter; None leaves it to the run."""

    request: Request | None = None  # none follows what is being measured
    #: Of a load: the case that is looked at; None follows what is being measured.
    rate: str | None = None
    method: str | None = None  # none follows what is being measured
    baseline: str | None = None  # none is the run's own
    sort: str = "layer"  # column of the table of layers, and its direction
    descending: bool = False
    layers: LayerFilter = field(default_factory=LayerFilter)
    parts_by_size: bool = False  # order of the parts; otherwise as they are numbered
    small_parts: bool = False  # whether parts of little time have rows of their own

    def shown_request(self, state: RunState) -> Request | None:
        """Return the request on the screen."""
        requests = state.requests()
        if self.request in requests:
            return self.request
        return requests[-1] if requests else None

    def shown_cases(self, state: RunState) -> list[CaseState]:
        """Return the cases on the screen: every method at one request."""
        request = self.shown_request(state)
        return state.cases_of(request) if request is not None else []

    def shown_case(self, state: RunState) -> CaseState | None:
        """Return the chosen case, or the one that is being measured, or the last one."""
        cases = self.shown_cases(state)
        for case in cases:
            if case.method == self.method:
                return case
        return cases[-1] if cases else None

    def shown_load(self, state: RunState) -> LoadCase | None:
        """Return the chosen rate of a load: what is chosen, or what is measured, or the last."""
        cases = state.load.cases
        if self.rate in cases:
            return cases[self.rate]
        newest = list(cases.values())
        return newest[-1] if newest else None

    def choose_load(self, state: RunState, method: str) -> None:
        """Choose a method of a load: at the rate that is shown, or its nearest."""
        shown = self.shown_load(state)
        own = [one for one in state.load.cases.values() if one.started.method == method]
        if shown is not None and own:
            near = min(own, key=lambda one: abs(one.started.rate - shown.started.rate))
            self.rate = near.started.case

    def next_load_method(self, state: RunState) -> str | None:
        """Choose the next method of a load, and return it."""
        shown = self.shown_load(state)
        methods = list(dict.fromkeys(one.started.method for one in state.load.cases.values()))
        found = _after(methods, shown.started.method if shown is not None else None)
        if found is not None:
            self.choose_load(state, found)
        return found

    def move_load(self, state: RunState, by: int) -> None:
        """Choose the rate of the same method that is the next higher one, or lower."""
        shown = self.shown_load(state)
        if shown is None:
            return
        method = shown.started.method
        own = sorted(
            (one.started.rate, one.started.case)
            for one in state.load.cases.values()
            if one.started.method == method
        )
        index = own.index((shown.started.rate, shown.started.case))
        self.rate = own[(index + by) % len(own)][1]

    def baseline_method(self, state: RunState) -> str | None:
        """Return the method that others are held against."""
        if self.baseline is not None:
            return self.baseline
        return state.run.baseline if state.run is not None else None

    def baseline_case(self, state: RunState) -> CaseState | None:
        """Return the baseline at the shown request; None where it was not measured."""
        wanted = self.baseline_method(state)
        return next((c for c in self.shown_cases(state) if c.method == wanted), None)

    def next_method(self, state: RunState) -> str | None:
        """Choose the next method of the shown request, and return it."""
        case = self.shown_case(state)
        methods = [c.method for c in self.shown_cases(state)]
        self.method = _after(methods, case.method if case is not None else None)
        return self.method

    def next_baseline(self, state: RunState) -> str | None:
        """Choose the next method as the baseline, and return it."""
        methods = [c.method for c in self.shown_cases(state)]
        methods += dict.fromkeys(one.started.method for one in state.load.cases.values())
        self.baseline = _after(methods, self.baseline_method(state))
        return self.baseline

    def move_request(self, state: RunState, by: int) -> Request | None:
        """Choose the request before or after the shown one, and return it."""
        requests, shown = state.requests(), self.shown_request(state)
        if shown is None:
            return None
        self.request = requests[(requests.index(shown) + by) % len(requests)]
        return self.request


def _after(names: list[str], name: str | None) -> str | None:
    """Return the name that follows `name` in a circle; the first where it is not among them."""
    if not names:
        return None
    return names[(names.index(name) + 1) % len(names)] if name in names else names[0]


# --- Bars, rows of parts and curves of the shown cases.


@dataclass(frozen=True)
class MethodBar:
    """One method's job completion time in parts."""

    case: CaseState
    parts: dict[str, float]  # part to seconds (`kvprof.records.cases.Account.stack`)
    seconds: float  # the uninstrumented wall time, or what was measured so far
    #: The baseline's wall time, once both are measured and this is not the baseline.
    baseline: float | None
    chosen: bool
    is_baseline: bool

    @property
    def measured(self) -> bool:
        """Whether the case is finished."""
        return self.case.finished is not None


def bars(state: RunState, choice: Choice) -> list[MethodBar]:
    """Return a bar for every method at the shown request, in the order of measuring."""
    chosen, base = choice.shown_case(state), choice.baseline_case(state)
    wall = base.account.seconds if base is not None and base.finished is not None else None
    made = []
    for case in choice.shown_cases(state):
        against = wall if case.finished is not None and case is not base else None
        made.append(
            MethodBar(
                case,
                case.account.stack(),
                case.account.seconds,
                against,
                case is chosen,
                case is base,
            )
        )
    return made


def shown_parts(state: RunState, choice: Choice) -> list[str]:
    """Return the parts that the shown cases have, in the order that was chosen."""
    rows = part_times(case.account for case in choice.shown_cases(state))
    if choice.parts_by_size:
        rows.sort(key=lambda row: -max(seconds or 0.0 for seconds in row[1]))
    return [part for part, _ in rows]


def nice_scale(value: float) -> float:
    """Return the next higher of 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8 times a power of ten.

    A bar that grows then moves, and the scale does not change with every event.
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    return next(step * power for step in steps if step * power >= value * (1 - 1e-9))


def itl_curve(case: CaseState, points: int) -> tuple[list[float], list[float]]:
    """Return contexts and time between tokens, at most `points` of them.

    Where several steps fall on one point, their weighted mean stands for them.
    """
    steps = sorted(
        (step.context, step.seconds, step.weight) for step in case.steps if step.phase == "decode"
    )
    if not steps:
        return [], []
    low, high = steps[0][0], steps[-1][0]
    wide = max(1, high - low + 1) / max(1, points)
    sums: dict[int, list[float]] = {}
    for context, seconds, weight in steps:
        entry = sums.setdefault(int((context - low) / wide), [0.0, 0.0, 0.0])
        entry[0] += context * weight
        entry[1] += seconds * weight
        entry[2] += weight
    kept = [entry for entry in sums.values() if entry[2] > 0]
    return [c / w for c, _, w in kept], [s / w for _, s, w in kept]
