"""What is chosen for a GPU and a layer's widths, and not for a model."""

from dataclasses import dataclass, replace

from kvprof.kernels.planes import STEP, RaggedLayout

__all__ = ["Tuning", "built_for", "rows_of", "tuning_for"]

#: Most values of a block of queries, or of its results: more would spill registers.
_MOST_VALUES = 8192


@dataclass(frozen=True)
class Tuning:
    """How the decode kernel is built and how finely its work is cut.

    Attributes
    ----------
    pieces : int
        Pieces of work per multiprocessor.
    tile : int
        Values of K and V in a tile.
    stages : int
        Tiles on their way at once.
    warps : int
        Of a program.
    """

    pieces: int = 8
    tile: int = 8192
    stages: int = 4
    warps: int = 1


def rows_of(layout: RaggedLayout) -> int:
    """Return how many of a group's query heads one program takes, padded: 16, 32 or 64.

    Where that is not all of them, as many programs as it takes read the same tokens, side by side,
    so that all but the first find them in L2.
    """
    width = max(layout.key_widths + layout.value_widths)
    rows = STEP
    while rows < layout.group and 2 * rows * width <= _MOST_VALUES:
        rows *= 2
    return rows


def tuning_for(layout: RaggedLayout, schedule: str = "equal") -> Tuning:
    """Return what a layer's widths and group ask for.

    Parameters
    ----------
    layout : RaggedLayout
    schedule : str
        ``lpt`` has one program per multiprocessor, which should keep more on its way.
    """
    widest = max(map(sum, zip(layout.key_widths, layout.value_widths, strict=True)))
    if widest > _MOST_VALUES // STEP:
        return Tuning(tile=32768, stages=2, warps=4)
    if rows_of(layout) > STEP:
        return Tuning(tile=16384, stages=3, warps=4)
    if widest > _MOST_VALUES // (2 * STEP):
        return Tuning(tile=16384, stages=3, warps=2)
    if schedule != "lpt" and {*layout.key_widths, *layout.value_widths} == {64}:
        # On an H200 at batch 8 a prototype reached 1.93 times full width so; one warp reaches 1.86.
        return Tuning(warps=2)
    # Four warps, or taller tiles, would spill: a program has the branches of all kinds in its loop.
    return Tuning(stages=6, warps=2) if schedule == "lpt" else Tuning()


def built_for(tuning: Tuning, element_size: int, *, paged: bool) -> Tuning:
    """Return how a kernel is built for a dtype of `element_size` bytes.

    A tile of 32-bit values is half as high, and its products, which no tensor core computes, take
    the registers of four times the warps. A load that has to wait for the number of its page takes
    the compiler's pipeline two stages.
    """
    if element_size > 2:
        tuning = replace(tuning, tile=tuning.tile // 2, warps=min(8, 4 * tuning.warps))
    return replace(tuning, stages=2 * tuning.stages - 1) if paged else tuning
