"""The data of a spectrum result, against numbers put together by hand."""

import json

import numpy as np
import pytest
import torch

from kvprof.analysis.moments import LayerMoments, Moments
from kvprof.analysis.pairs import PAIRS, pair_gram, query_head_gram
from kvprof.analysis.spectrum import query_head_data, spectrum_data
from tests.analysis import stacked

SHAPES = [(2, 2, 8, 6), (1, 3, 4, 6)]  # kv heads, group, width of K, width of V: layers differ


@pytest.fixture(scope="module")
def seen():
    """Moments of two layers with unlike heads, and the vectors that they came from."""
    generator = torch.Generator().manual_seed(0)
    layers, chunks, outputs = [], [], []
    for kv_heads, group, d, d_v in SHAPES:
        w_o = torch.randn(kv_heads * group, d_v, 10, generator=generator, dtype=torch.float64)
        shapes = {"q": (kv_heads * group, d), "k": (kv_heads, d), "v": (kv_heads, d_v)}
        shapes |= {"q_pre": shapes["q"], "k_pre": shapes["k"]}
        c_o = (w_o @ w_o.mT).view(kv_heads, group, d_v, d_v).sum(1)
        w_v = torch.randn(kv_heads, 12, d_v, generator=generator, dtype=torch.float64)
        layers.append(LayerMoments.empty(shapes, c_o.device, c_o=c_o, c_wv=w_v.mT @ w_v))
        vectors = {
            key: torch.randn(3, heads, 11, width, generator=generator)
            * torch.logspace(0, -3, width)
            for key, (heads, width) in shapes.items()
        }
        for value in vectors.values():
            value[:, :, 0] *= 20  # a sink
        chunks.append(vectors)
        outputs.append(w_o.numpy())
    moments = Moments(layers, "model")
    for index, vectors in enumerate(chunks):
        moments.add(index, vectors)
    moments.count(3, 11)
    return moments, chunks, outputs


def ranks(values: np.ndarray, rate: float) -> int:
    return next(r for r in range(1, len(values) + 1) if values[r:].sum() <= rate * values.sum())


def test_every_figure_equals_its_definition_on_the_stacked_vectors(seen):
    moments, chunks, outputs = seen
    data = spectrum_data(moments, PAIRS[:-1], [0.05, 0.2], grid=3)
    exact: dict[str, list[list[np.ndarray]]] = {}
    for pair in PAIRS[:-1]:
        exact[pair] = []
        for (kv_heads, *_), vectors, w_o in zip(SHAPES, chunks, outputs, strict=True):
            whole = {key: stacked.rows([value]) for key, value in vectors.items()}
            exact[pair].append(
                [
                    stacked.singular_values(
                        stacked.pair_rows(whole, w_o, pair, head, weight_tokens=8192)
                    )
                    for head in range(kv_heads)
                ]
            )
        found = data["pairs"][pair]
        heads = [head for layer in exact[pair] for head in layer]
        for ours, theirs in zip(found["singular_values"], exact[pair], strict=True):
            for row, values in zip(ours, theirs, strict=True):
                stacked.close_to_largest(row, values)
        widest = max(len(head) for head in heads)
        mean = [np.mean([h[i] for h in heads if len(h) > i]) for i in range(widest)]
        np.testing.assert_allclose(found["mean"], mean, atol=1e-6 * mean[0])
        largest = np.array([head[0] for head in heads])
        assert found["cv_of_max"] == pytest.approx(largest.std() / largest.mean(), rel=1e-6)
        kept = np.cumsum(heads[0] ** 2) / np.sum(heads[0] ** 2)
        np.testing.assert_allclose(found["energy_kept"][0][0], kept, atol=1e-9)
        share = heads[0] / heads[0].sum()
        share = share[share > 0]
        rank = np.exp(-(share * np.log(share)).sum())
        assert found["effective_rank"][0][0] == pytest.approx(rank, rel=1e-6)

    full = sum(kv * (d + d_v) for kv, _, d, d_v in SHAPES)
    for row, rate in zip(data["removal"], (0.05, 0.2), strict=True):
        qk = [[ranks(head, rate) for head in layer] for layer in exact["qk"]]
        vo = [[ranks(head, rate) for head in layer] for layer in exact["vo"]]
        assert (row["removal_rate"], row["ranks_qk"], row["ranks_vo"]) == (rate, qk, vo)
        assert row["dim_rate"] == pytest.approx(1 - sum(map(sum, qk + vo)) / full, abs=1e-12)
        assert row["dim_rate_rounded"] <= row["dim_rate"]


def test_leaving_out_the_first_position_equals_never_having_seen_it(seen):
    moments, chunks, _ = seen
    without = Moments(
        [
            LayerMoments(
                rest={k: torch.zeros_like(v) for k, v in layer.rest.items()},
                first={k: torch.zeros_like(v) for k, v in layer.first.items()},
                c_o=layer.c_o,
            )
            for layer in moments.layers
        ],
        "model",
    )
    for index, vectors in enumerate(chunks):
        without.add(index, vectors, skip_first=1)
    without.count(3, 11, skip_first=1)
    # V counts for few tokens, so that the number of tokens it is scaled by decides ranks.
    rates, weight = list(np.linspace(0.01, 0.6, 60)), 40
    rows, skipped = (
        spectrum_data(one, ["qk", "vo"], rates, value_weight_tokens=weight)["removal"]
        for one in (moments, without)
    )
    found = [row["dim_rate_without_first"] for row in rows]
    assert found == pytest.approx([row["dim_rate"] for row in skipped], abs=1e-15)
    assert found != [row["dim_rate"] for row in rows], "the sink shows"
    assert "dim_rate_without_first" not in skipped[0]


