"""Which rate of a load was served: what ends it, and the largest that a method serves."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprof.analysis.stats import binomial_interval

__all__ = [
    "ATTAINED",
    "LOSSY",
    "UNJUDGED",
    "fails",
    "is_beyond",
    "is_lossy",
    "is_overloaded",
    "is_starved",
    "is_unsettled",
    "is_within",
    "largest",
    "sheds",
]

#: Of the requests, unless an objective says otherwise: so many must be within it.
ATTAINED = 0.9
#: Of requests that failed, from which on those that were served say little of all.
LOSSY = 0.01
#: What limits a method of which nobody knows what it serves.
UNJUDGED = ("unsettled", "client")
#: Of the mean time between requests: a client of whose requests one in twenty is later is too slow.
_LATE = 0.05


def sheds(row: Mapping[str, Any]) -> bool:
    """Whether the server turned away more requests than may be lost of a rate that is served."""
    shed: int = row.get("shed", 0)
    return shed > 0 and shed > LOSSY * row["requests"]


def is_lossy(row: Mapping[str, Any]) -> bool:
    """Whether so many requests were shed or failed that those that were served say little."""
    lost, asked = row.get("failed", 0) + row.get("shed", 0), row["requests"]
    return bool(lost > LOSSY * asked)


def fails(row: Mapping[str, Any]) -> bool:
    """Whether significantly more requests failed than may be lost of a rate that is served."""
    if not (failed := row.get("failed", 0)):
        return False
    return binomial_interval(failed / row["requests"], row["requests"])[0] > LOSSY


def is_starved(row: Mapping[str, Any]) -> bool:
    """Whether the client sent so late that what it measured is itself; no verdict of a server."""
    late: float | None = row.get("lateness_seconds", {}).get("p95")
    return late is not None and late > _LATE / row["rate"]


def is_overloaded(row: Mapping[str, Any]) -> bool:
    """Whether it is too much: the queue grows, or the server sheds requests, or they fail."""
    return not is_starved(row) and (row["grows"] is True or sheds(row) or fails(row))


def is_unsettled(row: Mapping[str, Any]) -> bool:
    """Whether nothing is told of a server: the client starved, or the system was still filling."""
    return is_starved(row) or (row.get("settled", True) is False and row["grows"] is None)


def is_within(row: Mapping[str, Any], share: float) -> bool:
    """Whether a rate was served: it was not too much, and enough requests are within."""
    attained = row["attained_share"]
    judged = row["complete"] and not is_overloaded(row) and not is_unsettled(row)
    return bool(judged and (attained is None or attained >= share))


def is_beyond(row: Mapping[str, Any], share: float) -> bool | None:
    """Whether a rate is shown to lie beyond (True) or within (False); None where it is open."""
    if not row["complete"] or is_starved(row):
        return None
    # Of no limit all attain; of too few requests nobody knows how many would.
    low, high = row["attained_share_interval"] or (0.0, 1.0)
    if is_overloaded(row) or high < share:
        return True
    steady = row["grows"] is False and row.get("failed", 0) <= LOSSY * row.get("requests", 0)
    return False if steady and (row["attained_share"] is None or low >= share) else None


def _why(row: Mapping[str, Any]) -> str:
    """Return why a rate is not within."""
    if is_starved(row):
        return "client"
    if row["grows"] is True:
        return "queue"
    if sheds(row) or fails(row):
        return "shed" if sheds(row) else "failures"
    # What is shown to miss the objective does so whether or not the system was still filling.
    open_yet = is_unsettled(row) and is_beyond(row, row["objective_share"]) is not True
    return "unsettled" if open_yet else "objective"


def largest(
    rows: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]] | None
) -> dict[str, Any]:
    """Return the largest rate that a method serves, and its ratio to the baseline's."""
    own = _bracket(rows)
    ratio, interval = None, None
    if baseline:
        other = _bracket(baseline)
        low, high = own["largest_rate_interval"]
        theirs_low, theirs_high = other["largest_rate_interval"]
        if _comparable(own, other):
            ratio = own["largest_rate"] / other["largest_rate"]
        interval = [
            low / theirs_high if low is not None and theirs_high else None,
            high / theirs_low if high is not None and theirs_low else None,
        ]
    return {**own, "ratio": ratio, "ratio_interval": interval}


def _comparable(own: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether largest rates have a ratio: not where the lesser one is but how far it was measured.

    Of two that are alike both ends were seen, or neither.
    """
    mine, theirs = own["largest_rate"], other["largest_rate"]
    if not mine or not theirs:
        return False
    seen, known = (one["limited_by"] not in (None, *UNJUDGED) for one in (own, other))
    return seen == known if mine == theirs else seen if mine < theirs else known


def _bracket(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the largest measured rate below the first that is not within, and between what it is.

    The interval goes from the largest rate shown to be within to the smallest shown to be
    beyond; an end that no measured rate gives is None.
    """
    known = [row for row in rows if row["complete"]]
    share = known[0]["objective_share"] if known else ATTAINED
    largest: float | None = None
    limited = None
    for row in known:
        if not is_within(row, share):
            limited = _why(row)
            break
        largest = row["rate"]
    beyond = [row["rate"] for row in known if is_beyond(row, share) is True]
    high = min(beyond, default=None)
    within = [
        row["rate"]
        for row in known
        if is_beyond(row, share) is False and (high is None or row["rate"] < high)
    ]
    return {
        "largest_rate": largest,
        "largest_rate_interval": [max(within, default=None), high],
        "limited_by": limited,
    }
