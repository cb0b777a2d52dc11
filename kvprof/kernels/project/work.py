"""What one pass of projection is given, for the Triton launch and for the CPU path alike."""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from kvprof.kernels.planes import LARGEST_WIDTH, chunks

__all__ = [
    "KEYS",
    "QUERY",
    "VALUES",
    "Case",
    "Destination",
    "Rotary",
    "Stream",
    "Unit",
    "Work",
    "begins_of",
    "planes_of",
]

#: The streams, as the kernel counts them.
QUERY, KEYS, VALUES = 0, 1, 2


class Case(NamedTuple):
    """A branch of the kernel.

    Attributes
    ----------
    stream : int
    width : int
        Of a unit.
    """

    stream: int
    width: int


class Unit(NamedTuple):
    """A block of a head's columns, 16 to 128 wide.

    Attributes
    ----------
    case : int
    head : int
        Or the first column of a row of latents.
    basis : int
        Where its columns of the basis begin.
    length : int
        Of a row of the basis.
    plane : int
        Where its plane begins in a row of the cache, per token of it.
    stride : int
        Of a row of what it writes.
    column : int
        Its first one there.
    """

    case: int
    head: int
    basis: int
    length: int
    plane: int
    stride: int
    column: int


@dataclass(frozen=True)
class Rotary:
    """RoPE of a pass: the tables, ``[batch or 1, tokens, dim or dim/2]``, and what they turn.

    Attributes
    ----------
    cos, sin : Tensor
    dim, offset : int
        Dimensions of a head that turn, and where they begin.
    interleaved : bool
        Pairs are neighbours (2i, 2i + 1), not halves (i, i + dim/2).
    """

    cos: Tensor
    sin: Tensor
    dim: int
    offset: int
    interleaved: bool


@dataclass(frozen=True)
class Stream:
    """States and their heads' bases.

    Attributes
    ----------
    states : Tensor
        ``[batch, tokens, heads, d]``, or ``[batch, tokens, Σ width]`` where there is no basis;
        without one a head's first columns are its latent.
    bases : Tensor or None
        `BasisSet.packed`; None where latents come as they are to be stored.
    widths : tuple of int
        Kept columns per KV head.
    """

    states: Tensor
    bases: Tensor | None
    widths: tuple[int, ...]


@dataclass(frozen=True)
class Destination:
    """Where tokens go.

    Attributes
    ----------
    buffer : Tensor
        The layer's cache.
    key_widths, value_widths : tuple of int
        Of the layout.
    pool, capacity : int
        Rows (sequences or pages), and tokens of each.
    start : Tensor or None
        ``[batch]`` int32.
    valid : Tensor or None
        ``[batch]`` int32.
    slots : Tensor or None
        A whole number for each token of the pass, in place of the other two.
    blocks : int
        Of a head, each with planes of its own for `capacity` tokens; tokens go into the first.
    widest : int
        Columns of a plane at most.
    """

    buffer: Tensor
    key_widths: tuple[int, ...]
    value_widths: tuple[int, ...]
    pool: int
    capacity: int
    start: Tensor | None
    valid: Tensor | None
    slots: Tensor | None
    blocks: int = 1
    widest: int = LARGEST_WIDTH

    @property
    def begins(self) -> tuple[int, ...]:
        """From `begins_of`."""
        return begins_of(self.key_widths, self.value_widths, self.blocks)

    def planes(self, width: int) -> tuple[int, ...]:
        """Return the columns of each plane of a head's side."""
        return planes_of(width, self.widest)


def begins_of(
    key_widths: tuple[int, ...], value_widths: tuple[int, ...], blocks: int
) -> tuple[int, ...]:
    """Return where each head's first planes of K and of V begin in a row, per token of a plane."""
    steps = []
    for key, value in zip(key_widths, value_widths, strict=True):
        steps += [key, value + (blocks - 1) * (key + value)]
    return (0, *accumulate(steps))[:-1]


def planes_of(width: int, widest: int) -> tuple[int, ...]:
    """Return the chunks of a width, those above `widest` columns in planes of as many."""
    found: list[int] = []
    for chunk in chunks(width):
        found += [min(chunk, widest)] * -(-chunk // widest)
    return tuple(found)


@dataclass(frozen=True)
class Work:
    """One pass: any of queries, keys and values. RoPE turns queries and keys, never values."""

    query: Stream | None = None
    keys: Stream | None = None
    values: Stream | None = None
    rotary: Rotary | None = None
    destination: Destination | None = None

    @property
    def states(self) -> Tensor:
        """The states of the first stream that there is: they tell dtype, device and rows."""
        streams = (self.query, self.keys, self.values)
        return next(stream.states for stream in streams if stream is not None)
