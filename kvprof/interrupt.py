"""How a process ends early: Ctrl-C, SIGTERM and SIGHUP.

All of them end alike: what was measured is kept, and the exit code is 130. This module comes before
everything else in a process and imports next to nothing.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kvprof.leftovers import to_remove

__all__ = ["Stop", "at_once", "fill_closed_streams", "graceful_interrupt", "raising"]

_INTERRUPTED = 130
# Windows has no SIGHUP.
_SIGNALS = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n))
_Handler = Callable[[int, FrameType | None], None]

# A key is not pressed twice within this; `timeout -s INT` sends its signal twice at once.
_TWICE_SECONDS = 0.3
# What a shell and a terminal that end send is there by then.
_MEANT_SECONDS = 5.0

_IMPORTING = "<frozen importlib"


class Stop:
    """Whether the user asked for the work to end; see `graceful_interrupt`."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self) -> bool:
        """Return True once Ctrl-C was pressed, or another signal asked for the end."""
        return self.requested


@contextmanager
def graceful_interrupt() -> Iterator[Stop]:
    """Turn the first Ctrl-C into a request to stop after the step in hand; the second one kills.

    SIGTERM and SIGHUP are requests too, and come twice from programs that send them; only one that
    comes seconds later is meant again, for a step that does not end. Outside the main thread
    signals cannot be caught, and they stay what they were.
    """
    stop = Stop()
    asked_at = 0.0

    def request(number: int, _frame: FrameType | None) -> None:
        nonlocal asked_at
        again = stop.requested
        now = time.monotonic()
        apart = _TWICE_SECONDS if number == signal.SIGINT else _MEANT_SECONDS
        if again and now - asked_at > apart:
            raise KeyboardInterrupt
        if again:
            return
        stop.requested, asked_at = True, now
        from kvprof import console

        what = "interrupted" if number == signal.SIGINT else signal.Signals(number).name
        console.warn(
            f"{what}: ending after the step in hand, keeping what was measured (Ctrl-C again drops "
            "it)"
        )

    with _handled(request, request):
        yield stop


@contextmanager
def raising() -> Iterator[None]:
    """Let each of the signals raise KeyboardInterrupt in the body, which can clean up.

    In the middle of an import it ends the process at once.
    """
    raised = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if _is_importing(frame):
            # There it would be swallowed at times, and half of a module would go on.
            _leave(number, frame)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif not raised:  # a second one would end the cleaning up after the first
            raised = True
            raise KeyboardInterrupt(signal.Signals(number).name)

    ignored = _in_main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    with _handled(end, None if ignored else end):
        yield


def at_once() -> None:
    """From here on, end at a signal at once: there is nothing yet, or no longer, to lose."""
    if not _in_main_thread():
        return
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _leave)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            return True
        frame = frame.f_back
    return False


def _leave(_number: int, _frame: FrameType | None) -> None:
    # No exception: in the middle of an import it could be swallowed, or told as a traceback.
    for remove in list(to_remove.values()):
        with contextlib.suppress(Exception):
            remove()
    with contextlib.suppress(OSError):
        os.write(2, b"kvprof: interrupted\n")
    os._exit(_INTERRUPTED)


@contextmanager
def _handled(end: _Handler, interrupt: _Handler | None) -> Iterator[None]:
    """Give SIGTERM and SIGHUP one handler and SIGINT another while the body runs."""
    previous = {}
    if _in_main_thread():
        for number in _SIGNALS:
            own = interrupt if number == signal.SIGINT else end
            ignored = signal.getsignal(number) == signal.SIG_IGN  # by nohup
            if own is not None and not (number != signal.SIGINT and ignored):
                previous[number] = signal.signal(number, own)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def fill_closed_streams() -> None:
    """Open the null device where a standard stream is closed.

    The next file that is opened would get its number, and with it what libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
