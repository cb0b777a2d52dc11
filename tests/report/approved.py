"""Reports as texts that somebody has read: a file each, at 80 columns."""

import os
from pathlib import Path

_FOLDER = Path(__file__).parent / "approved"


def check_approved(name: str, text: str) -> None:
    """Hold a text against its file; with KVPROF_APPROVE=1 write it there instead."""
    path = _FOLDER / f"{name}.txt"
    if os.environ.get("KVPROF_APPROVE"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, "read it, then run with KVPROF_APPROVE=1"
