"""Files that the view saves: always new ones, whole or not at all."""

from pathlib import Path
from typing import Any

from kvprof.errors import FailedError
from kvprof.records.files import render_result, write_beside
from kvprof.records.fold import result_of
from kvprof.records.journal import read_events

__all__ = ["recorded_result", "save_new"]


def save_new(folder: Path, stem: str, suffix: str, content: str) -> Path:
    """Write `content` to ``stem.suffix``, or ``stem-2.suffix`` and so on where that exists.

    Returns
    -------
    Path
        Of the new file.

    Raises
    ------
    FailedError
        When nothing can be written there.
    """
    return write_beside(folder / f"{stem}{suffix}", content.encode("utf-8"))


def recorded_result(record: Path | None, result: dict[str, Any] | None) -> str:
    """Return the result of a run as its file's text: what is on disk now, incomplete or not.

    Parameters
    ----------
    record : Path or None
        The run's events; None when there are none.
    result : dict or None
        The result, for a run without events.

    Raises
    ------
    FailedError
        When the events do not make a result yet.
    """
    if record is None:
        assert result is not None
        return render_result(result)
    if not record.exists():
        raise FailedError("there is nothing to export yet: no event was written")
    recording = read_events(record)
    return render_result(result_of(recording.events, damage=recording.damage))
