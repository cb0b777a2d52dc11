"""Series of any length in bounded memory."""

from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Thinned"]

_Row = TypeVar("_Row")

#: Rows that a series holds at most; below it nothing is left out.
KEPT = 2048


class Thinned(Generic[_Row]):
    """A series that keeps every row up to `most`, then every second one, then every fourth.

    Adding costs the same however long the series is (amortised).

    Parameters
    ----------
    most : int
        Rows to hold, 2 or more.
    """

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._rows: list[_Row] = []
        self._last: _Row | None = None
        self.stride = 1
        self.count = 0

    def add(self, row: _Row) -> None:
        """Append a row."""
        if self.count % self.stride == 0:
            self._rows.append(row)
            if len(self._rows) >= self._most:
                self._rows = self._rows[::2]
                self.stride *= 2
        self.count += 1
        self._last = row

    @property
    def last(self) -> _Row | None:
        """The newest row, kept or not."""
        return self._last

    def __iter__(self) -> Iterator[_Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
