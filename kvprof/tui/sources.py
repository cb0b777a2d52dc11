"""Where the view's events come from: a file that grows, or a recording that plays."""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvprof.records.events import Event
from kvprof.records.journal import Follower

__all__ = ["Live", "NoEvents", "Replay", "Source"]

_AHEAD = 500  # events that a replay reads ahead


class Source(Protocol):
    """What the view asks for events; it never writes any."""

    @property
    def damage(self) -> str | None:
        """What is wrong with the record, after its last readable event."""

    @property
    def playing(self) -> bool:
        """Whether events are held back to come at their time."""

    def poll(self, at_most: int) -> list[Event]:
        """Return the next events that are due, at most so many; empty when there are none now."""
        ...

    def jump(self) -> None:
        """Hold nothing back any more."""

    def pause(self) -> None:
        """Let no time pass until the next poll."""

    def age(self) -> float | None:
        """Return seconds since the record last grew; None where that means nothing."""
        ...


class Live:
    """The events of a file, as they come.

    Parameters
    ----------
    path : Path
        It may not exist yet, and another process may be writing it.
    wanted : callable, optional
        Tells whether the file is the one that is meant: while it is not, there are no events.
    """

    playing = False

    def __init__(self, path: Path, wanted: Callable[[], bool] | None = None) -> None:
        self._path = path
        self._follower = Follower(path)
        self._wanted = wanted

    @property
    def damage(self) -> str | None:
        """What is wrong with the record."""
        return self._follower.damage

    def poll(self, at_most: int) -> list[Event]:
        """Return the next events."""
        if self._wanted is not None:
            if not self._wanted():
                return []
            self._wanted = None
        return self._follower.poll(at_most)

    def jump(self) -> None:
        """Do nothing: no event is held back."""

    def pause(self) -> None:
        """Do nothing: the file waits."""

    def age(self) -> float | None:
        """Return seconds since the file last grew."""
        try:
            return max(0.0, time.time() - self._path.stat().st_mtime)
        except OSError:
            return None


class Replay:
    """A recording whose events come at their own times."""

    def __init__(
        self,
        path: Path,
        speed: float,  # seconds of the run per second
        #: Seconds that pass; tests give one that does as it is told.
        clock: Callable[[], float] = time.monotonic,
        start: float = 0.0,  # seconds of the run that are there at once
    ) -> None:
        self._follower = Follower(path)
        self._ahead: deque[Event] = deque()
        self._speed = speed
        self._clock = clock
        self._position = start  # in the run
        self._seen: float | None = None  # when the position was true
        self.playing = True

    @property
    def damage(self) -> str | None:
        """What is wrong with the record, once everything before it was played."""
        return None if self._ahead else self._follower.damage

    def poll(self, at_most: int) -> list[Event]:
        """Return the next events that are due."""
        now = self._clock()
        if self._seen is not None:
            self._position += (now - self._seen) * self._speed
        self._seen = now
        due: list[Event] = []
        while len(due) < at_most:
            if not self._ahead:
                self._ahead.extend(self._follower.poll(_AHEAD))
            if not self._ahead or (self.playing and self._ahead[0].time > self._position):
                break
            due.append(self._ahead.popleft())
        if not self._ahead and (self._follower.finished or self._follower.damage is not None):
            self.playing = False
        return due

    def jump(self) -> None:
        """Play the rest at once."""
        self.playing = False

    def pause(self) -> None:
        """Let no time pass until the next poll."""
        self._seen = None

    def age(self) -> float | None:
        """Return None: a recording does not grow."""
        return None


class NoEvents:
    """Of a result that has no events beside it: the state was made from the result."""

    damage = None
    playing = False

    def poll(self, at_most: int) -> list[Event]:
        """Return nothing."""
        return []

    def jump(self) -> None:
        """Do nothing: no event is held back."""

    def pause(self) -> None:
        """Do nothing: no time passes."""

    def age(self) -> float | None:
        """Return None: nothing grows."""
        return None
