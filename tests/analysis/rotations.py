"""Bases and Gram matrices with a rotation that is known, in plain numpy."""

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import ortho_group
from torch import Tensor

from kvprof.analysis.stability import PairFactors, Run

Array = NDArray[np.float64]


def haar(width: int, seed: int, heads: int | None = None) -> Array:
    """Draw orthogonal matrices uniformly, ``[d, d]`` or ``[heads, d, d]``."""
    return np.asarray(ortho_group.rvs(width, size=heads or 1, random_state=seed))


def planar(width: int, first: int, second: int, angle: float) -> Array:
    """Return the rotation by `angle` in the plane of two axes."""
    turn = np.eye(width)
    cos, sin = np.cos(angle), np.sin(angle)
    turn[np.ix_([first, second], [first, second])] = [[cos, -sin], [sin, cos]]
    return turn


def block_rotation(width: int, columns: list[int], seed: int) -> Array:
    """Return a rotation that mixes some axes at random and leaves the others."""
    turn = np.eye(width)
    turn[np.ix_(columns, columns)] = haar(len(columns), seed)
    return turn


def gram_of(basis: Array, eigenvalues: Array) -> Array:
    return (basis * eigenvalues[..., None, :]) @ np.swapaxes(basis, -1, -2)


def tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def factors(*layers: Array, left: list[Array] | None = None, right: list[Array] | None = None):
    """Make factors of Gram matrices ``[heads, d, d]``, one per layer."""

    def of(other: list[Array] | None) -> list[Tensor]:
        return [tensor(gram) for gram in (layers if other is None else other)]

    return PairFactors(of(None), of(left), of(right))


def run(
    name: str, snapshots: dict[int, PairFactors], *, pair: str = "qk", seed: int | None = 0
) -> Run:
    return Run(name, seed, 64, {tokens: {pair: one} for tokens, one in snapshots.items()})
