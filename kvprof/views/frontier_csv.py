"""A frontier result as one tidy table."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvprof.views.frontier_data import tasks_of
from kvprof.views.tidy import tidy_csv

__all__ = ["to_csv"]

_FIGURES = ("compression_ratio", "bytes_per_token", "share")
_QUALITY = ("accuracy", "relative_accuracy")
_KL = ("mean", "p999", "worst")


def to_csv(result: Mapping[str, Any]) -> str:
    """Return a frontier with one row per tested rate, which pandas reads as it is.

    ``max_rate`` says which row of a method is its largest rate. Columns of tasks are
    ``task_<name>`` and ``task_<name>_baseline``. Floats are written in full (`repr`).

    Parameters
    ----------
    result : mapping
        Of ``kvprof frontier``.
    """
    tasks = tasks_of(result)
    columns = (
        "label", "method", "options", "target", "metric", "context", "dtype", "rate", "rate_asked",
        "max_rate", *_FIGURES, "share_low", "share_high", *_QUALITY, "relative_accuracy_low",
        "relative_accuracy_high", "perplexity", "baseline_perplexity",
        *(f"kl_{part}" for part in _KL),
        *(f"task_{task}{end}" for task in tasks for end in ("", "_baseline")),
    )  # fmt: skip
    return tidy_csv(columns, _rows(result, tasks))


def _rows(result: Mapping[str, Any], tasks: list[str]) -> Iterator[dict[str, Any]]:
    data = result["data"]
    common = {key: data[key] for key in ("target", "metric", "context", "dtype")}
    for method in data["methods"]:
        for point in method["points"]:
            share = point["share_interval"] or (None, None)
            relative = point.get("relative_accuracy_interval") or (None, None)
            row = {
                "label": method["label"],
                "method": method["method"],
                "options": json.dumps(method["options"], sort_keys=True),
                **common,
                "rate": point["rate"],
                "rate_asked": point.get("rate_asked"),
                "max_rate": point["rate"] == method["max_rate"],
                **{key: point.get(key) for key in (*_FIGURES, *_QUALITY)},
                "share_low": share[0],
                "share_high": share[1],
                "relative_accuracy_low": relative[0],
                "relative_accuracy_high": relative[1],
                "perplexity": point["perplexity"],
                "baseline_perplexity": data["baseline"]["perplexity"],
                **{f"kl_{part}": point.get("kl", {}).get(part) for part in _KL},
            }
            for task in tasks:
                found = point["tasks"].get(task, {})
                row[f"task_{task}"] = found.get("accuracy")
                row[f"task_{task}_baseline"] = found.get("baseline")
            yield row
