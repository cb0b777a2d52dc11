"""How a decoding step's work is cut into pieces that cost the same (methods: load balance).

A head's work is its context times its widths, plus a constant per token for what does not shrink
with the width (softmax). Cutting each head into as many pieces as its share of the whole asks for
leaves no multiprocessor waiting for the widest head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout

__all__ = ["COST_PER_TOKEN", "Cut", "equal_shares", "tile_height"]

#: Columns that a token costs beside its own: softmax does not shrink with the width.
COST_PER_TOKEN = 32


@dataclass(frozen=True)
class Cut:
    """Pieces of work.

    Attributes
    ----------
    items : tuple of (row, head, start, stop, pair)
        Tokens ``start … stop - 1`` of one KV head of one sequence; `pair` indexes `pairs`.
    parts : tuple of (first item, count)
        For every sequence and KV head, row after row.
    pairs : tuple of (key width, value width, tile height)
        The kinds of heads that there are.
    """

    items: tuple[tuple[int, int, int, int, int], ...]
    parts: tuple[tuple[int, int], ...]
    pairs: tuple[tuple[int, int, int], ...]


def tile_height(key_width: int, value_width: int, tile: int) -> int:
    """Return how many tokens a tile has, a power of two from 16 on, so that all move as much.

    Parameters
    ----------
    key_width, value_width : int
    tile : int
        Values of K and V that one tile should hold.
    """
    height = 16
    while 2 * height * (key_width + value_width) <= tile and height < 512:
        height *= 2
    return height


def equal_shares(layout: RaggedLayout, lengths: Sequence[int], pieces: int, tile: int) -> Cut:
    """Cut all heads of all sequences into about `pieces` pieces of equal cost.

    Parameters
    ----------
    layout : RaggedLayout
    lengths : sequence of int
        Tokens of each sequence.
    pieces : int
        How many pieces to aim at, a few per multiprocessor; every head has at least one.
    tile : int
        See `tile_height`; a piece is a whole number of tiles but for a sequence's end.

    Raises
    ------
    UsageError
        When a sequence is empty, or longer than the layout has room for.
    """
    if len(lengths) != layout.batch:
        raise UsageError(f"{len(lengths)} lengths for {layout.batch} sequences")
    for length in lengths:
        if not 1 <= length <= layout.capacity:
            raise UsageError(
                f"a context of {length} tokens cannot run: the cache holds 1 to {layout.capacity}"
            )
    widths = list(zip(layout.key_widths, layout.value_widths, strict=True))
    kinds = list(dict.fromkeys(widths))
    costs = [length * (sum(pair) + COST_PER_TOKEN) for length in lengths for pair in widths]
    share = sum(costs) / max(1, pieces)
    items: list[tuple[int, int, int, int, int]] = []
    parts = []
    for number, cost in enumerate(costs):
        row, head = divmod(number, layout.heads)
        height = tile_height(*widths[head], tile)
        tiles = -(-lengths[row] // height)
        count = min(tiles, max(1, round(cost / share)))
        parts.append((len(items), count))
        bounds = [min(lengths[row], tiles * part // count * height) for part in range(count + 1)]
        kind = kinds.index(widths[head])
        items += [(row, head, start, stop, kind) for start, stop in pairwise(bounds)]
    return Cut(tuple(items), tuple(parts), tuple((*w, tile_height(*w, tile)) for w in kinds))
