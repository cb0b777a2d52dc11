"""A stability result as one tidy table."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvprof.views.tidy import tidy_csv

__all__ = ["COLUMNS", "to_csv"]

_FIGURES = (
    "ratio",
    "ratio_sign_aligned",
    "ratio_cluster_aligned",
    "subspace_distance",
    "principal_angle",
    "extra_energy_loss",
    "extra_score_error",
    "extra_output_error",
)
_KEYS = (
    "pair",
    "source",
    "target",
    "tokens",
    "seq_len_source",
    "seq_len_target",
    "seed",
    "layer",
    "kv_head",
    "rank",
    "removal_rate",
    *_FIGURES,
)
# Results of before 2026-11-21 lack it.
_OWN = "own_energy_loss"

#: Keys of a curve's row, then the ends of each figure's spread, which averages alone have.
COLUMNS = (
    *_KEYS,
    _OWN,
    "heads_and_seeds",
    *(f"{figure}_{end}" for figure in _FIGURES for end in ("low", "high")),
)


def to_csv(result: Mapping[str, Any]) -> str:
    """Return every curve row of a stability result in one table that pandas reads as it is.

    A row without ``layer`` and ``kv_head`` is an average over heads and seeds; it alone has
    ``heads_and_seeds`` (how many) and, for every figure, ``<figure>_low`` and ``<figure>_high``
    (2.5 and 97.5 percentiles over them). Angles are in radians, losses and errors are shares;
    floats are written in full (`repr`).

    Parameters
    ----------
    result : mapping
        Of ``kvprof stability``.
    """
    return tidy_csv(COLUMNS, _rows(result))


def _rows(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for row in result["data"]["curves"]:
        line = {key: row[key] for key in _KEYS} | {_OWN: row.get(_OWN)}
        if row["layer"] is None:
            line["heads_and_seeds"] = row.get("heads_and_seeds")
            for figure, (low, high) in row.get("spread", {}).items():
                line[f"{figure}_low"], line[f"{figure}_high"] = low, high
        yield line
