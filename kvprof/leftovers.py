"""What a process that leaves at once has to remove, since nobody else would.

Apart from `kvprof.interrupt`, which knows the console: records use this and must not.
"""

from collections.abc import Callable

__all__ = ["to_remove"]

#: What removes it, by the id of its owner.
to_remove: dict[int, Callable[[], object]] = {}
