"""An evaluation as one tidy table: a row per method and figure."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvprof.views.tidy import tidy_csv

__all__ = ["COLUMNS", "to_csv"]

COLUMNS = (
    "method", "rate", "bytes_per_token", "context", "protocol", "scope", "name", "metric", "value",
    "baseline", "low", "high", "count", "dtype",
)  # fmt: skip


def to_csv(result: Mapping[str, Any]) -> str:
    """Return every figure of a result of ``kvprof eval``, one to a row.

    ``scope`` is ``all`` (every text together), ``text``, ``task``, ``task_depth``, ``task_length``
    or ``harness``; ``name`` says which. ``baseline`` is the uncompressed model's figure,
    ``low`` and ``high`` the ends of the 95 % interval where there is one, ``count`` the tokens or
    questions behind a figure, ``dtype`` that of the full width which ``rate`` is relative to.

    Parameters
    ----------
    result : mapping
        Of ``kvprof eval``.
    """
    return tidy_csv(COLUMNS, _rows(result["data"]))


def _rows(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for one in data["evaluations"]:
        known = {key: one[key] for key in COLUMNS[:5]}
        for row in (*_text_rows(one), *_task_rows(one)):
            yield known | row | {"dtype": data["dtype"]}
    if data["harness"] is not None:
        for row in data["harness"]["rows"]:
            yield {
                "method": row["method"], "protocol": "harness", "scope": "harness",
                "name": row["task"], "metric": row["metric"], "value": row["value"],
                "count": row["items"],
            }  # fmt: skip


def _text_rows(one: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    every = {"scope": "all", "name": "", "count": one["decoded_tokens"]}
    yield {**every, "metric": "accuracy", "value": one["accuracy"],
           "baseline": one["baseline_accuracy"]}  # fmt: skip
    yield {**every, "metric": "relative_accuracy", "value": one["relative_accuracy"],
           **_ends(one["relative_accuracy_interval"])}  # fmt: skip
    yield {**every, "metric": "perplexity", "value": one["perplexity"],
           "baseline": one["baseline_perplexity"]}  # fmt: skip
    yield {**every, "metric": "perplexity_ratio", "value": one["perplexity_ratio"],
           **_ends(one["perplexity_ratio_interval"])}  # fmt: skip
    for name, value in one["kl"].items():
        yield {**every, "metric": f"kl_{name}", "value": value}
    for name, found in one["sources"].items():
        own = {"scope": "text", "name": name, "count": found["tokens"]}
        yield {**own, "metric": "accuracy", "value": found["accuracy"],
               "baseline": found["baseline_accuracy"]}  # fmt: skip
        yield {**own, "metric": "relative_accuracy", "value": found["relative_accuracy"],
               **_ends(found["interval"])}  # fmt: skip
        yield {**own, "metric": "perplexity", "value": found["perplexity"],
               "baseline": found["baseline_perplexity"]}  # fmt: skip
        yield {**own, "metric": "kl_mean", "value": found["kl_mean"]}


def _task_rows(one: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for task, found in one["tasks"].items():
        yield {"scope": "task", "name": task, **_share(found)}
        difference = found["accuracy"] - found["baseline"]
        yield {"scope": "task", "name": task, "metric": "difference", "value": difference,
               "count": found["items"], **_ends(found["difference_interval"])}  # fmt: skip
        for by in ("depth", "length"):
            for value, share in found[f"by_{by}"].items():
                yield {"scope": f"task_{by}", "name": f"{task} {value}", **_share(share)}


def _share(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "metric": "accuracy",
        "value": found["accuracy"],
        "baseline": found["baseline"],
        "count": found["items"],
    }


def _ends(interval: Any) -> dict[str, Any]:
    return {} if interval is None else dict(zip(("low", "high"), interval, strict=True))
