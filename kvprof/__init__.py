"""Tells how few dimensions a model's KV cache needs, what that costs, and whether it is faster.

>>> import kvprof
>>> plan = kvprof.plan(model, method="kq", rate=0.5)
>>> with kvprof.compressed(model, plan):
...     model.generate(...)
"""

from __future__ import annotations

from kvprof.version import __version__

# Neither typing nor importlib: every process of kvprof begins here, and Ctrl-C may come at once.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from kvprof.moments.api import plan
    from kvprof.runtime.compressed import compressed

__all__ = ["__version__", "compressed", "plan"]

# Loaded on first use: importing kvprof imports no torch.
_LAZY = {"plan": "kvprof.moments.api", "compressed": "kvprof.runtime.compressed"}


def __getattr__(name: str) -> Any:
    """Return what is loaded on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    """Return the names that are there, loaded or not."""
    return sorted({*globals(), *_LAZY})
