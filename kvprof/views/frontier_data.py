"""A frontier result as its views need it: methods in order, and those not to be told apart."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from kvprof.methods.named import ALWAYS
from kvprof.records.figures import judging_tasks
from kvprof.views.numbers import MISSING
from kvprof.views.plot import Series

__all__ = [
    "STOPPED",
    "Method",
    "base_name",
    "best_point",
    "curves",
    "furthest",
    "interval_text",
    "lowest_drawn",
    "metric_name",
    "ranked",
    "share_at",
    "share_text",
    "shown_rate",
    "single",
    "sure_rate",
    "targets_of",
    "tasks_of",
    "unable_tasks",
    "uncompressed",
    "undecided",
]

_METRIC_NAMES = {
    "accuracy": "next-token accuracy",
    "perplexity": "perplexity (baseline over method)",
    "tasks": "mean task accuracy",
}

#: The reason of a method whose search the user ended.
STOPPED = "interrupted"

Method = Mapping[str, Any]


def metric_name(metric: str) -> str:
    """Return a metric in words; a task is called by its name."""
    return _METRIC_NAMES.get(metric, f"accuracy on {metric.replace('_', ' ')}")


def targets_of(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return ``metric`` and ``target`` of all that have to hold, the first one first."""
    data = result["data"]
    return list(data.get("targets") or [{"metric": data["metric"], "target": data["target"]}])


def share_at(point: Mapping[str, Any], metric: str | None = None) -> Mapping[str, Any]:
    """Return ``share`` and ``share_interval`` of a target's metric at a point."""
    shares: Mapping[str, Any] = point.get("shares", {})
    found: Mapping[str, Any] = point if metric is None else shares.get(metric, point)
    return found


def ranked(result: Mapping[str, Any]) -> list[Method]:
    """Return the methods by falling `shown_rate`, sure ones first; those without one last."""

    def order(method: Method) -> tuple[bool, float]:
        rate = shown_rate(method)
        return sure_rate(method) is None, float("inf") if rate is None else -rate

    return sorted(result["data"]["methods"], key=order)


def shown_rate(method: Method) -> float | None:
    """Return the rate at which a method's figures are shown: the sure one, else the largest."""
    sure = sure_rate(method)
    return method["max_rate"] if sure is None else sure


def best_point(method: Method) -> Mapping[str, Any] | None:
    """Return the evaluation at a method's `shown_rate`; None where it has none."""
    rate = shown_rate(method)
    if rate is None:
        return None
    found: Mapping[str, Any] = next(point for point in method["points"] if point["rate"] == rate)
    return found


def single(method: Method) -> bool:
    """Whether a method has one point, so that nothing was searched."""
    return len(method["points"]) == 1


def base_name(result: Mapping[str, Any]) -> str:
    """Return what rates are relative to, in words."""
    return "full width at 16 bits"


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


def unable_tasks(result: Mapping[str, Any]) -> list[str]:
    """Return the tasks at which the uncompressed model is at chance."""
    judging = judging_tasks(result["data"]["baseline"])
    return [task for task in tasks_of(result) if task not in judging]


def undecided(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of methods, neighbours in rank, whose largest rates may be the other way round.

    The true largest rate of a method lies in ``max_rate_interval``; where two of these overlap the
    sample does not tell which method goes further. Methods with nothing to turn are left out: their
    rate is what it is.
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


def lowest_drawn(target: float) -> float:
    """Return the share down to which a plot has to reach: ten times what a target gives away."""
    return max(0.0, 1.0 - 10.0 * max(0.001, 1.0 - target))


def curves(
    result: Mapping[str, Any], floor: float | None = None, metric: str | None = None
) -> list[Series]:
    """Return one curve per method, the share kept against the rate, in order of rank."""
    drawn = []
    for method in ranked(result):
        found = [(point["rate"], share_at(point, metric)) for point in method["points"]]
        points = [
            (rate, kept)
            for rate, kept in found
            if kept["share"] is not None and (floor is None or kept["share"] >= floor)
        ]
        if not points:
            continue
        ends = [kept["share_interval"] or (None, None) for _, kept in points]
        drawn.append(
            Series(
                method["label"],
                [rate for rate, _ in points],
                [kept["share"] for _, kept in points],
                [end[0] for end in ends],
                [end[1] for end in ends],
            )
        )
    return drawn


def uncompressed(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the baseline as the point of full width, where that was not run through the cache."""
    base = result["data"]["baseline"]
    return {
        "compression_ratio": 1.0,
        "bytes_per_token": base.get("bytes_per_token"),
        "relative_accuracy": 1.0,
        "share": 1.0,
        "perplexity": base["perplexity"],
        "kl": {"mean": 0.0, "p999": 0.0, "worst": 0.0},
        "tasks": base["tasks"],
    }


def share_text(value: float | None) -> str:
    """Return a share of the baseline as tables have it."""
    return MISSING if value is None else f"{value:.4f}"


def interval_text(bounds: Sequence[float | None] | None) -> str:
    """Return an interval as tables have it; a dash for one that is open or was not found."""
    if bounds is None or None in bounds:
        return MISSING
    return f"[{bounds[0]:.3f}, {bounds[1]:.3f}]"
