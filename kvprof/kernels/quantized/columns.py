"""A side whose columns have bits of their own: runs of adjacent columns of 8, 4, 3 or 2 bits.

One scale, a byte in e4m3, is for a token's whole row, and nothing else is kept beside the codes, so
a block takes ``128 · (Σ columns · bits / 8 + 1)`` bytes and not one more. Four tokens share a place
whatever the bits: a plane of 2 bits has them in one byte, of 4 in two, the first and the third in
one of them, of 8 in four. 3 bits are two planes: of the lower two, and of the highest, of which a
byte has those of four tokens for two columns, half a plane apart, in turn::

    K, a columns of 3 bits and b of 2
    │ 2 bits: [place, a + b] │ highest: [place, a/2], byte c has columns c and c + a/2 │
    0                        32(a + b)                                                 48a + 32b

    V, a plane of a columns of 3 bits
    │ 2 bits: [a, place]     │ highest: [a/2, place]                                   │
    0                        32a                                                       48a

Of K the lower two lie in one plane with the columns of 2 bits behind them, for a kernel waits for
each piece of keys that it asks for by itself. Where a is no multiple of 32, its first 16 columns
have planes of their own, side by side, which a kernel takes at once.

A byte's highest bit is turned. So a code, or bits of it, is a factor of a product of whole numbers
where it lies, when nothing is done to the byte but to leave out its other bits: behind n bits it is
2^n times itself, and in the highest ones 2^n times what it is less half of what it can be
(`kvprof.kernels.quantized.column_kernel`).

A value is ``scale · step · (code - (2^bits - 1) / 2)`` with the step of least squared error for a
normal variable (`kvprof.analysis.uniform.uniform_step`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from kvprof.analysis.uniform import uniform_step
from kvprof.errors import UsageError
from kvprof.kernels.planes import STEP
from kvprof.kernels.quantized.codes import BITS_PER_COLUMN, COLUMN_BITS, COLUMN_FORMATS, Bits
from kvprof.kernels.quantized.operand_layout import (
    PLACES,
    WIDEST_PLANE,
    OperandLayout,
    Placed,
    Plane,
    Runs,
    SideAddresses,
    SideKind,
    StoredColumns,
    Tokens,
    Tuning,
    replace_bits,
    taken,
    width_of,
)
from kvprof.kernels.quantized.tables import MovedColumn, PlaneColumns, Stretch

__all__ = [
    "COLUMN_SLOTS",
    "TURNED",
    "ColumnsLayout",
    "dequantised_columns",
    "quantise_columns",
]

#: Tokens of a place.
COLUMN_SLOTS = 4
_DIGITS = 12
#: Columns of K's planes of 2 bits and of the highest of 3, and by how many fewer columns one may
#: have than a product sums over.
_WIDEST, _SPARE = 128, 32
#: Of a byte, as it is stored.
TURNED = 0x80
_TOP_BITS = torch.finfo(torch.float8_e4m3fn)


def _runs(kind: SideKind) -> Runs:
    assert not isinstance(kind, int)
    return kind


@lru_cache(maxsize=64)
def _by_column(runs: Runs, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return every column's step, float32, and half the numbers that its code can be."""
    with torch.inference_mode(False):
        widths = torch.tensor([width for width, _ in runs])
        steps = torch.tensor([uniform_step(bits) for _, bits in runs])
        halves = torch.tensor([2.0 ** (bits - 1) for _, bits in runs])
        spread = steps.repeat_interleave(widths), halves.repeat_interleave(widths)
        return spread[0].to(device), spread[1].to(device)


