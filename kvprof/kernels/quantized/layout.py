"""Where quantised keys and values of a layer lie, in one or more segments of the context.

A segment is tokens that are stored alike: a `RaggedLayout`'s widths in a format per side. One
segment of 4 bits is quantised decoding; TALE is three: sinks as they are, the middle with values
cut to their first columns and few bits, recent tokens with all columns and more bits. The context
of a row is all its segments together; their order means nothing to attention.

A row of a uint8 cache is one stretch of memory: segment after segment, head after head, block after
block. A row is a sequence, or in a pool of pages a page, whose tokens are whole blocks of its one
segment; slots and tables are those of `kvprof.kernels.planes`. A block is ``32·S`` tokens of one
head with all that is known of them, so that a kernel finds everything at constant distances and
reads one stretch of memory::

    one block, head of width 96 and 64, both sides 4 bits in groups of 32 columns (S = 2)
    ├ K codes ─────────────┬ K scales ──┬ K middles ─┬ V codes ────┬ V scales ┬ V middles ┤
    │ three planes of 32   │ g0  g1  g2 │ g0  g1  g2 │ two of 32   │ g0  g1   │ g0  g1   │
    0                      3072         3456         3840          5888       6144       6400

Of rows of codes, which this is, a plane is 64, 32 or 16 columns, none in two groups of scales;
columns with bits of their own lie otherwise (`kvprof.kernels.quantized.columns`). ``S`` (slots) is
how many tokens share a byte on the side with the fewest bits: 1 at 8 bits, 2 at 4, 4 at 2. Token
``t`` of a row is slot ``t % S`` of place ``t % 32S // S`` of block ``t // 32S``; a sequence's
capacity is padded to pairs of blocks. A byte holds the same column of neighbouring tokens and never
two columns, so that unpacking moves nothing between lanes, whatever the width, and so that both
sides enter a product with what is summed over in the bytes of a word: columns for K, places for V.
With 4 bits on both sides::

    K, a plane of w columns: [place, column], w bytes a place
    │ place 0                            │ place 1                            │ … place 31 │
    │ byte c: token 0 low, token 1 high  │ byte c: token 2 low, token 3 high  │            │
    0                                    w                                    2w          32w

    V, a plane of w columns: [column, place], 32 bytes a column
    │ column 0                                                           │ column 1 …
    │ byte 0: token 0 low, 1 high │ byte 1: token 2 low, 3 high │ … 31   │
    0                             1                                      32

At 2 bits a byte holds four tokens, lowest bits first. Where the other side has fewer bits, a place
is several bytes that lie apart: ``[slots / tokens of a byte, place, column]`` (V: ``…, column,
place]``). 3 bits lie in the container of 4, e4m3 in that of 8. A side at full precision has rows,
``[token, column]`` per plane.

Scales and middles are float16, ``[group, place, slot]``, which is token by token, so that one word
has the scales of two neighbouring tokens; but the middles of V, which enter a product with the
tokens of one slot, lie ``[group, slot, place]``. A group is `columns` adjacent columns; the last of
a row may be narrower. Everything begins on a multiple of 16 bytes.

That is how rows of one number of bits lie; another operand layout says by itself how its sides do
(`kvprof.kernels.quantized.layout_registry`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvprof.errors import UsageError
from kvprof.kernels.checks import check_dtype
from kvprof.kernels.planes import STEP, RaggedLayout, in_rows
from kvprof.kernels.quantized.codes import Bits
from kvprof.kernels.quantized.layout_registry import format_of, operand_layout_of
from kvprof.kernels.quantized.operand_layout import (
    MOST_PLACES,
    PLACES,
    OperandLayout,
    Placed,
    SideKind,
    width_of,
)

__all__ = [
    "HeadConfig",
    "Segment",
    "SegmentsLayout",
    "UnitKind",
    "of_configs",
    "segment_of",
]

#: A head's (keys, values) per segment.
HeadConfig = tuple[tuple[SideKind, SideKind], ...]
#: A unit's formats of keys and values, the columns that share a scale, and both sides.
UnitKind = tuple[Bits, Bits, int | None, SideKind, SideKind]


@dataclass(frozen=True)
class Segment:
    """Tokens that are stored alike."""

    layout: RaggedLayout  # widths, group, batch and the segment's own capacity
    #: A format: 8, 4, 3 or 2 bits with a float16 scale and middle per token and group of columns;
    #: `"fp8"` for e4m3; None for full precision; another operand layout's.
    key_bits: Bits = None
    value_bits: Bits = None
    columns: int | None = 32  # that share a scale, a multiple of 16; None for a token's whole row
    #: Whether the layout is of a pool of pages: its batch the pages, its capacity a page's tokens.
    paged: bool = False
    #: Per head where a width does not say all of a layout's sides, else empty.
    key_kinds: tuple[SideKind, ...] = ()
    value_kinds: tuple[SideKind, ...] = ()

    def __post_init__(self) -> None:
        keys, values = operand_layout_of(self.key_bits), operand_layout_of(self.value_bits)
        keys.check_kinds(self.key_kinds, self.layout.key_widths)
        values.check_kinds(self.value_kinds, self.layout.value_widths)
        if keys is not values:
            raise UsageError(
                f"keys have {keys.words} and values {values.words}; both must be the same"
            )
        if self.columns is not None and (self.columns < STEP or self.columns % STEP):
            raise UsageError(
                f"{self.columns} columns cannot share a scale; use a multiple of {STEP}, or None "
                "for the whole row"
            )
        if self.paged and self.layout.capacity % (PLACES * self.slots):
            raise UsageError(
                f"pages of {self.layout.capacity} tokens cannot store {self.key_bits} and "
                f"{self.value_bits} bits; use multiples of {PLACES * self.slots} tokens"
            )

    @property
    def slots(self) -> int:
        """Tokens that share a place of a block."""
        containers = (format_of(bits).container for bits in (self.key_bits, self.value_bits))
        return max(8 // bits if bits else 1 for bits in containers)

    def kind(self, head: int) -> tuple[SideKind, SideKind]:
        """Return what a head's keys and values are like."""
        own = self.layout
        return (
            self.key_kinds[head] if self.key_kinds else own.key_widths[head],
            self.value_kinds[head] if self.value_kinds else own.value_widths[head],
        )

    @property
    def blocks(self) -> int:
        """Blocks of a sequence."""
        return self.capacity // (PLACES * self.slots)

    @property
    def capacity(self) -> int:
        """Tokens that there is room for, with the padding."""
        if self.paged:
            return self.layout.capacity
        block = MOST_PLACES * self.slots
        return -(-self.layout.capacity // block) * block


def segment_of(
    kinds: Sequence[tuple[SideKind, SideKind]],
    group: int,
    batch: int,
    capacity: int,
    key_bits: Bits = None,
    value_bits: Bits = None,
    columns: int | None = 32,
    *,
    paged: bool = False,
) -> Segment:
    """Return a segment whose heads are of these kinds; the rest as `Segment` and its layout."""
    sides = list(zip(*kinds, strict=True))
    keys, values = (tuple(map(width_of, side)) for side in sides)
    own = [() if all(isinstance(kind, int) for kind in side) else side for side in sides]
    layout = RaggedLayout(keys, values, group, batch, capacity)
    return Segment(layout, key_bits, value_bits, columns, paged, own[0], own[1])


@dataclass(frozen=True)
class SegmentsLayout:
    """One layer's segments; the same heads, group and batch in each."""

    segments: tuple[Segment, ...]
    dtype: torch.dtype = torch.bfloat16  # of the run, and of what is stored at full precision

    def __post_init__(self) -> None:
        shapes = {(s.layout.heads, s.layout.group, s.layout.batch) for s in self.segments}
        if len(shapes) != 1:
            raise UsageError(
                "the segments of a layer must have the same heads, group and batch, not "
                f"{sorted(shapes)}"
            )
        if self.paged and len(self.segments) > 1:
            raise UsageError("a page stores tokens of one segment, but this layer has several")
        check_dtype("a layer", self.dtype)

    @property
    def paged(self) -> bool:
        """Whether rows are pages."""
        return any(segment.paged for segment in self.segments)

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.segments[0].layout.heads

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.segments[0].layout.group

    @property
    def batch(self) -> int:
        """Sequences, or pages."""
        return self.segments[0].layout.batch

    @cached_property
    def widest(self) -> RaggedLayout:
        """What queries and outputs look like: per head the widest of its segments."""
        layouts = [segment.layout for segment in self.segments]
        keys = tuple(map(max, *(x.key_widths for x in layouts), (0,) * self.heads))
        values = tuple(map(max, *(x.value_widths for x in layouts), (0,) * self.heads))
        return RaggedLayout(keys, values, self.group, self.batch, 1)

    @cached_property
    def configs(self) -> tuple[HeadConfig, ...]:
        """The head configurations, each once and sorted, in whatever order a layer has them."""
        return tuple(
            sorted({tuple(own.kind(head) for own in self.segments) for head in range(self.heads)})
        )

    def unit_kind(self, segment: int, head: int) -> UnitKind:
        """Return a unit's kernel kind; segments in the same formats have the same."""
        own = self.segments[segment]
        exact = own.key_bits is None and own.value_bits is None
        return own.key_bits, own.value_bits, None if exact else own.columns, *own.kind(head)

    @cached_property
    def unit_kinds(self) -> dict[UnitKind, tuple[int, int]]:
        """The kinds of unit, each with the first unit (segment, head) of it."""
        found: dict[UnitKind, tuple[int, int]] = {}
        for segment in range(len(self.segments)):
            for head in range(self.heads):
                found.setdefault(self.unit_kind(segment, head), (segment, head))
        return found

    def sides(self, segment: int, head: int) -> tuple[OperandLayout, OperandLayout]:
        """Return K and V of a head of a segment."""
        own = self.segments[segment]
        shared = (own.columns, own.slots, self.dtype)
        keys, values = own.kind(head)

        return (
            operand_layout_of(own.key_bits).of(False, keys, own.key_bits, *shared),
            operand_layout_of(own.value_bits).of(True, values, own.value_bits, *shared),
        )

    def placed(self, segment: int, head: int, values: bool) -> Placed:
        """Return K or V of a head of a segment, and where it lies in a row."""
        keys, other = self.sides(segment, head)
        start, size = self.offsets[segment][head], self.block_bytes(segment, head)
        return Placed(other, start + keys.nbytes, size) if values else Placed(keys, start, size)

    def block_bytes(self, segment: int, head: int) -> int:
        """Return the bytes of a block of a head."""
        return sum(side.nbytes for side in self.sides(segment, head))

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """Bytes of a row's segments and heads."""
        return tuple(
            segment.blocks * self.block_bytes(number, head)
            for number, segment in enumerate(self.segments)
            for head in range(self.heads)
        )

    @cached_property
    def offsets(self) -> tuple[tuple[int, ...], ...]:
        """Byte of a row at which a head begins, per segment and head."""
        starts = [0, *accumulate(self._sizes)]
        return tuple(
            tuple(starts[number * self.heads : (number + 1) * self.heads])
            for number in range(len(self.segments))
        )

    @property
    def row(self) -> int:
        """Bytes of a row: codes, scales, middles and the padding to pairs of blocks."""
        return sum(self._sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer without gaps."""
        return self.batch * self.row

    def blocks(self, buffer: Tensor, segment: int, head: int) -> tuple[Tensor, Tensor]:
        """Return the blocks of a head's K and V, ``[batch, blocks, bytes]`` each: views."""
        start, size = self.offsets[segment][head], self.block_bytes(segment, head)
        count = self.segments[segment].blocks
        rows = in_rows(buffer, self.batch)
        whole = rows[:, start : start + count * size].unflatten(1, (count, size))
        border = self.sides(segment, head)[0].nbytes
        return whole[..., :border], whole[..., border:]

    def empty(self, device: torch.device | str = "cpu") -> Tensor:
        """Return a buffer without tokens."""
        return torch.zeros(self.nbytes, dtype=torch.uint8, device=device)

    def packed(self, states: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> Tensor:
        """Return the buffer that holds tokens from each segment's first on, quantised."""
        buffer = self.empty(states[0][0][0].device)
        for number, pair in enumerate(states):
            for head in range(self.heads):
                for blocks, side, given in zip(
                    self.blocks(buffer, number, head), self.sides(number, head), pair, strict=True
                ):
                    missing = self.segments[number].capacity - given[head].shape[1]
                    side.store(blocks, pad(given[head], (0, 0, 0, missing)))
        return buffer

    def head(self, buffer: Tensor, segment: int, head: int) -> tuple[Tensor, Tensor]:
        """Return a head's K and V, ``[batch, capacity, width]`` float32, dequantised."""
        capacity = self.segments[segment].layout.capacity
        keys, values = (
            side.load(blocks)[:, :capacity]
            for blocks, side in zip(
                self.blocks(buffer, segment, head), self.sides(segment, head), strict=True
            )
        )
        return keys, values


def of_configs(layout: SegmentsLayout, configs: Sequence[HeadConfig]) -> SegmentsLayout:
    """Return a layout with one head of every kind, by which a kernel for all of them is built."""
    groups = sorted(set(configs))
    if missing := set(layout.configs) - set(configs):
        raise UsageError(f"heads of widths {min(missing)} are not among the head groups {groups}")
    segments = [
        # Of pages the tokens say how high tiles can be.
        segment_of(
            pairs,
            layout.group,
            1,
            segment.layout.capacity if segment.paged else 1,
            segment.key_bits,
            segment.value_bits,
            segment.columns,
            paged=segment.paged,
        )
        for segment, pairs in zip(layout.segments, zip(*groups, strict=True), strict=True)
    ]
    return SegmentsLayout(tuple(segments), layout.dtype)
