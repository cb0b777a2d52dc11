"""From the moments of a model to the ``data`` of a spectrum result."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from kvprof.analysis.moments import Moments
from kvprof.analysis.pairs import VALUE_WEIGHT_TOKENS, pair_gram, query_head_gram
from kvprof.analysis.spectrum import (
    coefficient_of_variation,
    effective_rank,
    energy_kept,
    removal,
    removal_ranks,
    round_up,
    singular_values,
)

__all__ = ["query_head_data", "spectrum_data"]


def spectrum_data(
    moments: Moments,
    pairs: Sequence[str],
    removal_rates: Sequence[float],
    *,
    grid: int = 16,
    value_weight_tokens: int | None = VALUE_WEIGHT_TOKENS,
    paired: bool = False,
) -> dict[str, Any]:
    """Return the singular values of every pair, layer and head, and what removal rates give.

    Parameters
    ----------
    moments : Moments
        Of one model and source.
    pairs : sequence of str
        Keys of `kvprof.analysis.pairs.PAIRS`.
    removal_rates : sequence of float
        FDC's r; ranks are given only when both ``qk`` and ``vo`` are among the pairs.
    grid : int
        Multiple that ranks are rounded up to, beside the unrounded ones.
    value_weight_tokens, paired
        See `kvprof.analysis.pairs.pair_gram`.

    Returns
    -------
    dict
        ``pairs``, ``removal`` and ``first_position`` as the result schema documents them. Lists
        are ``[layer][kv_head]``; layers may differ in heads and widths.
    """

    def values_of(source: Moments, pair: str) -> list[Tensor]:
        grams = (
            pair_gram(source, layer, pair, value_weight_tokens=value_weight_tokens, paired=paired)
            for layer in range(len(source.layers))
        )
        return [singular_values(gram).cpu() for gram in grams]

    values = {pair: values_of(moments, pair) for pair in pairs}
    rows: list[dict[str, Any]] = []
    if "qk" in values and "vo" in values:
        rows = [
            asdict(removal(values["qk"], values["vo"], rate, grid=grid)) for rate in removal_rates
        ]
        if moments.sequences:
            rest = _without_first(moments)
            without = values_of(rest, "qk"), values_of(rest, "vo")
            for row in rows:
                without_first = removal(*without, row["removal_rate"], grid=1)
                row["dim_rate_without_first"] = without_first.dim_rate
    return {
        "pairs": {pair: _pair_data(layers) for pair, layers in values.items()},
        "removal": rows,
        "first_position": _first_position(moments),
    }


def query_head_data(
    moments: Moments,
    removal_rates: Sequence[float],
    *,
    grid: int = 16,
    paired: bool = False,
) -> dict[str, Any]:
    """Return what ``qk`` is with one basis per query head, and what the cache would then cost.

    FDC §5.1 read literally (`kvprof.analysis.pairs.query_head_gram`): every query head has its own
    rank, and a compressed key of that many dimensions is stored for each.

    Parameters
    ----------
    moments : Moments
        Of one model and source.
    removal_rates : sequence of float
        FDC's r.
    grid : int
        Multiple that ranks are rounded up to, beside the unrounded ones.
    paired : bool
        Of the grouped basis that it is compared with.

    Returns
    -------
    dict
        ``group``, ``qk`` and ``removal`` as the result schema documents them
        (``data.per_query_head``); dimensions are those of keys, per token, over all layers.
    """
    layers = range(len(moments.layers))
    own = [singular_values(query_head_gram(moments, x)).cpu() for x in layers]
    grouped = [singular_values(pair_gram(moments, x, "qk", paired=paired)).cpu() for x in layers]

    def ranks(values: list[Tensor], rate: float, multiple: int) -> list[list[int]]:
        return [
            [
                round_up(rank, multiple, heads.shape[-1])
                for rank in removal_ranks(heads, rate).tolist()
            ]
            for heads in values
        ]

    def dims(found: list[list[int]]) -> int:
        return sum(map(sum, found))

    rows = []
    for rate in removal_rates:
        plain, rounded = ranks(own, rate, 1), ranks(own, rate, grid)
        rows.append(
            {
                "removal_rate": rate,
                "grid": grid,
                "ranks": plain,
                "rounded_ranks": rounded,
                "stored_dims": dims(plain),
                "stored_dims_rounded": dims(rounded),
                "grouped_dims": dims(ranks(grouped, rate, 1)),
                "grouped_dims_rounded": dims(ranks(grouped, rate, grid)),
                "full_dims": sum(heads.numel() for heads in grouped),
            }
        )
    group = [len(a) // len(b) for a, b in zip(own, grouped, strict=True)]
    return {"group": group, "qk": _pair_data(own), "removal": rows}


def _without_first(moments: Moments) -> Moments:
    """Return the same moments as if position 0 of every sequence had not been seen."""
    rest = moments.snapshot()
    for layer in rest.layers:
        for value in layer.first.values():
            value.zero_()
    rest.tokens = max(1, moments.tokens - moments.sequences)
    rest.sequences = 0
    return rest


def _pair_data(layers: list[Tensor]) -> dict[str, Any]:
    return {
        "singular_values": [layer.tolist() for layer in layers],
        "mean": _mean_over_heads(layers),
        "cv_of_max": coefficient_of_variation(layers),
        "effective_rank": [effective_rank(layer).tolist() for layer in layers],
        "energy_kept": [energy_kept(layer).tolist() for layer in layers],
    }


def _mean_over_heads(layers: list[Tensor]) -> list[float]:
    """Average dimension by dimension over the heads that have it (FDC Fig. 3)."""
    heads = [head for layer in layers for head in layer.tolist()]
    widest = max(len(head) for head in heads)
    columns = ([head[i] for head in heads if i < len(head)] for i in range(widest))
    return [sum(column) / len(column) for column in columns]


def _first_position(moments: Moments) -> dict[str, Any]:
    """Return how much of the energy sits in position 0, where attention sinks are.

    ``token_share`` is what an even spread would give.
    """
    data: dict[str, Any] = {"token_share": moments.sequences / max(1, moments.tokens)}
    for key in ("q", "k", "v"):
        first = sum(float(_trace(layer.first[key])) for layer in moments.layers)
        total = sum(float(_trace(layer.gram(key))) for layer in moments.layers)
        data[f"energy_share_{key}"] = first / total if total else 0.0
    return data


def _trace(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).sum().cpu()
