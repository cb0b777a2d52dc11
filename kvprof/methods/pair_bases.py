"""The bases that methods choose from, for one layer's keys or values, from moments.

Errors are predicted per token: of keys after RoPE the mean squared error of the scaled scores (of
one query and key, summed over the group's queries), of values the squared error of ``V W_O``; of
shared latents (Palu, TALE), which scores do not see through RoPE, the energy lost of K or V.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvprof.analysis.bases import eigenbasis, lost_product, optimal_pair, whitened_pair
from kvprof.analysis.centring import centred_keys, layer_centre
from kvprof.analysis.moments import LossMoments, Moments, from_eigenvalues, group_size, joint_gram
from kvprof.analysis.pairs import pair_gram, query_head_gram
from kvprof.errors import UsageError
from kvprof.models.layout import LayerLayout

__all__ = [
    "KEY_BASES",
    "VALUE_BASES",
    "SideBases",
    "chosen",
    "loss_keys",
    "loss_values",
    "shared_bases",
    "shared_outputs",
]


@dataclass(frozen=True, eq=False)
class SideBases:
    """Bases of one layer's keys or values at full rank; a lower rank is their first columns.

    Attributes
    ----------
    heads : int
        KV heads per group.
    down, up : Tensor
        ``[groups, width, width]`` float32 on the CPU.
    values : Tensor
        ``[groups, width]`` singular values, descending, float64.
    errors : Tensor
        ``[groups, width + 1]`` predicted squared error at every rank, float64.
    per_query_head : bool
        Whether a group is a query head with a stored key of its own, instead of KV heads.
    counted : Tensor or None
        ``[groups, width]``: what a removal rate counts, where that is not `values`.
    """

    heads: int
    down: Tensor
    up: Tensor
    values: Tensor
    errors: Tensor
    per_query_head: bool = False
    counted: Tensor | None = None


def svd_qk(moments: Moments, facts: LayerLayout) -> SideBases:
    """``svd-qk``: the SVD of queries and keys, each query head bringing its key: ``C_q + G · C_k``.

    The sum over a group of FDC's pairs of each query head with its key head (FDC §5.1, ZACK §4.3),
    which keeps more accuracy than stacking the keys once.
    """
    return _key_basis(moments, facts, pair_gram(moments, facts.index, "qk", paired=True))


def svd_qk_stacked(moments: Moments, facts: LayerLayout) -> SideBases:
    """``svd-qk-stacked``: the group's queries stacked on its keys once, ``C_q + C_k``."""
    return _key_basis(moments, facts, pair_gram(moments, facts.index, "qk"))


def svd_qk_literal(moments: Moments, facts: LayerLayout) -> SideBases:
    """``svd-qk-literal``: a basis and a stored key per query head, ``C_q^h + C_k``.

    FDC §5.1 to the letter; with G query heads per KV head it stores G keys where the model stores
    one. A target's predicted error is that of its own query head's scores.
    """
    layer = moments.layers[facts.index]
    queries = layer.gram("q").cpu() / moments.tokens * facts.scaling**2
    keys = layer.gram("k").cpu() / moments.tokens
    keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], dim=0)
    bases = _orthogonal(query_head_gram(moments, facts.index).cpu(), queries, keys)
    return replace(bases, per_query_head=True)


def svd_k(moments: Moments, facts: LayerLayout) -> SideBases:
    """``svd-k``: the SVD of the keys alone (ZACK §3.1's strawman, EigenAttention, Loki)."""
    return _key_basis(moments, facts, moments.layers[facts.index].gram("k"))


def kq(moments: Moments, facts: LayerLayout) -> SideBases:
    """``kq``: the best pair for ``Q Kᵀ`` (KQ-SVD).

    A removal rate ρ lets go ρ of keys without their mean, and ρ⁴ of the mean, which says nothing
    about a token: in layer 0 of Qwen2.5-Coder-1.5B it is 99 % of the sum, and left the least rank.
    """
    query, key = _query_key(moments, facts)
    layer = moments.layers[facts.index]
    bases = _optimal(key, query)
    if layer.cross is None:  # moments without the mean already, or that cannot tell it
        return bases
    centre = layer_centre(layer, moments.tokens, None, by_query=True, values=False)
    _, _, rest = optimal_pair(centred_keys(layer, centre).cpu() / moments.tokens, query)
    return replace(bases, counted=_mostly_rest(bases.values, rest.sum(-1, keepdim=True)))


