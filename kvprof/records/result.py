"""What a result is: one JSON object per run, whose ``kind`` says what its ``data`` holds."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from os import PathLike, fspath
from typing import Any

from kvprof.version import __version__

__all__ = ["RECORD_DAMAGED", "RECORD_ENDS", "SCHEMA", "build_result", "to_plain"]

#: Written into every result. The number grows when an older kvprof would misread a newer result.
SCHEMA = "kvprof/1"
#: How the reasons begin for which a record, and perhaps not its run, is incomplete.
RECORD_DAMAGED = "the record can be read in part only"
RECORD_ENDS = "the record ends before the run does"


def build_result(
    kind: str,
    *,
    environment: Mapping[str, Any],
    inputs: Mapping[str, Any],
    data: Mapping[str, Any],
    warnings: Sequence[str] = (),
    complete: bool = True,
    created: datetime | None = None,
    incomplete_reason: str | None = None,
) -> dict[str, Any]:
    """Return a result, ready to be written."""
    if complete and incomplete_reason is not None:
        raise ValueError("a complete result cannot have a reason for being incomplete")
    moment = created if created is not None else datetime.now(UTC)
    result = {
        "schema": SCHEMA,
        "kind": kind,
        "complete": complete,
        "incomplete_reason": None if complete else incomplete_reason or "interrupted",
        "warnings": list(warnings),
        "created": moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "kvprof_version": __version__,
        "environment": environment,
        "inputs": inputs,
        "data": data,
    }
    return {key: to_plain(value, key) for key, value in result.items()}


def to_plain(value: Any, where: str = "") -> Any:
    """Return `value` in JSON's own types: no arrays, no NaN, no keys but strings."""
    if isinstance(value, Enum):
        return to_plain(value.value, where)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        # A file name that is no UTF-8 arrives with lone surrogates, which no file can hold.
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}; JSON allows finite numbers or null")
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} is not a string")
        return {key: to_plain(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry, f"{where}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, PathLike):
        return to_plain(fspath(value), where)
    if hasattr(value, "tolist"):
        return to_plain(value.tolist(), where)
    raise TypeError(f"{where}: JSON cannot represent a {type(value).__name__}")
