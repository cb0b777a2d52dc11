"""What a process that leaves at once has to remove, since nobody else would."""

from collections.abc import Callable

__all__ = ["to_remove"]

#: What removes it, by the id of its owner.
to_remove: dict[int, Callable[[], object]] = {}
