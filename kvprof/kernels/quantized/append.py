"""Single tokens of a segment: stored, quantised, at places of their own per sequence, and read."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import row_stride
from kvprof.kernels.quantized.layout import SegmentsLayout
from kvprof.kernels.quantized.operand_layout import PLACES, SideAddresses, StoredColumns, Tokens

__all__ = ["Addresses", "addresses_of", "append", "read", "read_scales", "write"]


@dataclass(frozen=True, eq=False)
class Addresses:
    """Where tokens of a segment lie, keys and values."""

    keys: SideAddresses
    values: SideAddresses


# For every layer of a model and every segment: made anew, they would be copied to the device.
@lru_cache(maxsize=4096)
def _stored(
    layout: SegmentsLayout, segment: int, values: bool, device: torch.device
) -> StoredColumns:
    """Return a side's constants."""
    heads = [layout.placed(segment, head, values) for head in range(layout.heads)]
    return type(heads[0].side).stored(heads, device)


def addresses_of(
    layout: SegmentsLayout, segment: int, slots: Tensor, *, stride: int | None = None
) -> Addresses:
    """Return where tokens lie; nothing waits for the device."""
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
    tokens = Tokens(there, far, block, token // own.slots, token % own.slots, token)
    keys, values = (
        _stored(layout, segment, values, slots.device).at(tokens) for values in (False, True)
    )
    return Addresses(keys, values)


def append(
    buffer: Tensor,
    layout: SegmentsLayout,
    segment: int,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    start: Tensor,
) -> None:
    """Store new tokens of a segment one after another; those behind its capacity are left out."""
    for head in range(layout.heads):
        for side, given in zip(layout.sides(segment, head), (keys, values), strict=True):
            if given[head].shape[-1] != side.width:
                raise UsageError(
                    f"head {head} of segment {segment} has {side.width} columns, but new tokens "
                    f"have {given[head].shape[-1]}"
                )
    tokens = torch.arange(keys[0].shape[1], device=keys[0].device)
    places = addresses_of(layout, segment, start.to(torch.int64)[:, None] + tokens)
    write(buffer, places, torch.cat(list(keys), dim=-1), torch.cat(list(values), dim=-1))


def write(buffer: Tensor, places: Addresses, keys: Tensor, values: Tensor) -> None:
    """Store tokens at their places, quantised; other tokens keep their values."""
    flat = _flat(buffer)
    places.keys.columns.write(flat, places.keys, keys)
    places.values.columns.write(flat, places.values, values)


def read(buffer: Tensor, places: Addresses) -> tuple[Tensor, Tensor]:
    """Return stored tokens, ``[batch, n, Σ width]`` float32 each, dequantised."""
    keys, values = (side.columns.read(_flat(buffer), side) for side in (places.keys, places.values))
    return keys, values


def read_scales(buffer: Tensor, places: Addresses) -> tuple[Tensor | None, Tensor | None]:
    """Return scales, ``[batch, n, heads]`` float32 each; None for a side without scales per row."""
    keys, values = (
        side.columns.scales(_flat(buffer), side) for side in (places.keys, places.values)
    )
    return keys, values


def _flat(buffer: Tensor) -> Tensor:
    """Return a cache, gaps between its rows included, as one stretch of bytes: a view."""
    if buffer.dim() == 1:
        return buffer
    rows, size = buffer.shape
    return buffer.as_strided(((rows - 1) * row_stride(buffer, rows) + size,), (1,))
