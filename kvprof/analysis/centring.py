"""Keys and values without their means: what is subtracted, and moments of what is left.

A key after RoPE is ``k_j = R_j (m + δ_j)``: m is the mean of a head's keys before RoPE, ``R_j`` the
rotation of position j. ``R_j m`` says nothing about a token, so only ``R_j δ_j`` is stored, and
scores get ``q · R_j m`` back. ``R_j m = B c_j`` with ``c_j`` the cosines and sines of position j
(and a 1 for dimensions that are not rotated), so the moments ``Σ k_j c_jᵀ`` and ``Σ c_j c_jᵀ`` give
m and the moments of centred keys for any choice of rotary pairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvprof.analysis.moments import JOINT_KEYS, LayerMoments, Moments
from kvprof.analysis.rotary import RotaryPairs
from kvprof.errors import UsageError

__all__ = [
    "Centre",
    "bias_centre",
    "centred_keys",
    "centred_moments",
    "layer_centre",
    "rotated_mean",
]


@dataclass(frozen=True, eq=False)
class Centre:
    """What a layer's keys and values are stored without.

    Attributes
    ----------
    keys : Tensor
        ``[num_kv_heads, d]`` float32: the mean of keys before RoPE, 0 in pairs that keep theirs.
    values : Tensor
        ``[num_kv_heads, d_v]`` float32: the mean of values.
    """

    keys: Tensor
    values: Tensor


def layer_centre(
    moments: LayerMoments, tokens: int, count: int | None, by_query: bool, values: bool = True
) -> Centre:
    """Return a layer's means, of as many rotary pairs as asked for.

    The mean is the least-squares one, of ``R_jᵀ k_j`` over the squared length of what ``R_j`` makes
    of a unit vector (the attention scaling of YaRN and LongRoPE, squared). Dimensions that are not
    rotated always give up theirs.

    Parameters
    ----------
    moments : LayerMoments
        With cross moments.
    tokens : int
        That were counted.
    count : int or None
        Rotary pairs that give up their mean, the same in all heads; None for all.
    by_query : bool
        Choose pairs by falling ``E|q_f|² |m_f|²`` (bases of low rank) instead of ``|m_f|²``
        (quantisers, whose error grows with the key whatever the query is).
    values : bool
        Whether values give up theirs; without, their mean is 0.
    """
    cross, table, pairs = _crossed(moments)
    f = pairs.count
    pair = torch.arange(f, device=cross.device)
    mean = torch.zeros_like(cross[..., 0])
    x, y = cross[:, pairs.first], cross[:, pairs.second]
    squares = (table.diagonal()[:f] + table.diagonal()[f : 2 * f]).clamp(min=1e-300)
    mean[:, pairs.first] = (x[:, pair, pair] + pairs.sign * y[:, pair, f + pair]) / squares
    mean[:, pairs.second] = (y[:, pair, pair] - pairs.sign * x[:, pair, f + pair]) / squares
    still = pairs.still(mean.shape[-1])
    mean[:, still] = cross[:, still, 2 * f] / table[2 * f, 2 * f]
    if count is not None and count < f:
        weight = mean[:, pairs.first].square() + mean[:, pairs.second].square()
        if by_query:
            energy = moments.grouped("q").diagonal(dim1=-2, dim2=-1)
            weight = weight * (energy[:, pairs.first] + energy[:, pairs.second])
        # One choice for all heads, which a kernel reads one table for: on Qwen2.5-Coder-1.5B it
        # keeps what a choice of each head's own does.
        dropped = weight.sum(0).argsort(descending=True)[count:]
        mean[:, pairs.first[dropped]] = mean[:, pairs.second[dropped]] = 0.0
    lost = moments.sums["v"] / tokens if values else torch.zeros_like(moments.sums["v"])
    return Centre(mean.float().cpu(), lost.float().cpu())


def bias_centre(moments: LayerMoments) -> Centre:
    """Return what a layer's projections of keys and values add, 0 where they add nothing."""
    both = (moments.biases.get(k, torch.zeros(moments.rest[k].shape[:2])) for k in ("k", "v"))
    return Centre(*(bias.float().cpu() for bias in both))


def rotated_mean(moments: LayerMoments) -> Tensor | None:
    """Return the mean of keys after RoPE, ``[num_kv_heads, d]`` float32; None where unknown."""
    if moments.cross is None:
        return None
    cross, table, pairs = _crossed(moments)
    constant = 2 * pairs.count
    return (cross[..., constant] / table[constant, constant]).float().cpu()


def centred_moments(moments: Moments, centres: Mapping[int, Centre]) -> Moments:
    """Return the moments of keys and values without their means, all positions together.

    Those of queries stay; magnitudes and moments across layers are left out, since they do not
    follow.

    Parameters
    ----------
    moments : Moments
        With cross moments, for every layer of `centres`.
    centres : mapping of int to Centre
        By layer; layers that are not in it stay as they are.
    """
    layers = [
        _centred(layer, moments.tokens, centres[index]) if index in centres else layer
        for index, layer in enumerate(moments.layers)
    ]
    return replace(moments, layers=layers, across=None, centred=True)


def centred_keys(layer: LayerMoments, centre: Centre) -> Tensor:
    """Return the second moment of keys after RoPE without their mean, ``[num_kv_heads, d, d]``."""
    cross, table, pairs = _crossed(layer)
    rotated = pairs.rotated(centre.keys.to(cross.device, torch.float64))
    crossed = cross @ rotated.mT
    return layer.gram("k") - crossed - crossed.mT + rotated @ table @ rotated.mT


def _centred(layer: LayerMoments, tokens: int, centre: Centre) -> LayerMoments:
    device = layer.rest["k"].device
    keys, values = (x.to(device, torch.float64) for x in (centre.keys, centre.values))
    grams = {key: layer.gram(key) for key in layer.rest} | {"k": centred_keys(layer, centre)}
    # Keys before RoPE are R_jᵀ k_j over the squared scaling, of which the whole mean is known.
    whole = layer_centre(layer, tokens, None, by_query=False).keys.to(device, torch.float64)
    means = {"k_pre": (whole, keys), "v": (layer.sums["v"] / tokens, values)}
    for joint, vector in JOINT_KEYS.items():
        if joint in grams:
            groups = len(grams[joint])
            mean, subtracted = means[vector]
            means[joint] = (mean.reshape(groups, -1), subtracted.reshape(groups, -1))
    if "o" in grams:
        group = len(grams["o"]) // len(values)
        means["o"] = (layer.sums["o"] / tokens, values.repeat_interleave(group, dim=0))
    for key, (mean, subtracted) in means.items():
        if key in grams:
            both = torch.einsum("hi,hj->hij", mean, subtracted)
            own = torch.einsum("hi,hj->hij", subtracted, subtracted)
            grams[key] = grams[key] + tokens * (own - both - both.mT)
    empty = {key: torch.zeros_like(gram) for key, gram in grams.items()}
    return replace(layer, rest=grams, first=empty, magnitudes={}, cross=None, table=None)


def _crossed(layer: LayerMoments) -> tuple[Tensor, Tensor, RotaryPairs]:
    if layer.cross is None or layer.table is None or layer.pairs is None:
        raise UsageError(
            "centre: the saved moments have no key means by position; save them again (kvprof "
            "spectrum --save) or use the option centre=false"
        )
    return layer.cross, layer.table, layer.pairs
