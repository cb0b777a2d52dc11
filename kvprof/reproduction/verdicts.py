"""Whether a claim holds of what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvprof.reproduction.measures import Measured
from kvprof.reproduction.recipe import Line

__all__ = [
    "DIRECTION", "NOT_JUDGED", "NOT_REPRODUCED", "REPRODUCED", "VERDICTS", "JudgedLine",
    "counted", "judge_line", "open_because", "verdict_of",
]  # fmt: skip

REPRODUCED = "reproduced"
DIRECTION = "reproduced in direction"
NOT_REPRODUCED = "not reproduced"
NOT_JUDGED = "cannot be judged here"
VERDICTS = (REPRODUCED, DIRECTION, NOT_REPRODUCED, NOT_JUDGED)


@dataclass(frozen=True)
class JudgedLine:
    """A line of a verdict and what became of it.

    Attributes
    ----------
    line : Line
    measured : Measured
    holds : bool or None
        None where that cannot be told: nothing was measured, what was is doubtful, or `uncertain`.
    uncertain : bool
        Whether the limit, with its tolerance, lies inside the measure's interval.
    """

    line: Line
    measured: Measured
    holds: bool | None
    uncertain: bool


def judge_line(line: Line, measured: Measured) -> JudgedLine:
    """Hold a measure against its line; a limit inside the interval is neither met nor missed."""
    if measured.value is None:
        return JudgedLine(line, measured, None, False)
    uncertain = measured.interval is not None and any(
        measured.interval[0] <= limit <= measured.interval[1] for limit in _limits(line)
    )
    open_ = uncertain or measured.doubt is not None
    return JudgedLine(line, measured, None if open_ else _holds(line, measured.value), uncertain)


def open_because(judged: JudgedLine) -> str | None:
    """Return why a line is open though something was measured; None where it is not."""
    if judged.measured.value is None or judged.holds is not None:
        return None
    if judged.measured.doubt is not None:
        return judged.measured.doubt
    assert judged.measured.interval is not None
    low, high = judged.measured.interval
    limits = " or ".join(
        f"{x:.4g}" for x in dict.fromkeys(_limits(judged.line)) if low <= x <= high
    )
    name = judged.line.measure
    return f"{name}: {limits} lies inside its interval, {low:.4g} to {high:.4g}"


def _slack(line: Line, limit: float) -> float:
    if line.tolerance_share is not None:
        return line.tolerance_share * abs(limit)
    return line.tolerance or 0.0


def _limits(line: Line) -> tuple[float, ...]:
    """Return the limits with their tolerance: one, or a lower and an upper one."""
    low, high = line.limit[0], line.limit[-1]
    lower, upper = low - _slack(line, low), high + _slack(line, high)
    if line.check in ("at_least", "above"):
        return (lower,)
    if line.check in ("at_most", "below"):
        return (upper,)
    return (lower, upper)


def _holds(line: Line, value: float) -> bool:
    limits = _limits(line)
    match line.check:
        case "at_least":
            return value >= limits[0]
        case "above":
            return value > limits[0]
        case "at_most":
            return value <= limits[0]
        case "below":
            return value < limits[0]
    return limits[0] <= value <= limits[1]


def verdict_of(lines: Sequence[JudgedLine]) -> str:
    """Return the verdict: all hold, only the weaker ones do, or neither.

    One that could not be measured leaves the whole open. One that is open for another reason does
    so only where it matters: where the weaker ones hold it takes nothing from them, and where one
    fails that must hold it saves nothing. Weaker ones alone show no more than a direction.
    """
    if not lines or any(line.measured.value is None for line in lines):
        return NOT_JUDGED
    weaker = [line for line in lines if line.line.direction]
    if all(line.holds for line in lines) and len(weaker) < len(lines):
        return REPRODUCED
    if weaker and all(line.holds for line in weaker):
        return DIRECTION
    if any(line.holds is False for line in weaker or lines):
        return NOT_REPRODUCED
    return NOT_JUDGED


def counted(verdicts: Mapping[str, int]) -> str:
    """Write how many there are of each: ``3 reproduced, 1 not reproduced``."""
    return ", ".join(f"{verdicts[one]} {one}" for one in VERDICTS if verdicts.get(one))
