"""What a reconstruction kernel is compiled for: widths, heads and RoPE's form."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch

from kvprof.errors import UsageError
from kvprof.kernels.planes import STEP, RaggedLayout, chunks
from kvprof.kernels.reconstruct.tuning import Target, Tuning, tuning_for

__all__ = ["Form", "blocks_of", "element_of"]

_MOST_CHUNKS = 4
_LARGEST_HEAD = 512


def blocks_of(width: int, most: int) -> tuple[int, ...]:
    """Return powers of two from 16 to `most` whose sum is `width`, rounded up to 16."""
    found = []
    left = -(-width // STEP) * STEP
    while left:
        block = min(most, 1 << left.bit_length() - 1)
        found.append(block)
        left -= block
    return tuple(found)


@dataclass(frozen=True)
class Form:
    """One layer's widths and how its keys are rebuilt.

    Attributes
    ----------
    key_widths, value_widths : tuple of int
        Of the latents, per group of KV heads.
    batch, capacity : int
        As in the layout.
    heads : int
        KV heads per group, n.
    group : int
        Query heads per KV head, G.
    head_dim : int
        d; 0 where nothing is rebuilt.
    rotary_dim : int
        Columns that RoPE turns, the first of a head.
    interleaved : bool
        Whether RoPE pairs neighbours instead of halves.
    element : int
        Bytes of a value.
    tuning : Tuning
    """

    key_widths: tuple[int, ...]
    value_widths: tuple[int, ...]
    batch: int
    capacity: int
    heads: int
    group: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    element: int
    tuning: Tuning

    def __post_init__(self) -> None:
        if not self.rebuild:
            return
        if not 1 <= self.head_dim <= _LARGEST_HEAD or self.head_dim % 8:
            raise UsageError(
                f"keys of head size {self.head_dim} cannot be rebuilt: multiples of 8 to "
                f"{_LARGEST_HEAD} can"
            )
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise UsageError(
                f"RoPE cannot turn {self.rotary_dim} of {self.head_dim} columns; where it turns "
                "none, kvprof.kernels.reconstruct.folded serves"
            )

    @property
    def rebuild(self) -> bool:
        """Whether keys are rebuilt, or queries come in the latents' own widths."""
        return self.head_dim > 0

    @property
    def queries(self) -> int:
        """Query heads per group of KV heads, n·G."""
        return self.heads * self.group

    @cached_property
    def layout(self) -> RaggedLayout:
        """The latents' planes."""
        widths = (self.key_widths, self.value_widths)
        return RaggedLayout(*widths, self.queries, self.batch, self.capacity)

    @property
    def rows(self) -> int:
        """Rows of queries in a product: the group's, filled up to what tensor cores take."""
        return max(16, 1 << (self.queries - 1).bit_length())

    @property
    def query_row(self) -> int:
        """Values of one sequence's queries."""
        if self.rebuild:
            return len(self.key_widths) * self.queries * self.head_dim
        return self.layout.query_offsets[-1]

    @cached_property
    def paired(self) -> tuple[int, ...]:
        """Blocks of the columns of each rotated half."""
        return blocks_of(self.rotary_dim // 2, self.tuning.columns)

    @cached_property
    def plain(self) -> tuple[int, ...]:
        """Blocks of the columns that RoPE leaves alone."""
        return blocks_of(self.head_dim - self.rotary_dim, self.tuning.columns)

    @property
    def padded(self) -> int:
        """Rows of `up` per head as the kernel has it: every half in whole blocks."""
        return 2 * sum(self.paired) + sum(self.plain)

    @cached_property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """Width pairs that occur, in the order of the groups."""
        return tuple(dict.fromkeys(zip(self.key_widths, self.value_widths, strict=True)))

    def tuned(self, target: Target) -> Tuning:
        """Return what a GPU asks for."""
        widest = max(self.key_widths)
        matrix = self.heads * self.padded * widest * self.element
        return tuning_for(target, matrix, widest, self.rows, self.element)

    def height(self, key_width: int, value_width: int) -> int:
        """Return the tokens of a tile, a power of two from 16 on."""
        most = self.tuning.tile // (self.element * max(key_width, value_width))
        return max(16, min(self.tuning.height, 1 << max(most, 1).bit_length() - 1))

    def cost(self, key_width: int, value_width: int) -> int:
        """Return what a token of a group costs, in columns read.

        The 32 stands for what does not shrink with the width (softmax), as in decode.
        """
        products = self.heads * self.padded * key_width
        return key_width + value_width + 32 + products // self.tuning.products

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """KINDS of `reconstruct_pieces`."""
        found: list[int] = []
        for pair in self.kinds:
            for width in pair:
                own = chunks(width)
                found += [*own, *(0,) * (_MOST_CHUNKS - len(own))]
            found.append(self.height(*pair))
        return tuple(found)

    def table(self) -> torch.Tensor:
        """Return ``[groups, COLUMNS]`` int64, see `kvprof.kernels.reconstruct.kernel.COLUMNS`."""
        pairs = list(zip(self.key_widths, self.value_widths, strict=True))
        count = len(pairs)
        queries = [number * self.query_row // count for number in range(count)]
        if not self.rebuild:
            queries = list(self.layout.query_offsets[:-1])
        ups = accumulate((self.heads * self.padded * width for width in self.key_widths), initial=0)
        rows = [
            (query, key, value, up, self.kinds.index(pair), output, pair[1],
             self.cost(*pair), self.height(*pair), self.heads)
            for query, (key, value), up, pair, output in zip(
                queries, self.layout.offsets, ups, pairs, self.layout.output_offsets, strict=False
            )
        ]  # fmt: skip
        return torch.tensor(rows, dtype=torch.int64)

    def encoded(self) -> list[int]:
        """Return the form as integers, as a custom operator takes it."""
        scalars = astuple(self)[2:-1]
        return [
            len(self.key_widths), *self.key_widths, *self.value_widths,
            *map(int, scalars), *map(int, astuple(self.tuning)),
        ]  # fmt: skip

    @staticmethod
    def decoded(numbers: Sequence[int]) -> "Form":
        """Return the form that `encoded` made the integers of."""
        return _decoded(tuple(numbers))


@lru_cache(maxsize=1024)
def _decoded(numbers: tuple[int, ...]) -> Form:
    count, *rest = numbers
    keys, values, rest = rest[:count], rest[count : 2 * count], rest[2 * count :]
    batch, capacity, heads, group, head_dim, rotary_dim, interleaved, element = rest[:8]
    pieces, height, tile, columns, kept, warps, stages, ahead, products = rest[8:]
    tuning = Tuning(pieces, height, tile, columns, bool(kept), warps, stages, bool(ahead), products)
    return Form(
        tuple(keys), tuple(values), batch, capacity, heads, group, head_dim, rotary_dim,
        bool(interleaved), element, tuning,
    )  # fmt: skip


def element_of(dtype: torch.dtype) -> int:
    """Return the bytes of a value.

    Raises
    ------
    UsageError
        For a dtype that the kernels do not run in.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UsageError(f"latents in {dtype} cannot run: bfloat16, float16 and float32 can")
    return dtype.itemsize
