"""New tokens go into a segment, at places of their own per sequence."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.levels.codes import e4m3, quantise
from kvprof.kernels.levels.layout import LevelsLayout
from kvprof.kernels.levels.side import PLACES, Side

__all__ = ["append"]


def append(
    buffer: Tensor,
    layout: LevelsLayout,
    segment: int,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    start: Tensor,
) -> None:
    """Store new tokens of a segment, quantised; other tokens keep their values.

    Nothing waits for the device. A token behind the segment's capacity is left out.

    Parameters
    ----------
    buffer : Tensor
        Written.
    layout : LevelsLayout
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
    count = layout.segments[segment].blocks
    capacity = layout.segments[segment].layout.capacity
    for head in range(layout.heads):
        size, begin = layout.block_bytes(segment, head), layout.offsets[segment][head]
        stored = buffer[begin : begin + layout.batch * count * size]
        begin = 0
        for side, given in zip(layout.sides(segment, head), (keys, values), strict=True):
            new = given[head]
            if new.shape[-1] != side.width:
                raise UsageError(
                    f"head {head} of segment {segment} is {side.width} wide, and new tokens "
                    f"{new.shape[-1]}"
                )
            tokens = torch.arange(new.shape[1], device=new.device)
            tokens = start.to(torch.int64)[:, None] + tokens
            there = (tokens >= 0) & (tokens < capacity)
            tokens = tokens.clamp(0, capacity - 1)
            rows = torch.arange(layout.batch, device=new.device)[:, None]
            block = (rows * count + tokens // (PLACES * side.slots)) * size + begin
            _store(stored, side, new, block, tokens % (PLACES * side.slots), there)
            begin += side.nbytes


def _replace(stored: Tensor, places: Tensor, there: Tensor, new: Tensor, mask: int) -> None:
    """Set the bits of `mask` at flat places to those of `new`.

    By adding differences: several tokens may share a byte, and those that are left out may share a
    place with one that is not.
    """
    old = stored.gather(0, places.flatten()).view(places.shape)
    change = torch.where(there[..., None], new - (old & mask), torch.zeros_like(new))
    stored.scatter_add_(0, places.flatten(), change.flatten())


def _store(
    stored: Tensor, side: Side, new: Tensor, block: Tensor, token: Tensor, there: Tensor
) -> None:
    """Store tokens at their places in blocks, both ``[batch, new]``; blocks in bytes."""
    if side.bits is None:
        whole = {2: torch.int16, 4: torch.int32}[side.dtype.itemsize]
        states, itemsize = new.to(side.dtype).contiguous().view(whole), side.dtype.itemsize
        for plane in side.planes:
            columns = torch.arange(plane.width, device=new.device)
            at = (block + side.plane_at(plane)) // itemsize + token * plane.width
            own = states[..., plane.start : plane.start + plane.width]
            _replace(stored.view(whole), at[..., None] + columns, there, own, -1)
        return
    if side.bits == "fp8":
        codes = e4m3(new)
    else:
        assert isinstance(side.bits, int)
        codes, scale, middle = quantise(new, side.bits, side.columns)
        groups = torch.arange(side.groups, device=new.device) * (PLACES * side.slots)
        slot_first = token % side.slots * PLACES + token // side.slots
        at = (block + side.code_bytes) // 2
        for given, order in ((scale, token), (middle, slot_first if side.values else token)):
            places = (at + order)[..., None] + groups
            _replace(stored.view(torch.int16), places, there, given.view(torch.int16), -1)
            at = at + side.scale_bytes // 2
    place, slot = token // side.slots, token % side.slots
    part, shift = slot // side.per_byte, side.container * (slot % side.per_byte)
    for plane in side.planes:
        columns = torch.arange(plane.width, device=new.device)
        if side.values:
            inside = (part[..., None] * plane.width + columns) * PLACES + place[..., None]
        else:
            inside = (part * PLACES + place)[..., None] * plane.width + columns
        at = (block + side.plane_at(plane))[..., None] + inside
        own = codes[..., plane.start : plane.start + plane.width]
        for number in range(side.per_byte):
            here = there & (shift == side.container * number)
            mask = (2**side.container - 1) << (side.container * number)
            _replace(stored, at, here, own << (side.container * number), mask)
