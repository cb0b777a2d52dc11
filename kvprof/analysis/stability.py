"""How alike two rotations are: three figures, because the papers' own is not well posed.

FDC §3.2 and §6.7, ZACK §4.3 and §6.6 compare singular vectors element by element. The sign of a
column is arbitrary, and columns with nearly equal singular values mix freely at no loss, so that
ratio alone neither shows nor excludes a cost. Beside it stand the distance between the subspaces
in use, and what a user pays for the wrong basis.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kvprof.analysis.bases import eigenbasis, lost_energy, lost_product
from kvprof.analysis.linalg import map_threads, svd
from kvprof.analysis.moments import Moments
from kvprof.analysis.pairs import pair_gram
from kvprof.errors import UsageError

__all__ = [
    "FACTOR_PAIRS",
    "HAAR_RATIO",
    "ColumnRatio",
    "Loss",
    "PairFactors",
    "Run",
    "Stack",
    "align_clusters",
    "align_signs",
    "cluster_sizes",
    "clusters",
    "column_ratio",
    "extra_loss",
    "loss",
    "pair_factors",
    "principal_angle",
    "relative_extra",
    "seed_perturbation",
    "subspace_distance",
]

#: What two unrelated bases typically give: no alignment, then signs aligned at d = 64 to 128.
HAAR_RATIO = (math.sqrt(2.0), 1.35)

#: Below this share of the energy a loss counts as none, and an extra loss is given as it is.
_OWN_LOSS_FLOOR = 1e-6

#: Cosine of an angle above which its sine is the better conditioned of the two.
_SINE_ABOVE = 0.7

# Heads of one rank that a thread takes at a time: few enough that no thread waits for another.
_HEADS_PER_TASK = 16


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

    First-order perturbation theory: columns i and i+1 of a basis rotate into each other by
    ``t_iᵀ ΔC t_{i+1} / (λ_i − λ_{i+1})``. The numerator, root mean square over all pairs of
    seeds, is what a gap of eigenvalues must exceed for the columns to be distinguished.

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
    # Only the elements beside the diagonal of tᵀ C t, without the rest of the product.
    mixing = ((grams @ target)[..., 1:] * target[..., :-1]).sum(-2)
    # The mean square over all pairs of seeds is twice the unbiased variance.
    return (2.0 * mixing.var(0, correction=1)).sqrt()


def clusters(values: Tensor, perturbation: Tensor) -> Tensor:
    """Return groups of neighbouring columns that a change of seed cannot tell apart.

    Parameters
    ----------
    values : Tensor
        ``[..., d]`` eigenvalues of the target, descending.
    perturbation : Tensor
        ``[..., d − 1]``, as `seed_perturbation` gives it, or any scale to hold the gaps against.

    Returns
    -------
    Tensor
        ``[..., d]`` int64: the first column of the group that each column is in. Groups are
        consecutive columns, and none is wider than d/8, so that unrelated bases never look
        aligned.
    """
    width = values.shape[-1]
    cap = max(1, width // 8)
    index = torch.arange(width, device=values.device)
    starts_run = values.new_ones(values.shape, dtype=torch.bool)
    starts_run[..., 1:] = ~(values[..., :-1] - values[..., 1:] <= perturbation)
    run_start = torch.where(starts_run, index, 0).cummax(-1).values
    # A run wider than the cap is cut from its front.
    return run_start + (index - run_start) // cap * cap


def cluster_sizes(starts: Tensor) -> Tensor:
    """Return the width of the group that each column is in, from `clusters`; ``[..., d]``."""
    columns_from = torch.zeros_like(starts).scatter_add_(-1, starts, torch.ones_like(starts))
    return columns_from.gather(-1, starts)


def align_clusters(source: Tensor, target: Tensor, starts: Tensor) -> Tensor:
    """Return `source` with each group of columns turned as near to the target's as possible.

    Orthogonal Procrustes inside each group; a group of one column is sign alignment.

    Parameters
    ----------
    source, target : Tensor
        ``[heads, d, d]`` bases.
    starts : Tensor
        ``[heads, d]`` as `clusters` gives them; on the CPU no step here waits for a GPU.
    """
    heads, width = starts.shape
    # All heads' columns as rows of one matrix; a group is consecutive rows of it.
    ours, theirs, aligned = (
        basis.mT.reshape(heads * width, width)
        for basis in (source, target, align_signs(source, target))
    )
    sizes = cluster_sizes(starts).flatten()
    is_start = (starts == torch.arange(width, device=starts.device)).flatten()
    for size, number in enumerate(sizes.bincount().tolist()):
        if size < 2 or number == 0:
            continue
        first = (is_start & (sizes == size)).nonzero()
        rows = (first + torch.arange(size, device=first.device)).to(source.device)
        our_group, their_group = ours[rows], theirs[rows]
        left, _, right = svd(our_group @ their_group.mT)
        aligned[rows] = (left @ right).mT @ our_group
    return aligned.view(heads, width, width).mT


def subspace_distance(overlap: Tensor, ranks: int | Sequence[int]) -> Tensor:
    """Return ``‖P − P̂‖_F / sqrt(2 · min(r, d − r))`` of the leading subspaces, 0 at full rank.

    Computed from the part of one subspace outside the other, which does not cancel: equal
    subspaces give 0 to rounding, not to its square root.

    Parameters
    ----------
    overlap : Tensor
        ``[d, d]`` or ``[heads, d, d]``: ``sourceᵀ @ target`` of two orthogonal bases.
    ranks : int or sequence of int
        One rank for all heads, or one for each.

    Returns
    -------
    Tensor
        ``[]`` or ``[heads]``.
    """
    width = overlap.shape[-1]
    rank = torch.as_tensor(ranks, device=overlap.device)
    row, column = rank[..., None, None], torch.arange(width, device=overlap.device)
    outside = (column[:, None] >= row) & (column < row)
    squares = torch.where(outside, overlap.square(), 0.0).sum((-2, -1))
    return (squares / torch.minimum(rank, width - rank).clamp_min(1)).sqrt()


def principal_angle(overlap: Tensor, ranks: int | Sequence[int]) -> Tensor:
    """Return the largest principal angle between the leading subspaces, in radians.

    From the cosine where the angle is large and from the sine where it is small, so that angles
    near 0 and near π/2 are both exact. Arguments and result as for `subspace_distance`; computed
    on the CPU, so an `overlap` that is used again is best copied there once.
    """
    width = overlap.shape[-1]
    heads = overlap.reshape(-1, width, width).cpu()
    each = torch.as_tensor(ranks).expand(len(heads))
    members = [
        (rank, part)
        for rank in sorted(set(each.tolist()))
        if rank < width
        for part in (each == rank).nonzero()[:, 0].split(_HEADS_PER_TASK)
    ]
    angles = heads.new_zeros(len(heads))
    found = map_threads(lambda task: _largest_angles(heads[task[1]], task[0]), members)
    for (_, part), its in zip(members, found, strict=True):
        angles[part] = its
    return angles.view(overlap.shape[:-2]).to(overlap.device)


def _largest_angles(overlap: Tensor, rank: int) -> Tensor:
    """Return the largest angle of each of ``[n, d, d]``, at one rank below d."""
    # The complements' angles are the same ones, and theirs is the smaller matrix above d/2.
    inside = overlap[:, :rank, :rank] if 2 * rank <= overlap.shape[-1] else overlap[:, rank:, rank:]
    cosine = torch.linalg.svdvals(inside)[:, -1]
    angles: Tensor = cosine.clamp_max(1.0).acos()
    small = (cosine > _SINE_ABOVE).nonzero()[:, 0]
    if len(small):
        sine = torch.linalg.svdvals(overlap[small, rank:, :rank])[:, 0]
        angles[small] = sine.clamp_max(1.0).asin()
    return angles


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


# --- The two factors of each pair, per token, so that snapshots of different size compare.


#: Pairs for which an error of a product is defined: scores for the first and third, outputs else.
FACTOR_PAIRS = ("qk", "vo", "k", "v")


@dataclass(frozen=True)
class PairFactors:
    """Gram matrices of one pair, one entry per layer, ``[num_kv_heads, d, d]`` float64.

    Attributes
    ----------
    gram : list of Tensor
        What the basis is taken from, on a scale that does not depend on the number of tokens.
    left, right : list of Tensor
        Of the two factors of the product: Q and K for the scores, V and W_Oᵀ for the outputs.
    """

    gram: list[Tensor]
    left: list[Tensor]
    right: list[Tensor]


def pair_factors(moments: Moments, pair: str) -> PairFactors:
    """Take the factors of `pair` out of moments.

    V always weighs `VALUE_WEIGHT_TOKENS` tokens against W_O in ``vo``, so that a sweep of token
    counts varies the estimate and nothing else.

    Raises
    ------
    UsageError
        When the pair has no product.
    """
    if pair not in FACTOR_PAIRS:
        raise UsageError(
            f"--pairs: {pair!r} has no basis to compare; use {', '.join(FACTOR_PAIRS)}"
        )
    per_token = 1.0 / moments.tokens
    gram, left, right = [], [], []
    for index, layer in enumerate(moments.layers):
        weighted = pair_gram(moments, index, pair)
        gram.append(weighted if pair == "vo" else weighted * per_token)
        if pair in ("qk", "k"):
            left.append(layer.grouped("q") * per_token)
            right.append(layer.gram("k") * per_token)
        else:
            left.append(layer.gram("v") * per_token)
            right.append(moments.output_weight(index))
    return PairFactors(gram, left, right)


# --- What one pass over one source leaves for comparison: its moments, and bases of all heads.


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
