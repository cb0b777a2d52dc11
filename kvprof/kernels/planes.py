"""Where the keys and values of a layer lie when every head has widths of its own.

A width is a sum of chunks, powers of two from 512 to 16, each at most once and at most four of
them: 112 = 64 + 32 + 16. Every chunk of a head is a plane of its own, dense and row by row, because
a row of 112 values is no whole number of the 128-byte lines that memory is read in, and a mask over
128 columns reads what nobody wants. A row of the cache is one
stretch of memory, head after head, here with head 0 of key width 112 and value width 64 and bf16::

    byte 0 of a row
    │ head 0                                                                      │ head 1 …
    ├── K, chunk 64 ──────┬── K, chunk 32 ────┬── K, chunk 16 ────┬── V, chunk 64 ┤
    0                     128 C               192 C               224 C           352 C

    one plane, K, chunk 64: ``[capacity, 64]``, 128 bytes a token
    │ token 0 │ token 1 │ … │ token C-1       │
    0         128       256                   128 C

``C`` is the capacity in tokens. So column ``c`` of chunk ``w`` of token ``t`` lies ``t·w + c``
values behind the beginning of its plane, and the planes of a row before it hold ``C`` tokens each.

A cache is rows ``[rows, values]`` with a stride between them, or all of them in one flat buffer. A
row is either a sequence or a page: of a pool of pages the rows are the pages and ``C`` is the
tokens of a page (a multiple of 16), so that a page is one stretch with everything of its tokens,
which can be copied, cleared, shared and sent. A table ``[sequences, most pages]`` of int32 tells
which page holds what::

    table[b] = 7 2 9 …                 pages of 64 tokens: token 130 of sequence b
    token t of sequence b is           is in page table[b, 130 // 64] = 9, place 130 % 64 = 2;
    in page table[b, t // C],          column c of chunk w lies 2·w + c values behind the
    place t % C                        beginning of its plane in row 9

Where new tokens go is told by slots, one for each: ``page·C + place``.

Queries are stored densely, head after head: the ``G`` query heads of KV head 0, each ``dk_0`` wide,
then those of KV head 1. Outputs likewise with ``dv``. A "head" may be a latent that several KV
heads share: ``G`` then counts the query heads of all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from kvprof.errors import UsageError

__all__ = [
    "LARGEST_GROUP",
    "LARGEST_WIDTH",
    "MOST_CHUNKS",
    "MOST_TOKENS",
    "STEP",
    "RaggedLayout",
    "chunks",
    "in_rows",
    "of_sequence",
    "row_stride",
    "widened",
]

#: Widths are multiples of it to 256, and of twice it above (so that four chunks suffice).
STEP = 16
LARGEST_WIDTH = 512
MOST_CHUNKS = 4
#: Of a sequence over pages, so that sums with it stay within 32 bits.
MOST_TOKENS = 2**30
#: Query heads that may share a stored head.
LARGEST_GROUP = 64


def _step(width: int) -> int:
    return STEP if width <= LARGEST_WIDTH // 2 else 2 * STEP


def chunks(width: int) -> tuple[int, ...]:
    """Return the chunks of a width, largest first."""
    if not STEP <= width <= LARGEST_WIDTH or width % _step(width):
        raise UsageError(
            f"a head of width {width} cannot run; widths must be multiples of {STEP} up to "
            f"{LARGEST_WIDTH // 2} or of {2 * STEP} up to {LARGEST_WIDTH}"
        )
    return tuple(chunk for chunk in (512, 256, 128, 64, 32, 16) if width & chunk)


def widened(width: int) -> int:
    """Return the least width that can run and holds `width` columns."""
    if not 1 <= width <= LARGEST_WIDTH:
        raise UsageError(f"a head of width {width} cannot run (limit {LARGEST_WIDTH})")
    step = _step(width)
    return -(-width // step) * step


@dataclass(frozen=True)
class RaggedLayout:
    """One layer's planes."""

    key_widths: tuple[int, ...]  # per KV head
    value_widths: tuple[int, ...]
    group: int  # query heads per KV head, G, at most 64
    #: Rows, and tokens that each has room for: sequences, or of a pool of pages the pages.
    batch: int
    capacity: int

    def __post_init__(self) -> None:
        for width in {*self.key_widths, *self.value_widths}:
            chunks(width)
        if len(self.key_widths) != len(self.value_widths) or not self.key_widths:
            raise UsageError(
                f"a layer needs as many key widths as value widths, not {len(self.key_widths)} "
                f"and {len(self.value_widths)}"
            )
        if min(self.group, self.batch, self.capacity) < 1 or self.group > LARGEST_GROUP:
            raise UsageError(
                f"a layer with {self.group} query heads per KV head (limit {LARGEST_GROUP}), "
                f"{self.batch} sequences and {self.capacity} tokens cannot run"
            )

    @property
    def heads(self) -> int:
        """KV heads."""
        return len(self.key_widths)

    @property
    def row(self) -> int:
        """Values of a row."""
        return self.capacity * (sum(self.key_widths) + sum(self.value_widths))

    @property
    def elements(self) -> int:
        """Values in a buffer without gaps."""
        return self.batch * self.row

    @cached_property
    def offsets(self) -> tuple[tuple[int, int], ...]:
        """Where each head's first plane of K and of V begins in a row, in values."""
        pairs = zip(self.key_widths, self.value_widths, strict=True)
        widths = [width for pair in pairs for width in pair]
        starts = [0, *accumulate(self.capacity * width for width in widths)]
        return tuple(zip(starts[0:-1:2], starts[1::2], strict=True))

    @cached_property
    def query_offsets(self) -> tuple[int, ...]:
        """Where each KV head's queries begin in a row of queries; the last entry is its length."""
        return (0, *accumulate(self.group * width for width in self.key_widths))

    @cached_property
    def output_offsets(self) -> tuple[int, ...]:
        """Where each KV head's outputs begin in a row of outputs; the last is its length."""
        return (0, *accumulate(self.group * width for width in self.value_widths))

    def packed(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Return the buffer that holds every head's keys and values."""
        parts = [
            plane.flatten(1)
            for head in range(self.heads)
            for states, width in (
                (keys[head], self.key_widths[head]),
                (values[head], self.value_widths[head]),
            )
            for plane in torch.split(states, list(chunks(width)), dim=-1)
        ]
        return torch.cat(parts, dim=1).flatten()

    def planes(self, buffer: Tensor, head: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return a head's planes of K and of V, ``[batch, capacity, chunk]`` each: views."""
        rows = in_rows(buffer, self.batch)
        widths = (self.key_widths[head], self.value_widths[head])
        found: list[list[Tensor]] = []
        for start, width in zip(self.offsets[head], widths, strict=True):
            own = []
            for chunk in chunks(width):
                size = self.capacity * chunk
                own.append(rows[:, start : start + size].unflatten(1, (self.capacity, chunk)))
                start += size
            found.append(own)
        return found[0], found[1]

    def head(self, buffer: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Return a head's K and V as ``[batch, capacity, width]``, copied out of the buffer."""
        keys, values = self.planes(buffer, head)
        return torch.cat(keys, dim=-1), torch.cat(values, dim=-1)


def in_rows(buffer: Tensor, rows: int) -> Tensor:
    """Return a cache as ``[rows, values]``, a view: of a flat one, or itself."""
    return buffer.view(rows, -1) if buffer.dim() == 1 else buffer


def row_stride(buffer: Tensor, rows: int) -> int:
    """Return the values from one row of a cache to the next."""
    # Of a single row torch may say any stride.
    return buffer.stride(0) if buffer.dim() == 2 and rows > 1 else buffer.numel() // rows


def of_sequence(rows: Tensor, sequence: int, table: Tensor | None, stop: int) -> Tensor:
    """Return a sequence's first `stop` tokens: a view, or copied out of its pages."""
    if table is None:
        return rows[sequence, :stop]
    pages = table[sequence, : -(-stop // rows.shape[1])].long()
    return rows[pages].flatten(0, 1)[:stop]
