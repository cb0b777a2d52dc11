"""One side, K or V, of one head of a segment: what a layout says, and what all have alike.

An operand layout is how the numbers of a block's tokens lie. It is a class of sides
(`kvprof.kernels.quantized.layout_registry` lists them) which says its planes, bytes and tables, how
tokens are stored and read, a block at a time and one by one, and which of the kernels' functions
reads them (by the number of its formats). Nothing else asks which layout a side has, but for the
two kernels that are launched (`kvprof.kernels.quantized.kernel`), and what refuses plans.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.quantized.codes import Bits, NumberFormat, restored, spread
from kvprof.kernels.quantized.tables import MovedColumn, PlaneColumns, Stretch

__all__ = [
    "MOST_PLACES",
    "PLACES",
    "WIDEST_PLANE",
    "OperandLayout",
    "Placed",
    "Plane",
    "Runs",
    "SideAddresses",
    "SideKind",
    "StoredColumns",
    "Tokens",
    "Tuning",
    "replace_bits",
    "taken",
    "width_of",
]

#: Places of a block: bytes of codes that lie side by side for one column of V.
PLACES = 32
#: Places that a kernel reads at once at most; the capacity is padded to so many.
MOST_PLACES = 64
WIDEST_PLANE = 64

#: Runs of adjacent columns, from the first on, each with a number of its layout's own.
Runs = tuple[tuple[int, int], ...]
#: What heads of one format differ by: a width; where that does not say it all, runs.
SideKind = int | Runs


def width_of(kind: SideKind) -> int:
    """Return how many columns a side has."""
    return kind if isinstance(kind, int) else sum(width for width, _ in kind)


@dataclass(frozen=True)
class Tuning:
    """How the kernel is built and how finely its work is cut."""

    pieces: int = 16  # pieces of work per multiprocessor: as many as it runs at once
    tile: int = 4096  # bytes of K and V that a tile should hold
    stages: int = 2  # tiles on their way at once
    warps: int = 1  # of a program
    #: Bytes that a token costs beside its own: softmax does not shrink with them. Not read where
    #: sides tell their products (`kvprof.kernels.quantized.cuts.token_cost`).
    per_token: int = 26
    registers: int = 128  # most of a thread; 0 leaves it to the compiler
    #: Tiles of a piece from which on a multiprocessor takes neighbouring pieces, which pays where
    #: heads are of several kinds, each with code of its own; 0 for pieces in order, always.
    near: int = 16
    #: Whether rows of codes are multiplied as int8, if both sides are such, and not as numbers of
    #: two bytes.
    int8: bool = False
    #: Whether pieces in order are given to programs such that a multiprocessor has few kinds.
    dealt: bool = False


@dataclass(frozen=True)
class Plane:
    """Columns ``start … start + width - 1`` of a side; they share what is kept of `group`."""

    start: int
    width: int
    group: int


@dataclass(frozen=True)
class OperandLayout(ABC):
    """K or V of a head; `kvprof.kernels.quantized.layout` has the drawing."""

    values: bool  # whether it is V
    width: int
    bits: Bits  # its format, one of `forms`
    columns: int | None  # that share a scale; None for a token's whole row
    slots: int  # tokens of a place
    dtype: torch.dtype  # of full precision

    #: The formats of the layout.
    forms: ClassVar[Mapping[Bits, NumberFormat]]
    #: What its sides have, in a sentence that refuses them.
    words: ClassVar[str]
    #: Whether a width says all of a head; else heads have kinds (`Segment.key_kinds`).
    by_width: ClassVar[bool] = True
    #: Heads (keys, values) whose kernels are compiled for every architecture, beside the forms that
    #: `kvprof.kernels.quantized.variants` lists.
    compiled: ClassVar[tuple[tuple[SideKind, SideKind], ...]] = ()

    # Of a class: from what a segment says to sides.

    @classmethod
    @abstractmethod
    def of(
        cls,
        values: bool,
        kind: SideKind,
        bits: Bits,
        columns: int | None,
        slots: int,
        dtype: torch.dtype,
    ) -> "OperandLayout":
        """Return the side of a head of a kind; the rest are the attributes of these names."""

    @classmethod
    def kind(cls, width: int, bits: int | None, runs: Runs) -> SideKind:
        """Return what a head is like whose columns are quantised so."""
        return width

    @classmethod
    def check_kinds(cls, kinds: Sequence[SideKind], widths: Sequence[int]) -> None:
        """Refuse what a segment's heads cannot be like."""
        wanted = 0 if cls.by_width else len(widths)
        if len(kinds) != wanted:
            raise UsageError(
                f"heads with {cls.words} require {wanted} head shapes, not {len(kinds)}"
            )
        for kind, width in zip(kinds, widths, strict=False):
            if width_of(kind) != width:
                raise UsageError(f"{kind} does not describe the {width} columns of the head")

    @classmethod
    def number(cls, kind: SideKind) -> int:
        """Return a kind as a whole number, which is what an operator takes."""
        assert isinstance(kind, int)
        return kind

    @classmethod
    def numbered(cls, number: int) -> SideKind:
        """Undo `number`."""
        return number

    @classmethod
    def tuned(cls, kinds: int) -> Tuning | None:
        """Return what its kernel is fastest with; None where widths and formats say that."""
        return None

    # What a block holds.

    @property
    def form(self) -> NumberFormat:
        """How its numbers are stored."""
        return self.forms[self.bits]

    @property
    def container(self) -> int:
        """Bits of a stored code; 0 at full precision."""
        return self.form.container

    @property
    def per_byte(self) -> int:
        """Tokens in a byte."""
        return 8 // self.container if self.container else 1

    @property
    @abstractmethod
    def planes(self) -> tuple[Plane, ...]:
        """Planes of multiples of 16 columns, none of which lies in two groups."""

    @property
    @abstractmethod
    def groups(self) -> int:
        """Scales of a token."""

    @property
    def products(self) -> int:
        """Products of tensor cores for a block's codes, where these say what a token costs; or 0.

        Of 16 rows by 8 columns, over 32 numbers: for eight digits of queries or weights.
        """
        return 0

    @property
    def loads(self) -> int:
        """Pieces of a block's codes that a program asks for one by one, where `products` say it."""
        return 0

    @property
    @abstractmethod
    def code_bytes(self) -> int:
        """Bytes of a block's codes, or of its values at full precision."""

    @property
    @abstractmethod
    def scale_bytes(self) -> int:
        """Bytes of a block's scales, and again of whatever else a group keeps."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of all that a block has beside its codes."""
        return len(self.form.kept) * self.scale_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.code_bytes + self.kept_bytes

    @abstractmethod
    def plane_at(self, plane: Plane) -> int:
        """Return the byte of a block at which a plane begins."""

    def kept_at(self, name: str) -> int:
        """Return the byte of a block's side at which something kept begins; 0 where it is not."""
        if name not in self.form.kept:
            return 0
        return self.code_bytes + self.form.kept.index(name) * self.scale_bytes

    # Whole blocks: stored, and read as the CPU multiplies them.

    @abstractmethod
    def store(self, blocks: Tensor, states: Tensor) -> None:
        """Write ``[batch, tokens, width]``, whole blocks, into ``[batch, blocks, nbytes]``."""

    @abstractmethod
    def raw(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return what is stored as numbers, its tokens by block, then slot, then place."""

    def load(self, blocks: Tensor) -> Tensor:
        """Return ``[batch, tokens, width]`` float32 from ``[batch, blocks, nbytes]``."""
        codes, *kept = self.raw(blocks)
        wide = (None if x is None else spread(x.mT, self.columns, self.width) for x in kept)
        ordered = torch.unflatten(restored(codes, *wide), 1, (-1, self.slots, PLACES)).transpose(
            2, 3
        )
        return ordered.flatten(1, 3)

    # What the kernels look up.

    @abstractmethod
    def table(self, before: int) -> list[PlaneColumns]:
        """Return what a kernel reads of the side, plane by plane; `before` it are bytes."""

    @abstractmethod
    def kept_from(self, name: str, before: int) -> int:
        """Return where something kept begins in a block as its kernel counts; 0 if nowhere."""

    @abstractmethod
    def moved(
        self,
        start: int,
        size: int,
        came: Sequence[tuple[int, int, int, int]],
        lowest: int,
        free: int,
    ) -> tuple[list[Stretch], list[MovedColumn]]:
        """Return how one launch stores a token, but for the side and head, and from row 0 on."""

    # Single tokens, of all heads at once.

    @classmethod
    @abstractmethod
    def stored(cls, heads: Sequence["Placed"], device: torch.device) -> "StoredColumns":
        """Return the constants by which single tokens are found, of a segment's heads."""


class Placed(NamedTuple):
    """A side and where it lies."""

    side: OperandLayout
    start: int  # byte of a row at which its first block begins
    size: int  # bytes from block to block


# --- Where single tokens of a segment lie in a layer's buffer, value by value, for all heads at
# once.
#
# A value's address is linear in the row, the block and the place of its token, with constants of
# its column. The constants are made once per layout, the addresses once per pass for all layers
# that are stored alike; what is left per layer is to quantise and to scatter, a few launches
# whatever the number of heads.


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of a segment, by where they are counted to."""

    there: Tensor  # `[batch, n]` bool: False for a token that is left out
    far: Tensor  # `[batch, n]` or `[batch, 1]` int64: the byte at which the token's row begins
    block: Tensor  # `[batch, n]` int64: of the row, of the block and of the place
    place: Tensor
    slot: Tensor
    token: Tensor  # `[batch, n]` int64: its number in the block


@dataclass(frozen=True, eq=False)
class StoredColumns(ABC):
    """The columns of K, or of V, of all heads of a segment, one head after another."""

    starts: tuple[int, ...]  # where each head's columns begin; the last entry is their number

    @abstractmethod
    def at(self, tokens: Tokens) -> "SideAddresses":
        """Return where tokens lie."""

    @abstractmethod
    def write(self, buffer: Tensor, places: "SideAddresses", states: Tensor) -> None:
        """Store ``[batch, n, Σ width]``, quantised, in a flat buffer of bytes."""

    @abstractmethod
    def read(self, buffer: Tensor, places: "SideAddresses") -> Tensor:
        """Return ``[batch, n, Σ width]`` float32 from a flat buffer of bytes."""

    def scales(self, buffer: Tensor, places: "SideAddresses") -> Tensor | None:
        """Return the scales, ``[batch, n, heads]`` float32; None unless a row has one."""
        return None


@dataclass(frozen=True, eq=False)
class SideAddresses:
    """Where one side of some tokens lies."""

    columns: StoredColumns
    there: Tensor  # `[batch, n]` bool: False for a token that is left out
    #: `[batch, n, columns]` int64, of codes in bytes, of full precision in values; of a layout
    #: whose codes lie in pieces `[batch, n, pieces]`.
    values: Tensor
    shift: Tensor  # `[batch, n, 1]` uint8: bits of a byte below a token's code; or by piece
    #: `[batch, n, groups]` int64 each: what the format keeps, as its layout counts.
    kept: tuple[Tensor, ...]


def replace_bits(
    stored: Tensor, at: Tensor, there: Tensor, new: Tensor, mask: Tensor | int
) -> None:
    """Set the bits of `mask` at flat places to those of `new`.

    By adding differences: several tokens may share a byte, and those that are left out may share a
    place with one that is not.
    """
    old = taken(stored, at)
    change = torch.where(there[..., None], new - (old & mask), torch.zeros_like(new))
    stored.scatter_add_(0, at.flatten(), change.flatten())


def taken(stored: Tensor, at: Tensor) -> Tensor:
    """Return what lies at flat places, in their shape."""
    return stored.gather(0, at.flatten()).view(at.shape)
