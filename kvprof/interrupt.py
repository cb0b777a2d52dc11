"""Ctrl-C that lets the work in hand finish: what was measured stays consistent and is kept."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvprof import console

__all__ = ["Stop", "graceful_interrupt"]


class Stop:
    """Whether the user asked for the work to end; see `graceful_interrupt`."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self) -> bool:
        """Return True once Ctrl-C was pressed."""
        return self.requested


@contextmanager
def graceful_interrupt() -> Iterator[Stop]:
    """Turn the first Ctrl-C into a request to stop after the step in hand; the second one kills.

    Outside the main thread signals cannot be caught, and Ctrl-C stays what it was.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(_signal: int, _frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        console.warn("interrupted: keeping what was measured (Ctrl-C again drops it)")

    previous = signal.signal(signal.SIGINT, request)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)
