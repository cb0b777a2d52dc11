"""A ``jct`` result as its views need it: requests, methods side by side, sweeps over lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import expm1, inf, log
from operator import attrgetter
from statistics import median
from typing import Any

from kvprof.analysis.stats import log_ratio_interval
from kvprof.sizes import format_bytes
from kvprof.views.numbers import count, unit_of
from kvprof.views.plot import Series

__all__ = [
    "QUANTITIES",
    "Curves",
    "Group",
    "Quantity",
    "Sweep",
    "byte_unit",
    "detailed",
    "groups",
    "memory_curves",
    "peak_name",
    "step_curves",
    "sweep_curves",
    "sweeps",
]

Case = Mapping[str, Any]

_FEW = 3  # groups that a report shows in full
_POINTS = 400  # of a curve
_TOGETHER = 0.2  # of a plot's height: curves that are nowhere further apart are one to the eye


@dataclass(frozen=True)
class Group:
    """The cases of one request: a batch, an input length and an output length."""

    batch: int
    input_len: int
    output_len: int
    cases: list[Case]  # of `data.cases`, in the order of measuring
    names: list[str]  # what to call each: its method, or the case where one method is there twice
    baseline: Case | None  # the case against which differences are shown, once it is measured

    @property
    def name(self) -> str:
        """The request in words."""
        return f"batch {self.batch}, {count(self.input_len)} in, {count(self.output_len)} out"

    @property
    def tokens(self) -> int:
        """Tokens of each sequence at the end."""
        return self.input_len + self.output_len

    def against(self) -> str | None:
        """Return what to call the baseline; None where it is not measured."""
        if self.baseline is None:
            return None
        return self.names[self.cases.index(self.baseline)]

    def base(self, key: str) -> float | None:
        """Return a figure of the baseline."""
        return None if self.baseline is None else self.baseline[key]

    def apart(self, case: Case) -> tuple[float, float] | None:
        """Return the ends of the share by which a case's time differs from the baseline's.

        Cases are measured one after the other, so that nothing pairs their runs.
        """
        if self.baseline is None or case is self.baseline:
            return None
        own, base = _ends(case), _ends(self.baseline)
        if own is None or base is None:
            return None
        low, high = log_ratio_interval(own, base)
        return expm1(low), expm1(high)


@dataclass(frozen=True)
class Sweep:
    """Requests that differ in one length only."""

    varied: str  # `input_len` or `output_len`
    members: list[Group]  # by that length

    @property
    def name(self) -> str:
        """The sweep in words."""
        first = self.members[0]
        if self.varied == "input_len":
            return f"batch {first.batch}, {count(first.output_len)} out, input length varied"
        return f"batch {first.batch}, {count(first.input_len)} in, output length varied"

    def length(self, group: Group) -> int:
        """Return the varied length of a member."""
        return group.input_len if self.varied == "input_len" else group.output_len

    def methods(self) -> list[str]:
        """Return every name in the sweep, in the order of measuring."""
        return list(dict.fromkeys(name for group in self.members for name in group.names))


@dataclass(frozen=True)
class Curves:
    """Curves of a plot and what its axes say."""

    series: list[Series]
    what: str  # of the y axis; the unit is empty for a ratio
    unit: str
    x_label: str
    log_y: bool


def groups(result: Mapping[str, Any]) -> list[Group]:
    """Return the requests of a result, in the order of measuring."""
    data = result["data"]
    found: dict[tuple[int, int, int], list[Case]] = {}
    for case in data["cases"]:
        key = case["batch"], case["input_len"], case["output_len"]
        found.setdefault(key, []).append(case)
    return [
        Group(*key, cases, _names(cases), _baseline(cases, data["baseline"]))
        for key, cases in found.items()
    ]


def _ends(case: Case) -> tuple[float, float, float] | None:
    """Return a case's time and the ends of it; None where they are not known."""
    ends, middle = case.get("jct_seconds_interval"), case["jct_seconds"]
    if not ends or not middle or not 0 < ends[0] <= ends[1] < inf:
        return None
    return middle, min(ends[0], middle), max(ends[1], middle)


def _names(cases: Sequence[Case]) -> list[str]:
    methods = [case["method"] for case in cases]
    return [
        case["method"] if methods.count(case["method"]) == 1 else case["case"] for case in cases
    ]


def _baseline(cases: Sequence[Case], method: str) -> Case | None:
    return next(
        (case for case in cases if case["method"] == method and case["jct_seconds"] is not None),
        None,
    )


def sweeps(result: Mapping[str, Any]) -> list[Sweep]:
    """Return requests that differ in one length only, three or more of each."""
    found = groups(result)
    made = []
    for varied, fixed in (("input_len", "output_len"), ("output_len", "input_len")):
        ordered = sorted(found, key=attrgetter("batch", fixed, varied))
        for _, members in groupby(ordered, key=attrgetter("batch", fixed)):
            listed = list(members)
            if len(listed) >= _FEW:
                made.append(Sweep(varied, listed))
    return made


