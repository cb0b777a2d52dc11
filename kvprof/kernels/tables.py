"""The tables of whole numbers that kernels read: their columns have names, each given once.

A table's columns are the fields of a `NamedTuple`, in their order; a field that is such a class
itself stands for its columns. Who fills a table on the host makes rows of that class; a kernel
reads column ``tl.constexpr(column(Head, "cost"))`` of rows that are ``len(columns(Head))`` long.
What several operations have alike is here; a table of one operation stands beside the code that
fills it. Nothing here needs Triton.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvprof.kernels.planes import MOST_CHUNKS, chunks

__all__ = [
    "Chunks",
    "Kind",
    "Output",
    "Part",
    "Table",
    "chunk_columns",
    "column",
    "columns",
    "joined_rows",
]

#: A class of rows.
Table = type[Any]


def columns(table: Table) -> tuple[str, ...]:
    """Return the names of a table's columns."""
    found: list[str] = []
    for name in table._fields:
        kind = table.__annotations__[name]
        found += columns(kind) if hasattr(kind, "_fields") else (name,)
    return tuple(found)


def column(table: Table, name: str) -> int:
    """Return the number of a column.

    Parameters
    ----------
    table : NamedTuple class
    name : str
        One of its `columns`.
    """
    return columns(table).index(name)


def joined_rows(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return rows one after another: a table that is a compile-time argument."""
    found: list[Any] = []
    for row in rows:
        for entry in row:
            found += entry if isinstance(entry, tuple) else (entry,)
    return tuple(found)


class Output(NamedTuple):
    """The first columns of every table of heads, whatever is stored of them."""

    outputs: int  # where a head's outputs begin in a row of them
    output_width: int  # of one of its query heads


class Part(NamedTuple):
    """The items of one head of one sequence; they are neighbours."""

    first: int
    items: int


class Chunks(NamedTuple):
    """The first columns of every table of kinds: chunks of K and of V, 0 where there is none.

    Attributes
    ----------
    k0, …, v3 : int
        Columns of a chunk.
    """

    k0: int
    k1: int
    k2: int
    k3: int
    v0: int
    v1: int
    v2: int
    v3: int


class Kind(NamedTuple):
    """A head configuration: its chunks, and the tokens of a tile."""

    chunks: Chunks
    height: int


def chunk_columns(key_width: int, value_width: int) -> Chunks:
    """Return the chunks of a pair of widths as kernels take them."""
    keys, values = (
        (*own, *(0,) * (MOST_CHUNKS - len(own))) for own in map(chunks, (key_width, value_width))
    )
    return Chunks(*keys, *values)
