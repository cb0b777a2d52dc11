"""kvprof: can a model's KV cache be stored in fewer dimensions, at what cost, and is it faster?"""

from kvprof.version import __version__

__all__ = ["__version__"]
