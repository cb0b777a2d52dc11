"""Paths into the data of a result: ``rows[method=kq].relative_accuracy``."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Found", "find", "last_name", "parse_path"]

Step = tuple[str, Any]

_PIECE = re.compile(r"\.?([^.\[\]]+)|\[([^\[\]]*)\]")
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")


@dataclass(frozen=True)
class Found:
    """A value at the end of a path.

    Attributes
    ----------
    value : object
    interval : (float, float) or None
        That stands beside it.
    row : mapping or None
        Which holds both.
    """

    value: Any
    interval: tuple[float, float] | None = None
    row: Mapping[str, Any] | None = None


def parse_path(text: str) -> list[Step]:
    """Read a path: names, ``[n]``, ``[key=value, key=value]``, ``["name"]``, ``[*]``.

    Raises
    ------
    ValueError
        In one line, when it is none.
    """
    steps: list[Step] = []
    place = 0
    while place < len(text):
        match = _PIECE.match(text, place)
        if match is None:
            raise ValueError(
                f"{text!r} is no path: write names and brackets, as in rows[method=kq].rate"
            )
        place = match.end()
        if match[1] is not None:
            steps.append(("name", match[1].strip()))
        else:
            steps.append(_bracket(match[2].strip(), text))
    if not steps:
        raise ValueError("the path is empty: write names and brackets, as in rows[method=kq].rate")
    return steps


def _bracket(inside: str, text: str) -> Step:
    if inside == "*":
        return ("all", None)
    if re.fullmatch(r"-?[0-9]+", inside):
        return ("index", int(inside))
    if quoted := _QUOTED.fullmatch(inside):
        return ("name", quoted[1] if quoted[1] is not None else quoted[2])
    pieces = inside.split(",")
    # A value may hold a comma; then it stands alone.
    if not all("=" in piece for piece in pieces):
        pieces = [inside]
    conditions = [piece.partition("=") for piece in pieces]
    if not all(key.strip() and equals for key, equals, _ in conditions):
        raise ValueError(f"{text!r}: [{inside}] is neither a number, nor key=value, nor *")
    return ("where", [(key.strip(), value.strip()) for key, _, value in conditions])


def find(data: Any, text: str) -> list[Found]:
    """Return every value that a path leads to; empty where there is none.

    Parameters
    ----------
    data : object
        Of a result.
    text : str
        See `parse_path`. A name that ends a path brings ``<name>_interval`` along.
    """
    found = [Found(data)]
    for kind, what in parse_path(text):
        found = [inner for outer in found for inner in _step(outer.value, kind, what)]
    return found


def last_name(text: str) -> str | None:
    """Return the name that a path ends in; None where it ends in a place of a list."""
    kind, what = parse_path(text)[-1]
    return what if kind == "name" else None


def _step(value: Any, kind: str, what: Any) -> list[Found]:
    if kind == "name":
        if not isinstance(value, Mapping) or what not in value:
            return []
        return [Found(value[what], _interval(value.get(f"{what}_interval")), value)]
    entries = list(value.values()) if isinstance(value, Mapping) and kind == "all" else value
    if kind == "where" and isinstance(value, Mapping):
        entries = [value]
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        return []
    if kind == "all":
        return [Found(one) for one in entries]
    if kind == "index":
        return [Found(entries[what])] if -len(entries) <= what < len(entries) else []
    return [
        Found(one)
        for one in entries
        if isinstance(one, Mapping) and all(alike(one.get(key), said) for key, said in what)
    ]


def alike(value: Any, said: Any) -> bool:
    """Tell whether a value of a result is the one that a recipe writes: 0.3 is 0.30."""
    if value is None or isinstance(value, bool):
        return str(value).lower() == str(said).lower() or (value is None and said in ("null", ""))
    if isinstance(value, int | float):
        try:
            return float(said) == value
        except (TypeError, ValueError):
            return False
    return str(value) == str(said)


def _interval(value: Any) -> tuple[float, float] | None:
    if isinstance(value, list) and len(value) == 2 and None not in value:
        return (value[0], value[1])
    return None
