"""Where the keys and values of a layer lie when every head has widths of its own.

A width is a sum of chunks, powers of two from 256 to 16, each at most once: 112 = 64 + 32 + 16.
Every chunk of a head is a plane of its own, dense and row by row, because a row of 112 values is
no whole number of the 128-byte lines that memory is read in, and a mask over 128 columns reads what
nobody wants. One flat buffer holds a layer::

    head 0                                                          head 1 …
    ├── K, chunk 64 ──┬── K, chunk 32 ──┬─ K, chunk 16 ─┬─ V, chunk 64 ─┤
    each plane:  sequence 0: token 0 [64 values] token 1 [64 values] … token capacity-1
                 sequence 1: …

Queries are stored densely, head after head: the ``G`` query heads of KV head 0, each ``dk_0`` wide,
then those of KV head 1. Outputs likewise with ``dv``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from kvprof.errors import UsageError

__all__ = ["LARGEST_WIDTH", "STEP", "RaggedLayout", "chunks"]

STEP = 16
LARGEST_WIDTH = 256


def chunks(width: int) -> tuple[int, ...]:
    """Return the chunks of a width, largest first.

    Raises
    ------
    UsageError
        When the width is no multiple of 16 from 16 to 256.
    """
    if not STEP <= width <= LARGEST_WIDTH or width % STEP:
        raise UsageError(
            f"a head of width {width} cannot run: widths are multiples of {STEP} from {STEP} to "
            f"{LARGEST_WIDTH}"
        )
    return tuple(chunk for chunk in (256, 128, 64, 32, 16) if width & chunk)


@dataclass(frozen=True)
class RaggedLayout:
    """One layer's planes.

    Attributes
    ----------
    key_widths, value_widths : tuple of int
        Per KV head.
    group : int
        Query heads per KV head, G.
    batch, capacity : int
        Sequences, and tokens that each has room for.
    """

    key_widths: tuple[int, ...]
    value_widths: tuple[int, ...]
    group: int
    batch: int
    capacity: int

    def __post_init__(self) -> None:
        for width in {*self.key_widths, *self.value_widths}:
            chunks(width)
        if len(self.key_widths) != len(self.value_widths) or not self.key_widths:
            raise UsageError(
                f"{len(self.key_widths)} key widths and {len(self.value_widths)} value widths "
                "are no layer"
            )
        if min(self.group, self.batch, self.capacity) < 1 or self.group > STEP:
            raise UsageError(
                f"a layer of {self.group} query heads per KV head, {self.batch} sequences and "
                f"{self.capacity} tokens cannot run (1 to {STEP} query heads)"
            )

    @property
    def heads(self) -> int:
        """KV heads."""
        return len(self.key_widths)

    @property
    def elements(self) -> int:
        """Values in the buffer."""
        return self.batch * self.capacity * (sum(self.key_widths) + sum(self.value_widths))

    @cached_property
    def offsets(self) -> tuple[tuple[int, int], ...]:
        """Where each head's first plane of K and of V begins, in values."""
        pairs = zip(self.key_widths, self.value_widths, strict=True)
        widths = [width for pair in pairs for width in pair]
        starts = [0, *accumulate(self.batch * self.capacity * width for width in widths)]
        return tuple(zip(starts[0:-1:2], starts[1::2], strict=True))

    @property
    def query_offsets(self) -> tuple[int, ...]:
        """Where each KV head's queries begin in a row of queries; the last entry is its length."""
        return (0, *accumulate(self.group * width for width in self.key_widths))

    @property
    def output_offsets(self) -> tuple[int, ...]:
        """Where each KV head's outputs begin in a row of outputs; the last is its length."""
        return (0, *accumulate(self.group * width for width in self.value_widths))

    def packed(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Return the buffer that holds ``[batch, capacity, width]`` of every head."""
        planes = [
            plane.reshape(-1)
            for head in range(self.heads)
            for states, width in (
                (keys[head], self.key_widths[head]),
                (values[head], self.value_widths[head]),
            )
            for plane in torch.split(states, list(chunks(width)), dim=-1)
        ]
        return torch.cat(planes)

    def head(self, buffer: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Return a head's K and V as ``[batch, capacity, width]``, copied out of the buffer."""
        widths = (self.key_widths[head], self.value_widths[head])
        found = []
        for start, width in zip(self.offsets[head], widths, strict=True):
            planes = []
            for chunk in chunks(width):
                size = self.batch * self.capacity * chunk
                plane = buffer[start : start + size]
                planes.append(plane.view(self.batch, self.capacity, chunk))
                start += size
            found.append(torch.cat(planes, dim=-1))
        return found[0], found[1]
