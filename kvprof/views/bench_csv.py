"""A bench result as one tidy table: the methods' rows and the full-width kernels'."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvprof.views.bench_data import beside_seconds, median_seconds
from kvprof.views.tidy import tidy_csv

__all__ = ["to_csv"]

_PLACE = ("method", "phase", "batch", "seq", "dtype", "schedule")
_FIGURES = (
    "bytes_moved", "cache_bytes", "tb_per_s", "bandwidth_share", "flop_per_s", "baseline",
    "speedup", "speedup_low", "speedup_high", "baseline_seconds", "error", "makespan_over_mean",
)  # fmt: skip
_WIDTHS = tuple(
    f"{side}_width_{end}" for side in ("keys", "values") for end in ("mean", "least", "most")
)


def to_csv(result: Mapping[str, Any]) -> str:
    """Return one row per method, phase, batch, context and schedule, and per full-width kernel.

    ``kind`` is ``method`` or ``baseline``; a baseline that could not run has no time and a
    ``reason``. ``seconds`` is the median of ``samples`` samples, ``seconds_low`` and
    ``seconds_high`` its 95 % interval; ``baseline_seconds`` is the median of
    the full-width kernel in turn with it. Floats are written in full (`repr`).

    Parameters
    ----------
    result : mapping
        Of ``kvprof bench``.
    """
    columns = (
        "kind", *_PLACE, "rate", *_WIDTHS, "seconds", "seconds_low", "seconds_high", "samples",
        *_FIGURES, "reason",
    )  # fmt: skip
    return tidy_csv(columns, _rows(result))


def _rows(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for row in result["data"]["rows"]:
        low, high = row["seconds_interval"] or (None, None)
        slowest, fastest = row.get("speedup_interval") or (None, None)
        yield {
            "kind": "method",
            **{key: row.get(key) for key in (*_PLACE, "rate", *_FIGURES)},
            "speedup_low": slowest,
            "speedup_high": fastest,
            "baseline_seconds": beside_seconds(row),
            **_widths(row["ranks"]),
            "seconds": median_seconds(row),
            "seconds_low": low,
            "seconds_high": high,
            "samples": len(row["seconds"] or ()),
        }
    for row in result["data"]["baselines"]:
        yield {
            "kind": "baseline",
            "method": row["name"],
            **{key: row[key] for key in ("phase", "batch", "seq", "reason")},
            "seconds": median_seconds(row),
            "samples": len(row["seconds"] or ()),
        }


def _widths(ranks: Mapping[str, Any] | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for side in ("keys", "values"):
        known = ranks[side] if ranks else ()
        if known:
            found |= {
                f"{side}_width_mean": sum(known) / len(known),
                f"{side}_width_least": min(known),
                f"{side}_width_most": max(known),
            }
    return found
