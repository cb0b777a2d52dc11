"""Targets: what share of the uncompressed model's metrics has to be kept, and up to which rate.

A frontier may have several. They hold together at a rate where each does by the rule for one, so
that the largest rate of all is the least of theirs: of point estimates and of intervals alike. To
show that every target holds takes no wider intervals than to show it of one; that some one is
missed is tested as often as there are targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvprof.analysis.stats import unseen_share
from kvprof.errors import UsageError
from kvprof.records.figures import judging_tasks
from kvprof.sizes import parse_nonzero

__all__ = [
    "DEFAULT_SHARE",
    "METRICS",
    "Target",
    "binding",
    "check_baseline",
    "check_metric",
    "holds",
    "joint_interval",
    "joint_rate",
    "kept_of",
    "least_loss",
    "max_rate",
    "max_rate_interval",
    "meets",
    "parse_targets",
    "share_interval_of",
    "share_of",
]

DEFAULT_SHARE = 0.99
# 0.99 written in decimal may lie above the ratio of two counts that is 0.99 exactly.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Target:
    """A share of the baseline's metric that has to be kept."""

    metric: str = "accuracy"  # one of `METRICS`, or a task's name
    share: float = DEFAULT_SHARE

    def described(self) -> dict[str, Any]:
        """Return what a result says of it."""
        return {"metric": self.metric, "target": self.share}


def parse_targets(texts: Sequence[str], metric: str | None = None) -> tuple[Target, ...]:
    """Read targets: a share is of the metric, ``needle=0.95`` of the one that it names."""
    metric = None if metric is None else _metric(metric)
    own = [text for text in texts if "=" not in text]
    if len(own) > 1:
        raise UsageError(
            f"--target {own[0]} and --target {own[1]} have the same metric; name another, such as "
            f"--target needle={own[1]}"
        )
    parts = (text.partition("=") for text in texts if "=" in text)
    named = [(_metric(name), sign, share) for name, sign, share in parts]
    if named and not own and metric is not None and metric not in {name for name, _, _ in named}:
        raise UsageError(
            f"--metric {metric} has no --target; add --target {metric}={DEFAULT_SHARE:g}"
        )
    targets = [Target(metric or "accuracy", parse_nonzero(text, what="--target")) for text in own]
    targets += [Target(name, parse_nonzero(text, what="--target")) for name, _, text in named]
    names = [target.metric for target in targets]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--target: {twice[0]} has two targets; give one")
    return tuple(targets) or (Target(metric or "accuracy"),)


def _metric(text: str) -> str:
    # Of tasks, which are named niah-single-1 and niah_single_1 alike.
    return text.strip().replace("-", "_")


#: Beside these, the name of any task that is evaluated.
METRICS = ("accuracy", "perplexity", "tasks")


def check_metric(metric: str, tasks: Sequence[str], *, what: str = "--metric") -> None:
    """Refuse a metric that is not measured."""
    if metric not in (*METRICS, *tasks):
        known = ", ".join((*(name for name in METRICS if tasks or name != "tasks"), *tasks))
        more = "" if tasks else ", or name tasks with --tasks"
        raise UsageError(f"{what}: {metric!r} is not measured; give one of {known}{more}")
    if metric == "tasks" and not tasks:
        raise UsageError(f"{what} tasks requires --tasks")


def check_baseline(metric: str, baseline: Mapping[str, Any], *, what: str = "--metric") -> None:
    """Refuse a metric of which the uncompressed model has nothing that could be kept."""
    if metric == "perplexity":
        return
    judging = judging_tasks(baseline)
    tasks = {name: task["accuracy"] for name, task in baseline["tasks"].items()}
    if metric in tasks and metric not in judging and tasks[metric]:
        task = baseline["tasks"][metric]
        raise UsageError(
            f"{what} {metric}: the uncompressed model's {task['accuracy']:.3g} is not "
            f"significantly above chance ({task['chance']:.3g}) on {task['items']} questions; "
            "give more --task-items or another metric"
        )
    together = sum(task["accuracy"] for task in judging.values())
    whole = {"accuracy": baseline["accuracy"], **tasks, "tasks": together}
    if not whole[metric]:
        raise UsageError(f"{what} {metric}: the uncompressed model scores 0; choose perplexity")


def share_of(evaluation: Mapping[str, Any], metric: str) -> float | None:
    """Return what share of the baseline an evaluation keeps; None where nothing was measured.

    For ``perplexity`` it is the baseline's over the evaluation's, for ``tasks`` the mean accuracy
    over the mean of the baseline's, both of the tasks that judge.
    """
    if metric == "accuracy":
        kept: float | None = evaluation["relative_accuracy"]
        return kept
    if metric == "perplexity":
        perplexity = evaluation["perplexity"]
        return evaluation["baseline_perplexity"] / perplexity if perplexity else None
    chosen = _chosen(evaluation, metric)
    whole = sum(task["baseline"] for task in chosen)
    return sum(task["accuracy"] for task in chosen) / whole if whole else None


def _chosen(evaluation: Mapping[str, Any], metric: str) -> list[Mapping[str, Any]]:
    """Return the tasks that a metric is of."""
    if metric == "tasks":
        return list(judging_tasks(evaluation).values())
    return [evaluation["tasks"][metric]]


