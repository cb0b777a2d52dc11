"""Loading torch and transformers, which takes seconds."""

import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvprof.errors import LackingError

__all__ = ["loading"]

_BYTES = 5 << 28  # of addresses, for torch and transformers


def _check_addresses() -> None:
    """Refuse a limit (``ulimit -v``) within which a library would wait for memory without end."""
    room = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= room < _BYTES:
        raise LackingError(f"out of memory: ulimit -v {room >> 10} is less than {_BYTES >> 10}")


@contextmanager
def loading() -> Iterator[None]:
    """Let a command load what loads torch, without a look for circles of unreachable objects.

    Python looks again and again while modules make objects, which stay: a fifth of the time that
    loading takes. What is there when the body ends is left out of every later look; what comes
    after it is found as it always is. Where transformers is loaded nothing is different: what is
    there may be what a run leaves.
    """
    _check_addresses()
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
