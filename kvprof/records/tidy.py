"""Tidy tables as CSV: one row per observation, empty where a column does not apply."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvprof.printable import printable

__all__ = ["ends", "tidy_csv"]

# Some programs take the wide signs of East Asian keyboards, and look past blanks in front.
_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]|[\t\n]")


def tidy_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a header, which pandas reads without an option."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writerow({name: _cell(name) for name in columns})
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def ends(name: str, bounds: Sequence[Any] | None) -> dict[str, Any]:
    """Return an interval as the columns ``<name>_low`` and ``<name>_high``; empty without one."""
    before = f"{name}_" if name else ""
    low, high = bounds or (None, None)
    return {f"{before}low": low, f"{before}high": high}


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    clean = printable(value)
    return f"'{clean}" if _FORMULA.match(clean) and not _is_number(clean) else clean


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
