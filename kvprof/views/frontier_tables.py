"""The tables of a frontier report: what each method keeps, and what it costs there."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprof.views.evaluation_tables import SplitTable
from kvprof.views.frontier_data import STOPPED, best_point, metric_name, ranked, tasks_of
from kvprof.views.numbers import MISSING, number
from kvprof.views.tables import Column, DataTable

__all__ = ["main_table", "source_table"]


def main_table(result: Mapping[str, Any]) -> SplitTable:
    """Return one row per method by falling rate, with every figure at its largest rate.

    Parameters
    ----------
    result : mapping
        Of ``kvprof frontier``.
    """
    metric = result["data"]["metric"]
    tasks = tasks_of(result)
    own = metric not in ("accuracy", "perplexity", *tasks)
    saved = (
        f"largest rate of {result['data']['dtype']}",
        "lies within",
        "times smaller",
        "bytes per token",
    )
    kept = (
        "share of accuracy",
        "95 % interval",
        *([f"share of {metric_name(metric)}"] if own else []),
        "perplexity",
        "mean KL",
    )
    answers = [task.replace("_", " ") for task in tasks]
    columns = [
        Column("method", words=True),
        *(Column(title) for title in (*saved, *kept, *answers)),
    ]
    rows = []
    for method in ranked(result):
        point = best_point(method)
        rate = method["max_rate"]
        if method["label"] == "full" and not method["points"]:
            point, rate = _uncompressed(result), 0.0
        if point is None:
            known = "none" if method["points"] else "not measured"
            rows.append([method["label"], known, *[MISSING] * (len(columns) - 2)])
            continue
        rows.append(
            [
                method["label"],
                _rate(rate) + (" so far" if method["reason"] == STOPPED and rate else ""),
                _within(method),
                f"{point['compression_ratio']:.2f}",
                MISSING if point["bytes_per_token"] is None else f"{point['bytes_per_token']:,.0f}",
                _share(point["relative_accuracy"]),
                _interval(point.get("relative_accuracy_interval")),
                *([_share(point["share"])] if own else []),
                number(point["perplexity"], 4),
                number(point["kl"]["mean"]),
                *(_task(point, task) for task in tasks),
            ]
        )
    return SplitTable(columns, rows, (len(saved), len(kept), len(answers)))


def source_table(result: Mapping[str, Any]) -> DataTable | None:
    """Return the share of accuracy kept on each text at the largest rate; None for one text.

    Parameters
    ----------
    result : mapping
        Of ``kvprof frontier``.
    """
    best = [(method["label"], best_point(method)) for method in ranked(result)]
    known = [(label, point) for label, point in best if point is not None and "sources" in point]
    names = list(dict.fromkeys(name for _, point in known for name in point["sources"]))
    if len(names) < 2:
        return None
    rows = []
    for label, point in known:
        cells = [label]
        for name in names:
            found = point["sources"].get(name)
            share = MISSING if found is None else _share(found["relative_accuracy"])
            bounds = None if found is None else found.get("interval")
            cells.append(f"{share} {_interval(bounds)}" if bounds else share)
        rows.append(cells)
    columns = [Column("share of accuracy", words=True), *(Column(name) for name in names)]
    return DataTable(columns, rows)


def _uncompressed(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the baseline as the point of full width, where that was not run through the cache."""
    base = result["data"]["baseline"]
    return {
        "compression_ratio": 1.0, "bytes_per_token": base.get("bytes_per_token"),
        "relative_accuracy": 1.0, "share": 1.0, "perplexity": base["perplexity"],
        "kl": {"mean": 0.0}, "tasks": base["tasks"],
    }  # fmt: skip


def _rate(value: float) -> str:
    # A rate that is 0 in bytes must not print as -0.000.
    return f"{value + 0.0:.3f}" if abs(value) >= 5e-4 else "0"


def _within(method: Mapping[str, Any]) -> str:
    bounds = method["max_rate_interval"]
    if bounds is None or len(method["points"]) == 1:
        return MISSING
    low = "below" if bounds[0] is None else _rate(bounds[0])
    high = "above" if bounds[1] is None else _rate(bounds[1])
    if bounds[0] is None:
        return MISSING if bounds[1] is None else f"under {high}"
    return f"over {low}" if bounds[1] is None else f"{low}–{high}"


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4f}"


def _interval(bounds: Sequence[float | None] | None) -> str:
    if bounds is None or None in bounds:
        return MISSING
    return f"[{bounds[0]:.3f}, {bounds[1]:.3f}]"


def _task(point: Mapping[str, Any], task: str) -> str:
    found = point["tasks"].get(task)
    return MISSING if found is None else f"{found['accuracy']:.3f}"
