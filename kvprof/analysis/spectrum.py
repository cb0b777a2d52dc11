"""Singular-value spectra and the ranks that a removal rate picks (FDC §3.2, §5.2; ZACK §5.2)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprof.analysis.moments import resolution

__all__ = [
    "Removal",
    "coefficient_of_variation",
    "effective_rank",
    "energy_kept",
    "from_eigenvalues",
    "removal",
    "removal_ranks",
    "round_up",
    "singular_values",
]


def singular_values(gram: Tensor) -> Tensor:
    """Return the singular values of stacked vectors from their Gram matrix.

    Parameters
    ----------
    gram : Tensor
        ``[..., d, d]`` float64, symmetric.

    Returns
    -------
    Tensor
        ``[..., d]`` float64, descending. Values below `resolution` times the largest are rounding
        noise of the Gram matrix and returned as exact zeros.
    """
    return from_eigenvalues(torch.linalg.eigvalsh(gram).flip(-1))


def from_eigenvalues(eigenvalues: Tensor) -> Tensor:
    """Return singular values from a Gram matrix's eigenvalues ``[..., d]``, noise cut to zero."""
    values = eigenvalues.clamp_min(0.0).sqrt()
    return torch.where(values >= resolution(values.shape[-1]) * values[..., :1], values, 0.0)


def effective_rank(values: Tensor) -> Tensor:
    """Return ``exp(entropy)`` of the singular values normalised to sum 1, ``[...]``.

    Between 1 (one direction) and d (all alike); 0 for a head that is all zero.
    """
    total = values.sum(-1, keepdim=True)
    share = values / total.clamp_min(torch.finfo(values.dtype).tiny)
    entropy = -torch.xlogy(share, share).sum(-1)
    return torch.where(total.squeeze(-1) > 0, entropy.exp(), 0.0)


def energy_kept(values: Tensor) -> Tensor:
    """Return the share of ``Σ s²`` that the first r dimensions keep, ``[..., d]`` for r = 1 … d."""
    energy = values.square().cumsum(-1)
    total = energy[..., -1:]
    return torch.where(total > 0, energy / total.clamp_min(torch.finfo(values.dtype).tiny), 1.0)


def coefficient_of_variation(values: list[Tensor]) -> float:
    """Return std / mean of the largest singular value over all heads of all layers.

    FDC tables 3 and 4, ZACK tables 6 and 7; the population standard deviation.

    Parameters
    ----------
    values : list of Tensor
        Per layer ``[num_kv_heads, d]``, descending.
    """
    largest = torch.cat([layer[:, 0].cpu() for layer in values])
    mean = float(largest.mean())
    return float(largest.std(correction=0)) / mean if mean > 0 else 0.0


def removal_ranks(values: Tensor, removal_rate: float) -> Tensor:
    """Return the fewest leading dimensions whose removed rest is at most `removal_rate`.

    FDC eq. 1, ZACK eq. 6: ``Σ_removed s_i / Σ s_i ≤ r``, singular values and not their squares.

    Parameters
    ----------
    values : Tensor
        ``[..., d]``, descending.
    removal_rate : float
        Between 0 and 1.

    Returns
    -------
    Tensor
        ``[...]`` int64, at least 1.
    """
    # Sum from the small end, so that the tail is exact and rounding never keeps one too many.
    tail = values.flip(-1).cumsum(-1).flip(-1)
    removed = torch.cat([tail[..., 1:], torch.zeros_like(tail[..., :1])], dim=-1)
    # A share that equals the rate up to rounding counts as equal.
    allowed = removed <= removal_rate * tail[..., :1] * (1 + 1e-12)
    return allowed.to(torch.int64).argmax(-1) + 1


def round_up(rank: int, grid: int, width: int) -> int:
    """Round a rank up to a multiple of `grid`, at most the full `width`."""
    return min(math.ceil(rank / grid) * grid, width)


@dataclass(frozen=True)
class Removal:
    """Ranks that one removal rate gives, and what of the cache's dimensions is saved.

    Attributes
    ----------
    removal_rate : float
        FDC's r, shared by all heads, layers and both pairs.
    ranks_qk, ranks_vo : list of list of int
        ``[layer][kv_head]``, as eq. 1 asks.
    rounded_ranks_qk, rounded_ranks_vo : list of list of int
        The same, rounded up to `grid`.
    dim_rate, dim_rate_rounded : float
        ``1 - Σ(r_k + r_v) / Σ(d_k + d_v)`` of each.
    grid : int
        1 when nothing is rounded.
    """

    removal_rate: float
    ranks_qk: list[list[int]]
    ranks_vo: list[list[int]]
    rounded_ranks_qk: list[list[int]]
    rounded_ranks_vo: list[list[int]]
    dim_rate: float
    dim_rate_rounded: float
    grid: int


def removal(qk: list[Tensor], vo: list[Tensor], removal_rate: float, *, grid: int = 16) -> Removal:
    """Apply one removal rate to every head of a model.

    Parameters
    ----------
    qk, vo : list of Tensor
        Singular values per layer, ``[num_kv_heads, d]``; widths may differ between layers.
    removal_rate : float
        Between 0 and 1.
    grid : int
        Multiple that kernels want; ranks are rounded up to it.
    """
    ranks_qk = [removal_ranks(layer, removal_rate).tolist() for layer in qk]
    ranks_vo = [removal_ranks(layer, removal_rate).tolist() for layer in vo]
    rounded_qk = _rounded(ranks_qk, qk, grid)
    rounded_vo = _rounded(ranks_vo, vo, grid)
    full = sum(layer.numel() for layer in (*qk, *vo))

    def rate(*ranks: list[list[int]]) -> float:
        return 1.0 - sum(sum(layer) for pair in ranks for layer in pair) / full

    return Removal(
        removal_rate=removal_rate,
        ranks_qk=ranks_qk,
        ranks_vo=ranks_vo,
        rounded_ranks_qk=rounded_qk,
        rounded_ranks_vo=rounded_vo,
        dim_rate=rate(ranks_qk, ranks_vo),
        dim_rate_rounded=rate(rounded_qk, rounded_vo),
        grid=grid,
    )


def _rounded(ranks: list[list[int]], values: list[Tensor], grid: int) -> list[list[int]]:
    return [
        [round_up(rank, grid, layer.shape[-1]) for rank in heads]
        for heads, layer in zip(ranks, values, strict=True)
    ]
