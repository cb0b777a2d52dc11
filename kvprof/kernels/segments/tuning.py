"""What is chosen for a GPU and not for a model."""

from dataclasses import dataclass

from kvprof.kernels.segments.columns import ColumnSide
from kvprof.kernels.segments.layout import SegmentsLayout

__all__ = ["Tuning", "query_block", "tuning_for"]

#: Numbers of a thread that a program's queries and sums may take.
_REGISTERS = 112


@dataclass(frozen=True)
class Tuning:
    """How the kernel is built and how finely its work is cut.

    Attributes
    ----------
    pieces : int
        Pieces of work per multiprocessor: as many as it runs at once.
    tile : int
        Bytes of K and V that a tile should hold.
    stages : int
        Tiles on their way at once.
    warps : int
        Of a program.
    per_token : int
        Bytes that a token costs beside its own: softmax does not shrink with them.
    registers : int
        Most of a thread; 0 leaves it to the compiler.
    near : int
        Tiles of a piece from which on a multiprocessor takes neighbouring pieces, which pays where
        heads are of several kinds, each with code of its own; 0 for pieces in order, always.
    """

    pieces: int = 16
    tile: int = 4096
    stages: int = 2
    warps: int = 1
    per_token: int = 26
    registers: int = 128
    near: int = 16


def _numbers(layout: SegmentsLayout, heads: int, warps: int) -> int:
    keys, values = max(layout.widest.key_widths), max(layout.widest.value_widths)
    return heads * keys // 64 + heads * values // (32 * warps)


def query_block(layout: SegmentsLayout, warps: int) -> int:
    """Return the query heads that a program serves: 8, 16 or 32, as registers allow.

    Further ones of a group read the cache again, from L2.
    """
    block = 8
    while block < layout.group and block < 32 and _numbers(layout, 2 * block, warps) <= _REGISTERS:
        block *= 2
    return block


def _near(kinds: int) -> int:
    """Return `Tuning.near` for so many kinds of unit.

    On an H200, behind whatever empties its caches: with two kinds of head shares never pay; with
    four they take 0.75 of the time in order at 48 tiles a piece, 0.98 at 4 and 1.10 at 2; with six
    0.52, 0.77 and 0.92. Below a tile a piece most programs would walk and find nothing.
    """
    return 0 if kinds <= 2 else 3 if kinds <= 4 else 1


def tuning_for(layout: SegmentsLayout) -> Tuning:
    """Return what was fastest on an H200 for a layer's widths and formats."""
    sides = [side for number in range(len(layout.segments)) for side in layout.sides(number, 0)]
    numbers = _numbers(layout, 8, 1)
    if numbers > _REGISTERS // 2 or all(side.bits is None for side in sides):
        warps = 2 if numbers > _REGISTERS else 1
        return Tuning(8, stages=3, warps=warps, per_token=32, registers=0, near=0)
    if any(isinstance(side, ColumnSide) for side in sides):
        # As many programs as have room for their tiles but one, of which exact tokens take some: a
        # twelfth takes 1.3 times as long, in one round or more. Of several kinds, shares pay for
        # pieces of 37 tiles (0.88 of the time of shorter ones in order), and double it for four.
        unlike = sum(any(isinstance(side, tuple) for side in own) for own in layout.unit_kinds)
        return Tuning(11, registers=144, near=16 if unlike > 2 else 0)
    near = _near(len(layout.unit_kinds))
    if not any(side.groups for side in sides):
        return Tuning(stages=3, warps=2, near=near)
    # Larger tiles, of which fewer programs have room at once.
    slots = {segment.slots for segment in layout.segments}
    return Tuning(16 if slots == {2} else 13 if slots == {1} else 12, near=near)
