"""Tidy tables as CSV: one row per observation, empty where a column does not apply."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["tidy_csv"]


def tidy_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a header, which pandas reads without an option.

    Parameters
    ----------
    columns : sequence of str
        Header, in order.
    rows : iterable of mapping
        Column to value; a missing column and None are written empty, floats in full (`repr`).

    Raises
    ------
    ValueError
        When a row holds a column that the header does not name.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
