"""Lines of a journal back into events: what is cut off, damaged or newer is told in words."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kvprof.errors import FailedError
from kvprof.records.events import (
    EVENTS,
    CaseStarted,
    Event,
    LoadRateStarted,
    RunFinished,
    RunStarted,
    Warned,
)
from kvprof.records.files import parse_json

__all__ = ["DamagedLineError", "EventReader", "event_from"]


_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)


def event_from(line: Mapping[str, Any]) -> Event:
    """Return the event of a line that `event_line` made.

    Keys that this version does not know are left out, so that a newer minor version can be read.
    """
    try:
        return _ADAPTER.validate_python(line)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_context=False)[0]
    name = line.get("event")
    if first["type"].startswith("union_tag"):
        raise ValueError(f"an unknown event: {name!r:.40}")
    _, where, *_ = *first["loc"], ""
    if first["type"].startswith("missing"):
        raise ValueError(f"a {name} event without {where}")
    raise ValueError(f"a {name} event with an invalid {where}: {first['input']!r:.40}")


class DamagedLineError(Exception):
    """A line that is no event; the message says which line, and what is wrong with it."""


class EventReader:
    """Reads the lines of one journal in order, and refuses what cannot follow the lines before."""

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
            raise ValueError(f"has {wrong}") from None
        if self._line == 1 and not isinstance(event, RunStarted):
            raise ValueError(f"is a {event.event} event before the run started")
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
        raise ValueError(f"is not an event but a JSON {type(entry).__name__}")
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
        raise FailedError(f"{name} is not a recorded kvprof run: its first line lacks {EVENTS}")
