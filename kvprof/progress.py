"""How long work tells how far it is, whoever does it and wherever that is shown."""

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Protocol

__all__ = ["Counter", "Progress", "nested", "silent"]


class Counter(Protocol):
    """What a progress bar lets one do."""

    def advance(self, amount: int = 1) -> None:
        """Count `amount` more units as done."""

    def describe(self, text: str) -> None:
        """Change the words in front of the count."""


class Progress(Protocol):
    """Shows one stage of the work; `kvprof.console.track` is one."""

    def __call__(self, description: str, total: int, /) -> AbstractContextManager[Counter]:
        """Return the context in which `total` units are counted."""


class _Silent:
    def advance(self, amount: int = 1) -> None:
        pass

    def describe(self, text: str) -> None:
        pass


def silent(description: str, total: int, /) -> AbstractContextManager[Counter]:
    """Show nothing: the `Progress` of who gave none."""
    return nullcontext(_Silent())


#: Shows a stage that begins by itself within another, if that one is shown.
nested: ContextVar[Progress] = ContextVar("nested", default=silent)
