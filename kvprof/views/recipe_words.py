"""A ledger's entries in words: what was claimed, what was measured, which side of it."""

from collections.abc import Mapping
from typing import Any

from kvprof.views.numbers import MISSING, axis_number, interval, number

__all__ = [
    "check_words", "claimed_words", "interval_words", "limits_of", "line_words", "measured_words",
    "published_words", "verdict_words",
]  # fmt: skip

_HELD = ("reproduced", "reproduced in direction")
_SIGNS = {"at_least": "≥", "at_most": "≤", "above": ">", "below": "<"}


def published_words(one: Mapping[str, Any]) -> str:
    """Write a published number with its unit: ``0.45 removal rate``, ``0.93 to 0.97 …``."""
    if one["value"] is not None:
        return f"{axis_number(one['value'])} {one['unit']}"
    return f"{axis_number(one['low'])} to {axis_number(one['high'])} {one['unit']}"


def limits_of(line: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lower and upper limit of a line with its tolerance; equal where there is one."""
    low, high = line["limit"][0], line["limit"][-1]
    share, fixed = line["tolerance_share"], line["tolerance"]

    def slack(limit: float) -> float:
        return share * abs(limit) if share is not None else fixed or 0.0

    if line["check"] in ("at_least", "above"):
        return (low - slack(low),) * 2
    if line["check"] in ("at_most", "below"):
        return (high + slack(high),) * 2
    return low - slack(low), high + slack(high)


def check_words(line: Mapping[str, Any]) -> str:
    """Write what must hold, the tolerance included: ``≥ 0.98``, ``4.5 to 5.5``."""
    low, high = limits_of(line)
    sign = _SIGNS.get(line["check"])
    return f"{sign} {axis_number(low)}" if sign else f"{axis_number(low)} to {axis_number(high)}"


def claimed_words(entry: Mapping[str, Any], line: Mapping[str, Any]) -> str:
    """Write what the paper says and what must hold for it."""
    found = [one for one in entry["published"] if one["id"] == line["published"]]
    said = f"{published_words(found[0])}; " if found else ""
    return f"{said}{check_words(line)}"


def measured_words(line: Mapping[str, Any]) -> str:
    """Write the number alone."""
    return number(line["measured"], 4)


def interval_words(line: Mapping[str, Any]) -> str:
    """Write the interval alone."""
    if line["interval"] is None:
        return MISSING
    return interval(line["measured"], line["interval"], 4).partition(" ")[2]


def line_words(line: Mapping[str, Any]) -> str:
    """Write whether a line holds, or why that cannot be told."""
    if line["measured"] is None:
        return "not measured"
    if line["holds"] is None:
        said = "open: limit inside the interval" if line["uncertain"] else "open: doubtful"
    else:
        said = "holds" if line["holds"] else "fails"
        said += " by construction" if line["by_construction"] and line["holds"] else ""
    return f"{said} (weaker claim)" if line["direction"] else said


def verdict_words(entry: Mapping[str, Any]) -> str:
    """Write the verdict, and whether nothing that could have been otherwise led to it."""
    held = [line for line in entry["lines"] if line["holds"]]
    made = entry["verdict"] in _HELD and all(line["by_construction"] for line in held)
    return f"{entry['verdict']}, by construction" if made else str(entry["verdict"])