def _mostly_rest(values: Tensor, rest: Tensor) -> Tensor:
    """Return values whose sum from a rank on is the least ρ with ``ρ rest + ρ⁴ mean`` ≥ theirs."""
    lost = values.flip(-1).cumsum(-1).flip(-1)
    mean = (lost[..., :1] - rest).clamp_min(0)
    low, high = torch.zeros_like(lost), torch.ones_like(lost)
    for _ in range(60):  # halvings: to the last digit
        rate = (low + high) / 2
        enough = rate * rest + rate**4 * mean >= lost
        low, high = torch.where(enough, low, rate), torch.where(enough, rate, high)
    return high - torch.cat([high[..., 1:], torch.zeros_like(high[..., :1])], dim=-1)


def svd_vo(moments: Moments, facts: LayerLayout) -> SideBases:
    """``svd-vo``: the SVD of V stacked on W_Oᵀ, V weighing 8,192 tokens (ZACK §4.3)."""
    return _value_basis(moments, facts, pair_gram(moments, facts.index, "vo"))


def svd_vo_raw(moments: Moments, facts: LayerLayout) -> SideBases:
    """``svd-vo-raw``: the same with V weighing as many tokens as were seen, as ZACK states it."""
    gram = pair_gram(moments, facts.index, "vo", value_weight_tokens=None)
    return _value_basis(moments, facts, gram)


def svd_v(moments: Moments, facts: LayerLayout) -> SideBases:
    """``svd-v``: the SVD of the values alone."""
    return _value_basis(moments, facts, moments.layers[facts.index].gram("v"))


def weight_v(moments: Moments, facts: LayerLayout) -> SideBases:
    """``weight-v``: the SVD of W_V alone (what FDC §5.2 says of V)."""
    return _value_basis(moments, facts, pair_gram(moments, facts.index, "w_v"))


def vo_opt(moments: Moments, facts: LayerLayout) -> SideBases:
    """``vo-opt``: the best pair for ``V [W_O^1 … W_O^G]``."""
    value, output = _value_output(moments, facts)
    return _optimal(value, output)


#: By the names that the options `keys` and `values` of a method take.
KEY_BASES: dict[str, Callable[[Moments, LayerLayout], SideBases]] = {
    "svd-qk": svd_qk,
    "svd-qk-stacked": svd_qk_stacked,
    "svd-qk-literal": svd_qk_literal,
    "svd-k": svd_k,
    "kq": kq,
}
VALUE_BASES: dict[str, Callable[[Moments, LayerLayout], SideBases]] = {
    "svd-vo": svd_vo,
    "svd-vo-raw": svd_vo_raw,
    "svd-v": svd_v,
    "weight-v": weight_v,
    "vo-opt": vo_opt,
}


def shared_bases(moments: Moments, facts: LayerLayout, vector: str, heads: int) -> SideBases:
    """Return Palu's whitened decomposition over groups of heads (also TALE's of V).

    Parameters
    ----------
    moments : Moments
        Kept with ``joint_heads`` a multiple of the group; for keys with ``pre_rope``.
    facts : LayerLayout
    vector : str
        ``k_pre`` or ``v``.
    heads : int
        KV heads per group; 0 for all of the layer's.
    """
    size = group_size(heads or facts.num_kv_heads, facts.num_kv_heads)
    gram = joint_gram(moments.layers[facts.index], vector, size).cpu() / moments.tokens
    down, up, values = whitened_pair(gram)
    return SideBases(size, down.float(), up.float(), values, _tail_energy(values))


def shared_outputs(moments: Moments, facts: LayerLayout, heads: int) -> SideBases:
    """Return ``vo-opt`` for latents of V that groups of heads share.

    The optimal pair of the group's values side by side and of a block-diagonal matrix of its W_O^h:
    heads attend to unlike tokens, so that what one's error does to the output is taken to be
    uncorrelated with the others'.

    Parameters
    ----------
    moments : Moments
        Kept with ``joint_heads`` a multiple of the group.
    facts : LayerLayout
    heads : int
        KV heads per group; 0 for all of the layer's.
    """
    size = group_size(heads or facts.num_kv_heads, facts.num_kv_heads)
    stored = joint_gram(moments.layers[facts.index], "v", size).cpu() / moments.tokens
    _, outputs = _value_output(moments, facts)
    blocks = [torch.block_diag(*part) for part in outputs.split(size)]
    return replace(_optimal(stored, torch.stack(blocks)), heads=size)


