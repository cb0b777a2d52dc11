"""Bases from Gram matrices, orthogonal or in pairs, and what is lost with their last columns."""

import torch
from torch import Tensor

from kvprof.analysis.linalg import column_signs, eigh, svd
from kvprof.analysis.moments import resolution

__all__ = [
    "GAUGE_FLOOR",
    "bit_reversed",
    "block_hadamard",
    "eigenbasis",
    "lost_energy",
    "lost_product",
    "optimal_pair",
    "random_rotation",
    "walsh_hadamard",
    "whitened_pair",
]


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


# --- Pairs of bases that are best for a product, and the whitened decomposition of grouped
# weights.
#
# A pair ``(down, up)`` stores ``X @ down[:, :r]`` and stands for ``X @ down[:, :r] @ up[:, :r].T``.
# At full rank ``down @ up.T`` is the identity, also on directions that calibration never saw.


#: Columns that hardly matter keep a finite scale: with (almost) nothing to balance, the gauge of
#: this share of the largest singular value is used. It bounds what unseen data is scaled by.
GAUGE_FLOOR = 1e-4


def optimal_pair(stored: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best pair for ``X @ Y.T``, with X stored, at every rank.

    KQ-SVD (arXiv 2512.05916) with X = K and Y = Q; with X = V and ``Y.T = [W_O^1 … W_O^G]`` the
    same for values. From ``R_xᵀR_x = stored``, ``R_yᵀR_y = other`` and the singular value
    decomposition ``R_x R_yᵀ = U Σ Wᵀ``: ``down = R_x⁻¹ U √Σ`` and ``up = R_xᵀ U / √Σ`` (the paper
    leaves Σ on one side; the gauge gives both latents the energy σ_i per column). ``R_x`` comes
    from the eigen-decomposition rather than Cholesky, so that a singular moment is no special
    case: directions of `stored` below what a Gram matrix resolves are appended last, as they are.

    Parameters
    ----------
    stored, other : Tensor
        ``[heads, d, d]`` float64 Gram matrices of X and Y, per token, so that both latents are of
        comparable scale.

    Returns
    -------
    down, up : Tensor
        ``[heads, d, d]``; the first r columns are the pair of rank r.
    values : Tensor
        ``[heads, d]`` singular values of ``X @ Y.T``, descending. The squared error at rank r is
        the sum of the squares from r on.
    """
    energies, directions = eigenbasis(stored)
    other_energies, other_directions = eigenbasis(other)
    width = stored.shape[-1]
    lengths = energies.sqrt()
    seen = lengths > resolution(width) * lengths[..., :1]
    lengths = torch.where(seen, lengths, 0.0)
    # R_x = diag(lengths) @ directions.T; rows that were not seen are zero.
    middle = lengths.unsqueeze(-1) * (directions.mT @ other_directions)
    left, values, _ = svd(middle * other_energies.sqrt().unsqueeze(-2))
    left, values = _unseen_last(left, values, seen)
    inverse = torch.where(seen, 1.0 / lengths.clamp_min(torch.finfo(torch.float64).tiny), 1.0)
    forward = torch.where(seen, lengths, 1.0)
    gauge = _gauge(values, seen.sum(-1))
    down = directions @ (inverse.unsqueeze(-1) * left) * gauge.unsqueeze(-2)
    up = directions @ (forward.unsqueeze(-1) * left) / gauge.unsqueeze(-2)
    signs = column_signs(up)
    return down * signs, up * signs, values


def whitened_pair(gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Palu's whitened decomposition of a grouped projection, from its output's moments.

    Palu (§3, appendix K as its code has it) takes ``L Lᵀ = C_x``, ``Lᵀ W = U Σ Vᵀ``,
    ``A = L⁻ᵀ U √Σ`` and ``B = √Σ Vᵀ``. As ``A = W V / √Σ``, and V and Σ² are the eigenvectors and
    eigenvalues of ``Wᵀ C_x W``, which is the Gram matrix of the output ``X W``, neither C_x nor W
    is needed (Swift-SVD makes the same observation): ``down = V / √Σ``, ``up = V √Σ``. With a bias
    the output holds it. The pair is nested: a lower rank is a truncation (TALE appendix B).

    Parameters
    ----------
    gram : Tensor
        ``[groups, n*d, n*d]`` float64 Gram matrix of the group's output, per token.

    Returns
    -------
    down, up, values
        As `optimal_pair`; the squared error of the output at rank r is ``Σ_{i ≥ r} values_i²``.
    """
    energies, directions = eigenbasis(gram)
    values = energies.sqrt()
    values = torch.where(values > resolution(gram.shape[-1]) * values[..., :1], values, 0.0)
    gauge = _gauge(values, (values > 0).sum(-1)).unsqueeze(-2)
    return directions / gauge, directions * gauge, values


def walsh_hadamard(width: int) -> Tensor:
    """Return an orthogonal Walsh-Hadamard matrix, block-diagonal where `width` is no power of two.

    Palu (§3.4) folds it between ``down`` and ``up`` so that latents quantise well. A width such as
    80 has no such matrix of its own: blocks of its binary parts (64 and 16) are used. It mixes the
    columns of a latent, so truncating to a lower token level is no longer possible.

    Parameters
    ----------
    width : int

    Returns
    -------
    Tensor
        ``[width, width]`` float64.
    """
    blocks = []
    for power in reversed(range(width.bit_length())):
        if width >> power & 1:
            block = torch.ones(1, 1, dtype=torch.float64)
            for _ in range(power):
                block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
            blocks.append(block / block.shape[0] ** 0.5)
    result = torch.zeros(width, width, dtype=torch.float64)
    start = 0
    for block in blocks:
        stop = start + len(block)
        result[start:stop, start:stop] = block
        start = stop
    return result


def block_hadamard(width: int, block: int = 0) -> Tensor:
    """Return Walsh-Hadamard matrices of `block` columns along a diagonal (SAW-INT4, §3).

    What is left over at the end, and a `block` that is no power of two, is cut into binary parts as
    by `walsh_hadamard`.

    Parameters
    ----------
    width : int
    block : int
        Columns of a block, at most `width`; 0 for the whole width.

    Returns
    -------
    Tensor
        ``[width, width]`` float64, orthogonal.
    """
    size = min(block, width) or width
    whole, rest = divmod(width, size)
    result: Tensor = torch.block_diag(*[walsh_hadamard(size)] * whole, walsh_hadamard(rest))
    return result


def bit_reversed(width: int) -> Tensor:
    """Return numbers below `width` in bit-reversed order, ``[width]`` int64."""
    bits = max(0, width - 1).bit_length()
    order = torch.zeros(2**bits, dtype=torch.int64)
    for bit in range(bits):
        order |= (torch.arange(2**bits) >> bit & 1) << (bits - 1 - bit)
    return order[order < width]


def random_rotation(width: int, seed: int) -> Tensor:
    """Return an orthogonal matrix drawn evenly from all there are, ``[width, width]`` float64.

    The QR decomposition of normal numbers, each column's sign such that R's diagonal is positive
    (without which the draw is not even).

    Parameters
    ----------
    width : int
    seed : int
    """
    source = torch.Generator().manual_seed(seed)
    normal = torch.randn(width, width, generator=source, dtype=torch.float64)
    basis, upper = torch.linalg.qr(normal)
    result: Tensor = basis * torch.where(upper.diagonal() < 0, -1.0, 1.0)
    return result


def _gauge(values: Tensor, seen: Tensor) -> Tensor:
    """Return √σ per column, bounded from below; 1 for the `unseen` columns at the end."""
    largest = values[..., :1]
    floored = torch.maximum(values, GAUGE_FLOOR * largest).sqrt()
    columns = torch.arange(values.shape[-1], device=values.device)
    unscaled = (columns >= seen.unsqueeze(-1)) | (largest <= 0)
    return torch.where(unscaled, 1.0, floored)


def _unseen_last(left: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Complete `left` to an orthogonal matrix, unseen directions last; zero values may mix them."""
    width = left.shape[-1]
    result = torch.zeros_like(left)
    values = values.clone()
    for head in range(len(left)):
        count = int(seen[head].sum())
        significant = values[head] > resolution(width) * values[head, :1]
        block = left[head, :count][:, significant]
        kept = block.shape[1]
        result[head, :count, :kept] = block
        if kept < count:
            completed = torch.linalg.qr(block, mode="complete").Q if kept else None
            rest = torch.eye(count).to(left) if completed is None else completed[:, kept:]
            result[head, :count, kept:count] = rest
        unseen = torch.arange(count, width)
        result[head, unseen, unseen] = 1.0
        values[head, kept:] = 0.0
    return result, values
