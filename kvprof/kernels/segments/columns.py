"""A side whose columns have bits of their own: runs of adjacent columns of 8, 4, 3 or 2 bits.

One scale, a byte in e4m3, is for a token's whole row, and nothing else is kept beside the codes, so
a block takes ``128 · (Σ columns · bits / 8 + 1)`` bytes and not one more. Four tokens share a place
whatever the bits: a plane of 2 bits has them in one byte, of 4 in two, of 8 in four. 3 bits are two
planes, the lower two bits and then the highest, of which a byte has those of four tokens for two
columns, half a plane apart, in turn::

    3 bits, K, a plane of w columns
    │ 2 bits: [place, column] │ highest: [place, w/2], byte c has columns c and c + w/2 │
    0                         32w                                                       48w

So every plane is of 1, 2, 4 or 8 bits and enters a product by itself, and a code of 3 bits is one
of 2 bits plus 4 times one of 1 bit (`kvprof.kernels.segments.column_kernel`).
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from kvprof.analysis.uniform import uniform_step
from kvprof.errors import UsageError
from kvprof.kernels.planes import STEP
from kvprof.kernels.segments.side import PLACES, WIDEST_PLANE, Plane, Side

__all__ = [
    "COLUMN_BITS",
    "COLUMN_SLOTS",
    "ColumnBits",
    "ColumnSide",
    "Piece",
    "check_column_bits",
    "column_width",
    "dequantised_columns",
    "from_number",
    "quantise_columns",
    "to_number",
]

#: Runs of adjacent columns and the bits of each, from the first column on.
ColumnBits = tuple[tuple[int, int], ...]

#: What a column can have, in the order of runs.
COLUMN_BITS = (8, 4, 3, 2)
#: Tokens of a place.
COLUMN_SLOTS = 4
_DIGITS = 12
_TOP_BITS = torch.finfo(torch.float8_e4m3fn)


def check_column_bits(runs: ColumnBits, width: int) -> None:
    """Refuse runs that the kernels do not have.

    Raises
    ------
    UsageError
        Unless bits fall from run to run and widths are multiples of 16 that make up `width`.
    """
    bits = [own for _, own in runs]
    known = set(bits) <= set(COLUMN_BITS) and bits == sorted(set(bits), reverse=True)
    if not known or column_width(runs) != width or any(own % STEP or own < 1 for own, _ in runs):
        raise UsageError(
            f"runs of columns and bits {runs} cannot be stored in {width} columns: bits fall from "
            f"run to run, from {', '.join(map(str, COLUMN_BITS))}, and widths are multiples of "
            f"{STEP}"
        )


def column_width(runs: ColumnBits) -> int:
    """Return how many columns runs have together."""
    return sum(width for width, _ in runs)


def to_number(runs: ColumnBits) -> int:
    """Return runs as a whole number, which is what an operator takes."""
    found = {bits: width for width, bits in runs}
    return sum(found.get(bits, 0) << _DIGITS * place for place, bits in enumerate(COLUMN_BITS))


def from_number(number: int) -> ColumnBits:
    """Undo `to_number`."""
    widths = [number >> _DIGITS * place & (1 << _DIGITS) - 1 for place in range(len(COLUMN_BITS))]
    return tuple((width, bits) for width, bits in zip(widths, COLUMN_BITS, strict=True) if width)


@lru_cache(maxsize=64)
def _by_column(runs: ColumnBits, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return every column's step, float32, and half the numbers that its code can be."""
    with torch.inference_mode(False):
        widths = torch.tensor([width for width, _ in runs])
        steps = torch.tensor([uniform_step(bits) for _, bits in runs])
        halves = torch.tensor([2.0 ** (bits - 1) for _, bits in runs])
        spread = steps.repeat_interleave(widths), halves.repeat_interleave(widths)
        return spread[0].to(device), spread[1].to(device)


def quantise_columns(rows: Tensor, runs: ColumnBits) -> tuple[Tensor, Tensor]:
    """Return the codes of rows ``[..., width]``, uint8, and their scales ``[..., 1]`` as bytes.

    Parameters
    ----------
    rows : Tensor
    runs : ColumnBits
    """
    values = rows.float()
    size = values.square().sum(-1, keepdim=True) / torch.full_like(values[..., :1], rows.shape[-1])
    scale = size.sqrt().clamp(_TOP_BITS.tiny, _TOP_BITS.max).to(torch.float8_e4m3fn)
    steps, halves = _by_column(runs, rows.device)
    level = (values / (scale.float() * steps)).floor()
    codes = torch.minimum(torch.maximum(level, -halves), halves - 1) + halves
    return codes.to(torch.uint8), scale.view(torch.uint8)


def dequantised_columns(codes: Tensor, scale: Tensor, runs: ColumnBits) -> Tensor:
    """Return the float32 values of codes ``[..., width]`` with scales ``[..., 1]`` as bytes."""
    steps, halves = _by_column(runs, codes.device)
    return scale.view(torch.float8_e4m3fn).float() * ((codes.float() - (halves - 0.5)) * steps)


@dataclass(frozen=True)
class Piece:
    """Bits of a column's code that lie in one byte with those of other tokens.

    Attributes
    ----------
    column : int
    at : int
        Byte of the side's block that has them for place 0, of the first part.
    part, place : int
        Bytes from part to part, and from place to place.
    bits : int
    below : int
        Bits of the code below them.
    shift : int
        Bits of the byte below those of its first token.
    apart : int
        Bits of the byte from token to token.
    """

    column: int
    at: int
    part: int
    place: int
    bits: int
    below: int
    shift: int
    apart: int


