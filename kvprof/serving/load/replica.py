"""One simulated engine that serves requests in continuous batches, as vLLM's V1 scheduler does.

Every step has a budget of tokens. Sequences that decode take one each, a prompt that was begun
goes on with what is left, and waiting ones are admitted, first come first served, while budget,
sequences and pages last and the whole prompt fits. A sequence for which there is no page preempts
the one that was admitted last, whose tokens are computed again. What is left out: speculation,
priorities, and that vLLM plans a step while the one before it runs.

Between two events, steps are alike: every decoding sequence grows by a token and a prompt by the
same piece, so that a step takes longer than the one before by the same amount. Such a stretch is
one piece of work however many steps it has, and the time of any of its tokens a closed form.
"""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf, sqrt
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from kvprof.errors import UsageError
from kvprof.serving.load.pages import Held, PagePool
from kvprof.serving.load.requests import Request
from kvprof.serving.load.step_times import StepTimes

__all__ = [
    "ROUTES",
    "EngineSettings",
    "LiveRequest",
    "Replica",
    "StepLog",
    "TokenTimes",
]

#: How requests are spread over replicas: in turn, or to where the least waits and runs.
ROUTES = ("shortest-queue", "round-robin")
_TOGETHER = 1024  # requests whose tokens' times are computed at once


@dataclass(frozen=True)
class EngineSettings:
    """What is served with; the defaults are those of vLLM's server on a GPU of 70 GiB and more."""

    pages: int  # of one replica's cache
    block_size: int = 16  # tokens of a page
    max_num_seqs: int = 1024  # sequences that run at once
    max_num_batched_tokens: int = 8192  # tokens of a step
    #: Whether pages of a prompt are found again by another that begins alike.
    prefix_caching: bool = True
    replicas: int = 1
    route: str = "shortest-queue"
    #: Seconds after which the router hears anew what waits and runs; in between it adds what it
    #: sent itself. vLLM's coordinator tells it every 0.1 s.
    refresh: float = 0.1

    def __post_init__(self) -> None:
        for name in ("pages", "block_size", "max_num_seqs", "replicas"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name.replace('_', ' ')}: {getattr(self, name)} is less than 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UsageError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is less than "
                f"--max-num-seqs {self.max_num_seqs}; raise the first or lower the second"
            )
        if self.route not in ROUTES:
            raise UsageError(f"no route {self.route!r}; use {', '.join(ROUTES)}")


