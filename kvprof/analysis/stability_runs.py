"""What one pass over one source leaves for comparison: its moments, and bases of all heads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kvprof.analysis.bases import eigenbasis
from kvprof.analysis.factors import PairFactors
from kvprof.analysis.stability import Loss, loss

__all__ = ["Run", "Stack"]


@dataclass(frozen=True)
class Stack:
    """All heads of one width, over all layers.

    Attributes
    ----------
    heads : list of (layer, kv_head)
        What each row is.
    gram, left, right : Tensor
        ``[n, d, d]``, as in `PairFactors`.
    values, basis : Tensor
        Eigenvalues ``[n, d]`` and eigenvectors ``[n, d, d]`` of `gram`, the largest first.
    """

    heads: list[tuple[int, int]]
    gram: Tensor
    left: Tensor
    right: Tensor
    values: Tensor
    basis: Tensor

    @cached_property
    def loss(self) -> Loss:
        """What is lost when leading columns of the own basis are kept."""
        return loss(self.gram, self.left, self.right, self.basis)


@dataclass
class Run:
    """The moments of one pass over one source.

    Attributes
    ----------
    name : str
        Of the source.
    seed : int or None
        For random tokens.
    seq_len : int
        Length of its sequences.
    snapshots : mapping of int to mapping of str to PairFactors
        By token count, then by pair.
    random_tokens : bool
        Whether the tokens were random, also when they come out of a file of moments.
    warnings : list of str
        What a reader must know of these moments.
    """

    name: str
    seed: int | None
    seq_len: int
    snapshots: Mapping[int, Mapping[str, PairFactors]]
    random_tokens: bool = False
    warnings: list[str] = field(default_factory=list)
    _bases: dict[tuple[int, str], list[Stack]] = field(default_factory=dict, repr=False)

    def largest(self, pair: str) -> PairFactors:
        """Return the factors of `pair` at the largest token count."""
        return self.snapshots[max(self.snapshots)][pair]

    def forget(self) -> None:
        """Give back the memory of the bases; they are computed again when needed."""
        self._bases.clear()

    def stacks(self, tokens: int, pair: str) -> list[Stack]:
        """Return all heads of a snapshot with their bases, stacked by width; computed once."""
        if (tokens, pair) not in self._bases:
            self._bases[tokens, pair] = _stack(self.snapshots[tokens][pair])
        return self._bases[tokens, pair]


def _stack(factors: PairFactors) -> list[Stack]:
    stacks = []
    # Layers may lie on several devices; their moments meet where the first layer is.
    home = factors.gram[0].device
    for width in sorted({gram.shape[-1] for gram in factors.gram}):
        layers = [i for i, gram in enumerate(factors.gram) if gram.shape[-1] == width]
        gram, left, right = (
            torch.cat([part[i].to(home) for i in layers])
            for part in (factors.gram, factors.left, factors.right)
        )
        heads = [(i, head) for i in layers for head in range(len(factors.gram[i]))]
        values, basis = eigenbasis(gram)
        stacks.append(Stack(heads, gram, left, right, values, basis))
    return stacks
