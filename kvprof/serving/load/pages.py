"""The pages of a simulated cache: taken, given back, and found again by requests that begin alike.

As vLLM's block pool does it: pages without a reference wait in a queue, and the first in it are
taken for new tokens; until then they can be found again. A request's last pages come before its
first ones in that queue, and a page that is not full comes before all others.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

__all__ = ["Held", "Idle", "PagePool", "Unit"]


@dataclass(eq=False)
class Idle:
    """Pages that nobody refers to, side by side in the queue.

    Attributes
    ----------
    pages : int
        How many of them are left; 0 once they are referred to again.
    key : hashable or None
        What they can be found by as a whole; None where nobody will look for them.
    """

    pages: int
    key: Hashable = None


@dataclass(eq=False)
class Unit:
    """Pages that are shared as a whole.

    Attributes
    ----------
    pages : int
    references : int
        Running requests that hold it.
    idle : Idle or None
        Its place in the queue, where nobody holds it.
    """

    pages: int
    references: int = 1
    idle: Idle | None = None


@dataclass
class Held:
    """What one request holds, or can find.

    Attributes
    ----------
    keys : sequence of hashable
        Of the units at the prompt's beginning that others may have too, in order.
    ends : sequence of int
        Pages up to the end of each unit.
    units : int
        How many of them the request holds as shared ones; the others are its own.
    closed : bool
        Whether somebody else wrote one of its units first: what follows is its own.
    own : Idle or None
        Its own pages that a preemption left in the queue.
    """

    keys: Sequence[Hashable] = ()
    ends: Sequence[int] = ()
    units: int = 0
    closed: bool = False
    own: Idle | None = None

    @property
    def shared(self) -> int:
        """Pages of the units that it holds."""
        return self.ends[self.units - 1] if self.units else 0


@dataclass
class PagePool:
    """All pages of one replica.

    Attributes
    ----------
    total : int
    caching : bool
        Whether pages are found again.
    free : int
        Pages that nobody refers to.
    """

    total: int
    caching: bool = True
    free: int = field(init=False)
    _unwritten: int = field(init=False)  # pages that hold nothing: taken first
    _queue: deque[Idle] = field(default_factory=deque, init=False)
    _units: dict[Hashable, Unit] = field(default_factory=dict, init=False)

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
            if isinstance(first.key, Held) or first.key is None:
                used = min(pages, first.pages)
                first.pages -= used
                pages -= used
            else:
                # A unit is found as a whole or not at all: what is left of it is no use to anyone.
                self._units.pop(first.key, None)
                first.key = None
                continue
            if not first.pages:
                queue.popleft()

    def found(self, held: Held, most: int) -> tuple[int, int, int]:
        """Return what a request would find: units, pages, and how many of these nobody holds.

        Parameters
        ----------
        held : Held
        most : int
            Pages that may be found: the token that is to be computed is never among them.
        """
        if not self.caching:
            return 0, 0, 0
        units = pages = idle = 0
        for key, end in zip(held.keys, held.ends, strict=True):
            unit = self._units.get(key)
            if unit is None or end > most:
                break
            units += 1
            pages = end
            idle += unit.pages if not unit.references else 0
        if held.own is not None and units == len(held.keys):
            again = min(held.own.pages, most - pages)
            pages, idle = pages + again, idle + again
        return units, pages, idle

    def hold(self, held: Held, units: int, pages: int) -> None:
        """Refer to what `found` returned."""
        for key in held.keys[:units]:
            unit = self._units[key]
            if unit.idle is not None:
                self.free -= unit.pages
                unit.idle.pages, unit.idle.key, unit.idle = 0, None, None
            unit.references += 1
        held.units, held.closed = units, False
        own, held.own = held.own, None
        again = pages - held.shared
        if own is not None and again:
            self.free -= again
            own.pages -= again
        if own is not None:
            own.key = None

    def write(self, held: Held, pages: int) -> None:
        """Let others find the units that lie within a request's first full `pages`."""
        if held.closed or not self.caching:
            return
        while held.units < len(held.keys) and held.ends[held.units] <= pages:
            key = held.keys[held.units]
            if key in self._units:
                held.closed = True
                return
            self._units[key] = Unit(held.ends[held.units] - held.shared)
            held.units += 1

    def give_back(self, held: Held, pages: int, full: int, *, again: bool = False) -> None:
        """Give back what a request holds.

        Parameters
        ----------
        held : Held
        pages, full : int
            All of its pages, and those of them that are full of tokens.
        again : bool
            Whether it will look for them again: it was preempted.
        """
        if not self.caching:
            self.free += pages
            self._unwritten += pages
            return
        shared = held.shared
        self.free += pages - shared
        self._unwritten += pages - full
        # What lies behind all units is its own alone; copies of units that others wrote first, and
        # units that are not whole, are found by nobody.
        alone = full - max(shared, held.ends[-1] if held.ends else 0)
        if again and alone > 0:
            held.own = Idle(alone, held)
            self._queue.append(held.own)
            full -= alone
        if full > shared:
            last = self._queue[-1] if self._queue else None
            if last is not None and last.key is None:
                last.pages += full - shared
            else:
                self._queue.append(Idle(full - shared))
        for key in reversed(held.keys[: held.units]):
            unit = self._units[key]
            unit.references -= 1
            if not unit.references:
                self.free += unit.pages
                unit.idle = Idle(unit.pages, key)
                self._queue.append(unit.idle)
        held.units = 0
