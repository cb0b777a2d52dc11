"""How alike two rotations are: three figures, because the papers' own is not well posed.

FDC §3.2 and §6.7, ZACK §4.3 and §6.6 compare singular vectors element by element. The sign of a
column is arbitrary, and columns with nearly equal singular values mix freely at no loss, so that
ratio alone neither shows nor excludes a cost. Beside it stand the distance between the subspaces
in use, and what a user pays for the wrong basis.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprof.analysis.bases import lost_energy, lost_product
from kvprof.analysis.linalg import svd, svdvals

__all__ = [
    "HAAR_RATIO",
    "ColumnRatio",
    "Loss",
    "align_clusters",
    "align_signs",
    "clusters",
    "column_ratio",
    "extra_loss",
    "loss",
    "principal_angle",
    "relative_extra",
    "seed_perturbation",
    "subspace_distance",
]

#: What two unrelated bases typically give: no alignment, then signs aligned at d = 64 to 128.
HAAR_RATIO = (math.sqrt(2.0), 1.35)

#: Below this share of the energy a loss counts as none, and an extra loss is given as it is.
_OWN_LOSS_FLOOR = 1e-6


@dataclass(frozen=True)
class ColumnRatio:
    """The papers' figures of one comparison, ``[...]`` each (one per head).

    Attributes
    ----------
    delta : Tensor
        ``mean |R_source − R_target|`` over the elements.
    epsilon : Tensor
        ``mean |R_target|``.
    """

    delta: Tensor
    epsilon: Tensor


def column_ratio(source: Tensor, target: Tensor) -> ColumnRatio:
    """Return δ and ε of FDC §3.2 (ZACK §4.3) for ``[..., d, d]`` bases, columns as they stand."""
    return ColumnRatio((source - target).abs().mean((-2, -1)), target.abs().mean((-2, -1)))


def align_signs(source: Tensor, target: Tensor) -> Tensor:
    """Return `source` with each column's sign chosen to point along the target's column."""
    inner = (source * target).sum(-2, keepdim=True)
    return torch.where(inner < 0, -source, source)


def seed_perturbation(grams: Tensor, target: Tensor) -> Tensor:
    """Return how strongly a change of seed mixes neighbouring columns.

    First-order perturbation theory: columns i and i+1 of a basis turn into each other by
    ``t_iᵀ ΔC t_{i+1} / (λ_i − λ_{i+1})``. The numerator, root mean square over all pairs of
    seeds, is what a gap of eigenvalues must exceed for the columns to be told apart.

    Parameters
    ----------
    grams : Tensor
        ``[seeds, ..., d, d]`` Gram matrices of the same source with other seeds, on the same
        scale as the target's eigenvalues; at least two seeds.
    target : Tensor
        ``[..., d, d]`` basis in which to look.

    Returns
    -------
    Tensor
        ``[..., d − 1]``.
    """
    if target.shape[-1] < 2:
        return target.new_zeros(*target.shape[:-2], 0)
    mixing = (target.mT @ grams @ target).diagonal(offset=1, dim1=-2, dim2=-1)
    # The mean square over all pairs of seeds is twice the unbiased variance.
    return (2.0 * mixing.var(0, correction=1)).sqrt()


def clusters(values: Tensor, perturbation: Tensor) -> list[list[int]]:
    """Return groups of neighbouring columns that a change of seed cannot tell apart.

    Parameters
    ----------
    values : Tensor
        ``[d]`` eigenvalues of the target, descending.
    perturbation : Tensor
        ``[d − 1]``, as `seed_perturbation` gives it, or any scale to hold the gaps against.

    Returns
    -------
    list of list of int
        Consecutive column indices; every column is in exactly one group, and no group is wider
        than d/8, so that unrelated bases never look aligned.
    """
    width = values.shape[0]
    cap = max(1, width // 8)
    joined = ((values[:-1] - values[1:]) <= perturbation).tolist()
    groups = [[0]]
    for column in range(1, width):
        if joined[column - 1] and len(groups[-1]) < cap:
            groups[-1].append(column)
        else:
            groups.append([column])
    return groups


def align_clusters(source: Tensor, target: Tensor, groups: list[list[list[int]]]) -> Tensor:
    """Return `source` with each group of columns turned as near to the target's as possible.

    Orthogonal Procrustes inside each group; a group of one column is sign alignment.

    Parameters
    ----------
    source, target : Tensor
        ``[heads, d, d]`` bases.
    groups : list of list of list of int
        For each head as `clusters` gives them.
    """
    aligned = align_signs(source, target)
    by_size: dict[int, list[tuple[int, list[int]]]] = {}
    for head, columns in enumerate(groups):
        for group in columns:
            by_size.setdefault(len(group), []).append((head, group))
    for size, members in by_size.items():
        if size == 1:
            continue
        rows = torch.tensor([head for head, _ in members])[:, None]
        columns_of = torch.tensor([group for _, group in members])
        # Indexing with [n, 1] and [n, size] moves the matrices' rows last: [n, size, d].
        ours, theirs = source[rows, :, columns_of], target[rows, :, columns_of]
        left, _, right = svd(ours @ theirs.mT)
        aligned[rows, :, columns_of] = (left @ right).mT @ ours
    return aligned


def subspace_distance(source: Tensor, target: Tensor, rank: int) -> Tensor:
    """Return ``‖P − P̂‖_F / sqrt(2 · min(r, d − r))`` for ``[..., d, d]`` bases, 0 at full rank.

    Computed from the part of one subspace outside the other, which does not cancel: equal
    subspaces give 0 to rounding, not to its square root.
    """
    width = source.shape[-1]
    if rank >= width:
        return source.new_zeros(source.shape[:-2])
    outside = _outside(source, target, rank)
    return outside.square().sum((-2, -1)).sqrt() / math.sqrt(min(rank, width - rank))


def principal_angle(source: Tensor, target: Tensor, rank: int) -> Tensor:
    """Return the largest principal angle between the leading subspaces, in radians, ``[...]``.

    From the cosine where the angle is large and from the sine where it is small, so that angles
    near 0 and near π/2 are both exact.
    """
    if rank >= source.shape[-1]:
        return source.new_zeros(source.shape[:-2])
    cosine = svdvals(source[..., :rank].mT @ target[..., :rank])[..., -1]
    angle = cosine.clamp_max(1.0).arccos()
    small = cosine > 0.7
    if bool(small.any()):
        sine = svdvals(_outside(source[small], target[small], rank))[..., 0]
        angle[small] = sine.clamp_max(1.0).arcsin()
    return angle


def _outside(source: Tensor, target: Tensor, rank: int) -> Tensor:
    """Return what the target's leading columns have outside the source's, ``[..., d − r, r]``."""
    return source[..., rank:].mT @ target[..., :rank]


def relative_extra(offline: Tensor, own: Tensor, *, floor: float = _OWN_LOSS_FLOOR) -> Tensor:
    """Return ``(offline − own) / own`` where own exceeds `floor`, else ``offline − own``."""
    extra = offline - own
    return torch.where(own > floor, extra / own.clamp_min(floor), extra)


@dataclass(frozen=True)
class Loss:
    """What is lost of a dataset at every rank, ``[..., d + 1]`` for r = 0 … d.

    Attributes
    ----------
    energy : Tensor
        Share of the pair's energy.
    product : Tensor
        Relative Frobenius error of the product (scores, or outputs).
    """

    energy: Tensor
    product: Tensor


def loss(gram: Tensor, left: Tensor, right: Tensor, basis: Tensor) -> Loss:
    """Return what is lost of a dataset when only leading columns of `basis` are kept.

    Parameters
    ----------
    gram : Tensor
        ``[..., d, d]``, the dataset's own Gram matrix of the pair.
    left, right : Tensor
        Gram matrices of the two factors on the dataset (Q and K, or V and W_Oᵀ).
    basis : Tensor
        ``[..., d, d]`` orthogonal.
    """
    return Loss(lost_energy(gram, basis), lost_product(left, right, basis).sqrt())


def extra_loss(offline: Loss, own: Loss) -> Loss:
    """Return what using the offline basis costs beyond the dataset's own, at every rank.

    Relative to the dataset's own loss where that exceeds 1e-6 of the energy (1e-3 of the norm for
    the product), else as it is. The product's can be negative: a dataset's own joint basis is not
    the best one for the product.
    """
    return Loss(
        relative_extra(offline.energy, own.energy),
        relative_extra(offline.product, own.product, floor=math.sqrt(_OWN_LOSS_FLOOR)),
    )
