"""Single tokens of a segment: stored, quantised, at places of their own per sequence, and read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.levels.codes import e4m3, quantise
from kvprof.kernels.levels.layout import LevelsLayout
from kvprof.kernels.levels.places import Columns, Places, SidePlaces, places_of

__all__ = ["append", "read", "write"]


def append(
    buffer: Tensor,
    layout: LevelsLayout,
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
    for head in range(layout.heads):
        for side, given in zip(layout.sides(segment, head), (keys, values), strict=True):
            if given[head].shape[-1] != side.width:
                raise UsageError(
                    f"head {head} of segment {segment} is {side.width} wide, and new tokens "
                    f"{given[head].shape[-1]}"
                )
    tokens = torch.arange(keys[0].shape[1], device=keys[0].device)
    places = places_of(layout, segment, start.to(torch.int64)[:, None] + tokens)
    write(buffer, places, torch.cat(list(keys), dim=-1), torch.cat(list(values), dim=-1))


def write(buffer: Tensor, places: Places, keys: Tensor, values: Tensor) -> None:
    """Store tokens at their places, quantised; other tokens keep their values.

    Parameters
    ----------
    buffer : Tensor
        Written.
    places : Places
        No two tokens at one place.
    keys, values : Tensor
        ``[batch, n, Σ width]``, the heads side by side.
    """
    _write(buffer, places.keys, keys)
    _write(buffer, places.values, values)


def read(buffer: Tensor, places: Places) -> tuple[Tensor, Tensor]:
    """Return stored tokens, ``[batch, n, Σ width]`` float32 each, dequantised.

    Of a token that is left out anything comes.

    Parameters
    ----------
    buffer : Tensor
    places : Places
    """
    return _read(buffer, places.keys), _read(buffer, places.values)


def _replace(stored: Tensor, at: Tensor, there: Tensor, new: Tensor, mask: Tensor | int) -> None:
    """Set the bits of `mask` at flat places to those of `new`.

    By adding differences: several tokens may share a byte, and those that are left out may share a
    place with one that is not.
    """
    old = stored.gather(0, at.flatten()).view(at.shape)
    change = torch.where(there[..., None], new - (old & mask), torch.zeros_like(new))
    stored.scatter_add_(0, at.flatten(), change.flatten())


def _write(buffer: Tensor, places: SidePlaces, states: Tensor) -> None:
    columns = places.columns
    side = columns.side
    if side.bits is None:
        whole = {2: torch.int16, 4: torch.int32}[side.dtype.itemsize]
        own = states.to(side.dtype).contiguous().view(whole)
        _replace(buffer.view(whole), places.values, places.there, own, -1)
        return
    if side.bits == "fp8":
        codes = e4m3(states)
    else:
        assert isinstance(side.bits, int)
        found = quantise(states[..., columns.fill], side.bits, columns.group)
        codes = found.codes[..., columns.kept]
        halves = buffer.view(torch.int16)
        for at, given in ((places.scales, found.scale), (places.middles, found.middle)):
            _replace(halves, at, places.there, given.contiguous().view(torch.int16), -1)
    mask = torch.full_like(places.shift, 2**side.container - 1) << places.shift
    _replace(buffer, places.values, places.there, codes << places.shift, mask)


def _read(buffer: Tensor, places: SidePlaces) -> Tensor:
    side = places.columns.side
    if side.bits is None:
        return _taken(buffer.view(side.dtype), places.values).float()
    codes = _taken(buffer, places.values) >> places.shift & (2**side.container - 1)
    if side.bits == "fp8":
        wide: Tensor = codes.view(torch.float8_e4m3fn).float()
        return wide
    halves = buffer.view(torch.float16)
    scale, middle = (
        _by_column(_taken(halves, at).float(), places.columns)
        for at in (places.scales, places.middles)
    )
    rows: Tensor = middle + scale * (codes.float() - 2 ** (side.container - 1))
    return rows


def _taken(stored: Tensor, at: Tensor) -> Tensor:
    return stored.gather(0, at.flatten()).view(at.shape)


def _by_column(scales: Tensor, columns: Columns) -> Tensor:
    """Give every column its group's: ``[..., groups]`` to ``[..., columns]``."""
    return scales[..., columns.kept // columns.group]
