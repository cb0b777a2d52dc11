"""How a step over segments is cut into pieces that cost the same, stated on the host.

The device does the same (`kvprof.kernels.levels.schedule`). A unit is one segment of one KV head of
one row; its cost is its tokens times their bytes, weighed by what they are, plus a constant per
token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvprof.kernels.levels.layout import LevelsLayout
from kvprof.kernels.levels.side import MOST_PLACES, PLACES, Side
from kvprof.kernels.levels.tuning import Tuning

__all__ = ["equal_shares", "places_of", "token_bytes", "token_cost"]

#: Parts of a byte in which costs are counted.
_PARTS = 16


@dataclass(frozen=True)
class _Weights:
    """What a byte costs, by what it is.

    Attributes
    ----------
    keys : float
        Of K's codes.
    value_scales : float
        Of V's scales and middles.
    padding : float
        By which a plane of 16 columns of K is padded in a product.
    """

    keys: float = 1.0
    value_scales: float = 1.0
    padding: float = 1.0


_BYTES = _Weights()
#: Where codes are stored in 4 bits: found by descent on an H200, on which a layer of eight unlike
#: heads (the ragged one of docs/benchmarks, groups of 32 columns) ends 3.5 % sooner than with bytes
#: alone. Nothing is known of segments of unlike bits beside one another.
_FOUR = _Weights(keys=0.75, value_scales=0.95, padding=1.45)


def token_bytes(layout: LevelsLayout, segment: int, head: int) -> int:
    """Return the bytes that a token of a head moves, scales and middles included."""
    return layout.block_bytes(segment, head) // (PLACES * layout.segments[segment].slots)


def token_cost(layout: LevelsLayout, segment: int, head: int, per_token: int) -> int:
    """Return what a token of a head costs, in sixteenths of a byte.

    Parameters
    ----------
    layout : LevelsLayout
    segment, head : int
    per_token : int
        Bytes' worth of what every token costs: `Tuning.per_token`.
    """
    keys, values = layout.sides(segment, head)
    padding = 0
    if keys.container:
        padding = sum(16 * keys.container // 8 for plane in keys.planes if plane.width == 16)
    four = len(layout.segments) == 1 and keys.container == values.container == 4
    weights = _FOUR if four else _BYTES
    cost = (
        weights.keys * _token(keys, keys.code_bytes)
        + _token(values, values.code_bytes)
        + _token(keys, 2 * keys.scale_bytes)
        + weights.value_scales * _token(values, 2 * values.scale_bytes)
        + weights.padding * padding
        + per_token
    )
    return round(_PARTS * cost)


def _token(side: Side, nbytes: int) -> float:
    return nbytes / (PLACES * side.slots)


def places_of(layout: LevelsLayout, segment: int, head: int, tile: int) -> int:
    """Return the places of a tile, so that it holds about `tile` bytes; a power of two.

    At least 32, a block; 64 where a token has a place of its own and a scale, which would be too
    small to be loaded asynchronously one by one.
    """
    slots = layout.segments[segment].slots
    scales = any(side.groups for side in layout.sides(segment, head))
    places = 2 * PLACES if scales and slots == 1 else PLACES
    own = token_bytes(layout, segment, head) * slots
    while places < MOST_PLACES and 2 * places * own <= tile:
        places *= 2
    return places


def equal_shares(
    layout: LevelsLayout, lengths: Sequence[Sequence[int]], pieces: int, tuning: Tuning
) -> tuple[list[tuple[int, int, int, int, int]], list[tuple[int, int]]]:
    """Cut all units into `pieces` pieces of equal cost.

    Exactly so many, but for units that are smaller than a piece or have fewer tiles: all are on the
    GPU at once, and one that is not would run when the others are done. By head, then row, so that
    neighbours are of one kind: what a multiprocessor runs has to fit its instruction cache
    (`kvprof.kernels.levels.kernel`).

    Parameters
    ----------
    layout : LevelsLayout
    lengths : sequence of sequence of int
        Tokens of each segment and row.
    pieces : int
    tuning : Tuning

    Returns
    -------
    items : list of (row, head, segment, start, stop)
        By head, then row, then segment, then token.
    parts : list of (first item, count)
        For every head of every row, by row.
    """
    count = len(layout.segments)
    units = [
        (row, head, segment)
        for head in range(layout.heads)
        for row in range(layout.batch)
        for segment in range(count)
    ]
    costs = [
        lengths[segment][row] * token_cost(layout, segment, head, tuning.per_token)
        for row, head, segment in units
    ]
    total = max(1, sum(costs))
    items: list[tuple[int, int, int, int, int]] = []
    parts = {}
    before = 0
    for (row, head, segment), cost in zip(units, costs, strict=True):
        if segment == 0:
            first = len(items)
        length = lengths[segment][row]
        slots = layout.segments[segment].slots
        height = slots * places_of(layout, segment, head, tuning.tile)
        tiles = -(-length // height)
        share = (before + cost) * pieces // total - before * pieces // total
        share = min(tiles, max(1, share))
        before += cost
        bounds = [min(length, tiles * part // max(1, share) * height) for part in range(share + 1)]
        items += [(row, head, segment, start, stop) for start, stop in pairwise(bounds)]
        if segment == count - 1:
            parts[row, head] = (first, len(items) - first)
    return items, [parts[task] for task in sorted(parts)]
