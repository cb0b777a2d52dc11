"""What is chosen for a GPU: how the reconstruction kernel is built and its work is cut."""

from dataclasses import dataclass

from kvprof.kernels.planes import STEP

__all__ = ["Target", "Tuning", "tuning_for"]


@dataclass(frozen=True)
class Tuning:
    """What is chosen for a GPU and a layer's widths.

    Attributes
    ----------
    pieces : int
        Pieces of work per multiprocessor.
    height : int
        Most tokens of a tile, a power of two.
    tile : int
        Most bytes of the latents of K, and of V, in a tile; a piece is a whole number of tiles but
        for a sequence's end.
    columns : int
        Most columns of a head's half that are rebuilt at once, a power of two from 16.
    kept : bool
        Whether a program keeps a group's `up`, or takes it block by block for every tile.
    warps : int
        Of a program.
    stages : int
        Tiles of latents (kept) or blocks of `up` (not kept) on their way at once.
    ahead : bool
        Whether the next tile of latents is called into L2; for where tiles are not pipelined.
    products : int
        Multiplications that take as long as reading one column: the cost by which work is cut.
    """

    pieces: int = 4
    height: int = 128
    tile: int = 81920
    columns: int = 64
    kept: bool = False
    warps: int = 8
    stages: int = 2
    ahead: bool = True
    products: int = 128


@dataclass(frozen=True)
class Target:
    """What a GPU has.

    Attributes
    ----------
    capability : int
        Compute capability times ten.
    shared : int
        Bytes of shared memory that a program may have.
    """

    capability: int = 90
    shared: int = 232448


def tuning_for(target: Target, matrix: int, row: int, queries: int, element: int) -> Tuning:
    """Return what a GPU and a layer ask for.

    Small matrices stay with programs of four warps, several to a multiprocessor, whose tiles are
    pipelined. Large ones come in blocks, as wide as shared memory has room for beside a tile.

    Parameters
    ----------
    target : Target
    matrix : int
        Bytes of the largest group's `up`.
    row : int
        Widest key latent.
    queries : int
        Rows of queries in a product.
    element : int
        Bytes of a value.
    """
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
