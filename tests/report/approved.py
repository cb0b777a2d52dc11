"""Reports as texts that somebody has read: a file each, at 80 columns."""

import os
from pathlib import Path
from typing import Any

from kvprof.report import report_of
from kvprof.report.blocks import Paragraph, Table

_FOLDER = Path(__file__).parent / "approved"


def check_approved(name: str, text: str) -> None:
    """Hold a text against its file; with KVPROF_APPROVE=1 write it there instead."""
    path = _FOLDER / f"{name}.txt"
    if os.environ.get("KVPROF_APPROVE"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "read it, then run with KVPROF_APPROVE=1"


def blocks(kind: Any, result: dict[str, Any]) -> list[Any]:
    """Return a report's blocks of a kind."""
    return [one for one in report_of(result).blocks if isinstance(one, kind)]


def said(result: dict[str, Any], role: str = "verdict") -> list[str]:
    """Return a report's paragraphs of a role."""
    return [one.text for one in blocks(Paragraph, result) if one.role == role]


def rows(table: Table) -> list[dict[str, str]]:
    """Return a table's rows by its titles."""
    titles = [column.title for column in table.columns]
    return [dict(zip(titles, row, strict=True)) for row in table.cells()]