def share_interval_of(evaluation: Mapping[str, Any], metric: str) -> list[float | None] | None:
    """Return the paired 95 % interval of `share_of`; None where the evaluation has none."""
    if metric == "accuracy":
        found: list[float | None] | None = evaluation["relative_accuracy_interval"]
        return found
    if metric == "perplexity":
        ratio = evaluation.get("perplexity_ratio_interval")
        # Over the baseline's there, under it here: the ends change places.
        return [1.0 / ratio[1], 1.0 / ratio[0]] if ratio and None not in ratio else None
    if metric == "tasks":
        # Of the sum of the tasks the ends' sum: too wide where they do not fall together.
        tasks = _chosen(evaluation, metric)
        ends: list[Any] = [task.get("difference_interval") for task in tasks]
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

    A bootstrap of right answers of which none was lost sees no spread: its interval ends at 1
    however few they are.
    """
    if metric in ("accuracy", "perplexity"):
        share = evaluation["baseline_accuracy"] if metric == "accuracy" else 1.0
        right = share * evaluation["decoded_tokens"]
    else:
        chosen = _chosen(evaluation, metric)
        right = sum(task["baseline"] * task["items"] for task in chosen)
    return unseen_share(right)


def max_rate(points: Sequence[Mapping[str, Any]], target: float) -> float | None:
    """Return the largest tested rate that meets a target, as every lower tested rate does."""
    return _last_meeting([(point["rate"], point["share"]) for point in points], target)


def max_rate_interval(
    points: Sequence[Mapping[str, Any]], target: float
) -> tuple[float | None, float | None] | None:
    """Return between which tested rates the true largest rate lies, given the shares' intervals.

    The lower end is the largest tested rate shown to meet the target, with every lower one
    doing so (None: not even the lowest): its interval lies wholly at or above the target, and its
    sample would have shown a loss as large as the target allows (`least_loss`). The upper end is
    the smallest tested rate whose interval lies wholly below it (None: no tested rate does).
    """
    ends = [(point["rate"], point["share_interval"]) for point in points]
    if not ends or any(end is None or None in end for _, end in ends):
        return None
    seen = [point["least_loss"] <= 1.0 - target + _ROUNDING for point in points]
    sure = [(rate, end[0] if fine else None) for (rate, end), fine in zip(ends, seen, strict=True)]
    low = _last_meeting(sure, target)
    shown_below = [rate for rate, end in ends if end[1] < target]
    return low, min(shown_below, default=None)


def _last_meeting(figures: Sequence[tuple[float, float | None]], target: float) -> float | None:
    found = None
    for rate, share in sorted(figures, key=lambda figure: figure[0]):
        if share is None or share < target - _ROUNDING:
            break
        found = rate
    return found


# --- Several targets at once.


def kept_of(evaluation: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return ``share``, ``share_interval`` and ``least_loss`` of a metric."""
    return {
        "share": share_of(evaluation, metric),
        "share_interval": share_interval_of(evaluation, metric),
        "least_loss": least_loss(evaluation, metric),
    }


def meets(evaluation: Mapping[str, Any], targets: Sequence[Target]) -> bool:
    """Whether an evaluation meets every target by its point estimates."""
    found = [(share_of(evaluation, target.metric), target.share) for target in targets]
    return all(share is not None and share >= least - _ROUNDING for share, least in found)


def holds(kept: Mapping[str, Mapping[str, Any]], targets: Sequence[Target]) -> bool:
    """Whether every target's metric is kept, by the lower end of its interval where it has one."""

    def lower(metric: str) -> float | None:
        found = kept[metric]
        end: float | None = (found["share_interval"] or [found["share"]])[0]
        return end

    found = [(lower(target.metric), target.share) for target in targets]
    return all(end is not None and end >= least - _ROUNDING for end, least in found)


def joint_rate(points: Sequence[Mapping[str, Any]], targets: Sequence[Target]) -> float | None:
    """Return the largest tested rate at which all targets hold, with every lower tested rate."""
    return _least([max_rate(_kept_at(points, target), target.share) for target in targets])


def joint_interval(
    points: Sequence[Mapping[str, Any]], targets: Sequence[Target]
) -> tuple[float | None, float | None] | None:
    """Return between which tested rates the true largest rate of all targets lies.

    Every target is shown to hold up to the lower end, and one to be missed at the upper end; see
    `max_rate_interval`.
    """
    each = [max_rate_interval(_kept_at(points, target), target.share) for target in targets]
    known = [bounds for bounds in each if bounds is not None]
    if len(known) < len(each):
        return None
    highs = [high for _, high in known if high is not None]
    return _least([low for low, _ in known]), min(highs, default=None)


def binding(points: Sequence[Mapping[str, Any]], targets: Sequence[Target]) -> list[str]:
    """Return the metrics that fail first, at the least tested rate where any does."""
    for point in sorted(points, key=lambda point: point["rate"]):
        failing = [target.metric for target in targets if not meets(point, [target])]
        if failing:
            return failing
    return []


def _kept_at(points: Sequence[Mapping[str, Any]], target: Target) -> list[dict[str, Any]]:
    return [{"rate": point["rate"], **kept_of(point, target.metric)} for point in points]


def _least(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return min(known) if known and len(known) == len(rates) else None