def detailed(result: Mapping[str, Any]) -> list[Group]:
    """Return the requests that a report shows part by part: few, or each sweep's longest."""
    found = groups(result)
    if len(found) <= _FEW:
        return found
    longest = [sweep.members[-1] for sweep in sweeps(result)]
    return longest or [max(found, key=lambda group: (group.tokens, group.batch))]


@dataclass(frozen=True)
class Quantity:
    """What a device is asked at a fixed rate."""

    words: str  # how reports call it
    unit: str  # `B` has binary prefixes
    factor: float  # from what is recorded to the unit
    brief: str  # around the figure where a device has one line for all of them

    def figure(self, value: float) -> str:
        """Write a value for that line, with its unit and what it is of."""
        if self.unit == "B":
            return self.brief.format(format_bytes(value))
        return self.brief.format(f"{value * self.factor:,.0f} {self.unit}")


#: By the names in a telemetry sample, in the order of the line; the load is in older records.
QUANTITIES = {
    "utilisation": Quantity("utilisation", "%", 100.0, "{} busy"),
    "load": Quantity("load", "%", 100.0, "{} of its threads"),
    "power_w": Quantity("power", "W", 1.0, "{}"),
    "temperature_c": Quantity("temperature", "°C", 1.0, "{}"),
    "sm_mhz": Quantity("SM clock", "MHz", 1.0, "SM {}"),
    "memory_mhz": Quantity("memory clock", "MHz", 1.0, "memory {}"),
    "memory_bytes": Quantity("memory", "B", 1.0, "{} used"),
}


def peak_name(inputs: Mapping[str, Any]) -> str:
    """Return what the most memory is of: a GPU's allocations, or a process on a CPU."""
    return "process peak" if inputs.get("device") == "cpu" else "device peak"


def step_curves(result: Mapping[str, Any], group: Group, factor: float = 1.0) -> list[Series]:
    """Return a curve per case: the time of a decode step against its context."""
    curves = []
    for name, case in zip(group.names, group.cases, strict=True):
        seconds: dict[int, list[float]] = {}
        for row in result["data"]["steps"]:
            if row["case"] == case["case"] and row["phase"] == "decode":
                seconds.setdefault(row["context"], []).append(row["seconds"] * factor)
        contexts = sorted(seconds)[:: -(-len(seconds) // _POINTS) or 1]
        # A request that was run several times has several steps at a context.
        curves.append(Series(name, contexts, [median(seconds[context]) for context in contexts]))
    return [curve for curve in curves if len(set(curve.x)) > 1]


def sweep_curves(sweep: Sweep) -> Curves:
    """Return job completion time by length, a curve per method.

    Over lengths that differ by a hundred times, methods that differ by a tenth are one line: then
    the curves are the methods' times over the baseline's.
    """
    x_label = "input tokens" if sweep.varied == "input_len" else "output tokens"
    factor, unit = unit_of(case["jct_seconds"] for group in sweep.members for case in group.cases)
    series, ratios = [], []
    against = next((name for group in sweep.members if (name := group.against())), None)
    for method in sweep.methods():
        own = [group for group in sweep.members if method in group.names]
        lengths = [sweep.length(group) for group in own]
        times = [group.cases[group.names.index(method)]["jct_seconds"] for group in own]
        bases = [group.base("jct_seconds") for group in own]
        series.append(Series(method, lengths, [t * factor if t else None for t in times]))
        shares = [t / b if t and b else None for t, b in zip(times, bases, strict=True)]
        ratios.append(Series(method, lengths, shares))
    if against is not None and len(series) > 1 and _would_overlap(series):
        return Curves(ratios, f"Job completion time over {against}'s", "", x_label, log_y=False)
    return Curves(series, "Job completion time", unit, x_label, log_y=True)


def _would_overlap(series: Sequence[Series]) -> bool:
    """Tell whether curves on a logarithmic axis would lie on top of each other."""
    at: dict[float, list[float]] = {}
    for one in series:
        for x, y in zip(one.x, one.y, strict=True):
            if y is not None:
                at.setdefault(x, []).append(y)
    every = [y for ys in at.values() for y in ys]
    if len(at) < 2 or max(every) <= min(every):
        return False
    apart = max(log(max(ys) / min(ys)) for ys in at.values())
    return apart < _TOGETHER * log(max(every) / min(every))


def byte_unit(most: float) -> tuple[int, str]:
    """Return the bytes of the unit that a curve of up to `most` bytes is drawn in, and its name."""
    return (2**30, "GiB") if most >= 2**31 else (2**20, "MiB")


def memory_curves(result: Mapping[str, Any], group: Group) -> tuple[list[Series], str]:
    """Return a curve per case, logical bytes against context, and the unit that all are in."""
    cases = {case["case"]: name for name, case in zip(group.names, group.cases, strict=True)}
    rows = [
        row
        for row in result["data"]["memory"]
        if row["case"] in cases and row["logical"] is not None
    ]
    factor, unit = byte_unit(max((row["logical"] for row in rows), default=0))
    curves = []
    for case, name in cases.items():
        points = sorted(
            (row["context"], row["logical"] / factor) for row in rows if row["case"] == case
        )
        curves.append(Series(name, [x for x, _ in points], [y for _, y in points]))
    return [curve for curve in curves if len(set(curve.x)) > 1], unit
