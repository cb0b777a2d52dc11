"""What a reconstruction kernel is compiled for: widths, heads and RoPE's form."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import STEP, RaggedLayout, chunks
from kvprof.kernels.tables import Kind, chunk_columns, joined_rows

__all__ = [
    "Group",
    "Item",
    "RebuildConfig",
    "RebuiltColumn",
    "RebuiltHead",
    "SeenPage",
    "Target",
    "Tuning",
    "arranged",
    "arranged_values",
    "blocks_of",
    "flat",
    "halves",
    "tuning_for",
]

#: Multiplications that take as long as reading one column: the cost by which work is cut.
_PRODUCTS = 128

# --- What is chosen for a GPU: how the reconstruction kernel is built and its work is cut.


@dataclass(frozen=True)
class Tuning:
    """What is chosen for a GPU and a layer's widths."""

    pieces: int = 4  # pieces of work per multiprocessor
    height: int = 128  # most tokens of a tile, a power of two
    #: Most bytes of the latents of K, and of V, in a tile; a piece is a whole number of tiles but
    #: for a sequence's end.
    tile: int = 81920
    #: Most columns of a head's half that are rebuilt at once, a power of two from 16.
    columns: int = 64
    #: Whether a program keeps a group's `up`, or takes it block by block for every tile.
    kept: bool = False
    warps: int = 8  # of a program
    stages: int = 2  # tiles of latents (kept) or blocks of `up` (not kept) on their way at once
    #: Whether the next tile of latents is called into L2; for where tiles are not pipelined.
    ahead: bool = True


@dataclass(frozen=True)
class Target:
    """What a GPU has."""

    capability: int = 90  # compute capability times ten
    shared: int = 232448  # bytes of shared memory that a program may have


def tuning_for(target: Target, matrix: int, row: int, queries: int, element: int) -> Tuning:
    """Return the tuning for a GPU and a layer: few warps for small matrices, else blocks."""
    # Classes of GPUs: H100 and B200; A100; GPUs of graphics cards.
    size = 0 if target.shared >= 220000 else 1 if target.shared >= 160000 else 2
    if matrix <= (32768, 32768, 16384)[size]:
        stages = 3 if size == 0 and element == 2 else 2
        height = 64 if size < 2 else 32
        return Tuning(12, height, 16384, kept=True, warps=4, stages=stages, ahead=False)
    tile = (81920, 65536, 32768)[size]
    blocks = (139264, 73728, 49152)[size]
    most = blocks // (2 * 2 * element * (row + queries))
    # Blackwell's compiler spills in the pipeline, and where rows are widest two blocks do not fit.
    stages = 1 if 100 <= target.capability < 110 or most < STEP else 2
    columns = max(STEP, min(64, 1 << max(most, 1).bit_length() - 1))
    return Tuning(tile=tile, columns=columns, stages=stages)


_LARGEST_HEAD = 512
_BLOCK_BYTES = 64 << 10


