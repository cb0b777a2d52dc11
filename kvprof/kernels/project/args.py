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
    "CacheSlots",
    "Case",
    "Operand",
    "ProjectArgs",
    "Rotary",
    "Unit",
    "begins_of",
    "planes_of",
]

#: The operands, as the kernel counts them.
QUERY, KEYS, VALUES = 0, 1, 2


class Case(NamedTuple):
    """A branch of the kernel."""

    operand: int
    width: int  # of a unit


class Unit(NamedTuple):
    """A block of a head's columns, 16 to 128 wide."""

    case: int
    head: int  # or the first column of a row of latents
    basis: int  # where its columns of the basis begin
    length: int  # of a row of the basis
    plane: int  # where its plane begins in a row of the cache, per token of it
    stride: int  # of a row of what it writes
    column: int  # its first one there


@dataclass(frozen=True)
class Rotary:
    """RoPE of a pass: the tables, ``[batch or 1, tokens, dim or dim/2]``, and what they turn."""

    cos: Tensor
    sin: Tensor
    dim: int  # dimensions of a head that turn, and where they begin
    offset: int
    interleaved: bool  # pairs are neighbours (2i, 2i + 1), not halves (i, i + dim/2)


@dataclass(frozen=True)
class Operand:
    """States and their heads' bases."""

    #: `[batch, tokens, heads, d]`, or `[batch, tokens, Σ width]` where there is no basis; without
    #: one a head's first columns are its latent.
    states: Tensor
    bases: Tensor | None  # `BasisSet.packed`; None where latents come as they are to be stored
    widths: tuple[int, ...]  # kept columns per KV head


@dataclass(frozen=True)
class CacheSlots:
    """Where tokens go."""

    buffer: Tensor  # the layer's cache
    key_widths: tuple[int, ...]  # of the layout
    value_widths: tuple[int, ...]
    pool: int  # rows (sequences or pages), and tokens of each
    capacity: int
    start: Tensor | None  # `[batch]` int32
    valid: Tensor | None  # `[batch]` int32
    slots: Tensor | None  # A whole number for each token of the pass, in place of the other two
    #: Of a head, each with planes of its own for `capacity` tokens; tokens go into the first.
    blocks: int = 1
    widest: int = LARGEST_WIDTH  # columns of a plane at most

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
class ProjectArgs:
    """One pass: any of queries, keys and values. RoPE turns queries and keys, never values."""

    query: Operand | None = None
    keys: Operand | None = None
    values: Operand | None = None
    rotary: Rotary | None = None
    destination: CacheSlots | None = None

    @property
    def states(self) -> Tensor:
        """The states of the first operand that there is: they tell dtype, device and rows."""
        operands = (self.query, self.keys, self.values)
        return next(operand.states for operand in operands if operand is not None)
