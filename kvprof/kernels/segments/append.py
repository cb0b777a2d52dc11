"""Single tokens of a segment: stored, quantised, at places of their own per sequence, and read."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import row_stride
from kvprof.kernels.segments.codes import encode, numbers, restored
from kvprof.kernels.segments.columns import (
    ColumnBits,
    ColumnSide,
    dequantised_columns,
    quantise_columns,
)
from kvprof.kernels.segments.layout import SegmentsLayout
from kvprof.kernels.segments.side import PLACES, Side

__all__ = [
    "Addresses",
    "Columns",
    "SideAddresses",
    "addresses_of",
    "append",
    "column_places",
    "read",
    "read_scales",
    "scale_places",
    "write",
]

# --- Where single tokens of a segment lie in a layer's buffer, value by value, for all heads at
# once.
#
# A value's address is linear in the row, the block, the part and the place of its token, with
# constants of its column (`kvprof.kernels.segments.layout` has the drawing). The constants are made
# once per layout, the addresses once per pass for all layers that are stored alike; what is left
# per layer is to quantise and to scatter, a few launches whatever the number of heads.


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of K, or of V, of all heads of a segment, one head after another.

    Attributes
    ----------
    side : Side
        The first head's; what is read from it is the same for all.
    starts : tuple of int
        Where each head's columns begin; the last entry is their number.
    first, block, part, place : Tensor
        ``[columns]`` int64: a value's address is ``first + block·n + part·p + place·q`` for block
        n of the batch, part p and place q; in values for a side at full precision, where `part` is
        0 and `place` counts tokens, else in bytes.
    fill : Tensor
        ``[groups * group]``: the columns with every group filled up by copies of its last one.
    kept : Tensor
        ``[columns]``: where each column is among those.
    group : int
        Columns that share a scale, filled up.
    scale_first, scale_block : Tensor
        ``[groups]`` int64, in float16: a scale's address is ``first + block·n`` and its token.
    to_next : Tensor
        ``[groups]`` int64: from the scales to what is kept next, and so on.
    """

    side: Side
    starts: tuple[int, ...]
    first: Tensor
    block: Tensor
    part: Tensor
    place: Tensor
    fill: Tensor
    kept: Tensor
    group: int
    scale_first: Tensor
    scale_block: Tensor
    to_next: Tensor


@dataclass(frozen=True, eq=False)
class PieceColumns:
    """The columns of K, or of V, of all heads where columns have bits of their own.

    Attributes
    ----------
    runs : tuple of ColumnBits
        Per head.
    starts : tuple of int
        As `Columns` has them.
    column, below, bits, shift, apart : Tensor
        ``[pieces]`` of `kvprof.kernels.segments.columns.Piece`, one head after another; int64, but
        for `below` and `bits`.
    first, block, part, place : Tensor
        ``[pieces]`` int64, of a byte of them, as `Columns` has them.
    scale_first, scale_block : Tensor
        ``[heads]`` int64, in bytes.
    """

    runs: tuple[ColumnBits, ...]
    starts: tuple[int, ...]
    column: Tensor
    below: Tensor
    bits: Tensor
    shift: Tensor
    apart: Tensor
    first: Tensor
    block: Tensor
    part: Tensor
    place: Tensor
    scale_first: Tensor
    scale_block: Tensor


@dataclass(frozen=True, eq=False)
class SideAddresses:
    """Where one side of some tokens lies.

    Attributes
    ----------
    columns : Columns or PieceColumns
    there : Tensor
        ``[batch, n]`` bool: False for a token that is left out.
    values : Tensor
        ``[batch, n, columns]`` int64, of codes in bytes, of full precision in values; with bits by
        column ``[batch, n, pieces]``.
    shift : Tensor
        ``[batch, n, 1]`` uint8: bits of a byte below a token's code; ``[batch, n, pieces]``.
    kept : tuple of Tensor
        ``[batch, n, groups]`` int64 each, in float16: what the format keeps; of bits by column the
        scales, ``[batch, n, heads]``, in bytes.
    """

    columns: Columns | PieceColumns
    there: Tensor
    values: Tensor
    shift: Tensor
    kept: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Addresses:
    """Where tokens of a segment lie, keys and values."""

    keys: SideAddresses
    values: SideAddresses


