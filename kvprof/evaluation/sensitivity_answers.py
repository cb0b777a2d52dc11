"""What the cells of a sensitivity say: keys or values, which layers, how many bits, sinks or not.

All of it takes the divergences of single parts to add up; `kvprof.evaluation.sensitivity` measures
what is recommended as a whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprof.methods.settings import FULL, Part

__all__ = ["answers", "layers_that_stay", "part_of"]

Row = Mapping[str, Any]
# Sums of two sides this near to each other are not told apart.
_ALIKE = 1.25


def part_of(row: Row) -> Part:
    """Return the part that a cell is of."""
    return Part(row["layer"], row["side"], row["kv_head"])


def answers(rows: Sequence[Row], parts: Sequence[Part], limit: float) -> dict[str, Any]:
    """Return the answers that complete settings allow.

    Parameters
    ----------
    rows : sequence of mapping
        Of `kvprof.evaluation.sensitivity.Sensitivity.cells`.
    parts : sequence of Part
        That were to be measured; a setting counts where all of them were.
    limit : float
        Divergence in nats that all parts together may cost.

    Returns
    -------
    dict
        ``sides``, ``layers``, ``needed``, ``first_tokens``, as the schema has them.
    """
    settings: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        settings.setdefault((row["setting"], row["exact_first"]), []).append(row)
    whole = {key: own for key, own in settings.items() if len(own) == len(parts)}
    plain = {name: own for (name, first), own in whole.items() if not first}
    return {
        "sides": [_sides(name, own) for name, own in plain.items()],
        "layers": [
            {"setting": name, "kl": _sum(own), **_stay(own, limit)} for name, own in plain.items()
        ],
        "needed": _needed(list(plain.values()), parts, limit),
        "first_tokens": [
            _first_tokens(name, first, plain[name], own)
            for (name, first), own in whole.items()
            if first and name in plain
        ],
    }


def layers_that_stay(rows: Sequence[Row], limit: float) -> list[int]:
    """Return the fewest layers without which the sum of a setting's cells is within a limit.

    Parameters
    ----------
    rows : sequence of mapping
        Of one setting.
    limit : float
        In nats.
    """
    costs: dict[int, float] = {}
    for row in rows:
        costs[row["layer"]] = costs.get(row["layer"], 0.0) + row["kl"]
    left = sum(costs.values())
    stay = []
    for layer in sorted(costs, key=lambda index: (-costs[index], index)):
        if left <= limit:
            break
        left -= costs[layer]
        stay.append(layer)
    return sorted(stay)


def _sum(rows: Sequence[Row]) -> float:
    return float(sum(row["kl"] for row in rows))


def _sides(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    keys, values = (
        _sum([row for row in rows if row["side"] == side]) for side in ("keys", "values")
    )
    more = None
    if max(keys, values) > _ALIKE * min(keys, values):
        more = "keys" if keys > values else "values"
    ratio = keys / values if values > 0 else None
    return {"setting": name, "keys": keys, "values": values, "ratio": ratio, "more": more}


def _stay(rows: Sequence[Row], limit: float) -> dict[str, Any]:
    stay = layers_that_stay(rows, limit)
    return {"stay": stay, "kl_left": _sum([row for row in rows if row["layer"] not in stay])}


def _needed(
    settings: Sequence[Sequence[Row]], parts: Sequence[Part], limit: float
) -> list[dict[str, Any]]:
    """Return the smallest quantised form of each part within an equal share of the limit."""
    share = limit / max(1, len(parts))
    found = []
    quantised = [row for rows in settings for row in rows if row["bits"] is not None]
    if not quantised:
        return []
    for part in parts:
        own = [row for row in quantised if part_of(row) == part and row["kl"] <= share]
        best = min(own, key=lambda row: row["bytes_per_token"], default=None)
        found.append(
            {
                "layer": part.layer,
                "side": part.side,
                "kv_head": part.kv_head,
                "setting": FULL if best is None else best["setting"],
                "bits": None if best is None else best["bits"],
            }
        )
    return found


def _first_tokens(
    name: str, first: int, plain: Sequence[Row], exact: Sequence[Row]
) -> dict[str, Any]:
    before, after = _sum(plain), _sum(exact)
    by_side = {}
    for side in ("keys", "values"):
        own, other = (_sum([row for row in rows if row["side"] == side]) for rows in (plain, exact))
        by_side[side] = 1 - other / own if own > 0 else None
    return {
        "setting": name,
        "exact_first": first,
        "kl": before,
        "kl_exact": after,
        "explained": 1 - after / before if before > 0 else None,
        "explained_by_side": by_side,
    }
