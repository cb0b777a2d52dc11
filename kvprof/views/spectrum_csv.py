"""A spectrum result as one tidy table."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from kvprof.views.tidy import tidy_csv

__all__ = ["COLUMNS", "to_csv"]

#: Columns of the table; a row leaves empty what does not apply to its `kind`.
COLUMNS = (
    "kind",
    "pair",
    "layer",
    "kv_head",
    "query_head",
    "dim",
    "removal_rate",
    "singular_value",
    "energy_kept",
    "effective_rank",
    "cv_of_max",
    "rank",
    "rank_rounded",
    "dim_rate",
    "dim_rate_rounded",
    "grid",
)

_OWN = "qk_per_query_head"


def to_csv(result: Mapping[str, Any]) -> str:
    """Return every figure of a spectrum result in one table that pandas reads as it is.

    Each row says in ``kind`` what it is:

    ======== ================================================= ==================================
    kind     identified by                                     holds
    ======== ================================================= ==================================
    value    pair, layer, kv_head, dim                         singular_value, energy_kept
    head     pair, layer, kv_head                              effective_rank
    mean     pair, dim                                         singular_value (mean over heads)
    pair     pair                                              cv_of_max
    rank     pair, layer, kv_head, removal_rate                rank, rank_rounded, grid
    rate     removal_rate                                      dim_rate, dim_rate_rounded, grid
    ======== ================================================= ==================================

    ``dim`` counts from 1, so that ``energy_kept`` is that of a rank of ``dim``; ``layer``,
    ``kv_head`` and ``query_head`` count from 0. Floats are written in full (`repr`). Rows of the
    pair ``qk_per_query_head`` have ``query_head`` instead of ``kv_head``.

    Parameters
    ----------
    result : mapping
        Of ``kvprof spectrum``.
    """
    data = result["data"]
    rows = chain(_pair_rows(data["pairs"]), _removal_rows(data.get("removal") or ()))
    if "per_query_head" in data:
        rows = chain(rows, _query_head_rows(data["per_query_head"]))
    return tidy_csv(COLUMNS, rows)


def _query_head_rows(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from _pair_rows({_OWN: data["qk"]}, which="query_head")
    for row in data["removal"]:
        at = {"removal_rate": row["removal_rate"], "grid": row["grid"]}
        for layer, ranks in enumerate(row["ranks"]):
            for head, rank in enumerate(ranks):
                yield {
                    "kind": "rank",
                    "pair": _OWN,
                    "layer": layer,
                    "query_head": head,
                    **at,
                    "rank": rank,
                    "rank_rounded": row["rounded_ranks"][layer][head],
                }


def _pair_rows(pairs: Mapping[str, Any], *, which: str = "kv_head") -> Iterator[dict[str, Any]]:
    for name, pair in pairs.items():
        yield {"kind": "pair", "pair": name, "cv_of_max": pair["cv_of_max"]}
        for dim, value in enumerate(pair["mean"], start=1):
            yield {"kind": "mean", "pair": name, "dim": dim, "singular_value": value}
        for layer, heads in enumerate(pair["singular_values"]):
            for place, values in enumerate(heads):
                head = {"pair": name, "layer": layer, which: place}
                effective = pair["effective_rank"][layer][place]
                yield {"kind": "head", **head, "effective_rank": effective}
                energies = pair["energy_kept"][layer][place]
                for dim, (value, energy) in enumerate(zip(values, energies, strict=True), start=1):
                    yield {
                        "kind": "value",
                        **head,
                        "dim": dim,
                        "singular_value": value,
                        "energy_kept": energy,
                    }


def _removal_rows(removal: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in removal:
        at = {"removal_rate": row["removal_rate"], "grid": row["grid"]}
        yield {
            "kind": "rate",
            **at,
            "dim_rate": row["dim_rate"],
            "dim_rate_rounded": row["dim_rate_rounded"],
        }
        for pair in ("qk", "vo"):
            rounded = row[f"rounded_ranks_{pair}"]
            for layer, ranks in enumerate(row[f"ranks_{pair}"]):
                for kv_head, rank in enumerate(ranks):
                    yield {
                        "kind": "rank",
                        "pair": pair,
                        "layer": layer,
                        "kv_head": kv_head,
                        **at,
                        "rank": rank,
                        "rank_rounded": rounded[layer][kv_head],
                    }
