"""Tells how few dimensions a model's KV cache needs, what that costs, and whether it is faster.

>>> import kvprof
>>> plan = kvprof.plan(model, method="kq", rate=0.5)
>>> with kvprof.compressed(model, plan):
...     model.generate(...)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvprof.version import __version__

if TYPE_CHECKING:
    from kvprof.calibration.api import plan
    from kvprof.runtime.compressed import compressed

__all__ = ["__version__", "compressed", "plan"]

# Loaded on first use: importing kvprof imports no torch.
_LAZY = {"plan": "kvprof.calibration.api", "compressed": "kvprof.runtime.compressed"}


def __getattr__(name: str) -> Any:
    """Return what is loaded on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    """Return the names that are there, loaded or not."""
    return sorted({*globals(), *_LAZY})
