"""What the screens draw of a run's state, before anything is drawn: bars, shares, curves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvprof.records.cases import ordered_parts
from kvprof.records.events import Balance
from kvprof.tui.choice import Choice
from kvprof.tui.state import CaseState, RunState

__all__ = [
    "Bar",
    "Strip",
    "bars",
    "nice_scale",
    "part_rows",
    "strips",
    "tbt_curve",
]


@dataclass(frozen=True)
class Bar:
    """One method's job completion time in parts.

    Attributes
    ----------
    case : CaseState
    parts : dict
        Part to seconds (`kvprof.records.cases.Account.stack`).
    seconds : float
        The uninstrumented wall time, or what was measured so far.
    baseline : float or None
        The baseline's wall time, once both are measured and this is not the baseline.
    chosen, is_baseline : bool
    """

    case: CaseState
    parts: dict[str, float]
    seconds: float
    baseline: float | None
    chosen: bool
    is_baseline: bool

    @property
    def measured(self) -> bool:
        """Whether the case is finished."""
        return self.case.finished is not None


def bars(state: RunState, choice: Choice) -> list[Bar]:
    """Return a bar for every method at the shown request, in the order of measuring."""
    chosen, base = choice.shown_case(state), choice.baseline_case(state)
    wall = base.jct_seconds() if base is not None and base.finished is not None else None
    made = []
    for case in choice.shown_cases(state):
        against = wall if case.finished is not None and case is not base else None
        made.append(
            Bar(
                case,
                case.account.stack(),
                case.jct_seconds(),
                against,
                case is chosen,
                case is base,
            )
        )
    return made


def part_rows(state: RunState, choice: Choice) -> list[tuple[str, list[float | None]]]:
    """Return a row per part: its seconds for every shown case, None where it has none."""
    columns = [case.part_seconds() for case in choice.shown_cases(state)]
    parts = ordered_parts(part for column in columns for part in column)
    if choice.parts_by_size:
        parts.sort(key=lambda part: -max(column.get(part, 0.0) for column in columns))
    return [(part, [column.get(part) for column in columns]) for part in parts]


def nice_scale(value: float) -> float:
    """Return the next higher of 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8 times a power of ten.

    A bar that grows then moves, and the scale does not change with every event.
    """
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    steps = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)
    return next(step * power for step in steps if step * power >= value * (1 - 1e-9))


def tbt_curve(case: CaseState, points: int) -> tuple[list[float], list[float]]:
    """Return contexts and time between tokens, at most `points` of them.

    Where several steps fall on one point, their weighted mean stands for them.
    """
    steps = sorted(case.steps)
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


@dataclass(frozen=True)
class Strip:
    """How a schedule loads the multiprocessors.

    Attributes
    ----------
    phase, schedule : str
    predicted, measured : list of float
        Per multiprocessor, relative to the mean; empty where not measured.
    """

    phase: str
    schedule: str
    predicted: list[float]
    measured: list[float]

    def highest(self) -> float:
        """Return the largest load of either."""
        return max((*self.predicted, *self.measured), default=0.0)


def strips(case: CaseState) -> list[Strip]:
    """Return the case's strips, prefill first."""
    keys = sorted(case.balance, key=lambda key: key[0] != "prefill")
    return [_strip(case.balance[key]) for key in keys]


def _strip(event: Balance) -> Strip:
    return Strip(
        event.phase, event.schedule, _relative(event.predicted), _relative(event.measured or [])
    )


def _relative(values: Sequence[float]) -> list[float]:
    mean = sum(values) / len(values) if values else 0.0
    return [value / mean for value in values] if mean > 0 else [0.0 for _ in values]