class StepLog:
    """Store one replica's runs of steps; times within a run grow linearly from step to step."""

    def __init__(self) -> None:
        self.first = array("q")
        self.start = array("d")
        self.base = array("d")
        self.slope = array("d")
        self.end = array("d")
        self.running = array("q")
        self.pages = array("q")  # at its end
        self.preemptions = array("q")

    def add(self, first: int, stretch: "_Stretch", replica: "Replica") -> None:
        """Note a stretch that is over."""
        self.first.append(first)
        self.start.append(stretch.start)
        self.base.append(stretch.base)
        self.slope.append(stretch.slope)
        self.end.append(stretch.ends(stretch.steps))
        self.running.append(len(replica.running))
        self.pages.append(replica.pool.total - replica.pool.free)
        self.preemptions.append(replica.preemptions)

    def ends_of(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return when steps ended."""
        firsts = np.array(self.first)
        at = np.searchsorted(firsts, steps, side="right") - 1
        j = steps - firsts[at]
        start, base, slope = (np.array(own)[at] for own in (self.start, self.base, self.slope))
        found: NDArray[np.float64] = start + (j + 1) * base + slope * (j * (j + 1) / 2)
        return found


class TokenTimes(Sequence[float]):
    """When each token of a request came, in seconds."""

    __slots__ = ("_times",)

    def __init__(self, times: NDArray[np.float64]) -> None:
        self._times = times

    def __len__(self) -> int:
        return len(self._times)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[float]: ...
    def __getitem__(self, index: int | slice) -> float | Sequence[float]:
        if isinstance(index, slice):
            return TokenTimes(self._times[index])
        return float(self._times[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self._times.astype(dtype or np.float64, copy=bool(copy))


class LiveRequest:
    """A request in a replica."""

    __slots__ = (
        "admitted",
        "base",
        "computed",
        "finish",
        "held",
        "ranges",
        "request",
        "since",
        "total",
    )

    def __init__(self, request: Request, held: Held) -> None:
        self.request = request
        self.held = held
        self.total = request.prompt  # tokens that must lie in the cache before the next is written
        self.computed = 0  # while its prompt is read; of a decoding one see `base`
        self.base = 0  # computed tokens less the replica's steps, while it decodes
        self.since = -1  # step in which it wrote the first token since it was (re)admitted
        self.finish = -1  # step after which all is written
        self.ranges: list[tuple[int, int]] = []
        self.admitted: float | None = None  # for the first time


@dataclass
class _Stretch:
    """Steps that are alike, under way; see `StepLog`."""

    start: float
    base: float
    slope: float
    steps: int
    piece: int  # tokens of the prompt that goes on, in each step
    taken: int  # pages taken already, for its first step
    open: bool  # whether an arrival would be admitted at the next step
    done: list[LiveRequest]  # whose prompt ends in it, which is one step then

    def ends(self, steps: int) -> float:
        """Return when so many of its steps are over, in seconds."""
        return self.start + steps * self.base + self.slope * (steps * (steps - 1) / 2)


class Replica:
    """One engine."""

    def __init__(self, settings: EngineSettings, times: StepTimes) -> None:
        self.settings, self.times = settings, times
        self.pool = PagePool(settings.pages, settings.prefix_caching)
        self.log = StepLog()
        self.waiting: deque[LiveRequest] = deque()
        self.running: dict[LiveRequest, None] = {}  # in the order in which they were admitted
        # Whose prompt was begun; the last of those that run.
        self.partial: LiveRequest | None = None
        self.steps = 0
        #: When the scheduler is next at work; never, while there is nothing to do.
        self.boundary = inf
        self._stretch: _Stretch | None = None
        self._context = 0  # of all decoding sequences in the next step
        self._decoding = 0
        self._residues = [0] * settings.block_size  # of `base`, of those that decode
        self._finishing: list[tuple[int, int, LiveRequest]] = []
        self.computed = self.found = self.again = self.kept = self.preemptions = 0

    def token_times(self, lives: Sequence["LiveRequest"]) -> Iterator[TokenTimes]:
        """Yield the token times of finished requests, with gaps at preemptions."""
        for begin in range(0, len(lives), _TOGETHER):
            own = [live.ranges for live in lives[begin : begin + _TOGETHER]]
            steps = [np.arange(a, b + 1) for ranges in own for a, b in ranges]
            ends = np.cumsum([sum(b - a + 1 for a, b in ranges) for ranges in own])
            yield from map(TokenTimes, np.split(self.log.ends_of(np.concatenate(steps)), ends[:-1]))

    # --- What arrives.

    def deliver(self, live: LiveRequest, time: float) -> None:
        """Take a request; what was to be done before `time` has been done."""
        self.waiting.append(live)
        stretch = self._stretch
        if stretch is None:
            self.boundary = min(self.boundary, time)
        elif stretch.open and stretch.steps > 1:
            stretch.steps = self._steps_until(stretch, time)
            stretch.open = False
            self.boundary = stretch.ends(stretch.steps)

    @staticmethod
    def _steps_until(stretch: _Stretch, time: float) -> int:
        """Return after how many steps a time is reached or passed; at least one."""
        wanted, base, slope = time - stretch.start, stretch.base, stretch.slope
        if slope > 0.0:
            half = base - slope / 2
            guess = (sqrt(half * half + 2 * slope * wanted) - half) / slope
        else:
            guess = wanted / base
        steps = max(1, min(stretch.steps, ceil(guess)))
        # Rounding may be off by one either way.
        while steps > 1 and stretch.ends(steps - 1) >= time:
            steps -= 1
        while steps < stretch.steps and stretch.ends(steps) < time:
            steps += 1
        return steps

    def run_until(self, time: float) -> None:
        """Do all that begins before a time."""
        while self.boundary < time:
            now = self.boundary
            if self._stretch is not None:
                self._commit(self._stretch)
            self._schedule(now)

    # --- A stretch ends.

    def _commit(self, stretch: _Stretch) -> None:
        steps, decoding, pool = stretch.steps, self._decoding, self.pool
        if steps > 1:
            pool.take(self._pages_of(steps, stretch.piece) - stretch.taken)
        self.log.add(self.steps, stretch, self)
        self.steps += steps
        self._context += steps * decoding
        self.computed += steps * (decoding + stretch.piece)
        if stretch.piece:
            partial = self.partial
            assert partial is not None
            partial.computed += steps * stretch.piece
            pool.write(partial.held, partial.computed // self.settings.block_size)
        for live in stretch.done:
            self._written_first(live)
        while self._finishing and self._finishing[0][0] <= self.steps:
            _, _, live = heappop(self._finishing)
            if live.finish == self.steps:
                live.finish = -1
                self._leave(live)
                del self.running[live]
        self._stretch = None

    def _written_first(self, live: LiveRequest) -> None:
        """Let a request whose tokens are computed decode; the step that ended wrote a token."""
        live.base = live.computed - self.steps
        live.since = self.steps - 1
        left = live.request.output - (live.total - live.request.prompt) - 1
        live.finish = self.steps + left
        self._decoding += 1
        self._context += live.computed + 1
        self._residues[live.base % self.settings.block_size] += 1
        heappush(self._finishing, (live.finish, live.request.number, live))

    def _leave(self, live: LiveRequest, *, again: bool = False) -> int:
        """Take a decoding request out, and give its pages back; return its computed tokens."""
        computed = live.base + self.steps
        self._decoding -= 1
        self._context -= computed + 1
        self._residues[live.base % self.settings.block_size] -= 1
        live.ranges.append((live.since, self.steps - 1))
        self._give_back(live, computed, again=again)
        return computed

    def _give_back(self, live: LiveRequest, computed: int, *, again: bool) -> None:
        size = self.settings.block_size
        self.pool.give_back(live.held, -(-computed // size), computed // size, again=again)

    # --- A step is put together, and as many more as will be like it.

    def _schedule(self, now: float) -> None:
        settings, pool = self.settings, self.pool
        preempted = self._make_room()
        partial, size = self.partial, settings.block_size
        budget = settings.max_num_batched_tokens - self._decoding
        piece, taken, pairs, growth = 0, self._residues[-self.steps % size], 0.0, 0.0
        decoding = self._decoding
        done: list[LiveRequest] = []
        tokens = decoding
        if partial is not None:
            before = partial.computed
            piece = min(partial.total - before, budget)
            taken += -(-(before + piece) // size) - -(-before // size)
            pairs = piece * before + piece * (piece + 1) / 2
            growth = self.times.per_pair * piece * piece
            tokens += piece
            budget -= piece
        pool.take(taken)
        ends = partial is not None and partial.computed + piece == partial.total
        if ends:
            # As one step of its own: its pages are taken, and it ends when the step does.
            assert partial is not None
            partial.computed += piece
            self.computed += piece
            pool.write(partial.held, partial.computed // size)
            done.append(partial)
            self.partial, piece = None, 0
        admitted = False
        if not preempted:
            while self.waiting and budget and len(self.running) < settings.max_num_seqs:
                found = self._admitted(self.waiting[0], budget, now)
                if found is None:
                    break
                live = self.waiting.popleft()
                self.running[live] = None
                before, now_read = found
                pairs += now_read * before + now_read * (now_read + 1) / 2
                tokens += now_read
                budget -= now_read
                self.computed += now_read
                admitted = True
                if live.computed == live.total:
                    done.append(live)
                else:
                    self.partial = live
        if not tokens:
            self.boundary = inf
            return
        base = self.times.dense(tokens) + self.times.per_context * self._context
        base += self.times.per_pair * pairs + self.times.per_sequence * decoding
        steps, may_enter = 1, not self.waiting and len(self.running) < settings.max_num_seqs
        if not (ends or admitted or preempted):
            steps = self._equal_steps(piece)
        stretch = _Stretch(
            now,
            base,
            self.times.per_context * decoding + growth,
            steps,
            piece,
            taken,
            may_enter and budget > 0,
            done,
        )
        self._stretch = stretch
        self.boundary = stretch.ends(steps)

    def _admitted(self, live: LiveRequest, budget: int, now: float) -> tuple[int, int] | None:
        """Give a waiting request its pages; return its tokens found and read, None for no room."""
        size, pool, held = self.settings.block_size, self.pool, live.held
        units, pages, idle = pool.found(held, (live.total - 1) // size)
        if -(-live.total // size) - pages + idle > pool.free:
            return None
        pool.hold(held, units, pages)
        before = pages * size
        read = min(live.total - before, budget)
        live.computed = before + read
        pool.take(-(-live.computed // size) - pages)
        pool.write(held, live.computed // size)
        if live.admitted is None:
            live.admitted = now
            self.found += before
        else:
            self.kept += before
        return before, read

    def _pages_of(self, steps: int, piece: int) -> int:
        """Return the pages that so many steps take, from the one on that comes next."""
        size, residues = self.settings.block_size, self._residues
        rounds, rest = divmod(steps, size)
        pages = rounds * self._decoding
        for j in range(rest):
            pages += residues[-(self.steps + j) % size]
        if piece:
            assert self.partial is not None
            before = self.partial.computed
            pages += -(-(before + steps * piece) // size) - -(-before // size)
        return pages

    def _equal_steps(self, piece: int) -> int:
        """Return how many steps are alike: until one is written, a prompt read, or pages lack."""
        finishing = self._finishing
        while finishing and finishing[0][2].finish != finishing[0][0]:
            heappop(finishing)  # it was preempted since
        limits = [finishing[0][0] - self.steps] if finishing else []
        if piece:
            assert self.partial is not None
            limits.append((self.partial.total - self.partial.computed - 1) // piece)
        steps = min(limits)
        # The first step's pages are taken already, and counted again here.
        free = self.pool.free + self._pages_of(1, piece)
        size = self.settings.block_size
        at_most = self._decoding * (steps // size + 1) + -(-steps * piece // size) + 1
        if at_most > free and self._pages_of(steps, piece) > free:
            low, high = 1, steps
            while high - low > 1:
                middle = (low + high) // 2
                if self._pages_of(middle, piece) > free:
                    high = middle
                else:
                    low = middle
            steps = low
        return max(1, steps)

    def _make_room(self) -> bool:
        """Preempt, the last one admitted first, until all that goes on has its pages."""
        size, pool = self.settings.block_size, self.pool
        needed = self._residues[-self.steps % size]
        partial = self.partial
        if partial is not None:
            before = partial.computed
            budget = self.settings.max_num_batched_tokens - self._decoding
            piece = min(partial.total - before, budget)
            needed += -(-(before + piece) // size) - -(-before // size)
        if needed <= pool.free:
            return False
        # Sequences are served in the order of their admission, each with a page of those that are
        # left: pages given back by the last ones serve the first.
        free, served = pool.free, 0
        order = list(self.running)
        while served < len(order):
            live = order[served]
            wants = self._wants(live, served)
            while wants > free and order:
                last = order.pop()
                before = pool.free
                self._preempt(last)
                free += pool.free - before
                if last is live:
                    break
            if served < len(order) and order[served] is live:
                free -= wants
                served += 1
        return True

    def _wants(self, live: LiveRequest, served: int) -> int:
        """Return the pages that a running request needs for the next step, after so many others."""
        size = self.settings.block_size
        if live is not self.partial:
            return 1 if (live.base + self.steps) % size == 0 else 0
        piece = min(live.total - live.computed, self.settings.max_num_batched_tokens - served)
        return -(-(live.computed + piece) // size) - -(-live.computed // size)

    def _preempt(self, live: LiveRequest) -> None:
        del self.running[live]
        self.preemptions += 1
        if live is self.partial:
            self.again += live.computed
            self._give_back(live, live.computed, again=True)
            self.partial = None
        else:
            self.again += self._leave(live, again=True)
            first, last = live.ranges[-1]
            live.total += last - first + 1
            live.finish = -1
        live.computed = 0
        self.waiting.appendleft(live)
