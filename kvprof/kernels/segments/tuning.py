"""What is chosen for a GPU and not for a model."""

from dataclasses import dataclass

__all__ = ["Tuning"]


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
        Bytes that a token costs beside its own: softmax does not shrink with them. Not read where
        sides tell their products (`kvprof.kernels.segments.cuts.token_cost`).
    registers : int
        Most of a thread; 0 leaves it to the compiler.
    near : int
        Tiles of a piece from which on a multiprocessor takes neighbouring pieces, which pays where
        heads are of several kinds, each with code of its own; 0 for pieces in order, always.
    int8 : bool
        Whether rows of codes are multiplied as int8, if both sides are such, and not as numbers of
        two bytes.
    dealt : bool
        Whether pieces in order are given to programs such that a multiprocessor has few kinds.
    """

    pieces: int = 16
    tile: int = 4096
    stages: int = 2
    warps: int = 1
    per_token: int = 26
    registers: int = 128
    near: int = 16
    int8: bool = False
    dealt: bool = False
