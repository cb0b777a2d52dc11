"""Batched decompositions of many small matrices, spread over threads on a CPU.

LAPACK takes one matrix at a time and its own threads gain nothing at a head's size; running the
batch in several Python threads does, because the calls release the interpreter's lock.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

__all__ = ["eigh", "svd", "svdvals"]

# Below this many matrices per thread, starting the threads costs more than it saves.
_FEWEST_PER_THREAD = 4


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return `torch.linalg.eigh` of ``[..., n, n]``: eigenvalues ascending, eigenvectors."""
    values, vectors = _spread(lambda part: tuple(torch.linalg.eigh(part)), matrices)
    return values, vectors


def svd(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin `torch.linalg.svd` of ``[..., m, n]``."""
    left, values, right = _spread(
        lambda part: tuple(torch.linalg.svd(part, full_matrices=False)), matrices
    )
    return left, values, right


def svdvals(matrices: Tensor) -> Tensor:
    """Return `torch.linalg.svdvals` of ``[..., m, n]``, descending."""
    (values,) = _spread(lambda part: (torch.linalg.svdvals(part),), matrices)
    return values


def _spread(
    decompose: Callable[[Tensor], tuple[Tensor, ...]], matrices: Tensor
) -> tuple[Tensor, ...]:
    flat = matrices.flatten(0, -3) if matrices.dim() > 2 else matrices[None]
    threads = min(torch.get_num_threads(), len(flat) // _FEWEST_PER_THREAD)
    if matrices.is_cuda or threads < 2:
        return decompose(matrices)
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(decompose, flat.chunk(threads)))
    whole = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return tuple(part.view(*matrices.shape[:-2], *part.shape[1:]) for part in whole)
