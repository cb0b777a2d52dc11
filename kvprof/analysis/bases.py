"""Orthogonal bases from Gram matrices, and what is lost when only their first columns are kept."""

import torch
from torch import Tensor

from kvprof.analysis.linalg import column_signs, eigh

__all__ = ["eigenbasis", "lost_energy", "lost_product"]


def eigenbasis(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors, the largest first.

    The eigenvectors of a Gram matrix are the right singular vectors of the stacked vectors
    (FDC §5.1, ZACK §4.3).

    Parameters
    ----------
    gram : Tensor
        ``[..., d, d]`` float64, symmetric, positive semi-definite.

    Returns
    -------
    values : Tensor
        ``[..., d]`` descending, negative rounding errors cut to 0.
    basis : Tensor
        ``[..., d, d]``, one direction per column; `column_signs` says which way each points.
    """
    values, vectors = eigh(gram)
    basis = vectors.flip(-1)
    return values.flip(-1).clamp_min(0.0), basis * column_signs(basis)


def lost_energy(gram: Tensor, basis: Tensor) -> Tensor:
    """Return the share of energy that is lost at every rank: ``‖X − X P_r‖² / ‖X‖²``.

    Parameters
    ----------
    gram : Tensor
        ``XᵀX``, ``[..., d, d]``.
    basis : Tensor
        ``[..., d, d]`` orthogonal; `P_r` projects on its first r columns.

    Returns
    -------
    Tensor
        ``[..., d + 1]`` for r = 0 … d; the last is exactly 0.
    """
    kept = torch.einsum("...ij,...ik,...kj->...j", basis, gram, basis).clamp_min(0.0)
    return _tail(kept) / gram.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True).clamp_min(_TINY)


def lost_product(left: Tensor, right: Tensor, basis: Tensor) -> Tensor:
    """Return the squared relative error of a product at every rank.

    ``‖X (I − P_r) Yᵀ‖² / ‖X Yᵀ‖²`` from ``XᵀX`` and ``YᵀY``: with X = Q and Y = K the pooled
    score error, with X = V and Y = W_Oᵀ the output error.

    Parameters
    ----------
    left, right : Tensor
        Gram matrices ``[..., d, d]`` of X and Y.
    basis : Tensor
        ``[..., d, d]`` orthogonal.

    Returns
    -------
    Tensor
        ``[..., d + 1]`` for r = 0 … d; the last is exactly 0.
    """
    rotated_left = basis.mT @ left @ basis
    rotated_right = basis.mT @ right @ basis
    product = rotated_left * rotated_right
    # The error at rank r is the sum over the block i, j >= r. Peel the blocks off from the end.
    columns = product.tril().sum(-2)
    rows = product.triu(1).sum(-1)
    shells = columns + rows
    total = product.sum((-2, -1)).unsqueeze(-1)
    return _tail(shells).clamp_min(0.0) / total.clamp_min(_TINY)


_TINY = torch.finfo(torch.float64).tiny


def _tail(values: Tensor) -> Tensor:
    """Return ``Σ_{i ≥ r} values_i`` for r = 0 … d."""
    tail = values.flip(-1).cumsum(-1).flip(-1)
    return torch.cat([tail, torch.zeros_like(tail[..., :1])], dim=-1)
