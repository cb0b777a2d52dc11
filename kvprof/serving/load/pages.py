"""The block pool of a simulated cache, with prefix caching, as vLLM's block pool works.

Free pages wait in a queue, and new tokens take the first; until then requests can find them again.
A request's last pages precede its first, and partly filled pages precede all others.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

__all__ = ["Held", "Idle", "PagePool", "Unit"]


@dataclass(eq=False)
class Unit:
    """Pages that are found and taken as a whole: one copy of them."""

    pages: int
    key: Hashable  # what they are found by
    references: int = 1  # running requests that hold it


@dataclass(eq=False)
class Idle:
    """Pages that nobody refers to, side by side in the queue."""

    pages: int  # how many of them are left; 0 once they are referred to again
    unit: Unit | None = None  # which these are, where others may find them
    awaited: bool = False  # whether a preempted request may look for them


@dataclass
class Held:
    """What one request holds, or can find."""

    #: Of the units at the prompt's beginning that others may have too, in order.
    keys: Sequence[Hashable] = ()
    ends: Sequence[int] = ()  # pages up to the end of each unit
    #: Those of them that the request has written or found, from the first on.
    units: list[Unit] = field(default_factory=list)
    own: Idle | None = None  # pages behind all units that a preemption left in the queue

    @property
    def shared(self) -> int:
        """Pages of the units that it holds."""
        return self.ends[len(self.units) - 1] if self.units else 0


@dataclass
class PagePool:
    """All pages of one replica."""

    total: int
    caching: bool = True  # whether pages are found again
    free: int = field(init=False)  # pages that nobody refers to
    _unwritten: int = field(init=False)  # pages that hold nothing: taken first
    _queue: deque[Idle] = field(default_factory=deque, init=False)
    #: Copies of each unit, the first of which is found; those of two that wrote it at a time.
    _copies: dict[Hashable, list[Unit]] = field(default_factory=dict, init=False)
    _idle: dict[Unit, Idle] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.free = self._unwritten = self.total

    def take(self, pages: int) -> None:
        """Take pages for new tokens; the caller has looked that as many are free."""
        self.free -= pages
        if pages <= self._unwritten:
            self._unwritten -= pages
            return
        pages -= self._unwritten
        self._unwritten = 0
        queue = self._queue
        while pages:
            first = queue[0]
            if first.unit is not None:
                # A unit is found as a whole or not at all: what is left of it is no use to anyone.
                self._forget(first.unit)
                first.unit = None
            used = min(pages, first.pages)
            first.pages -= used
            pages -= used
            if not first.pages:
                queue.popleft()

    def _forget(self, unit: Unit) -> None:
        del self._idle[unit]
        copies = self._copies[unit.key]
        copies.remove(unit)
        if not copies:
            del self._copies[unit.key]

    def found(self, held: Held, most: int) -> tuple[int, int, int]:
        """Return what a request would find: units, pages, and how many of these nobody holds."""
        if not self.caching:
            return 0, 0, 0
        units = pages = idle = 0
        for key, end in zip(held.keys, held.ends, strict=True):
            copies = self._copies.get(key)
            if copies is None or end > most:
                break
            units += 1
            pages = end
            idle += copies[0].pages if not copies[0].references else 0
        if held.own is not None and units == len(held.keys):
            again = min(held.own.pages, most - pages)
            pages, idle = pages + again, idle + again
        return units, pages, idle

    def hold(self, held: Held, units: int, pages: int) -> None:
        """Refer to what `found` returned."""
        for key in held.keys[:units]:
            unit = self._copies[key][0]
            if not unit.references:
                idle = self._idle.pop(unit)
                self.free -= unit.pages
                idle.pages, idle.unit = 0, None
            unit.references += 1
            held.units.append(unit)
        own, held.own = held.own, None
        if own is not None:
            again = pages - held.shared
            self.free -= again
            own.pages -= again
            own.awaited = False

    def write(self, held: Held, pages: int) -> None:
        """Let others find the units that lie within a request's first full `pages`."""
        if not self.caching:
            return
        while len(held.units) < len(held.keys) and held.ends[len(held.units)] <= pages:
            block = len(held.units)
            unit = Unit(held.ends[block] - held.shared, held.keys[block])
            self._copies.setdefault(unit.key, []).append(unit)
            held.units.append(unit)

    def give_back(self, held: Held, pages: int, full: int, *, again: bool = False) -> None:
        """Give back what a request holds."""
        if not self.caching:
            self.free += pages
            self._unwritten += pages
            return
        shared = held.shared
        self.free += pages - shared
        self._unwritten += pages - full
        if full > shared:
            self._append(Idle(full - shared), held, again and len(held.units) == len(held.keys))
        for unit in reversed(held.units):
            unit.references -= 1
            if not unit.references:
                self.free += unit.pages
                self._idle[unit] = idle = Idle(unit.pages, unit)
                self._queue.append(idle)
        held.units = []

    def _append(self, idle: Idle, held: Held, again: bool) -> None:
        """Put a request's own pages into the queue, for itself to find or for nobody."""
        if again:
            idle.awaited = True
            held.own = idle
            self._queue.append(idle)
            return
        last = self._queue[-1] if self._queue else None
        if last is not None and last.unit is None and not last.awaited:
            last.pages += idle.pages
        else:
            self._queue.append(idle)
