"""A side whose columns have the same bits: rows of codes in planes, or rows at full precision.

`kvprof.kernels.quantized.layout` has the drawing, `kvprof.kernels.quantized.codes` the arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from kvprof.kernels.quantized.codes import (
    ROW_FORMATS,
    Bits,
    encode,
    from_bytes,
    in_bytes,
    numbers,
    restored,
)
from kvprof.kernels.quantized.operand_layout import (
    PLACES,
    WIDEST_PLANE,
    OperandLayout,
    Placed,
    Plane,
    SideAddresses,
    SideKind,
    StoredColumns,
    Tokens,
    replace_bits,
    taken,
    width_of,
)
from kvprof.kernels.quantized.tables import MovedColumn, PlaneColumns, Stretch

__all__ = ["RowsLayout"]


@dataclass(frozen=True)
class RowsLayout(OperandLayout):
    """K or V of a head whose columns have the same bits, or none are quantised."""

    forms = ROW_FORMATS
    words: ClassVar[str] = "the same bits in all columns"

    @classmethod
    def of(
        cls,
        values: bool,
        kind: SideKind,
        bits: Bits,
        columns: int | None,
        slots: int,
        dtype: torch.dtype,
    ) -> "RowsLayout":
        """Return the side of a head; its kind is a width."""
        return cls(values, width_of(kind), bits, columns, slots, dtype)

    @property
    def groups(self) -> int:
        """Scales of a token."""
        return -(-self.width // (self.columns or self.width)) if self.form.kept else 0

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """Planes of 64, 32 or 16 columns, none of which lies in two groups."""
        found = []
        group_width = self.columns if self.groups and self.columns else self.width
        for group, begin in enumerate(range(0, self.width, group_width)):
            at, left = begin, min(group_width, self.width - begin)
            while left:
                width = next(w for w in (WIDEST_PLANE, 32, 16) if w <= left)
                found.append(Plane(at, width, group))
                at, left = at + width, left - width
        return tuple(found)

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes, or of its values at full precision."""
        stored = self.container or 8 * self.dtype.itemsize
        return PLACES * self.slots * self.width * stored // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scales, and again of whatever else a group keeps."""
        return 2 * self.groups * PLACES * self.slots

    def plane_at(self, plane: Plane) -> int:
        """Return the byte of a block at which a plane begins."""
        return self.code_bytes * plane.start // self.width

    def codes(self, blocks: Tensor, plane: Plane) -> Tensor:
        """Return a plane's bytes as a view ``[batch, blocks, part, place, column]``."""
        start = self.plane_at(plane)
        own = blocks[..., start : start + self.code_bytes * plane.width // self.width]
        parts = self.slots // self.per_byte
        if self.values:
            return torch.unflatten(own, -1, (parts, plane.width, PLACES)).transpose(-1, -2)
        return torch.unflatten(own, -1, (parts, PLACES, plane.width))

    def rows(self, blocks: Tensor, plane: Plane) -> Tensor:
        """Return a plane at full precision as a view ``[batch, blocks, token, column]``."""
        start = self.plane_at(plane)
        own = blocks[..., start : start + self.code_bytes * plane.width // self.width]
        return torch.unflatten(own.view(self.dtype), -1, (PLACES * self.slots, plane.width))

    def kept(self, blocks: Tensor) -> list[Tensor]:
        """Return what a format keeps as views ``[batch, blocks, group, place, slot]``."""
        found = []
        for name in self.form.kept:
            begin = self.kept_at(name)
            own = blocks[..., begin : begin + self.scale_bytes].view(torch.float16)
            if self.slots_first(name):
                own = torch.unflatten(own, -1, (self.groups, self.slots, PLACES))
                found.append(own.transpose(-1, -2))
            else:
                found.append(torch.unflatten(own, -1, (self.groups, PLACES, self.slots)))
        return found

    def slots_first(self, name: str) -> bool:
        """Whether something kept lies slot by slot, as what enters products with tokens does."""
        return self.values and name == "middle"

    def store(self, blocks: Tensor, states: Tensor) -> None:
        """Write ``[batch, tokens, width]``, whole blocks, into ``[batch, blocks, nbytes]``."""
        if self.bits is None:
            blocked = torch.unflatten(states, 1, (-1, PLACES * self.slots))
            for plane in self.planes:
                columns = slice(plane.start, plane.start + plane.width)
                self.rows(blocks, plane).copy_(blocked[..., columns])
            return
        codes, *kept = encode(states, self.bits, self.columns)
        for stored, given in zip(self.kept(blocks), kept, strict=True):
            stored.copy_(torch.unflatten(given, 1, (-1, PLACES, self.slots)).movedim(-1, 2))
        # [batch, blocks, slot, place, column]
        blocked = torch.unflatten(codes, 1, (-1, PLACES, self.slots)).transpose(2, 3)
        joined = in_bytes(blocked, self.container, self.per_byte)
        for plane in self.planes:
            columns = slice(plane.start, plane.start + plane.width)
            self.codes(blocks, plane).copy_(joined[..., columns])

    def raw(self, blocks: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `OperandLayout.raw`; codes are counted from the middle of their container."""
        if self.bits is None:
            parts = [self.rows(blocks, plane) for plane in self.planes]
            rows = torch.unflatten(torch.cat(parts, dim=-1), 2, (PLACES, self.slots))
            return rows.transpose(2, 3).flatten(1, 3).float(), None, None
        joined = torch.cat([self.codes(blocks, plane) for plane in self.planes], dim=-1)
        codes = from_bytes(joined, self.container, self.per_byte).flatten(1, 3)
        kept = (x.permute(0, 2, 1, 4, 3).flatten(2).float() for x in self.kept(blocks))
        named = dict(zip(self.form.kept, kept, strict=True))
        return numbers(codes, self.bits), named.get("scale"), named.get("middle")

    def table(self, before: int) -> list[PlaneColumns]:
        """Return the planes; where they begin in bytes, or in values at full precision."""
        found: list[PlaneColumns] = []
        groups = [plane.group for plane in self.planes]
        unit = self.dtype.itemsize if self.bits is None else 1
        for number, plane in enumerate(self.planes):
            first = number == 0 or groups[number - 1] != plane.group
            last = number + 1 == len(groups) or groups[number + 1] != plane.group
            # Bytes enter a product in fours per lane, which takes 32 columns of K.
            depth = plane.width if self.bits is None else max(32, plane.width)
            at = (before + self.plane_at(plane)) // unit
            found.append(
                PlaneColumns(
                    plane.start, plane.width, depth, plane.group, int(first), int(last), at
                )
            )
        return found

    def kept_from(self, name: str, before: int) -> int:
        """Return where something kept begins in a block, in float16; 0 if nowhere."""
        at = self.kept_at(name)
        return (before + at) // 2 if at else 0

    def column_places(self, start: int, size: int) -> list[tuple[int, int, int, int]]:
        """Return ``(first, block, part, place)`` of every column, as `RowColumns` has them."""
        full = self.bits is None
        unit = self.dtype.itemsize if full else 1
        found: list[tuple[int, int, int, int]] = []
        for plane in self.planes:
            begin = (start + self.plane_at(plane)) // unit
            for column in range(plane.width):
                if full:
                    found.append((begin + column, size // unit, 0, plane.width))
                elif self.values:
                    found.append((begin + column * PLACES, size, plane.width * PLACES, 1))
                else:
                    found.append((begin + column, size, plane.width * PLACES, plane.width))
        return found

    def scale_places(self, start: int, size: int) -> list[tuple[int, int, int]]:
        """Return ``(scale_first, scale_block, to_next)`` of every scale."""
        first = (start + self.code_bytes) // 2
        return [
            (first + number * PLACES * self.slots, size // 2, self.scale_bytes // 2)
            for number in range(self.groups)
        ]

    def moved(
        self,
        start: int,
        size: int,
        came: Sequence[tuple[int, int, int, int]],
        lowest: int,
        free: int,
    ) -> tuple[list[Stretch], list[MovedColumn]]:
        """Return how one launch stores a token: a stretch for every scale; as `OperandLayout`."""
        scales = self.scale_places(start, size)
        step = (self.columns or self.width) if scales else free
        stretches = [
            Stretch(
                0,
                begin,
                min(step, self.width - begin),
                *(scales[begin // step] if scales else (0, 0, 0)),
            )
            for begin in range(0, self.width, step)
        ]
        goes = self.column_places(start, size)
        columns = [
            MovedColumn(*came[number], *goes[number], int(number >= lowest))
            for number in range(self.width)
        ]
        return stretches, columns

    @classmethod
    def stored(cls, heads: Sequence[Placed], device: torch.device) -> "RowColumns":
        """Return the constants by which single tokens are found, of a segment's heads."""
        own: list[RowsLayout] = []
        places: list[tuple[int, int, int, int]] = []
        scales: list[tuple[int, int, int]] = []
        for side, start, size in heads:
            assert isinstance(side, cls)
            own.append(side)
            places += side.column_places(start, size)
            scales += side.scale_places(start, size)
        group = own[0].columns or max(side.width for side in own)
        starts = (0, *accumulate(side.width for side in own))
        fill: list[int] = []
        kept: list[int] = []
        for begun, side in zip(starts, own, strict=False):
            for begin in range(0, side.width, group):
                width = min(group, side.width - begin)
                kept += range(len(fill), len(fill) + width)
                last = begun + begin + width - 1
                fill += [min(begun + begin + column, last) for column in range(group)]

        def whole(rows: list[int]) -> Tensor:
            return torch.tensor(rows, dtype=torch.int64, device=device)

        first, block, part, place = (whole(list(rows)) for rows in zip(*places, strict=True))
        found = [whole([row[i] for row in scales]) for i in range(3)]
        return RowColumns(
            starts, own[0], first, block, part, place, whole(fill), whole(kept), group, *found
        )


@dataclass(frozen=True, eq=False)
class RowColumns(StoredColumns):
    """The columns of all heads of a segment."""

    side: RowsLayout  # the first head's; what is read from it is the same for all
    #: `[columns]` int64: a value's address is `first + block·n + part·p + place·q` for block n of
    #: the batch, part p and place q; in values for a side at full precision, where `part` is 0 and
    #: `place` counts tokens, else in bytes.
    first: Tensor
    block: Tensor
    part: Tensor
    place: Tensor
    #: `[groups * group]`: the columns with every group filled up by copies of its last one.
    fill: Tensor
    kept: Tensor  # `[columns]`: where each column is among those
    group: int  # columns that share a scale, filled up
    #: `[groups]` int64, in float16: a scale's address is `first + block·n` and its token.
    scale_first: Tensor
    scale_block: Tensor
    to_next: Tensor  # `[groups]` int64: from the scales to what is kept next, and so on

    def at(self, tokens: Tokens) -> SideAddresses:
        """Return where tokens lie: codes in bytes, else in values; what is kept in float16."""
        side, slot = self.side, tokens.slot
        part, step = slot // side.per_byte, tokens.place
        unit = 1
        if side.bits is None:
            step, unit = tokens.token, side.dtype.itemsize
        block = tokens.block[..., None]
        values = (
            self.first
            + (tokens.far // unit)[..., None]
            + block * self.block
            + part[..., None] * self.part
            + step[..., None] * self.place
        )
        scales = self.scale_first + (tokens.far // 2)[..., None] + block * self.scale_block
        slot_first = slot * PLACES + tokens.place
        kept = tuple(
            scales
            + number * self.to_next
            + (slot_first if side.slots_first(name) else tokens.token)[..., None]
            for number, name in enumerate(side.form.kept)
        )
        shift = (side.container * (slot % side.per_byte)).to(torch.uint8)[..., None]
        return SideAddresses(self, tokens.there, values, shift, kept)

    def write(self, buffer: Tensor, places: SideAddresses, states: Tensor) -> None:
        """Store ``[batch, n, Σ width]``, quantised, in a flat buffer of bytes."""
        side = self.side
        if side.bits is None:
            whole = {2: torch.int16, 4: torch.int32}[side.dtype.itemsize]
            own = states.to(side.dtype).contiguous().view(whole)
            replace_bits(buffer.view(whole), places.values, places.there, own, -1)
            return
        if not side.form.kept:
            (codes,) = encode(states, side.bits, None)
        else:
            codes, *kept = encode(states[..., self.fill], side.bits, self.group)
            codes = codes[..., self.kept]
            halves = buffer.view(torch.int16)
            for at, given in zip(places.kept, kept, strict=True):
                replace_bits(halves, at, places.there, given.contiguous().view(torch.int16), -1)
        mask = torch.full_like(places.shift, 2**side.container - 1) << places.shift
        replace_bits(buffer, places.values, places.there, codes << places.shift, mask)

    def read(self, buffer: Tensor, places: SideAddresses) -> Tensor:
        """Return ``[batch, n, Σ width]`` float32 from a flat buffer of bytes."""
        side = self.side
        if side.bits is None:
            return taken(buffer.view(side.dtype), places.values).float()
        codes = taken(buffer, places.values) >> places.shift & (2**side.container - 1)
        halves = buffer.view(torch.float16)
        # Every column has its group's.
        kept = (taken(halves, at).float()[..., self.kept // self.group] for at in places.kept)
        named = dict(zip(side.form.kept, kept, strict=True))
        return restored(numbers(codes, side.bits), named.get("scale"), named.get("middle"))
