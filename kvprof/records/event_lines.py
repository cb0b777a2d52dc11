"""Lines of a journal back into events: what is cut off, damaged or newer is told in words."""

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from kvprof.errors import FailedError
from kvprof.records.events import (
    EVENTS,
    PHASES,
    CaseStarted,
    Event,
    LoadRateStarted,
    LoadRequest,
    RunFinished,
    RunStarted,
    Warned,
)
from kvprof.records.files import parse_json

__all__ = ["DamagedLineError", "EventReader", "event_from"]


_LARGEST = 2.0**63  # of bytes, tokens, seconds, operations per second
_MOST_LAYERS = 10_000
_MOST_SERVERS = 100_000
_TYPES: dict[str, type[Event]] = {kind.type: kind for kind in Event.__subclasses__()}
# The names of each one's fields.
_NAMES = {name: tuple(entry.name for entry in fields(kind)) for name, kind in _TYPES.items()}
_REQUIRED = {
    name: tuple(
        entry.name
        for entry in fields(kind)
        if entry.default is MISSING and entry.default_factory is MISSING
    )
    for name, kind in _TYPES.items()
}


def event_from(line: Mapping[str, Any]) -> Event:
    """Return the event of a line that `event_line` made.

    Keys that this version does not know are left out, so that a newer minor version can be read.
    """
    kind = _TYPES.get(str(line.get("event")))
    if kind is None:
        raise ValueError(f"{line.get('event')!r} is no event")
    known = {name: line[name] for name in _NAMES[kind.type] if name in line}
    for name in ("command", "cases", "throttled"):
        if isinstance(known.get(name), list):
            known[name] = tuple(known[name])
    if lacking := [name for name in _REQUIRED[kind.type] if name not in known]:
        raise ValueError(f"a {kind.type} event without {', '.join(lacking)}")
    return kind(**known)


class DamagedLineError(Exception):
    """A line that is no event; the message says which line, and what is wrong with it."""


