"""The two factors of each pair, per token, so that snapshots of different size compare."""

from dataclasses import dataclass

from torch import Tensor

from kvprof.analysis.moments import Moments
from kvprof.analysis.pairs import VALUE_WEIGHT_TOKENS, pair_gram
from kvprof.errors import UsageError

__all__ = ["FACTOR_PAIRS", "PairFactors", "pair_factors"]

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


def pair_factors(
    moments: Moments, pair: str, *, value_weight_tokens: int = VALUE_WEIGHT_TOKENS
) -> PairFactors:
    """Take the factors of `pair` out of moments.

    V always weighs `value_weight_tokens` tokens against W_O in ``vo``, so that a sweep of token
    counts varies the estimate and nothing else.

    Raises
    ------
    UsageError
        When the pair has no product.
    """
    if pair not in FACTOR_PAIRS:
        raise UsageError(
            f"--pairs: {pair!r} is no pair with a basis to compare; choose from "
            f"{', '.join(FACTOR_PAIRS)}"
        )
    per_token = 1.0 / moments.tokens
    gram, left, right = [], [], []
    for index, layer in enumerate(moments.layers):
        weighted = pair_gram(moments, index, pair, value_weight_tokens=value_weight_tokens)
        gram.append(weighted if pair == "vo" else weighted * per_token)
        if pair in ("qk", "k"):
            left.append(layer.grouped("q") * per_token)
            right.append(layer.gram("k") * per_token)
        else:
            left.append(layer.gram("v") * per_token)
            right.append(layer.output_gram())
    return PairFactors(gram, left, right)
