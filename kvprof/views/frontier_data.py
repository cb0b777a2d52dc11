"""A frontier result as its views need it: methods in order, and those that cannot be told apart."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from kvprof.views.plot import Series

__all__ = [
    "METRIC_NAMES",
    "STOPPED",
    "base_name",
    "best_point",
    "curves",
    "furthest",
    "lowest_drawn",
    "metric_name",
    "ranked",
    "single",
    "sure_rate",
    "tasks_of",
    "undecided",
]

METRIC_NAMES = {
    "accuracy": "next-token accuracy",
    "perplexity": "perplexity (baseline over method)",
    "tasks": "mean task accuracy",
}

#: The reason of a method whose search the user ended.
STOPPED = "interrupted"

#: Methods that stand in every frontier; they have nothing to turn.
ALWAYS = ("full", "fp8")

Method = Mapping[str, Any]


def metric_name(metric: str) -> str:
    """Return a metric in words; a task is called by its name."""
    return METRIC_NAMES.get(metric, f"accuracy on {metric.replace('_', ' ')}")


def ranked(result: Mapping[str, Any]) -> list[Method]:
    """Return the methods by falling ``max_rate``; those without one last, as they were asked for.

    Parameters
    ----------
    result : mapping
        Of ``kvprof frontier``.
    """
    return sorted(
        result["data"]["methods"],
        key=lambda method: float("inf") if method["max_rate"] is None else -method["max_rate"],
    )


def best_point(method: Method) -> Mapping[str, Any] | None:
    """Return the evaluation at a method's ``max_rate``; None where it has none."""
    if method["max_rate"] is None:
        return None
    found: Mapping[str, Any] = next(
        point for point in method["points"] if point["rate"] == method["max_rate"]
    )
    return found


def single(method: Method) -> bool:
    """Whether a method has one point, so that nothing was searched."""
    return len(method["points"]) == 1


def base_name(result: Mapping[str, Any]) -> str:
    """Return what rates are relative to, in words."""
    return f"full width in {result['data']['dtype']}"


def sure_rate(method: Method) -> float | None:
    """Return the largest tested rate up to which the whole interval keeps the target.

    None where there is none, or the sample is too small to tell.
    """
    bounds = method["max_rate_interval"]
    found: float | None = None if bounds is None else bounds[0]
    return found


def furthest(method: Method) -> float | None:
    """Return the rate that a method may reach at most, given its intervals; None if not measured.

    A method with nothing to turn has one rate; where no tested rate surely misses the target, and
    where no interval is known, it may be any.
    """
    if not method["points"]:
        return None
    if single(method) and method["label"] in ALWAYS:
        rate: float = method["points"][0]["rate"]
        return rate
    bounds = method["max_rate_interval"]
    return 1.0 if bounds is None or bounds[1] is None else float(bounds[1])


def tasks_of(result: Mapping[str, Any]) -> list[str]:
    """Return the tasks that were evaluated."""
    return list(result["data"]["baseline"]["tasks"])


def undecided(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of methods, neighbours in rank, whose largest rates may be the other way round.

    The true largest rate of a method lies in ``max_rate_interval``; where two of these overlap the
    sample does not tell which method goes further. Methods with nothing to turn are left out: their
    rate is what it is.

    Parameters
    ----------
    result : mapping
        Of ``kvprof frontier``.
    """
    searched = [
        method
        for method in ranked(result)
        if method["max_rate"] is not None
        and method["max_rate_interval"] is not None
        and not single(method)
    ]
    pairs = []
    for further, nearer in pairwise(searched):
        low = further["max_rate_interval"][0]
        high = nearer["max_rate_interval"][1]
        if low is None or high is None or low < high:
            pairs.append((further["label"], nearer["label"]))
    return pairs


def lowest_drawn(result: Mapping[str, Any]) -> float:
    """Return the share down to which a plot has to reach: ten times what the target gives away.

    Parameters
    ----------
    result : mapping
        Of ``kvprof frontier``.
    """
    return max(0.0, 1.0 - 10.0 * max(0.001, 1.0 - float(result["data"]["target"])))


def curves(result: Mapping[str, Any], floor: float | None = None) -> list[Series]:
    """Return one curve per method, the share kept against the rate, in order of rank.

    Parameters
    ----------
    result : mapping
        Of ``kvprof frontier``.
    floor : float or None
        Leaves out shares below it, which would flatten everything else.
    """
    drawn = []
    for method in ranked(result):
        points = [
            point
            for point in method["points"]
            if point["share"] is not None and (floor is None or point["share"] >= floor)
        ]
        if not points:
            continue
        ends = [point["share_interval"] or (None, None) for point in points]
        drawn.append(
            Series(
                method["label"],
                [point["rate"] for point in points],
                [point["share"] for point in points],
                [end[0] for end in ends],
                [end[1] for end in ends],
            )
        )
    return drawn
