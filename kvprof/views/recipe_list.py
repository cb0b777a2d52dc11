"""The recipes that there are, as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprof.views.tables import Column, DataTable

__all__ = ["listing"]


def listing(recipes: Sequence[Mapping[str, Any]]) -> DataTable:
    """Return a table of recipes: name, item, profiles, claim.

    Parameters
    ----------
    recipes : sequence of mapping
        With ``name, paper, item, claim, judged, profiles``.
    """
    columns = [Column(name, words=True) for name in ("recipe", "of", "profiles", "claim")]
    rows = [
        (
            one["name"],
            f"{one['paper']}, {one['item']}",
            " ".join(one["profiles"]) or "none",
            one["claim"] if one["judged"] is None else f"{one['claim']} (not judged)",
        )
        for one in recipes
    ]
    return DataTable(columns, rows)