def blocks_of(width: int, most: int) -> tuple[int, ...]:
    """Return powers of two from 16 to `most` whose sum is `width`, rounded up to 16."""
    found = []
    left = -(-width // STEP) * STEP
    while left:
        block = min(most, 1 << left.bit_length() - 1)
        found.append(block)
        left -= block
    return tuple(found)


class Group(NamedTuple):
    """What the kernels look up of a group; the first columns are `kvprof.kernels.tables.Output`."""

    outputs: int
    output_width: int
    queries: int  # where its queries begin in a row of them
    keys: int  # where its first plane begins in a row of the cache
    values: int
    up: int  # where its matrix begins
    heads: int  # KV heads
    cost: int  # of a token
    height: int  # tokens of a tile
    kind: int  # its pair of widths among `RebuildConfig.kinds`


class Item(NamedTuple):
    """Tokens ``start … stop - 1`` of one group of one row; none where it is empty."""

    row: int
    group: int
    start: int
    stop: int


class SeenPage(NamedTuple):
    """A page whose keys are rebuilt."""

    page: int  # its number in the pool; -1 for none
    begin: int  # position of its first token


class RebuiltHead(NamedTuple):
    """What is looked up of a KV head whose pages are rebuilt."""

    keys: int  # where its first plane begins in a row of rebuilt pages
    values: int
    value_up: int  # where the matrix begins that rebuilds its values; 0 where they are copied


class RebuiltColumn(NamedTuple):
    """The plane that has a column of a rebuilt head: its first column, and its width."""

    start: int
    width: int


@dataclass(frozen=True)
class RebuildConfig:
    """One layer's widths and how its keys are rebuilt."""

    key_widths: tuple[int, ...]  # of the latents, per group of KV heads
    value_widths: tuple[int, ...]
    batch: int  # as in the layout: sequences and their tokens, or pages and theirs
    capacity: int
    heads: int  # KV heads per group, n
    group: int  # query heads per KV head, G
    head_dim: int  # d; 0 where nothing is rebuilt
    rotary_dim: int  # columns that RoPE turns, the first of a head
    interleaved: bool  # whether RoPE pairs neighbours instead of halves
    element: int  # bytes of a value
    tuning: Tuning
    #: Of a pool of pages, how many sequences it has and the tokens of one at most; 0 without.
    sequences: int = 0
    longest: int = 0

    def __post_init__(self) -> None:
        if not self.rebuild:
            return
        if not 1 <= self.head_dim <= _LARGEST_HEAD or self.head_dim % 8:
            raise UsageError(
                f"head_dim {self.head_dim} cannot be rebuilt; it must be a multiple of 8 up to "
                f"{_LARGEST_HEAD}"
            )
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise UsageError(
                f"RoPE cannot rotate {self.rotary_dim} of {self.head_dim} columns; without RoPE, "
                "fold the matrices into the queries instead"
            )

    @property
    def rebuild(self) -> bool:
        """Whether keys are rebuilt, or queries come in the latents' own widths."""
        return self.head_dim > 0

    @property
    def paged(self) -> bool:
        """Whether the layout's rows are pages."""
        return self.sequences > 0

    @property
    def rows(self) -> int:
        """Sequences."""
        return self.sequences or self.batch

    @property
    def most(self) -> int:
        """Tokens that a sequence has at most."""
        return self.longest if self.paged else self.capacity

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
    def query_rows(self) -> int:
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

    @cached_property
    def value_blocks(self) -> tuple[int, ...]:
        """Blocks of a head's columns, for values that are rebuilt: a block is 64 KiB at most."""
        most, row = self.tuning.columns, max(self.value_widths) * self.element
        while most > STEP and most * row > _BLOCK_BYTES:
            most //= 2
        return blocks_of(self.head_dim, most)

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
        return tuning_for(target, matrix, widest, self.query_rows, self.element)

    def height(self, key_width: int, value_width: int) -> int:
        """Return the tokens of a tile, a power of two from 16 on."""
        most = self.tuning.tile // (self.element * max(key_width, value_width))
        return max(16, min(self.tuning.height, 1 << max(most, 1).bit_length() - 1))

    def cost(self, key_width: int, value_width: int) -> int:
        """Return a token's cost in columns read; 32 stands for softmax, as in decode."""
        products = self.heads * self.padded * key_width
        return key_width + value_width + 32 + products // _PRODUCTS

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """KINDS of `reconstruct_pieces`."""
        return joined_rows([Kind(chunk_columns(*pair), self.height(*pair)) for pair in self.kinds])

    def table(self) -> torch.Tensor:
        """Return the rows of `Group`, int64."""
        pairs = list(zip(self.key_widths, self.value_widths, strict=True))
        count = len(pairs)
        queries = [number * self.query_row // count for number in range(count)]
        if not self.rebuild:
            queries = list(self.layout.query_offsets[:-1])
        ups = accumulate((self.heads * self.padded * width for width in self.key_widths), initial=0)
        rows = [
            Group(
                outputs=output,
                output_width=pair[1],
                queries=query,
                keys=key,
                values=value,
                up=up,
                heads=self.heads,
                cost=self.cost(*pair),
                height=self.height(*pair),
                kind=self.kinds.index(pair),
            )
            for query, (key, value), up, pair, output in zip(
                queries, self.layout.offsets, ups, pairs, self.layout.output_offsets, strict=False
            )
        ]
        return torch.tensor(rows, dtype=torch.int64)

    def encoded(self) -> list[int]:
        """Return the config as integers, as a custom operator takes it."""
        return _encoded(self)

    @staticmethod
    def decoded(numbers: Sequence[int]) -> "RebuildConfig":
        """Return the config that `encoded` made the integers of."""
        return _decoded(tuple(numbers))


# Every layer of every step asks for it.
@lru_cache(maxsize=8192)
def _encoded(config: RebuildConfig) -> list[int]:
    *scalars, tuning, sequences, longest = astuple(config)[2:]
    return [
        len(config.key_widths),
        *config.key_widths,
        *config.value_widths,
        *map(int, scalars),
        sequences,
        longest,
        *map(int, tuning),
    ]


@lru_cache(maxsize=1024)
def _decoded(numbers: tuple[int, ...]) -> RebuildConfig:
    count, *rest = numbers
    keys, values, rest = rest[:count], rest[count : 2 * count], rest[2 * count :]
    batch, capacity, heads, group, head_dim, rotary_dim, interleaved, element = rest[:8]
    sequences, longest, *rest = rest[8:]
    pieces, height, tile, columns, kept, warps, stages, ahead = rest
    tuning = Tuning(pieces, height, tile, columns, bool(kept), warps, stages, bool(ahead))
    return RebuildConfig(
        tuple(keys),
        tuple(values),
        batch,
        capacity,
        heads,
        group,
        head_dim,
        rotary_dim,
        bool(interleaved),
        element,
        tuning,
        sequences,
        longest,
    )


# --- The matrices that rebuild keys, sorted as the kernel reads them.


def halves(width: int, interleaved: bool) -> tuple[slice, slice]:
    """Return which of `width` rotated columns are the first and the second of their pairs."""
    if interleaved:
        return slice(0, width, 2), slice(1, width, 2)
    return slice(0, width // 2), slice(width // 2, width)


def flat(up: Sequence[Tensor], config: RebuildConfig) -> Tensor:
    """Return every group's `up`, row after row, in one buffer."""
    wanted = [(config.heads * config.head_dim, width) for width in config.key_widths]
    shapes = [tuple(matrix.shape) for matrix in up]
    if shapes != wanted:
        raise UsageError(f"matrices of shapes {shapes} do not match the layer's keys: {wanted}")
    if len({matrix.dtype for matrix in up}) > 1:
        raise UsageError("the matrices that rebuild keys have different dtypes")
    return torch.cat([matrix.reshape(-1) for matrix in up])


def arranged(up: Sequence[Tensor], config: RebuildConfig) -> Tensor:
    """Return every group's `up` in one buffer, block after block of columns.

    Per group and KV head: for every block of rotated pairs the rows of the first halves and then of
    the second, after them the blocks of rows that RoPE leaves alone. Blocks past a half's end are
    filled with zeros; every block is cut into the chunks of the latent's width, each dense.
    """
    first, second = halves(config.rotary_dim, config.interleaved)
    parts: list[Tensor] = []
    for matrix, width in zip(up, config.key_widths, strict=True):
        for head in matrix.reshape(config.heads, config.head_dim, width):
            turned, rest = head[: config.rotary_dim], head[config.rotary_dim :]
            pairs = [
                torch.split(_filled(turned[half]), list(config.paired)) for half in (first, second)
            ]
            blocks = [block for pair in zip(*pairs, strict=True) for block in pair]
            parts += _chunked([*blocks, *torch.split(_filled(rest), list(config.plain))])
    return torch.cat(parts)


def arranged_values(up: Sequence[Tensor], config: RebuildConfig) -> Tensor:
    """Return the matrices that rebuild values in one buffer, as `arranged` sorts keys'."""
    wanted = [(config.heads * config.head_dim, width) for width in config.value_widths]
    if (shapes := [tuple(matrix.shape) for matrix in up]) != wanted:
        raise UsageError(f"matrices of shapes {shapes} do not match the layer's values: {wanted}")
    parts: list[Tensor] = []
    for matrix in up:
        for head in matrix.unflatten(0, (config.heads, config.head_dim)):
            parts += _chunked(torch.split(_filled(head), list(config.value_blocks)))
    return torch.cat(parts)


def _chunked(blocks: Sequence[Tensor]) -> list[Tensor]:
    """Return the chunks of every block of rows, each dense."""
    return [
        chunk.reshape(-1)
        for block in blocks
        for chunk in torch.split(block, list(chunks(block.shape[1])), dim=1)
    ]


def _filled(rows: Tensor) -> Tensor:
    """Fill up with zero rows to a multiple of 16."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % STEP))