def column_places(
    layout: SegmentsLayout, segment: int, head: int, values: bool
) -> list[tuple[int, int, int, int]]:
    """Return ``(first, block, part, place)`` of every column of a head, as `Columns` has them."""
    side, start = _begun(layout, segment, head, values)
    size = layout.block_bytes(segment, head)
    full = side.bits is None
    unit = side.dtype.itemsize if full else 1
    found: list[tuple[int, int, int, int]] = []
    for plane in side.planes:
        begin = (start + side.plane_at(plane)) // unit
        for column in range(plane.width):
            if full:
                found.append((begin + column, size // unit, 0, plane.width))
            elif values:
                found.append((begin + column * PLACES, size, plane.width * PLACES, 1))
            else:
                found.append((begin + column, size, plane.width * PLACES, plane.width))
    return found


def scale_places(
    layout: SegmentsLayout, segment: int, head: int, values: bool
) -> list[tuple[int, int, int]]:
    """Return ``(scale_first, scale_block, to_next)`` of every scale of a head."""
    side, start = _begun(layout, segment, head, values)
    first, size = (start + side.code_bytes) // 2, layout.block_bytes(segment, head) // 2
    return [
        (first + number * PLACES * side.slots, size, side.scale_bytes // 2)
        for number in range(side.groups)
    ]


def _begun(layout: SegmentsLayout, segment: int, head: int, values: bool) -> tuple[Side, int]:
    """Return a side of a head, and at which byte of a row it begins."""
    keys, other = layout.sides(segment, head)
    start = layout.offsets[segment][head]
    return (other, start + keys.nbytes) if values else (keys, start)


# For every layer of a model and every segment: made anew, they would be copied to the device.
@lru_cache(maxsize=4096)
def _columns(layout: SegmentsLayout, segment: int, values: bool, device: torch.device) -> Columns:
    """Return a side's constants."""
    own = [layout.sides(segment, head)[values] for head in range(layout.heads)]
    shared = own[0].columns
    group = shared or max(side.width for side in own)
    starts = (0, *accumulate(side.width for side in own))
    numbers: list[tuple[int, int, int, int]] = []
    fill: list[int] = []
    kept: list[int] = []
    scales: list[tuple[int, int, int]] = []
    for head, side in enumerate(own):
        numbers += column_places(layout, segment, head, values)
        scales += scale_places(layout, segment, head, values)
        for begin in range(0, side.width, group):
            width = min(group, side.width - begin)
            kept += range(len(fill), len(fill) + width)
            last = starts[head] + begin + width - 1
            fill += [min(starts[head] + begin + column, last) for column in range(group)]

    def whole(rows: list[int]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=device)

    first, block, part, place = (whole(list(rows)) for rows in zip(*numbers, strict=True))
    found = [whole([row[i] for row in scales]) for i in range(3)]
    return Columns(
        own[0], starts, first, block, part, place, whole(fill), whole(kept), group, *found
    )


@lru_cache(maxsize=4096)
def _pieces(
    layout: SegmentsLayout, segment: int, values: bool, device: torch.device
) -> PieceColumns:
    """Return a side's constants where columns have bits of their own."""
    starts, runs, scales = [0], [], []
    rows: list[tuple[int, ...]] = []
    for head in range(layout.heads):
        side, start = _begun(layout, segment, head, values)
        assert isinstance(side, ColumnSide)
        size = layout.block_bytes(segment, head)
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
        tuple(runs),
        tuple(starts),
        column,
        below.to(torch.uint8),
        bits.to(torch.uint8),
        *others,
        *map(whole, zip(*scales, strict=True)),
    )


def addresses_of(
    layout: SegmentsLayout, segment: int, slots: Tensor, *, stride: int | None = None
) -> Addresses:
    """Return where tokens lie; nothing waits for the device.

    Parameters
    ----------
    layout : SegmentsLayout
    segment : int
    slots : Tensor
        ``[batch, n]`` integers, each row's slots in the segment; of a pool of pages any shape of
        two, ``page · C + place`` for pages of C tokens. A slot that there is not, below 0 or behind
        the capacity, is left out.
    stride : int, optional
        Bytes from one row of the cache to the next; those of a row by default.
    """
    own = layout.segments[segment]
    slots = slots.to(torch.int64)
    room = own.layout.capacity * (layout.batch if own.paged else 1)
    there = (slots >= 0) & (slots < room)
    slots = slots.clamp(0, room - 1)
    if own.paged:
        rows, slots = slots // own.layout.capacity, slots % own.layout.capacity
    else:
        rows = torch.arange(layout.batch, device=slots.device)[:, None]
    far = (layout.row if stride is None else stride) * rows
    block = slots // (PLACES * own.slots)
    token = slots % (PLACES * own.slots)
    place, slot = token // own.slots, token % own.slots
    keys, values = (
        _piece_side(_pieces(layout, segment, values, slots.device), there, far, block, place, slot)
        if runs
        else _side(
            _columns(layout, segment, values, slots.device), there, far, block, token, place, slot
        )
        for values, runs in ((False, own.key_columns), (True, own.value_columns))
    )
    return Addresses(keys, values)


def _piece_side(
    columns: PieceColumns,
    there: Tensor,
    far: Tensor,
    block: Tensor,
    place: Tensor,
    slot: Tensor,
) -> SideAddresses:
    # Tokens that a byte of a piece has, and which of them this one is.
    together = torch.div(8, columns.apart, rounding_mode="floor")
    slots, places = slot[..., None], place[..., None]
    values = (
        columns.first
        + far[..., None]
        + block[..., None] * columns.block
        + slots // together * columns.part
        + places * columns.place
    )
    scales = columns.scale_first + far[..., None] + block[..., None] * columns.scale_block
    shift = (columns.shift + columns.apart * (slots % together)).to(torch.uint8)
    return SideAddresses(columns, there, values, shift, (scales + 4 * places + slots,))


def _side(
    columns: Columns,
    there: Tensor,
    far: Tensor,
    block: Tensor,
    token: Tensor,
    place: Tensor,
    slot: Tensor,
) -> SideAddresses:
    side = columns.side
    part, step = slot // side.per_byte, place
    unit = 1
    if side.bits is None:
        step, unit = token, side.dtype.itemsize
    values = (
        columns.first
        + (far // unit)[..., None]
        + block[..., None] * columns.block
        + part[..., None] * columns.part
        + step[..., None] * columns.place
    )
    scales = columns.scale_first + (far // 2)[..., None] + block[..., None] * columns.scale_block
    slot_first = slot * PLACES + place
    kept = tuple(
        scales
        + number * columns.to_next
        + (slot_first if side.slots_first(name) else token)[..., None]
        for number, name in enumerate(side.form.kept)
    )
    shift = (side.container * (slot % side.per_byte)).to(torch.uint8)[..., None]
    return SideAddresses(columns, there, values, shift, kept)


def append(
    buffer: Tensor,
    layout: SegmentsLayout,
    segment: int,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    start: Tensor,
) -> None:
    """Store new tokens of a segment one after another; other tokens keep their values.

    Nothing waits for the device. A token behind the segment's capacity is left out.

    Parameters
    ----------
    buffer : Tensor
        Written.
    layout : SegmentsLayout
    segment : int
    keys, values : sequence of Tensor
        ``[batch, new, width]`` per head.
    start : Tensor
        ``[batch]`` integers: where each sequence's first new token goes.

    Raises
    ------
    UsageError
        When widths do not fit.
    """
    for head in range(layout.heads):
        for side, given in zip(layout.sides(segment, head), (keys, values), strict=True):
            if given[head].shape[-1] != side.width:
                raise UsageError(
                    f"head {head} of segment {segment} is {side.width} wide, and new tokens "
                    f"{given[head].shape[-1]}"
                )
    tokens = torch.arange(keys[0].shape[1], device=keys[0].device)
    places = addresses_of(layout, segment, start.to(torch.int64)[:, None] + tokens)
    write(buffer, places, torch.cat(list(keys), dim=-1), torch.cat(list(values), dim=-1))


def write(buffer: Tensor, places: Addresses, keys: Tensor, values: Tensor) -> None:
    """Store tokens at their places, quantised; other tokens keep their values.

    Parameters
    ----------
    buffer : Tensor
        Written.
    places : Addresses
        No two tokens at one place.
    keys, values : Tensor
        ``[batch, n, Σ width]``, the heads side by side.
    """
    _write(buffer, places.keys, keys)
    _write(buffer, places.values, values)


def read(buffer: Tensor, places: Addresses) -> tuple[Tensor, Tensor]:
    """Return stored tokens, ``[batch, n, Σ width]`` float32 each, dequantised.

    Of a token that is left out anything comes.

    Parameters
    ----------
    buffer : Tensor
    places : Addresses
    """
    return _read(buffer, places.keys), _read(buffer, places.values)


def read_scales(buffer: Tensor, places: Addresses) -> tuple[Tensor | None, Tensor | None]:
    """Return the scales of stored tokens, ``[batch, n, heads]`` float32 each.

    None for a side whose columns have no bits of their own.

    Parameters
    ----------
    buffer : Tensor
    places : Addresses
    """
    keys, values = (
        _taken(_flat(buffer), side.kept[0]).view(torch.float8_e4m3fn).float()
        if isinstance(side.columns, PieceColumns)
        else None
        for side in (places.keys, places.values)
    )
    return keys, values


def _replace(stored: Tensor, at: Tensor, there: Tensor, new: Tensor, mask: Tensor | int) -> None:
    """Set the bits of `mask` at flat places to those of `new`.

    By adding differences: several tokens may share a byte, and those that are left out may share a
    place with one that is not.
    """
    old = stored.gather(0, at.flatten()).view(at.shape)
    change = torch.where(there[..., None], new - (old & mask), torch.zeros_like(new))
    stored.scatter_add_(0, at.flatten(), change.flatten())


def _write(buffer: Tensor, places: SideAddresses, states: Tensor) -> None:
    columns = places.columns
    buffer = _flat(buffer)
    if isinstance(columns, PieceColumns):
        heads = torch.split(states, _widths(columns), dim=-1)
        pairs = [quantise_columns(*pair) for pair in zip(heads, columns.runs, strict=True)]
        codes, scales = (torch.cat(each, dim=-1) for each in zip(*pairs, strict=True))
        _replace(buffer, places.kept[0], places.there, scales, 255)
        mask = (1 << columns.bits) - 1
        own = (codes[..., columns.column] >> columns.below & mask) << places.shift
        _replace(buffer, places.values, places.there, own, mask << places.shift)
        return
    side = columns.side
    if side.bits is None:
        whole = {2: torch.int16, 4: torch.int32}[side.dtype.itemsize]
        own = states.to(side.dtype).contiguous().view(whole)
        _replace(buffer.view(whole), places.values, places.there, own, -1)
        return
    if not side.form.kept:
        (codes,) = encode(states, side.bits, None)
    else:
        codes, *kept = encode(states[..., columns.fill], side.bits, columns.group)
        codes = codes[..., columns.kept]
        halves = buffer.view(torch.int16)
        for at, given in zip(places.kept, kept, strict=True):
            _replace(halves, at, places.there, given.contiguous().view(torch.int16), -1)
    mask = torch.full_like(places.shift, 2**side.container - 1) << places.shift
    _replace(buffer, places.values, places.there, codes << places.shift, mask)


def _read(buffer: Tensor, places: SideAddresses) -> Tensor:
    columns = places.columns
    buffer = _flat(buffer)
    if isinstance(columns, PieceColumns):
        mask = (1 << columns.bits) - 1
        own = (_taken(buffer, places.values) >> places.shift & mask) << columns.below
        whole = own.new_zeros(*own.shape[:-1], columns.starts[-1])
        whole.index_add_(-1, columns.column, own)
        heads = torch.split(whole, _widths(columns), dim=-1)
        scales = _taken(buffer, places.kept[0]).split(1, dim=-1)
        found = [dequantised_columns(*own) for own in zip(heads, scales, columns.runs, strict=True)]
        return torch.cat(found, dim=-1)
    side = columns.side
    if side.bits is None:
        return _taken(buffer.view(side.dtype), places.values).float()
    codes = _taken(buffer, places.values) >> places.shift & (2**side.container - 1)
    halves = buffer.view(torch.float16)
    kept = (_by_column(_taken(halves, at).float(), columns) for at in places.kept)
    named = dict(zip(side.form.kept, kept, strict=True))
    return restored(numbers(codes, side.bits), named.get("scale"), named.get("middle"))


def _widths(columns: PieceColumns) -> list[int]:
    return [stop - start for start, stop in pairwise(columns.starts)]


def _flat(buffer: Tensor) -> Tensor:
    """Return a cache, gaps between its rows included, as one stretch of bytes: a view."""
    if buffer.dim() == 1:
        return buffer
    rows, size = buffer.shape
    return buffer.as_strided(((rows - 1) * row_stride(buffer, rows) + size,), (1,))


def _taken(stored: Tensor, at: Tensor) -> Tensor:
    return stored.gather(0, at.flatten()).view(at.shape)


def _by_column(scales: Tensor, columns: Columns) -> Tensor:
    """Give every column its group's: ``[..., groups]`` to ``[..., columns]``."""
    return scales[..., columns.kept // columns.group]
