"""Batched decompositions of small matrices on Python threads; cuSOLVER and LAPACK are slower."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["column_signs", "eigh", "few_threads", "map_threads", "svd"]

Item = TypeVar("Item")
Out = TypeVar("Out")

# Below this many matrices per thread, handing them over costs more than it saves.
_FEWEST_PER_THREAD = 4

# What many small products and factorisations can use; more threads only wait for each other. 64 on
# two cores made the bases of the reference model 27 times slower.
_FEW = 4

# Magnitudes this near, relative to the largest, count as equal: rounding must not decide a sign.
_TIE = 1e-6

# Up to this size cuSOLVER decomposes a whole batch at once, by Jacobi's method.
_JACOBI_WIDTH = 32


@contextmanager
def few_threads() -> Iterator[None]:
    """Let torch use a few threads of the CPU at most while the body runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(before, _FEW))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def column_signs(vectors: Tensor) -> Tensor:
    """Return the sign that every column of a basis has to be multiplied with: the convention.

    An eigenvector's sign is arbitrary, and libraries, versions and thread counts answer with one or
    the other. Nothing that is exact depends on it, but asymmetric quantisers do: the range of a
    group of latents is another when one of its columns is turned round, so that ``kq-4bit`` kept
    another accuracy on another LAPACK. Here a column's entry of largest magnitude is positive (of
    several as large, to 1e-6, the first). That makes a basis the same everywhere, no better or
    worse. Directions of equal eigenvalue mix freely all the same; no sign settles that.

    Parameters
    ----------
    vectors : Tensor
        ``[..., n, r]``, one direction per column.

    Returns
    -------
    Tensor
        ``[..., 1, r]`` of 1 and -1.
    """
    sizes = vectors.abs()
    largest = sizes >= (1 - _TIE) * sizes.amax(-2, keepdim=True)
    deciding = vectors.gather(-2, largest.to(torch.int8).argmax(-2, keepdim=True))
    return torch.where(deciding < 0, -1.0, 1.0).to(vectors)


def eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return `torch.linalg.eigh` of ``[..., n, n]``: eigenvalues ascending, eigenvectors."""
    values, vectors = _spread(lambda part: tuple(torch.linalg.eigh(part)), matrices)
    return values, vectors


def svd(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin `torch.linalg.svd` of ``[..., m, n]``."""
    if matrices.is_cuda and max(matrices.shape[-2:]) <= _JACOBI_WIDTH:
        left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    else:
        left, values, right = _spread(
            lambda part: tuple(torch.linalg.svd(part, full_matrices=False)), matrices
        )
    return left, values, right


def map_threads(function: Callable[[Item], Out], items: Sequence[Item]) -> list[Out]:
    """Return `function` of every item, in order; torch uses one thread inside each call."""
    threads = torch.get_num_threads()
    if threads < 2 or len(items) < 2:
        return [function(item) for item in items]
    return list(_pool(threads).map(function, items))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return threads in each of which torch, and so LAPACK, computes on one core."""
    all_started = threading.Barrier(threads)

    def start() -> None:
        # A thread's first question sets its count to the last one set anywhere, so ask before.
        torch.get_num_threads()
        torch.set_num_threads(1)
        # Nobody is idle before everybody runs, so that each task below starts a thread.
        all_started.wait()

    pool = ThreadPoolExecutor(threads, thread_name_prefix="kvprof-linalg", initializer=start)
    list(pool.map(lambda _: None, range(threads)))
    # The count is the calling thread's own, but threads started later inherit the last one set.
    torch.set_num_threads(threads)
    return pool


def _spread(
    decompose: Callable[[Tensor], tuple[Tensor, ...]], matrices: Tensor
) -> tuple[Tensor, ...]:
    flat = matrices.reshape(-1, *matrices.shape[-2:]).cpu()
    # Moments that stand in for measured ones are the same for all heads.
    if len(flat) > 1 and torch.equal(flat[0], flat[-1]) and bool((flat == flat[0]).all()):
        return tuple(
            one[0].expand(*matrices.shape[:-2], *one.shape[1:]).contiguous().to(matrices.device)
            for one in decompose(flat[:1])
        )
    chunks = flat.chunk(max(1, min(torch.get_num_threads(), len(flat) // _FEWEST_PER_THREAD)))
    parts = map_threads(decompose, chunks)
    whole = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return tuple(
        part.view(*matrices.shape[:-2], *part.shape[1:]).to(matrices.device) for part in whole
    )
