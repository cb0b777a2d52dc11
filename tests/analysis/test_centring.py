"""Means of keys and values, and moments without them, against sums over single tokens."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvprof.analysis.centring import centred_moments, layer_centre
from kvprof.analysis.moments import LayerMoments, Moments
from kvprof.analysis.rotary import RotaryPairs
from kvprof.methods.pair_bases import kq

HEADS, QUERIES, TOKENS = 2, 4, 40


def pairs_of(rotated: int, interleaved: bool) -> list[tuple[int, int, int, int]]:
    half = rotated // 2
    if interleaved:
        return [(2 * f, 2 * f + 1, 1, f) for f in range(half)]
    return [(f, f + half, 1, f) for f in range(half)]


def turned(x: Tensor, pairs: list[tuple[int, int, int, int]], cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[…, T, d]`` pair by pair, as RoPE is written down."""
    result = x.clone()
    for a, b, sign, column in pairs:
        c, s = cos[:, column], sign * sin[:, column]
        result[..., a] = x[..., a] * c - x[..., b] * s
        result[..., b] = x[..., b] * c + x[..., a] * s
    return result


@settings(max_examples=25)
@given(
    width=st.sampled_from([6, 8]),
    rotated=st.sampled_from([0, 4, 6]),
    interleaved=st.booleans(),
    scaling=st.sampled_from([1.0, 1.2]),
    count=st.sampled_from([None, 0, 1, 2]),
    by_query=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_moments_are_of_what_is_stored(
    width: int,
    rotated: int,
    interleaved: bool,
    scaling: float,
    count: int | None,
    by_query: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    pairs = pairs_of(rotated, interleaved)
    angle = torch.arange(TOKENS, dtype=torch.float64)[:, None] * 0.7 ** torch.arange(
        max(1, rotated // 2), dtype=torch.float64
    )
    cos, sin = scaling * angle.cos(), scaling * angle.sin()
    before = drawn(1, HEADS, TOKENS, width) + 5 * drawn(1, HEADS, 1, width)
    keys = turned(before, pairs, cos, sin)
    values = drawn(1, HEADS, TOKENS, width) + 3
    queries = drawn(1, QUERIES, TOKENS, width)
    rotary = RotaryPairs.of(pairs)
    shapes = {"q": (QUERIES, width), "k": (HEADS, width), "v": (HEADS, width)}
    layer = LayerMoments.empty(
        {**shapes, "k_pre": (HEADS, width)}, torch.device("cpu"), pairs=rotary
    )
    moments = Moments([layer], "")
    vectors = {"q": queries, "k": keys, "v": values, "k_pre": before}
    angles = rotary.angles(cos, sin)[None]
    moments.add(0, vectors, angles=angles)
    moments.count(1, TOKENS)

    centre = layer_centre(layer, TOKENS, count, by_query)
    # The mean before RoPE, least squares where the scaling is not 1; all unrotated dimensions.
    mean = before.mean((0, 2))
    kept = torch.zeros(HEADS, width, dtype=torch.float64)
    still = [i for i in range(width) if not any(i in pair[:2] for pair in pairs)]
    kept[:, still] = mean[:, still]
    weight = [0.0] * len(pairs)
    for head in range(HEADS):
        energy = queries[0, 2 * head : 2 * head + 2].square().sum((0, 1))
        for f, (a, b, *_) in enumerate(pairs):
            seen = energy[[a, b]].sum() if by_query else 1
            weight[f] += float(mean[head, [a, b]].square().sum() * seen)
    order = sorted(range(len(pairs)), key=lambda f: -weight[f])
    for f in order if count is None else order[:count]:
        kept[:, [*pairs[f][:2]]] = mean[:, [*pairs[f][:2]]]
    assert torch.allclose(centre.keys.double(), kept, atol=1e-5)
    assert torch.allclose(centre.values.double(), values.mean((0, 2)), atol=1e-5)

    found = centred_moments(moments, {0: centre}).layers[0]
    lost = turned(centre.keys.double()[None, :, None].expand_as(keys), pairs, cos, sin)
    for name, rows in (
        ("k", keys - lost),
        ("v", values - centre.values.double()[None, :, None]),
        ("k_pre", before - centre.keys.double()[None, :, None]),
        ("q", queries),
    ):
        wanted = rows[0].mT @ rows[0]
        assert torch.allclose(found.gram(name), wanted, atol=1e-4 * float(wanted.norm())), name
    assert torch.allclose(lost, angles @ rotary.rotated(centre.keys.double()).mT, atol=1e-9)

    # A removal rate ρ of kq lets go ρ of the singular values of Q (K − its mean)ᵀ, ρ⁴ of others.
    left = (keys - turned(mean[None, :, None].expand_as(keys), pairs, cos, sin))[0]
    if scaling == 1:
        asked = queries.reshape(HEADS, -1, width)
        rest, lost = (
            torch.linalg.svdvals(0.5 / TOKENS * rows @ asked.mT)[:, :width]
            for rows in (left, keys[0])
        )
        rest, whole = rest.sum(-1, keepdim=True), lost.sum(-1, keepdim=True)
        counted = kq(moments, SimpleNamespace(index=0, scaling=0.5)).counted
        rates = counted.flip(-1).cumsum(-1).flip(-1)
        may_go = rates * rest + rates**4 * (whole - rest).clamp_min(0)
        assert torch.allclose(may_go, lost.flip(-1).cumsum(-1).flip(-1), rtol=1e-4)
        assert torch.allclose(rates[:, 0], torch.ones(HEADS, dtype=torch.float64), rtol=1e-4)
