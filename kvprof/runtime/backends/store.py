"""What a layer's store is, whichever kernels it is for."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kvprof.errors import UsageError

__all__ = ["KernelStore", "next_capacity"]

# Room is made for whole tiles of tokens.
_TILE = 64


def next_capacity(held: int, wanted: int, reach: int | None) -> int:
    """Return for how many tokens to make room where `wanted` are to come.

    Parameters
    ----------
    held : int
        That there is room for now.
    wanted : int
    reach : int or None
        Longest sequence that is to come, where it is known.
    """
    if reach is not None and reach >= wanted:
        # What generation will never reach is not worth holding.
        return min(2 * wanted, reach)
    return -(-max(wanted, 2 * held) // _TILE) * _TILE


class KernelStore(ABC):
    """What one layer stores for the kernels: one tensor for all rows of a batch.

    Attributes
    ----------
    buffer : Tensor
        Empty before the first token.
    exact : bool
        Whether what is stored of a token never changes, so that the newest can be taken back.
    captured : bool
        Whether a CUDA graph reads and writes the buffer where it lies.
    """

    exact: bool = True

    def __init__(self) -> None:
        self.buffer: Tensor = torch.empty(0)
        self.captured = False

    def _may_move(self) -> None:
        """Refuse to lay the tokens elsewhere where a CUDA graph would go on writing here.

        Raises
        ------
        UsageError
        """
        if self.captured:
            raise UsageError(
                "a CUDA graph writes into this cache, which another number of sequences needs "
                "elsewhere; make a new cache for them, and capture a step of it"
            )

    @property
    @abstractmethod
    def rows(self) -> int:
        """Sequences that it has room for; 0 before the first token."""

    @abstractmethod
    def select(self, index: list[int]) -> None:
        """Make row i what row ``index[i]`` was."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all tokens; a static cache keeps its room."""

    @abstractmethod
    def bytes_at(self, seen: list[int]) -> int:
        """Return the bytes of what is stored of rows that have had `seen` tokens each."""
