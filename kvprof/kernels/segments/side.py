"""One side, K or V, of one head of a segment: what a block holds of it and in which order."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvprof.kernels.segments.codes import (
    Bits,
    NumberFormat,
    encode,
    format_of,
    from_bytes,
    in_bytes,
    numbers,
    restored,
    spread,
)

__all__ = ["MOST_PLACES", "PLACES", "WIDEST_PLANE", "Plane", "Side"]

#: Places of a block: bytes of codes that lie side by side for one column of V.
PLACES = 32
#: Places that a kernel reads at once at most; the capacity is padded to so many.
MOST_PLACES = 64
WIDEST_PLANE = 64


@dataclass(frozen=True)
class Plane:
    """Columns ``start … start + width - 1`` of a side; they share the scales of `group`."""

    start: int
    width: int
    group: int


@dataclass(frozen=True)
class Side:
    """K or V of a head; `kvprof.kernels.segments.layout` has the drawing.

    Attributes
    ----------
    values : bool
        Whether it is V.
    width : int
    bits : int, "fp8" or None
    columns : int or None
    slots : int
        Tokens of a place.
    dtype : torch.dtype
        Of full precision.
    """

    values: bool
    width: int
    bits: Bits
    columns: int | None
    slots: int
    dtype: torch.dtype

    @property
    def form(self) -> NumberFormat:
        """How its numbers are stored."""
        return format_of(self.bits)

    @property
    def container(self) -> int:
        """Bits of a stored code; 0 at full precision."""
        return self.form.container

    @property
    def per_byte(self) -> int:
        """Tokens in a byte."""
        return 8 // self.container if self.container else 1

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

    @property
    def kept_bytes(self) -> int:
        """Bytes of all that a block has beside its codes."""
        return len(self.form.kept) * self.scale_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.code_bytes + self.kept_bytes

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

    def kept_at(self, name: str) -> int:
        """Return the byte of a block's side at which something kept begins; 0 where it is not."""
        if name not in self.form.kept:
            return 0
        return self.code_bytes + self.form.kept.index(name) * self.scale_bytes

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
        """Return what is stored as numbers, its tokens by block, then slot, then place.

        Parameters
        ----------
        blocks : Tensor
            ``[batch, blocks, nbytes]``.

        Returns
        -------
        codes : Tensor
            ``[batch, tokens, width]`` float32, counted from the middle of the container.
        scale, middle : Tensor or None
            ``[batch, groups, tokens]`` float32; None for what the format does not keep.
        """
        if self.bits is None:
            parts = [self.rows(blocks, plane) for plane in self.planes]
            rows = torch.unflatten(torch.cat(parts, dim=-1), 2, (PLACES, self.slots))
            return rows.transpose(2, 3).flatten(1, 3).float(), None, None
        joined = torch.cat([self.codes(blocks, plane) for plane in self.planes], dim=-1)
        codes = from_bytes(joined, self.container, self.per_byte).flatten(1, 3)
        kept = (x.permute(0, 2, 1, 4, 3).flatten(2).float() for x in self.kept(blocks))
        named = dict(zip(self.form.kept, kept, strict=True))
        return numbers(codes, self.bits), named.get("scale"), named.get("middle")

    def load(self, blocks: Tensor) -> Tensor:
        """Return ``[batch, tokens, width]`` float32 from ``[batch, blocks, nbytes]``."""
        codes, *kept = self.raw(blocks)
        wide = (None if x is None else spread(x.mT, self.columns, self.width) for x in kept)
        ordered = torch.unflatten(restored(codes, *wide), 1, (-1, self.slots, PLACES)).transpose(
            2, 3
        )
        return ordered.flatten(1, 3)
