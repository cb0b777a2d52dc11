"""How far a number of a result can be trusted: its interval, and doubts that forbid a verdict."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprof.records.cases import MOST_UNATTRIBUTED
from kvprof.records.figures import Figure, interval_of_share

__all__ = ["doubt_about", "implied_interval", "implied_value", "row_of"]

Row = Mapping[str, Any]

_Z = 1.96  # 95 % of a normal distribution


def row_of(result: Row, figure: Figure) -> Row | None:
    """Return the row of a result that a figure is of, where it says more of the figure."""
    key, data = dict(figure.key), result["data"]
    match result["kind"]:
        case "jct":
            return key
        case "bench":
            rows = data["rows"]
            return next((r for r in rows if all(r.get(k) == v for k, v in key.items())), None)
        case "eval" if figure.name == "task_accuracy":
            own = next(one for one in data["evaluations"] if one["method"] == key["method"])
            row: Row = own["tasks"][key["task"]]
            return row
    return None


def implied_value(value: Any, row: Row | None, name: str | None) -> Any:
    """Return a value, or what its absence means: no rate that meets a target is a rate of 0."""
    none_meets = name == "max_rate" and value is None and row is not None and row.get("points")
    return 0.0 if none_meets else value


def implied_interval(result: Row, row: Row | None, name: str | None) -> tuple[float, float] | None:
    """Return the 95 % interval of a number that has none beside it, from what its row says.

    Parameters
    ----------
    result : mapping
    row : mapping or None
        That the number stands in.
    name : str or None
        Of the number.

    Returns
    -------
    tuple of float or None
        Of a share of questions Wilson's, which stays wide where every question was answered; of a
        harness's score its standard error's; of a speed-up what the two times' intervals allow; of
        a frontier's largest rate its own, from 0 (full width) where no tested rate surely meets the
        target, and up to 1 where none surely misses it or nobody knows.
    """
    if row is None:
        return None
    if name in ("accuracy", "baseline", "task_accuracy") and row.get("items"):
        share = row["baseline" if name == "baseline" else "accuracy"]
        return interval_of_share(share, row["items"])
    if name == "value" and "stderr" in row:
        if row["value"] in (0, 1) and row["items"]:  # where a standard error sees no spread
            return interval_of_share(row["value"], row["items"])
        if row["stderr"] is not None:
            return row["value"] - _Z * row["stderr"], row["value"] + _Z * row["stderr"]
    if name == "speedup" and row.get("speedup") is not None:
        return _of_speedup(result, row)  # of an older record, which has no interval beside it
    if name == "max_rate" and row.get("points"):
        # A sample without intervals (one sequence) leaves every rate open.
        low, high = row.get("max_rate_interval") or (None, None)
        return low or 0.0, 1.0 if high is None else high
    return None


def _of_speedup(result: Row, row: Row) -> tuple[float, float] | None:
    same = ("phase", "batch", "seq")
    baseline = next(
        (
            one
            for one in result["data"]["baselines"]
            if one["name"] == row["baseline"] and all(one[key] == row[key] for key in same)
        ),
        None,
    )
    above = _of_median(baseline["seconds"]) if baseline is not None else None
    below = row["seconds_interval"]
    if above is None or below is None or None in below:
        return None
    # The row's own speed-up is over the samples beside it, which may lie outside the others.
    value = row["speedup"]
    return min(value, above[0] / below[1]), max(value, above[1] / below[0])


def _of_median(samples: Sequence[float]) -> tuple[float, float] | None:
    if len(samples) < 2:
        return None
    import numpy as np
    from scipy.stats import bootstrap

    found = bootstrap((samples,), np.median, method="percentile", rng=0).confidence_interval
    return float(found.low), float(found.high)


def doubt_about(result: Row, row: Row | None) -> str | None:
    """Return why a number decides nothing, or None where it may.

    Parameters
    ----------
    result : mapping
    row : mapping or None
        That the number stands in.

    Returns
    -------
    str or None
        Of a frontier that was interrupted: what was not tested may be the largest rate. Of a
        request's time, when more of it than `kvprof.records.cases.MOST_UNATTRIBUTED` belongs to no
        part, or parts sum to more than their phase by as much: then they are not what happened.
    """
    if result["kind"] == "frontier" and not result.get("complete", True):
        return "the frontier was interrupted, and its largest rates are those so far"
    if result["kind"] != "jct" or row is None or "case" not in row:
        return None
    case = next((one for one in result["data"]["cases"] if one["case"] == row["case"]), None)
    share = case["unattributed_share"] if case is not None else None
    if case is None or share is None:
        return None
    # Older records do not say by how much the parts of a phase exceed it.
    excess = case.get("excess_share")
    excess = max(0.0, -share) if excess is None else excess
    if max(share, excess) <= MOST_UNATTRIBUTED:
        return None
    limit = f"{100 * MOST_UNATTRIBUTED:g} % at most"
    if excess > MOST_UNATTRIBUTED:
        return f"{row['case']}: {100 * excess:.1f} % more than its time is in parts ({limit})"
    return f"{row['case']}: {100 * share:.1f} % of its time has no part ({limit})"
