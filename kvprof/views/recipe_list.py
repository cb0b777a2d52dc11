"""The recipes that there are: a line each, or a table with whole claims."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvprof.views.tables import Column, DataTable

__all__ = ["lines", "listing"]

_TITLES = ("recipe", "of", "profiles", "claim")
_GAP = 2  # columns


def listing(recipes: Sequence[Mapping[str, Any]]) -> DataTable:
    """Return a table of recipes: name, item, profiles, claim.

    Parameters
    ----------
    recipes : sequence of mapping
        With ``name, paper, item, claim, judged, profiles``.
    """
    columns = [Column(name, words=True) for name in _TITLES]
    return DataTable(columns, [_row(one) for one in recipes])


def lines(recipes: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    """Return a line per recipe, of at most so many columns: what does not fit ends in ``…``.

    Parameters
    ----------
    recipes : sequence of mapping
        As `listing` takes them.
    width : int
    """
    rows = [_TITLES, *(_row(one) for one in recipes)]
    # A claim has what the others leave; of an item and its paper the beginning says which it is.
    widest = [max(len(row[place]) for row in rows) for place in range(3)]
    widest[1] = min(widest[1], max(len("FDC, Table 10"), width // 5))
    shown = []
    for number, row in enumerate(rows):
        line = Text(no_wrap=True, style="bold" if not number else "")
        for words, columns in zip(row, widest, strict=False):
            cell = Text(words, end="")
            cell.truncate(columns, overflow="ellipsis", pad=True)
            line.append_text(cell).append(" " * _GAP)
        line.append(row[3])
        line.truncate(width, overflow="ellipsis")
        shown.append(line)
    return Group(*shown)


def _row(one: Mapping[str, Any]) -> tuple[str, str, str, str]:
    claim = one["claim"] if one["judged"] is None else f"{one['claim']} (not judged)"
    profiles = " ".join(one["profiles"]) or "none"
    return one["name"], f"{one['paper']}, {one['item']}", profiles, " ".join(claim.split())
