"""What share of the uncompressed model's metric an evaluation keeps, and up to which rate."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprof.errors import UsageError

__all__ = [
    "METRICS",
    "check_baseline",
    "check_metric",
    "least_loss",
    "max_rate",
    "max_rate_interval",
    "share_interval_of",
    "share_of",
]

#: Beside these, the name of any task that is evaluated.
METRICS = ("accuracy", "perplexity", "tasks")


def check_metric(metric: str, tasks: Sequence[str]) -> None:
    """Refuse a metric that is not measured.

    Parameters
    ----------
    metric : str
        One of `METRICS`, or a task's name.
    tasks : sequence of str
        Names of the tasks that are evaluated.

    Raises
    ------
    UsageError
        When it is none of these.
    """
    if metric not in (*METRICS, *tasks):
        known = ", ".join((*METRICS, *tasks))
        raise UsageError(f"--metric: {metric!r} is not measured here; choose from {known}")
    if metric == "tasks" and not tasks:
        raise UsageError("--metric tasks: no tasks are evaluated; name some with --tasks")


def check_baseline(metric: str, baseline: Mapping[str, Any]) -> None:
    """Refuse a metric of which the uncompressed model has nothing that could be kept.

    Parameters
    ----------
    metric : str
        As `check_metric` lets through.
    baseline : mapping
        The uncompressed model's evaluation.

    Raises
    ------
    UsageError
        When that is so.
    """
    if metric == "perplexity":
        return
    tasks = {name: task["accuracy"] for name, task in baseline["tasks"].items()}
    whole = {"accuracy": baseline["accuracy"], **tasks, "tasks": sum(tasks.values())}
    if not whole[metric]:
        raise UsageError(
            f"--metric {metric}: the uncompressed model itself gets nothing right, so there is no "
            "share of it to keep; choose perplexity"
        )


def share_of(evaluation: Mapping[str, Any], metric: str) -> float | None:
    """Return what share of the baseline an evaluation keeps; None where nothing was measured.

    For ``perplexity`` it is the baseline's over the evaluation's, for ``tasks`` the mean accuracy
    over the mean of the baseline's.

    Parameters
    ----------
    evaluation : mapping
        Of `kvprof.evaluation.evaluator`.
    metric : str
        As `check_metric` lets through.
    """
    if metric == "accuracy":
        kept: float | None = evaluation["relative_accuracy"]
        return kept
    if metric == "perplexity":
        perplexity = evaluation["perplexity"]
        return evaluation["baseline_perplexity"] / perplexity if perplexity else None
    tasks = evaluation["tasks"]
    chosen = list(tasks.values()) if metric == "tasks" else [tasks[metric]]
    whole = sum(task["baseline"] for task in chosen)
    return sum(task["accuracy"] for task in chosen) / whole if whole else None


def share_interval_of(evaluation: Mapping[str, Any], metric: str) -> list[float | None] | None:
    """Return the paired 95 % interval of `share_of`; None where the evaluation has none.

    Parameters
    ----------
    evaluation, metric
        As for `share_of`.
    """
    if metric == "accuracy":
        found: list[float | None] | None = evaluation["relative_accuracy_interval"]
        return found
    if metric == "perplexity":
        ratio = evaluation.get("perplexity_ratio_interval")
        # Over the baseline's there, under it here: the ends change places.
        return [1.0 / ratio[1], 1.0 / ratio[0]] if ratio and None not in ratio else None
    if metric == "tasks":
        # Of the sum of the tasks the ends' sum: too wide where they do not fall together.
        tasks = evaluation["tasks"].values()
        ends = [task.get("difference_interval") for task in tasks]
        whole = sum(task["baseline"] for task in tasks)
        if not whole or any(not end or None in end for end in ends):
            return None
        return [1.0 + sum(end[side] for end in ends) / whole for side in (0, 1)]
    task = evaluation["tasks"][metric]
    difference = task.get("difference_interval")
    if not difference or None in difference or not task["baseline"]:
        return None
    return [1.0 + end / task["baseline"] for end in difference]


def least_loss(evaluation: Mapping[str, Any], metric: str) -> float:
    """Return the smallest loss of a share that a sample could have shown, at 95 %.

    Of n right answers of which none was lost, up to 3 in n may be lost on other data (the rule of
    three). A bootstrap sees no spread there: its interval ends at 1 however small n is.

    Parameters
    ----------
    evaluation, metric
        As for `share_of`; of perplexity, n is the number of scored tokens.
    """
    if metric in ("accuracy", "perplexity"):
        share = evaluation["baseline_accuracy"] if metric == "accuracy" else 1.0
        right = share * evaluation["decoded_tokens"]
    else:
        tasks = evaluation["tasks"]
        chosen = tasks.values() if metric == "tasks" else [tasks[metric]]
        right = sum(task["baseline"] * task["items"] for task in chosen)
    return 3.0 / right if right else 1.0


def max_rate(points: Sequence[Mapping[str, Any]], target: float) -> float | None:
    """Return the largest tested rate that meets a target with every lower tested rate meeting it.

    Parameters
    ----------
    points : sequence of mapping
        With ``rate`` and ``share``, in any order.
    target : float
        Share of the baseline that has to be kept; the point estimate decides.
    """
    return _last_meeting([(point["rate"], point["share"]) for point in points], target)


def max_rate_interval(
    points: Sequence[Mapping[str, Any]], target: float
) -> tuple[float | None, float | None] | None:
    """Return between which tested rates the true largest rate lies, given the shares' intervals.

    The lower end is the largest tested rate that surely meets the target, with every lower one
    doing so (None: not even the lowest): its interval lies wholly at or above the target, and its
    sample would have shown a loss as large as the target allows (`least_loss`). The upper end is
    the smallest tested rate whose interval lies wholly below it (None: no tested rate does).

    Parameters
    ----------
    points : sequence of mapping
        With ``rate``, ``share``, ``share_interval`` and ``least_loss``.
    target : float

    Returns
    -------
    tuple of float or None
        None where a point has no interval.
    """
    ends = [(point["rate"], point["share_interval"]) for point in points]
    if not ends or any(end is None or None in end for _, end in ends):
        return None
    seen = [point["least_loss"] <= 1.0 - target + 1e-12 for point in points]
    sure = [(rate, end[0] if fine else None) for (rate, end), fine in zip(ends, seen, strict=True)]
    low = _last_meeting(sure, target)
    surely_below = [rate for rate, end in ends if end[1] < target]
    return low, min(surely_below, default=None)


def _last_meeting(figures: Sequence[tuple[float, float | None]], target: float) -> float | None:
    found = None
    for rate, share in sorted(figures, key=lambda figure: figure[0]):
        # 0.99 written in decimal may lie above the ratio of two counts that is 0.99 exactly.
        if share is None or share < target - 1e-12:
            break
        found = rate
    return found