def test_the_share_of_the_first_position_is_told(seen):
    moments, chunks, _ = seen
    data = spectrum_data(moments, ["k"], [])["first_position"]
    assert data["token_share"] == pytest.approx(3 / 33)
    for key in ("q", "k", "v"):
        squares = [vectors[key].double().square() for vectors in chunks]
        share = sum(s[:, :, 0].sum() for s in squares) / sum(s.sum() for s in squares)
        assert data[f"energy_share_{key}"] == pytest.approx(float(share), rel=1e-12)


def test_ranks_need_both_pairs_and_nothing_else_is_made_up(seen):
    moments, *_ = seen
    data = spectrum_data(moments, ["qk", "k"], [0.1])
    assert data["removal"] == []
    assert set(data["pairs"]) == {"qk", "k"}


def test_the_data_is_json_and_work_on_it_leaves_the_moments_alone(seen):
    moments, *_ = seen
    before = [layer.gram("k").clone() for layer in moments.layers]
    json.dumps(spectrum_data(moments, list(PAIRS), [0.1]), allow_nan=False)
    assert all(torch.equal(a, b.gram("k")) for a, b in zip(before, moments.layers, strict=True))
    assert (moments.tokens, moments.sequences) == (33, 3)


def test_bases_per_query_head_are_those_of_each_head_stacked_on_its_keys(seen):
    moments, chunks, _ = seen
    rates, grid = [0.05, 0.3], 3
    data = query_head_data(moments, rates, grid=grid)
    assert data["group"] == [group for _, group, *_ in SHAPES]
    exact, grouped = [], []
    for (kv_heads, group, *_), vectors in zip(SHAPES, chunks, strict=True):
        q, k = stacked.rows([vectors["q"]]), stacked.rows([vectors["k"]])
        exact.append(
            [
                stacked.singular_values(np.concatenate([q[h], k[h // group]]))
                for h in range(kv_heads * group)
            ]
        )
        grouped.append(
            [
                stacked.singular_values(np.concatenate([*q[h * group : (h + 1) * group], k[h]]))
                for h in range(kv_heads)
            ]
        )
    for ours, theirs in zip(data["qk"]["singular_values"], exact, strict=True):
        for row, values in zip(ours, theirs, strict=True):
            stacked.close_to_largest(row, values)

    def up(rank: int, width: int) -> int:
        return min(-(-rank // grid) * grid, width)

    for row, rate in zip(data["removal"], rates, strict=True):
        own = [[ranks(head, rate) for head in layer] for layer in exact]
        shared = [[ranks(head, rate) for head in layer] for layer in grouped]
        assert (row["removal_rate"], row["grid"], row["ranks"]) == (rate, grid, own)
        widths = [d for *_, d, _ in SHAPES]
        rounded = [[up(r, d) for r in layer] for layer, d in zip(own, widths, strict=True)]
        assert row["rounded_ranks"] == rounded
        assert row["stored_dims"] == sum(map(sum, own))
        assert row["stored_dims_rounded"] == sum(map(sum, rounded))
        assert row["grouped_dims"] == sum(map(sum, shared))
        assert row["grouped_dims_rounded"] == sum(
            up(r, d) for layer, d in zip(shared, widths, strict=True) for r in layer
        )
        # Uncompressed keys are stored once per KV head.
        assert row["full_dims"] == sum(kv * d for kv, _, d, _ in SHAPES)
    json.dumps(data, allow_nan=False)


def test_the_paired_form_is_the_sum_over_a_groups_query_heads(seen):
    moments, *_ = seen
    for layer, (kv_heads, group, d, _) in enumerate(SHAPES):
        own = query_head_gram(moments, layer)
        paired = pair_gram(moments, layer, "qk", paired=True)
        summed = own.view(kv_heads, group, d, d).sum(1)
        torch.testing.assert_close(summed, paired, rtol=1e-12, atol=0)


def test_with_one_query_head_per_kv_head_both_bases_are_the_same(seen):
    generator = torch.Generator().manual_seed(1)
    shapes = dict.fromkeys(("q", "k", "v"), (3, 5))
    moments = Moments([LayerMoments.empty(shapes, torch.device("cpu"))], "model")
    moments.add(0, {key: torch.randn(2, 3, 9, 5, generator=generator) for key in shapes})
    moments.count(2, 9)
    data = query_head_data(moments, [0.2], grid=1)
    assert data["group"] == [1]
    assert data["qk"] == spectrum_data(moments, ["qk"], [])["pairs"]["qk"]
    assert data["removal"][0]["stored_dims"] == data["removal"][0]["grouped_dims"]