@dataclass(frozen=True)
class ColumnSide(Side):
    """K or V of a head whose columns have bits of their own.

    Attributes
    ----------
    runs : ColumnBits
    """

    runs: ColumnBits = ()

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """Planes of 64 (of V 32), 32 or 16 columns, none in two runs; `group` is the run."""
        # Sums of more rows of V would have another layout in registers than the weights.
        widest = 32 if self.values else WIDEST_PLANE
        found, begin = [], 0
        for number, (left, _) in enumerate(self.runs):
            while left:
                width = next(w for w in (widest, 32, 16) if w <= left)
                found.append(Plane(begin, width, number))
                begin, left = begin + width, left - width
        return tuple(found)

    def bits_of(self, plane: Plane) -> int:
        """Return the bits of a plane's codes."""
        return self.runs[plane.group][1]

    @property
    def groups(self) -> int:
        """Scales of a token."""
        return 1

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes."""
        return sum(PLACES * COLUMN_SLOTS * width * bits // 8 for width, bits in self.runs)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scales, place by place."""
        return PLACES * COLUMN_SLOTS

    def plane_at(self, plane: Plane) -> int:
        """Return the byte of a block at which a plane begins."""
        before = (own for own in self.planes if own.start < plane.start)
        return sum(PLACES * COLUMN_SLOTS * own.width * self.bits_of(own) // 8 for own in before)

    def top_at(self, plane: Plane) -> int:
        """Return the byte of a block at which the highest bits of a plane of 3 bits begin."""
        return self.plane_at(plane) + PLACES * plane.width

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What a token has in bytes, column by column; of 3 bits the highest come last."""
        found, tops = [], []
        for plane in self.planes:
            bits, at = self.bits_of(plane), self.plane_at(plane)
            stored = 2 if bits == 3 else bits
            half = plane.width // 2
            for number in range(plane.width):
                column = plane.start + number
                own = self._stride(number, plane.width)
                part = PLACES * plane.width
                found.append(Piece(column, at + own[0], part, own[1], stored, 0, 0, stored))
                if bits == 3:
                    own = self._stride(number % half, half)
                    top = self.top_at(plane) + own[0]
                    tops.append(Piece(column, top, 0, own[1], 1, 2, number // half, 2))
        return (*found, *tops)

    def _stride(self, column: int, width: int) -> tuple[int, int]:
        """Return where a column begins in a plane, and how far it is from place to place."""
        if self.values:
            return column * PLACES, 1
        return column, width

    def _views(self, blocks: Tensor) -> list[tuple[Tensor, slice, int, int, int, int]]:
        """Return every plane of bits as a view ``[batch, blocks, part, place, column]``.

        With it the columns that it has, and of them what `Piece` has from its bits on.
        """
        found = []
        for plane in self.planes:
            bits, half = self.bits_of(plane), plane.width // 2
            stored = 2 if bits == 3 else bits
            columns = slice(plane.start, plane.start + plane.width)
            view = self._view(blocks, self.plane_at(plane), stored // 2, plane.width)
            found.append((view, columns, stored, 0, 0, stored))
            if bits == 3:
                view = self._view(blocks, self.top_at(plane), 1, half)
                for number in (0, 1):
                    begin = plane.start + number * half
                    found.append((view, slice(begin, begin + half), 1, 2, number, 2))
        return found

    def _view(self, blocks: Tensor, at: int, parts: int, width: int) -> Tensor:
        own = blocks[..., at : at + parts * PLACES * width]
        if self.values:
            return torch.unflatten(own, -1, (parts, width, PLACES)).transpose(-1, -2)
        return torch.unflatten(own, -1, (parts, PLACES, width))

    def row_scales(self, blocks: Tensor) -> Tensor:
        """Return the scales as a view ``[batch, blocks, place, slot]`` of bytes."""
        own = blocks[..., self.code_bytes : self.code_bytes + self.scale_bytes]
        return torch.unflatten(own, -1, (PLACES, COLUMN_SLOTS))

    def store(self, blocks: Tensor, states: Tensor) -> None:
        """Write ``[batch, tokens, width]``, whole blocks, into ``[batch, blocks, nbytes]``."""
        codes, scale = quantise_columns(states, self.runs)
        self.row_scales(blocks).copy_(scale[..., 0].unflatten(1, (-1, PLACES, COLUMN_SLOTS)))
        # [batch, blocks, slot, place, column]
        blocked = codes.unflatten(1, (-1, PLACES, COLUMN_SLOTS)).transpose(2, 3)
        blocks[..., : self.code_bytes] = 0
        for view, columns, bits, below, shift, apart in self._views(blocks):
            parts = blocked[..., columns].unflatten(2, (-1, 8 // apart)).unbind(3)
            for number, part in enumerate(parts):
                own = (part >> below & (1 << bits) - 1) << shift + apart * number
                view |= own

    def raw(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return what is stored as numbers, its tokens by block, then slot, then place.

        Parameters
        ----------
        blocks : Tensor
            ``[batch, blocks, nbytes]``.

        Returns
        -------
        codes : Tensor
            ``[batch, tokens, width]`` float32, steps included.
        scale : Tensor
            ``[batch, 1, tokens]`` float32.
        middle : None
        """
        shape = (*blocks.shape[:2], COLUMN_SLOTS, PLACES, self.width)
        codes = blocks.new_zeros(shape)
        for view, columns, bits, below, shift, apart in self._views(blocks):
            parts = [
                (view >> shift + apart * number & (1 << bits) - 1) << below
                for number in range(8 // apart)
            ]
            codes[..., columns] |= torch.stack(parts, 3).flatten(2, 3)
        steps, halves = _by_column(self.runs, blocks.device)
        found = (codes.flatten(1, 3).float() - (halves - 0.5)) * steps
        scale = self.row_scales(blocks).view(torch.float8_e4m3fn).float()
        return found, scale.transpose(-1, -2).flatten(1)[:, None], None