class EventReader:
    """Reads the lines of one journal in order, and refuses what cannot follow the lines before.

    Parameters
    ----------
    name : str
        The journal, as the user knows it; named when its format is newer.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._line = 0
        self._cases: set[str] = set()
        self.finished = False

    def read(self, line: bytes) -> Event:
        """Return the event of the next line."""
        self._line += 1
        try:
            return self._event(line)
        except ValueError as wrong:
            raise DamagedLineError(f"line {self._line} {wrong}") from None

    def _event(self, line: bytes) -> Event:
        entry = _parsed(line)
        if self._line == 1:
            _check_format(self._name, entry)
        if self.finished:
            raise ValueError("comes after the run's end")
        try:
            event = event_from(entry)
        except ValueError as wrong:
            raise ValueError(f"holds no event: {wrong}") from None
        _check_types(event)
        _check_limits(event)
        if self._line == 1 and not isinstance(event, RunStarted):
            raise ValueError(f"is a {event.type} event before the run started")
        if isinstance(event, CaseStarted | LoadRateStarted):
            self._cases.add(event.case)
        elif (
            # A warning may say why a case was never started.
            not isinstance(event, Warned)
            and (case := getattr(event, "case", None)) is not None
            and case not in self._cases
        ):
            raise ValueError(f"is of case {case!r}, which was never started")
        self.finished = isinstance(event, RunFinished)
        return event


def _parsed(line: bytes) -> dict[str, Any]:
    entry = parse_json(line)
    if not isinstance(entry, dict):
        raise ValueError(f"holds no event but a JSON {type(entry).__name__}")
    return entry


def _check_format(name: str, entry: dict[str, Any]) -> None:
    """Refuse a journal that this kvprof would misread; its first line says its format."""
    stated = entry.get("format")
    family, _, version = str(stated).partition("/")
    own_family, _, own_version = EVENTS.partition("/")
    known = family == own_family and version.isdecimal() and len(version) < 10
    if known and int(version) > int(own_version):
        raise FailedError(
            f"{name} was written by a newer kvprof (format {stated}, this one reads {EVENTS}); "
            "upgrade kvprof to read it"
        )
    if known and 1 <= int(version) < int(own_version):
        raise FailedError(
            f"{name} was written by an earlier kvprof (format {stated}, this one reads {EVENTS}); "
            "its result.json can still be read"
        )
    if stated != EVENTS:
        raise FailedError(f"{name} is no record of a kvprof run: its first line states no {EVENTS}")


def _check_types(event: Event) -> None:
    # A fold or a screen that trusts the annotations must not meet a text where a time should be.
    for name, fits in _checks(type(event)):
        if not fits(getattr(event, name)):
            value = repr(getattr(event, name))
            shown = value if len(value) <= 40 else value[:40] + "…"
            raise ValueError(f"holds a {event.type} event whose {name} cannot be {shown}")


def _check_limits(event: Event) -> None:
    """Refuse what fits its type and can be no measurement: it would cost hours, or overflow."""
    if isinstance(event, RunStarted | RunFinished):
        return  # what they carry for the result, the result's schema looks at
    for name in _NAMES[event.type]:
        if not _plausible(getattr(event, name)):
            raise ValueError(f"holds a {event.type} event whose {name} nothing can have")
    phase = getattr(event, "phase", None)
    if phase not in (None, *PHASES):
        known = " or ".join(PHASES)
        raise ValueError(f"holds a {event.type} event of phase {phase!r:.40}, not {known}")
    if isinstance(event, LoadRequest) and event.server >= _MOST_SERVERS:
        raise ValueError(f"holds a {event.type} event of more servers than any load has")
    layer = getattr(event, "layer", None)
    layers = [layer] if layer is not None else []
    if isinstance(event, CaseStarted):
        layers += [one["layer"] for one in event.layers if isinstance(one.get("layer"), int)]
    if len(layers) > _MOST_LAYERS or any(one >= _MOST_LAYERS for one in layers):
        raise ValueError(f"holds a {event.type} event of more layers than any model has")


def _plausible(value: Any) -> bool:
    """Tell whether no number in a value is far off, and no count below zero."""
    if isinstance(value, float):
        return abs(value) < _LARGEST
    if value is None or isinstance(value, (bool, str)):
        return True
    if isinstance(value, int):
        return 0 <= value < _LARGEST
    if isinstance(value, dict):
        return all(map(_plausible, value.values()))
    return not isinstance(value, (list, tuple)) or all(map(_plausible, value))


_Check = Callable[[Any], bool]


_CHECKS: dict[str, list[tuple[str, _Check]]] = {}


def _checks(kind: type[Event]) -> list[tuple[str, _Check]]:
    if kind.type not in _CHECKS:
        hints = get_type_hints(kind)
        _CHECKS[kind.type] = [(name, _check(hints[name])) for name in _NAMES[kind.type]]
    return _CHECKS[kind.type]


# bool is an int to Python, and no number to a reader; JSON writes 1.0 s as 1 where it may.
_ACCEPTED: dict[Any, tuple[type, ...]] = {
    float: (float, int),
    **{one: (one,) for one in (bool, int, str, type(None))},
}


def _check(hint: Any) -> _Check:
    """Return what tells whether a value read from JSON is of an annotated type."""
    origin, of = get_origin(hint), get_args(hint)
    options = of if origin in (Union, types.UnionType) else (hint,)
    if all(one in _ACCEPTED for one in options):
        accepted = frozenset(kind for one in options for kind in _ACCEPTED[one])
        return lambda value: type(value) in accepted
    if hint is Any:
        return lambda value: True
    if origin in (Union, types.UnionType):
        checks = [_check(one) for one in of]
        return lambda value: any(fits(value) for fits in checks)
    if origin in (list, tuple):
        entry = _check(of[0])
        return lambda value: isinstance(value, origin) and all(map(entry, value))
    if origin is dict:
        entry = _check(of[1])
        return lambda value: isinstance(value, dict) and all(map(entry, value.values()))
    raise TypeError(f"no event has a field of {hint}")
