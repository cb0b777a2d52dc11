"""The pairs whose spectra are shown, each a Gram matrix per layer and KV head.

``qk`` and ``vo`` are the joint pairs of FDC and ZACK, ``q``, ``k``, ``v`` the vectors alone,
``q_pre`` and ``k_pre`` the ones before RoPE, ``w_v`` the value projection's weight; formulas are in
docs/concepts.md.
"""

from torch import Tensor

from kvprof.analysis.moments import LayerMoments, Moments
from kvprof.errors import UsageError

__all__ = [
    "PAIRS",
    "VALUE_WEIGHT_TOKENS",
    "check_pairs",
    "pair_gram",
    "query_head_gram",
]

PAIRS = ("qk", "vo", "q", "k", "v", "q_pre", "k_pre", "w_v")

#: ``svd-vo`` stacks V on W_Oᵀ, so the basis weighs V by the number of tokens seen. ``C_v`` is
#: scaled to this many tokens, so that a longer calibration does not silently change the weight.
VALUE_WEIGHT_TOKENS = 8192


def check_pairs(pairs: list[str]) -> tuple[str, ...]:
    """Return the pairs asked for, each once, in the order of `PAIRS`.

    Raises
    ------
    UsageError
        When one is unknown, or none is named.
    """
    unknown = [pair for pair in pairs if pair not in PAIRS]
    if unknown or not pairs:
        named = repr(unknown[0]) if unknown else "an empty list"
        raise UsageError(f"--pairs: {named} is unknown; use {', '.join(PAIRS)}")
    return tuple(pair for pair in PAIRS if pair in pairs)


def pair_gram(
    moments: Moments,
    layer: int,
    pair: str,
    *,
    value_weight_tokens: int | None = VALUE_WEIGHT_TOKENS,
    paired: bool = False,
) -> Tensor:
    """Return the Gram matrix of the stacked vectors of a pair, ``[num_kv_heads, d, d]`` float64.

    ``qk`` is ``C_q + C_k`` with the queries of a group stacked (FDC §5.1 read per KV head);
    ``vo`` is ``w · C_v + C_o`` (ZACK §4.3), ``w = value_weight_tokens / tokens``.

    Parameters
    ----------
    moments : Moments
        Of a model.
    layer : int
        Which layer.
    pair : str
        One of `PAIRS`.
    value_weight_tokens : int or None
        Tokens that V counts for in ``vo``; None keeps the raw form, weighted by the tokens seen.
    paired : bool
        Weigh ``qk`` as summing FDC's pairs of each query head with its key head does,
        ``C_q + G · C_k`` for a group of G query heads, instead of stacking the keys once.

    Raises
    ------
    UsageError
        When the moments do not hold the pair.
    """
    store: LayerMoments = moments.layers[layer]
    if pair == "qk":
        group = store.rest["q"].shape[0] // store.rest["k"].shape[0]
        return store.grouped("q") + (group if paired else 1) * store.gram("k")
    if pair == "vo":
        weight = 1.0 if value_weight_tokens is None else value_weight_tokens / moments.tokens
        return weight * store.gram("v") + store.output_gram()
    if pair == "w_v":
        if store.c_wv is None:
            raise UsageError(
                "w_v: V is not one linear projection of the layer's input in this model (MLA, "
                "normalised values); leave it out"
            )
        return store.c_wv
    if pair not in store.rest:
        raise UsageError(f"{pair}: not in the saved moments; collect it with --pairs {pair}")
    return store.grouped(pair)


def query_head_gram(moments: Moments, layer: int) -> Tensor:
    """Return ``C_q^h + C_k`` of each query head with its group's keys, ``[num_heads, d, d]``.

    What FDC §5.1 says literally, one basis per query head. Such a basis compresses the group's keys
    once per query head, G times the cache; the grouped ``qk`` of `pair_gram` compresses them once.
    Both are the same where every KV head has one query head.

    Parameters
    ----------
    moments : Moments
        Of a model.
    layer : int
        Which layer.
    """
    store = moments.layers[layer]
    queries, keys = store.gram("q"), store.gram("k")
    return queries + keys.repeat_interleave(queries.shape[0] // keys.shape[0], dim=0)
