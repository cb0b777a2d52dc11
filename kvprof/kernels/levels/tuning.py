"""What is chosen for a GPU and not for a model."""

from dataclasses import dataclass

from kvprof.kernels.levels.layout import LevelsLayout

__all__ = ["Tuning", "query_block", "tuning_for"]

#: Numbers of a thread that a program's queries and sums may take.
_REGISTERS = 112


@dataclass(frozen=True)
class Tuning:
    """How the kernel is built and how finely its work is cut.

    Attributes
    ----------
    pieces : int
        Pieces of work per multiprocessor.
    tile : int
        Bytes of K and V that a tile should hold.
    stages : int
        Tiles on their way at once.
    warps : int
        Of a program.
    per_token : int
        Bytes that a token costs beside its own: softmax does not shrink with them.
    """

    pieces: int = 8
    tile: int = 4096
    stages: int = 3
    warps: int = 1
    per_token: int = 32


def _numbers(layout: LevelsLayout, heads: int, warps: int) -> int:
    keys, values = max(layout.widest.key_widths), max(layout.widest.value_widths)
    return heads * keys // 64 + heads * values // (32 * warps)


def query_block(layout: LevelsLayout, warps: int) -> int:
    """Return the query heads that a program serves: 8, 16 or 32, as registers allow.

    Further ones of a group read the cache again, from L2.
    """
    block = 8
    while block < layout.group and block < 32 and _numbers(layout, 2 * block, warps) <= _REGISTERS:
        block *= 2
    return block


def tuning_for(layout: LevelsLayout) -> Tuning:
    """Return what a layer asks for: two warps for wide heads, and for four tokens in a byte."""
    crowded = any(segment.slots == 4 for segment in layout.segments)
    wide = _numbers(layout, 8, 1) > _REGISTERS
    return Tuning(warps=2 if crowded or wide else 1)
