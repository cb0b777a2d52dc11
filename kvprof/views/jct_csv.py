"""A ``jct`` result as one tidy table."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvprof.records.cases import accounts
from kvprof.views.tidy import tidy_csv

__all__ = ["to_csv"]

_REQUEST = ("case", "method", "batch", "input_len", "output_len")
_FIGURES = (
    "rate", "jct_seconds", "ttft_seconds", "decode_seconds", "tbt_seconds", "tbt_p99_seconds",
    "instrumented_seconds", "overhead", "decode_overhead", "measured_seconds", "unattributed_share",
    "excess_share", "energy_per_token_joules", "complete",
)  # fmt: skip
_COLUMNS = (
    "kind", *_REQUEST, "phase", "part", "step", "layer", "context", "seconds", "share",
    "by_difference", "weight", *_FIGURES, "key_rank_mean", "value_rank_mean", "nbytes", "error",
    "logical", "allocated", "full_width", "peak", "level", "tokens", "schedule", "sm", "predicted",
    "measured", "device", "time", "name", "value",
)  # fmt: skip


def to_csv(result: Mapping[str, Any]) -> str:
    """Return what was measured, one observation per row; ``kind`` says of what.

    ``case``: a case's totals. ``part``: a part of a case in one phase. ``step``: a forward pass.
    ``layer``: a layer of a case. ``memory``: the cache's bytes at a context, and ``level``: its
    tokens per level. ``balance``: a multiprocessor under a schedule. ``telemetry``: a value of a
    device. Floats are written in full (`repr`).

    Parameters
    ----------
    result : mapping
        Of kind ``jct``.
    """
    return tidy_csv(_COLUMNS, _rows(result["data"]))


def _rows(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    known = accounts(data)
    request = {case["case"]: {key: case[key] for key in _REQUEST} for case in data["cases"]}
    for case in data["cases"]:
        account = known[case["case"]]
        yield {
            "kind": "case",
            **{key: case.get(key) for key in (*_REQUEST, *_FIGURES)},
            "measured_seconds": account.seconds,
            "excess_share": account.excess_share(),
        }
    for row in data["parts"]:
        yield {"kind": "part", **row, "share": known[row["case"]].share(row["seconds"])}
    for row in data["steps"]:
        yield {"kind": "step", **request[row["case"]], **row}
    for row in data["layers"]:
        yield {
            "kind": "layer",
            **request[row["case"]],
            **{key: row[key] for key in ("layer", "nbytes", "error", "seconds")},
            "key_rank_mean": _mean(row["key_ranks"]),
            "value_rank_mean": _mean(row["value_ranks"]),
        }
    for row in data["memory"]:
        known = {key: value for key, value in row.items() if key != "levels"}
        yield {"kind": "memory", **request[row["case"]], **known}
        for level, tokens in row["levels"].items():
            yield {
                "kind": "level",
                **request[row["case"]],
                "context": row["context"],
                "level": level,
                "tokens": tokens,
            }
    for row in data["balance"]:
        measured = row["measured"] or [None] * len(row["predicted"])
        for sm, (work, busy) in enumerate(zip(row["predicted"], measured, strict=False)):
            yield {
                "kind": "balance",
                **request[row["case"]],
                "schedule": row["schedule"],
                "phase": row["phase"],
                "sm": sm,
                "predicted": work,
                "measured": busy,
            }
    for device, found in data["telemetry"].items():
        series = found["series"]
        for name in series:
            if name == "time":
                continue
            for time, value in zip(series["time"], series[name], strict=True):
                if value is not None:
                    yield {
                        "kind": "telemetry",
                        "device": device,
                        "time": time,
                        "name": name,
                        "value": value,
                    }


def _mean(ranks: list[float] | None) -> float | None:
    return sum(ranks) / len(ranks) if ranks else None