def loss_keys(moments: Moments, facts: LayerLayout, loss: LossMoments) -> SideBases:
    """Return the pair whose errors are those of the next token: keys against their `LossMoments`.

    As ``kq``, with the Fisher information of a key in the place of the queries' moment: predicted
    errors are in nats, twice the divergence.
    """
    stored = moments.layers[facts.index].gram("k").cpu() / moments.tokens
    return _optimal(stored, loss.keys[facts.index])


def loss_values(
    moments: Moments, facts: LayerLayout, loss: LossMoments, heads: int = 1
) -> SideBases:
    """Return the same for values, in latents that groups of heads share.

    What heads of a group lose together is in the Fisher information of their values side by side,
    where `shared_outputs` has to take it to be uncorrelated.

    Parameters
    ----------
    moments : Moments
        Kept with ``joint_heads`` a multiple of the group where that is more than one head.
    facts : LayerLayout
    loss : LossMoments
    heads : int
        KV heads per group; 0 for all of the layer's.
    """
    size = group_size(heads or facts.num_kv_heads, facts.num_kv_heads)
    layer = moments.layers[facts.index]
    stored = (layer.gram("v") if size == 1 else joint_gram(layer, "v", size)).cpu()
    width = size * facts.v_head_dim
    whole = loss.values[facts.index]
    blocks = [
        whole[start : start + width, start : start + width]
        for start in range(0, whole.shape[-1], width)
    ]
    return replace(_optimal(stored / moments.tokens, torch.stack(blocks)), heads=size)


def _key_basis(moments: Moments, facts: LayerLayout, gram: Tensor) -> SideBases:
    query, key = _query_key(moments, facts)
    return _orthogonal(gram.cpu(), query, key)


def _value_basis(moments: Moments, facts: LayerLayout, gram: Tensor) -> SideBases:
    value = moments.layers[facts.index].gram("v").cpu() / moments.tokens
    return _orthogonal(gram.cpu(), value, moments.output_weight(facts.index).cpu())


def _query_key(moments: Moments, facts: LayerLayout) -> tuple[Tensor, Tensor]:
    """Per-token moments of the group's queries, scaled as scores are, and of the keys."""
    layer = moments.layers[facts.index]
    query = layer.grouped("q").cpu() / moments.tokens * facts.scaling**2
    return query, layer.gram("k").cpu() / moments.tokens


def _value_output(moments: Moments, facts: LayerLayout) -> tuple[Tensor, Tensor]:
    layer = moments.layers[facts.index]
    return layer.gram("v").cpu() / moments.tokens, layer.output_gram().cpu()


def _orthogonal(gram: Tensor, left: Tensor, right: Tensor) -> SideBases:
    energies, basis = eigenbasis(gram)
    size = (left * right).sum((-2, -1)).unsqueeze(-1)  # ‖X Yᵀ‖²
    errors = lost_product(left, right, basis) * size
    flat = basis.float()
    return SideBases(1, flat, flat, from_eigenvalues(energies), errors)


def _optimal(stored: Tensor, other: Tensor) -> SideBases:
    down, up, values = optimal_pair(stored, other)
    return SideBases(1, down.float(), up.float(), values, _tail_energy(values))


def _tail_energy(values: Tensor) -> Tensor:
    tail = values.square().flip(-1).cumsum(-1).flip(-1)
    return torch.cat([tail, torch.zeros_like(tail[..., :1])], dim=-1)


def chosen(
    name: str, known: dict[str, Callable[[Moments, LayerLayout], SideBases]], what: str
) -> Callable[[Moments, LayerLayout], SideBases]:
    """Return the basis of a name.

    Raises
    ------
    UsageError
        When there is none.
    """
    if name not in known:
        raise UsageError(f"{what}: unknown basis {name!r}; use {', '.join(known)}")
    return known[name]
