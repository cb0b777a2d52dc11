"""Marks in the runtime that say what a stretch of work is for, and clocks that time the stretches.

The runtime writes ``with part("compress"): …`` around what belongs to a part of job completion time
(`kvprof.records.parts.PARTS`). Without a clock that does nothing, and inside code that is being
compiled it is left out. Marks nest, and times are exclusive: what an inner part takes is not also
the outer part's. An inner part that names no layer belongs to the outer part's layer.

What the runtime calls by which name, where the names leave room:

- ``compress``: products with a basis before tokens are stored (keys, values, and queries that are
  turned into the keys' basis), moving tokens down levels; on the kernels also writing the planes.
- ``decompress``: rebuilding keys or values from latents, rotating rebuilt keys, turning attention's
  output back where no folded projection does.
- ``quantise``: codes from rows and rows from codes, both ways.
- ``evict``: scores that decide what leaves, and picking what stays.
- ``schedule``: cutting a step's work for the kernels, and counting the tokens of the rows.
- ``attention``: everything else between the projections, appending to the cache included. The
  kernels' combining of splits is in there too: one operator does both.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

__all__ = [
    "REST",
    "Clock",
    "EventClock",
    "Stretch",
    "WallClock",
    "is_timing",
    "part",
    "timing",
]

#: What no mark names. On a CPU that is the host's work; on a GPU, kernels that belong to no part.
REST = "host"

_OFF = nullcontext()
_running: "Clock | None" = None


def part(name: str, layer: int | None = None) -> AbstractContextManager[None]:
    """Mark what the body does as a part, where a clock runs; to be used in ``with`` at once."""
    clock = _running
    if clock is None or clock.muted or torch.compiler.is_compiling():
        return _OFF
    clock.enter(name, layer)
    return clock.leaving


def is_timing() -> bool:
    """Whether a clock runs, which wants to see every mark."""
    return _running is not None


@contextmanager
def timing(clock: "Clock") -> Iterator[None]:
    """Time the body's marks with a clock; an inner `timing` replaces the outer one."""
    global _running
    before = _running
    clock.begin()
    _running = clock
    try:
        yield
        clock.finish()
    finally:
        clock.muted = False
        _running = before


class Stretch(NamedTuple):
    """Adjacent work that belongs to one part."""

    part: str
    layer: int | None
    seconds: float
    exact: bool  # false where the GPU had nothing to do at times, or may have had


class _Leaving:
    """Closes the innermost mark; a clock has one, whatever the mark."""

    __slots__ = ("_clock",)

    def __init__(self, clock: "Clock") -> None:
        self._clock = clock

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        self._clock.leave()


class Clock(ABC):
    """Notes when each mark begins and ends."""

    def __init__(self) -> None:
        self.muted = False  # marks of the runtime are passed over; `enter` and `leave` still work
        self.leaving = _Leaving(self)  # calls `leave` at its end
        self._stack: list[tuple[str, int | None]] = []
        # Of the stretch that begins at each stamp; the last stamp begins none.
        self._labels: list[tuple[str, int | None]] = []

    def begin(self) -> None:
        """Forget what was timed before and start with `REST`."""
        self._clear()
        self._stack[:] = [(REST, None)]
        self._labels[:] = self._stack
        self._stamp()

    def enter(self, name: str, layer: int | None = None) -> None:
        """Begin a part; every call needs its `leave`."""
        label = (name, self._stack[-1][1] if layer is None else layer)
        self._stack.append(label)
        self._labels.append(label)
        self._stamp()

    def leave(self) -> None:
        """End the innermost part."""
        self._stack.pop()
        self._labels.append(self._stack[-1])
        self._stamp()

    def finish(self) -> None:
        """End the last stretch."""
        self._stamp()

    def read(self) -> list[Stretch]:
        """Return the stretches between `begin` and `finish`, in order of time."""
        return [
            Stretch(*label, seconds, exact)
            for label, (seconds, exact) in zip(self._labels, self._lengths(), strict=True)
        ]

    @abstractmethod
    def _clear(self) -> None:
        """Forget all stamps."""

    @abstractmethod
    def _stamp(self) -> None:
        """Note the time."""

    @abstractmethod
    def _lengths(self) -> list[tuple[float, bool]]:
        """Return seconds between stamps, and whether they are exact."""


class WallClock(Clock):
    """Reads the host's monotonic clock: for a CPU, which computes as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self._times: list[float] = []

    def _clear(self) -> None:
        self._times.clear()

    def _stamp(self) -> None:
        self._times.append(time.perf_counter())

    def _lengths(self) -> list[tuple[float, bool]]:
        return [(b - a, True) for a, b in zip(self._times, self._times[1:], strict=False)]


class EventClock(Clock):
    """Records CUDA events into the current stream; nothing waits until they are read.

    `read` must not be called before the device has finished (a token that was copied to the host
    says so).

    Parameters
    ----------
    captured : bool
        The marks are being captured in a CUDA graph: events become nodes of it, and `read` tells of
        its last replay.
    watched : bool
        At each mark ask whether the device has passed the one before. Where it has, it may have
        waited for the host within the stretch, which is then not exact. Not while capturing.
    """

    def __init__(self, *, captured: bool = False, watched: bool = False) -> None:
        super().__init__()
        self._captured = captured
        self._watched = watched
        self._events: list[Any] = []  # made once, recorded anew in every step
        self._used = 0
        self._passed: list[bool] = []
        self._stream: Any = None

    def _clear(self) -> None:
        self._used = 0
        self._passed.clear()
        self._stream = torch.cuda.current_stream()

    def _stamp(self) -> None:
        if self._used == len(self._events):
            self._events.append(self._new_event())
        self._events[self._used].record(self._stream)
        if self._watched and self._used:
            self._passed.append(self._events[self._used - 1].query())
        self._used += 1

    def _new_event(self) -> Any:
        return torch.cuda.Event(enable_timing=True, external=self._captured)

    def _lengths(self) -> list[tuple[float, bool]]:
        events = self._events[: self._used]
        passed = self._passed or [False] * (len(events) - 1)
        return [
            (float(a.elapsed_time(b)) / 1e3, not late)
            for a, b, late in zip(events, events[1:], passed, strict=False)
        ]
