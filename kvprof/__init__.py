"""Tells how few dimensions a model's KV cache needs, what that costs, and whether it is faster."""

from kvprof.version import __version__

__all__ = ["__version__"]
