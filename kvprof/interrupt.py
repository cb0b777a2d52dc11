"""How a process ends early: Ctrl-C, SIGTERM and SIGHUP keep what was measured, and are 130.

The first asks; a step that takes long is broken off; the second ends the process at once.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from kvprof.errors import ExitCode, Interrupted

__all__ = ["Stop", "graceful_interrupt", "raising"]

_SIGNALS = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n))
_Handler = Callable[[int, FrameType | None], None]

# A key is not pressed twice within this; `timeout` and a shell that ends send theirs twice.
_TWICE_SECONDS = 0.3
# For the step in hand; then it is broken off, or the process ends where it does not listen.
_STEP_SECONDS = 2.0
_DEAF_SECONDS = 4.0

_IMPORT = ("importlib._bootstrap", "_frozen_importlib")
# What writes a result; the module's other functions run the measurement.
_WRITING = ("end", "end_recorded", "finish")
# What is not broken off: half of a module or of a line would be left.
_HALF = (*_IMPORT, "kvprof.records.journal")


class Stop:
    """Whether the user asked for the work to end; see `graceful_interrupt`."""

    def __init__(self) -> None:
        self.requested = False
        self._heard = threading.Event()

    def __call__(self) -> bool:
        """Return True once the end was asked for; who asks here ends by itself."""
        if self.requested:
            self.heard()
        return self.requested

    def heard(self) -> None:
        """Break nothing off any more."""
        self._heard.set()
        if self.requested:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def watch(self, signals: int) -> None:
        """End the process where a signal, which this pipe tells of, is not heard within seconds."""
        while told := os.read(signals, 1):
            if told[0] in _SIGNALS and not self._heard.wait(_DEAF_SECONDS):
                _leave()


@contextmanager
def graceful_interrupt() -> Iterator[Stop]:
    """Turn the first signal into a request to stop; the second one ends the process at once.

    A step that has not ended within seconds is left by `Interrupted`. Outside the main thread
    signals cannot be caught, and they stay what they were.
    """
    stop = Stop()
    asked_at = 0.0

    def request(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked_at
        if stop.requested:
            if time.monotonic() - asked_at > _TWICE_SECONDS:
                _leave()
            return
        stop.requested, asked_at = True, time.monotonic()
        _say("Interrupted; finishing the current step (Ctrl-C again to abort)")
        signal.setitimer(signal.ITIMER_REAL, _STEP_SECONDS, 0.1)

    def overdue(_number: int, frame: FrameType | None) -> None:
        if _is_within(frame, _HALF):
            return  # this comes again
        stop.heard()
        if not _is_within(frame, ("kvprof.commands.output",), _WRITING):
            raise Interrupted("interrupted")

    with _handled({**dict.fromkeys(_SIGNALS, request), signal.SIGALRM: overdue}), _watched(stop):
        try:
            yield stop
        finally:
            stop.heard()


@contextmanager
def _watched(stop: Stop) -> Iterator[None]:
    """Let a thread see signals while the main one is deaf to them: in a call that is no Python."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    watcher = threading.Thread(target=stop.watch, args=(reading,), daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        watcher.join()
        os.close(reading)


@contextmanager
def raising() -> Iterator[None]:
    """Let each of the signals raise `Interrupted` in the body, which can clean up.

    In the middle of an import it ends the process at once: there it would be swallowed at times.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if _is_within(frame, _IMPORT):
            _leave()
        raise Interrupted("interrupted")

    with _handled(dict.fromkeys(_SIGNALS, end)):
        yield


def _is_within(
    frame: FrameType | None, modules: tuple[str, ...], functions: tuple[str, ...] = ()
) -> bool:
    while frame is not None:
        inside = frame.f_globals.get("__name__") in modules
        if inside and (not functions or frame.f_code.co_name in functions):
            return True
        frame = frame.f_back
    return False


def _leave() -> None:
    _say("interrupted")
    os._exit(ExitCode.INTERRUPTED)


def _say(words: str) -> None:
    with contextlib.suppress(OSError):  # not by the stream, which may be in the middle of a write
        os.write(2, f"kvprof: {words}\n".encode())


@contextmanager
def _handled(handlers: dict[int, _Handler]) -> Iterator[None]:
    """Give signals their handlers while the body runs, but for those that nohup ignores."""
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            if signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