def quantise_columns(rows: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """Return the codes of rows ``[..., width]``, uint8, and their scales ``[..., 1]`` as bytes."""
    values = rows.float()
    size = values.square().sum(-1, keepdim=True) / torch.full_like(values[..., :1], rows.shape[-1])
    scale = size.sqrt().clamp(_TOP_BITS.tiny, _TOP_BITS.max).to(torch.float8_e4m3fn)
    steps, halves = _by_column(runs, rows.device)
    level = (values / (scale.float() * steps)).floor()
    codes = torch.minimum(torch.maximum(level, -halves), halves - 1) + halves
    return codes.to(torch.uint8), scale.view(torch.uint8)


def dequantised_columns(codes: Tensor, scale: Tensor, runs: Runs) -> Tensor:
    """Return the float32 values of codes ``[..., width]`` with scales ``[..., 1]`` as bytes."""
    steps, halves = _by_column(runs, codes.device)
    return scale.view(torch.float8_e4m3fn).float() * ((codes.float() - (halves - 0.5)) * steps)


@dataclass(frozen=True)
class BitPlane(Plane):
    """Bits of a plane's codes."""

    bits: int  # 8, 4 or 2, or 1 of the highest of 3
    below: int = 0  # bits of the codes below them

    @property
    def parts(self) -> int:
        """Bytes of a place for each column, or for two columns that share one."""
        return max(1, self.bits // 2)

    @property
    def apart(self) -> int:
        """Bits of a byte from token to token."""
        return max(2, self.bits)

    @property
    def across(self) -> int:
        """Bytes of a part from place to place, if these are K's."""
        return self.width // 2 if self.bits == 1 else self.width

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return PLACES * self.parts * self.across


def _widths(width: int, widest: int, spare: int) -> list[int]:
    """Return widths of planes: powers of two up to `widest`, or up to `spare` less; 16 at least."""
    found = []
    while width:
        own = min(widest, 1 << (width - 1).bit_length())
        if own - width > spare:
            own //= 2
        found.append(min(own, width))
        width -= found[-1]
    return found


@dataclass(frozen=True)
class Piece:
    """Bits of a column's code that lie in one byte with those of other tokens."""

    column: int
    at: int  # byte of the side's block that has them for place 0, of the first part
    part: int  # bytes from part to part, and from place to place
    place: int
    bits: int
    below: int  # bits of the code below them
    shift: int  # bits of the byte below those of its first token
    apart: int  # bits of the byte from token to token


@dataclass(frozen=True)
class ColumnsLayout(OperandLayout):
    """K or V of a head whose columns have bits of their own."""

    runs: Runs = ()  # with the bits of each

    forms = COLUMN_FORMATS
    words = BITS_PER_COLUMN
    by_width = False
    # Several, so that multiprocessors have shares of the work, and neighbours.
    compiled = (
        (((16, 8), (16, 4), (32, 3), (16, 2)), ((16, 8), (16, 4), (16, 3), (16, 2))),
        (((16, 2),), ((16, 4),)),
        (((16, 4),), ((16, 2),)),
    )

    @classmethod
    def of(
        cls,
        values: bool,
        kind: SideKind,
        bits: Bits,
        columns: int | None,
        slots: int,
        dtype: torch.dtype,
    ) -> "ColumnsLayout":
        """Return the side of a head; its kind are runs, and one scale is for all columns."""
        return cls(values, width_of(kind), bits, None, slots, dtype, _runs(kind))

    @classmethod
    def kind(cls, width: int, bits: int | None, runs: Runs) -> SideKind:
        """Return what a head is like whose columns are quantised so: those of 0 bits left out."""
        if runs:
            return tuple((columns, own) for columns, own in runs if own)
        assert bits is not None
        return ((width, bits),)

    @classmethod
    def check_kinds(cls, kinds: Sequence[SideKind], widths: Sequence[int]) -> None:
        """Refuse what a segment's heads cannot be like."""
        super().check_kinds(kinds, widths)
        for kind in kinds:
            bits = [own for _, own in _runs(kind)]
            known = set(bits) <= set(COLUMN_BITS) and bits == sorted(set(bits), reverse=True)
            if not known or any(width % STEP or width < 1 for width, _ in _runs(kind)):
                raise UsageError(
                    f"columns and bits {kind} cannot be stored: bits must decrease "
                    f"({', '.join(map(str, COLUMN_BITS))}), and widths must be multiples of {STEP}"
                )

    @classmethod
    def number(cls, kind: SideKind) -> int:
        """Return runs as a whole number, which is what an operator takes."""
        found = {bits: width for width, bits in _runs(kind)}
        return sum(found.get(bits, 0) << _DIGITS * place for place, bits in enumerate(COLUMN_BITS))

    @classmethod
    def numbered(cls, number: int) -> SideKind:
        """Undo `number`."""
        mask = (1 << _DIGITS) - 1
        widths = [number >> _DIGITS * place & mask for place in range(len(COLUMN_BITS))]
        pairs = zip(widths, COLUMN_BITS, strict=True)
        return tuple((width, bits) for width, bits in pairs if width)

    @classmethod
    def tuned(cls, kinds: int) -> Tuning | None:
        """Return what was fastest on an H200."""
        # As many programs as a scheduler has registers for, three of 168, all of them at once: with
        # one that is not it takes 1.2 times as long on an H200. With several kinds multiprocessors
        # take their own: with two 0.96 and 0.95 of the time in order, in pieces of four tiles and
        # of 32.
        several = kinds > 1
        return Tuning(12, registers=168, near=int(several), dealt=several)

    @cached_property
    def planes(self) -> tuple[BitPlane, ...]:
        """Planes of at most 64 columns, of K's of fewer than 4 bits 128, of V 32."""
        widest = 32 if self.values else WIDEST_PLANE
        found: list[BitPlane] = []
        begin = 0
        for run, bits in self.runs:
            if not self.values and bits < 4:
                break
            for width in _widths(run, widest, 0 if self.values else _SPARE):
                found.append(BitPlane(begin, width, 0, 2 if bits == 3 else bits))
                if bits == 3:
                    found.append(BitPlane(begin, width, 0, 1, 2))
                begin += width
        return (*found, *([] if self.values else self._low_planes(begin)))

    def _low_planes(self, begin: int) -> list[BitPlane]:
        """Return the planes of K's columns of 3 and of 2 bits, which begin there."""
        found: list[BitPlane] = []
        runs = {bits: width for width, bits in self.runs}
        three = runs.get(3, 0)
        low = three + runs.get(2, 0)
        if three % (2 * STEP):
            found += [BitPlane(begin, STEP, 0, 2), BitPlane(begin, STEP, 0, 1, 2)]
            begin, low, three = begin + STEP, low - STEP, three - STEP
        top = begin
        for width in _widths(low, _WIDEST, _SPARE):
            found.append(BitPlane(begin, width, 0, 2))
            begin += width
        for width in _widths(three, _WIDEST, 0):
            found.append(BitPlane(top, width, 0, 1, 2))
            top += width
        return found

    def bits_of(self, column: int) -> int:
        """Return the bits of a column's codes."""
        behind = 0
        for width, bits in self.runs:
            behind += width
            if column < behind:
                return bits
        raise IndexError(column)

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
        number = self.planes.index(plane)
        return sum(own.nbytes for own in self.planes[:number])

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What a token has in bytes, column by column; of 3 bits the highest come last."""
        found: list[Piece] = []
        tops: list[Piece] = []
        for plane in self.planes:
            at = self.plane_at(plane)
            to_column, to_place = (PLACES, 1) if self.values else (1, plane.across)
            for number in range(plane.width):
                shift, own = divmod(number, plane.across)
                piece = Piece(
                    column=plane.start + number,
                    at=at + own * to_column,
                    part=PLACES * plane.across,
                    place=to_place,
                    bits=plane.bits,
                    below=plane.below,
                    shift=shift,
                    apart=plane.apart,
                )
                (tops if plane.below else found).append(piece)
        return (*found, *tops)

    def _views(self, blocks: Tensor) -> list[tuple[Tensor, slice, int, int, int, int]]:
        """Return planes of bits as ``[batch, blocks, part, place, column]``, and their columns."""
        found = []
        for plane in self.planes:
            at = self.plane_at(plane)
            own = blocks[..., at : at + plane.nbytes]
            if self.values:
                shape = plane.parts, plane.across, PLACES
                view = torch.unflatten(own, -1, shape).transpose(-1, -2)
            else:
                view = torch.unflatten(own, -1, (plane.parts, PLACES, plane.across))
            for shift in range(plane.width // plane.across):
                begin = plane.start + shift * plane.across
                columns = slice(begin, begin + plane.across)
                found.append((view, columns, plane.bits, plane.below, shift, plane.apart))
        return found

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
            parts = blocked[..., columns].unflatten(2, (8 // apart, -1)).unbind(2)
            for number, part in enumerate(parts):
                own = (part >> below & (1 << bits) - 1) << shift + apart * number
                view |= own
        blocks[..., : self.code_bytes] ^= TURNED

    def raw(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return what is stored as numbers, its tokens by block, then slot, then place."""
        shape = (*blocks.shape[:2], COLUMN_SLOTS, PLACES, self.width)
        codes = blocks.new_zeros(shape)
        for view, columns, bits, below, shift, apart in self._views(blocks):
            parts = [
                ((view ^ TURNED) >> shift + apart * number & (1 << bits) - 1) << below
                for number in range(8 // apart)
            ]
            codes[..., columns] |= torch.cat(parts, 2)
        steps, halves = _by_column(self.runs, blocks.device)
        found = (codes.flatten(1, 3).float() - (halves - 0.5)) * steps
        scale = self.row_scales(blocks).view(torch.float8_e4m3fn).float()
        return found, scale.transpose(-1, -2).flatten(1)[:, None], None

    def _joint(self, plane: BitPlane) -> bool:
        """Return whether a kernel takes both planes of columns of 3 bits at once."""
        return self.values or plane.width == STEP

    def table(self, before: int) -> list[PlaneColumns]:
        """Return what a kernel reads of the side, plane by plane; `before` it are bytes."""
        found: list[PlaneColumns] = []
        # The highest bits lie behind the lower ones where both are taken together.
        planes = [plane for plane in self.planes if not (plane.below and self._joint(plane))]
        # Sums of codes of 8 bits, which are large, are kept by themselves.
        alone = [plane.bits == 8 for plane in planes]
        for number, plane in enumerate(planes):
            bits = self.bits_of(plane.start) if self._joint(plane) else plane.bits
            first = number == 0 or alone[number - 1] != alone[number]
            last = plane == planes[-1] or alone[number + 1] != alone[number]
            found.append(
                PlaneColumns(
                    start=plane.start,
                    width=plane.width,
                    # Over as many columns of K a product sums.
                    depth=plane.width
                    if self.values
                    else max(32, 1 << (plane.width - 1).bit_length()),
                    group=int(plane.bits < 8 and alone[0]),
                    first=int(first),
                    last=int(last),
                    at=before + self.plane_at(plane),
                    bits=bits,
                    step=uniform_step(bits) if self.values else 1.0,
                )
            )
        return found

    @cached_property
    def products(self) -> int:
        """Products: places of K, summed over columns, and columns of V, summed over places."""
        wide = sum(
            # The highest of 3 bits are as many columns of V more.
            2 * row.width if self.values and row.bits == 3 else row.depth
            for row in self.table(0)
        )
        return COLUMN_SLOTS * wide * PLACES // (16 * 32)

    @cached_property
    def loads(self) -> int:
        """Pieces of a block's codes that a program asks for one by one."""
        found = 0
        for row in self.table(0):
            parts = max(1, row.bits // 2)
            if self.values:
                found += parts + (row.bits == 3)
            else:
                # Of 16 columns what else were two lies side by side.
                found += max(1, parts // 2) if row.width == STEP else parts
        return found

    def kept_from(self, name: str, before: int) -> int:
        """Return where something kept begins in a block, in bytes; 0 if nowhere."""
        at = self.kept_at(name)
        return before + at if at else 0

    def moved(
        self,
        start: int,
        size: int,
        came: Sequence[tuple[int, int, int, int]],
        lowest: int,
        free: int,
    ) -> tuple[list[Stretch], list[MovedColumn]]:
        """Return how one launch stores a token: a single stretch; as `OperandLayout`."""
        tops = {piece.column: number for number, piece in enumerate(self.pieces) if piece.below}
        halves = {plane.start: plane.across for plane in self.planes if plane.below}
        rows = []
        for number, own in enumerate(self.pieces):
            mate = tops.get(own.column, number) - number
            if own.below:
                begin = max(first for first in halves if first <= own.column)
                half = halves[begin]
                other = own.column + (half if own.column < begin + half else -half)
                mate = tops[other] - number
            rows.append(
                MovedColumn(
                    *came[own.column],
                    start + own.at,
                    size,
                    own.part,
                    own.place,
                    int(own.column >= lowest),
                    own.bits,
                    own.below,
                    own.shift,
                    own.apart,
                    self.bits_of(own.column),
                    mate,
                )
            )
        return [Stretch(0, 0, self.width, start + self.code_bytes, size, 0, len(tops))], rows

    @classmethod
    def stored(cls, heads: Sequence[Placed], device: torch.device) -> "PieceColumns":
        """Return the constants by which single tokens are found, of a segment's heads."""
        starts, runs, scales = [0], [], []
        rows: list[tuple[int, ...]] = []
        for side, start, size in heads:
            assert isinstance(side, cls)
            rows += [
                (
                    starts[-1] + own.column,
                    own.below,
                    own.bits,
                    own.shift,
                    own.apart,
                    start + own.at,
                    size,
                    own.part,
                    own.place,
                )
                for own in side.pieces
            ]
            runs.append(side.runs)
            scales.append((start + side.code_bytes, size))
            starts.append(starts[-1] + side.width)

        def whole(rows: tuple[int, ...]) -> Tensor:
            return torch.tensor(rows, dtype=torch.int64, device=device)

        column, below, bits, *others = map(whole, zip(*rows, strict=True))
        return PieceColumns(
            tuple(starts),
            tuple(runs),
            column,
            below.to(torch.uint8),
            bits.to(torch.uint8),
            *others,
            *map(whole, zip(*scales, strict=True)),
        )


@dataclass(frozen=True, eq=False)
class PieceColumns(StoredColumns):
    """The columns of all heads of a segment, whose codes lie in pieces."""

    runs: tuple[Runs, ...]  # per head
    #: `[pieces]` of `Piece`, one head after another; int64, but for `below` and `bits`.
    column: Tensor
    below: Tensor
    bits: Tensor
    shift: Tensor
    apart: Tensor
    #: `[pieces]` int64: the address of a byte of them is `first + block·n + part·p + place·q` for
    #: block n of the batch, part p and place q.
    first: Tensor
    block: Tensor
    part: Tensor
    place: Tensor
    scale_first: Tensor  # `[heads]` int64, in bytes
    scale_block: Tensor

    def at(self, tokens: Tokens) -> SideAddresses:
        """Return where tokens lie, piece by piece; scales ``[batch, n, heads]`` in bytes."""
        # Bytes that a place's tokens are in, by turns.
        parts = torch.div(self.apart, 2, rounding_mode="floor")
        slots, places = tokens.slot[..., None], tokens.place[..., None]
        far, block = tokens.far[..., None], tokens.block[..., None]
        values = (
            self.first + far + block * self.block + slots % parts * self.part + places * self.place
        )
        scales = self.scale_first + far + block * self.scale_block
        turn = torch.div(slots, parts, rounding_mode="floor")
        shift = (self.shift + self.apart * turn).to(torch.uint8)
        return SideAddresses(self, tokens.there, values, shift, (scales + 4 * places + slots,))

    def write(self, buffer: Tensor, places: SideAddresses, states: Tensor) -> None:
        """Store ``[batch, n, Σ width]``, quantised, in a flat buffer of bytes."""
        heads = torch.split(states, self._widths, dim=-1)
        pairs = [quantise_columns(*pair) for pair in zip(heads, self.runs, strict=True)]
        codes, scales = (torch.cat(each, dim=-1) for each in zip(*pairs, strict=True))
        replace_bits(buffer, places.kept[0], places.there, scales, 255)
        mask = (1 << self.bits) - 1
        own = (codes[..., self.column] >> self.below & mask) << places.shift
        mask = mask << places.shift
        replace_bits(buffer, places.values, places.there, own ^ mask & TURNED, mask)

    def read(self, buffer: Tensor, places: SideAddresses) -> Tensor:
        """Return ``[batch, n, Σ width]`` float32 from a flat buffer of bytes."""
        mask = (1 << self.bits) - 1
        own = ((taken(buffer, places.values) ^ TURNED) >> places.shift & mask) << self.below
        whole = own.new_zeros(*own.shape[:-1], self.starts[-1])
        whole.index_add_(-1, self.column, own)
        heads = torch.split(whole, self._widths, dim=-1)
        scales = taken(buffer, places.kept[0]).split(1, dim=-1)
        found = [dequantised_columns(*own) for own in zip(heads, scales, self.runs, strict=True)]
        return torch.cat(found, dim=-1)

    def scales(self, buffer: Tensor, places: SideAddresses) -> Tensor | None:
        """Return the scales, ``[batch, n, heads]`` float32."""
        return taken(buffer, places.kept[0]).view(torch.float8_e4m3fn).float()

    @property
    def _widths(self) -> list[int]:
        return [stop - start for start, stop in pairwise(self.starts)]
