"""Loading torch and transformers, which takes seconds."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["loading"]


@contextmanager
def loading() -> Iterator[None]:
    """Let a command load what loads torch, without a look for circles of unreachable objects.

    Python looks again and again while modules make objects, which stay: a fifth of the time that
    loading takes. What is there when the body ends is left out of every later look; what comes
    after it is found as it always is. Where transformers is loaded nothing is different: what is
    there may be what a run leaves.
    """
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
