"""Records as an enemy, or a failing disk, would leave them: any leaf of a value is another."""

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

__all__ = ["HOSTILE", "LEAVES", "filled", "mutations", "texts_filled"]

#: Sets a title, clears the screen, turns text round, is markup, a formula of a spreadsheet and of a
#: figure, ends a cell of a table, and starts a page's script.
HOSTILE = (
    "=1+\x1b]0;t\x07\x1b[2J\x9b31m\u202e\u2066[red][link=x]y[/]|`</td><script>\u2028$a_{^\\frac"
    "\U000e0041"
)
#: What may stand where anything else should.
LEAVES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    1e300,
    -1e300,
    1e-300,
    2**63,
    10**6,
    "",
    "x",
    HOSTILE,
    "9" * 5000,
    "kvprof/" + "9" * 5000,
    [],
    {},
    [None],
    [1],
    {"a": 1},
    [{}],
    "0001-01-01T00:00:00Z",
    json.loads("[" * 60 + "]" * 60),
)
_ABSENT = object()


def texts_filled(value: Any, *, keep: frozenset[str] = frozenset()) -> Any:
    """Return a value in which `HOSTILE` is added to every text but those under the keys `keep`."""
    if isinstance(value, dict):
        return {
            key: entry if key in keep else texts_filled(entry, keep=keep)
            for key, entry in value.items()
        }
    if isinstance(value, list):
        return [texts_filled(entry, keep=keep) for entry in value]
    return HOSTILE + value if isinstance(value, str) else value


def _places(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if at:
        yield at
    # Of a list the first two entries stand for all.
    inner = dict(enumerate(value[:2])) if isinstance(value, list) else value
    for key, entry in inner.items() if isinstance(inner, dict) else ():
        yield from _places(entry, (*at, key))


class _Renamed:
    """Stands for a value whose key has another name: of a task, a method, a field."""


def filled(value: Any, place: tuple[str | int, ...], new: Any) -> Any:
    """Return a copy of a value in which something else stands at a place, or nothing."""
    changed = copy.deepcopy(value)
    around = changed
    for step in place[:-1]:
        around = around[step]
    if new is _ABSENT:
        del around[place[-1]]
    elif new is _Renamed:
        if isinstance(around, dict):
            around[HOSTILE + str(place[-1])] = around.pop(place[-1])
    else:
        around[place[-1]] = copy.deepcopy(new)
    return changed


def mutations(value: Any) -> st.SearchStrategy[Any]:
    """Return a strategy of copies of a value that differ from it in one place."""
    places = st.sampled_from(list(_places(value)))
    return st.builds(filled, st.just(value), places, st.sampled_from([*LEAVES, _ABSENT, _Renamed]))
