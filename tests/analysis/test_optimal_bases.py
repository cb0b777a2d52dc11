"""Optimal pairs and the whitened decomposition against plain numpy on the stacked data."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.analysis.bases import (
    eigenbasis,
    lost_product,
    optimal_pair,
    walsh_hadamard,
    whitened_pair,
)

TOKENS = 60


def data(seed, width, rank, decay=2.0, tokens=TOKENS):
    """Vectors with a decaying spectrum that fill only `rank` directions."""
    random = np.random.default_rng(seed)
    scales = 10.0 ** (-decay * np.arange(width) / width) * (np.arange(width) < rank)
    turn = np.linalg.qr(random.normal(size=(width, width)))[0]
    return random.normal(size=(tokens, width)) * scales @ turn


def gram(x):
    return torch.from_numpy(x.T @ x / TOKENS)[None]


def product_error(queries, keys, down, up, rank):
    """‖QKᵀ − QBAᵀKᵀ‖² per token pair, from the data."""
    kept = keys @ down[:, :rank].numpy() @ up[:, :rank].numpy().T
    return float(((queries @ (keys - kept).T) ** 2).sum()) / TOKENS**2


@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sampled_from([3, 8, 16]),
    st.floats(0.2, 1.0),
    st.floats(0.2, 1.0),
    st.integers(1, 4),
    st.floats(0.0, 6.0),
)
def test_kq_loses_least_of_all_bases_at_every_rank(seed, width, fill_k, fill_q, group, decay):
    keys = data(seed, width, max(1, round(fill_k * width)), decay)
    queries = np.concatenate(
        [data(seed + 1 + i, width, max(1, round(fill_q * width)), decay) for i in range(group)]
    )
    c_k, c_q = gram(keys), gram(queries)
    down, up, values = optimal_pair(c_k, c_q)
    total = float((values**2).sum())
    truth = np.linalg.svd(queries @ keys.T / TOKENS, compute_uv=False)[:width]
    truth = np.pad(truth, (0, width - len(truth)))

    random = torch.from_numpy(
        np.linalg.qr(np.random.default_rng(seed).normal(size=(width, width)))[0]
    )[None]
    others = [
        lost_product(c_q, c_k, basis)[0] * float((c_q * c_k).sum())
        for basis in (eigenbasis(c_q + c_k)[1], eigenbasis(c_k)[1], random)
    ]
    for rank in range(1, width + 1):
        error = product_error(queries, keys, down[0], up[0], rank)
        # The error is the tail, and no other basis of that rank is better.
        assert error == pytest.approx((truth[rank:] ** 2).sum(), abs=1e-11 * total)
        assert error == pytest.approx(float((values[0, rank:] ** 2).sum()), abs=1e-11 * total)
        assert all(error <= float(other[rank]) + 1e-11 * total for other in others)


@pytest.mark.parametrize(("rank_k", "rank_q"), [(16, 16), (5, 16), (16, 5), (5, 7), (1, 1), (0, 3)])
@pytest.mark.parametrize("decay", [1.0, 12.0])
def test_full_rank_is_exact_on_data_never_seen_also_in_float32(rank_k, rank_q, decay):
    down, up, _ = optimal_pair(gram(data(0, 16, rank_k, decay)), gram(data(1, 16, rank_q, decay)))
    identity = torch.eye(16)
    assert torch.allclose(down[0] @ up[0].T, identity.double(), atol=1e-10)
    assert torch.allclose(down[0].float() @ up[0].float().T, identity, atol=5e-6)


def test_the_gauge_gives_stored_and_query_latents_the_same_energy():
    keys, queries = data(0, 8, 8), data(1, 8, 8)
    down, up, values = optimal_pair(gram(keys), gram(queries))
    stored = (keys @ down[0].numpy()) ** 2
    asked = (queries @ up[0].numpy()) ** 2
    np.testing.assert_allclose(stored.sum(0) / TOKENS, values[0].numpy(), rtol=1e-9)
    np.testing.assert_allclose(asked.sum(0) / TOKENS, values[0].numpy(), rtol=1e-9)


def test_unseen_directions_come_last_and_unscaled():
    down, up, values = optimal_pair(gram(data(0, 8, 3)), gram(data(1, 8, 8)))
    assert (values[0, 3:] == 0).all()
    assert torch.allclose(down[0, :, 3:].norm(dim=0), torch.ones(5).double())
    assert torch.allclose(up[0, :, 3:].norm(dim=0), torch.ones(5).double())


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_whitened_pair_is_palus_decomposition_and_its_error_the_tail(heads):
    random = np.random.default_rng(3)
    hidden, width = 24, 5 * heads
    inputs = random.normal(size=(TOKENS, hidden)) * np.linspace(0.1, 3, hidden)
    weight = random.normal(size=(hidden, width))
    outputs = inputs @ weight
    down, up, values = whitened_pair(gram(outputs))

    # Palu as its code has it: whiten with the Cholesky factor of the input's covariance.
    lower = np.linalg.cholesky(inputs.T @ inputs / TOKENS)
    left, sigma, right = np.linalg.svd(lower.T @ weight, full_matrices=False)
    np.testing.assert_allclose(values[0].numpy(), sigma, rtol=1e-9)
    for rank in range(1, width + 1):
        root = np.sqrt(sigma[:rank])
        theirs = np.linalg.solve(lower.T, left[:, :rank] * root) @ (root[:, None] * right[:rank])
        ours = weight @ down[0, :, :rank].numpy() @ up[0, :, :rank].numpy().T
        np.testing.assert_allclose(ours, theirs, atol=1e-9)
        error = ((outputs - inputs @ ours) ** 2).sum() / TOKENS
        assert error == pytest.approx((sigma[rank:] ** 2).sum(), abs=1e-10 * (sigma**2).sum())


def test_whitened_pair_is_exact_at_full_rank_on_unseen_directions():
    down, up, values = whitened_pair(gram(data(0, 12, 4)))
    assert (values[0, 4:] == 0).all()
    assert torch.allclose(down[0] @ up[0].T, torch.eye(12).double(), atol=1e-12)


@pytest.mark.parametrize("width", [1, 2, 16, 48, 80, 112, 7])
def test_walsh_hadamard_is_orthogonal_and_spreads_a_column(width):
    rotation = walsh_hadamard(width)
    assert torch.allclose(rotation @ rotation.T, torch.eye(width).double(), atol=1e-12)
    largest_block = 2 ** (width.bit_length() - 1)
    assert float(rotation[0].abs().max()) == pytest.approx(largest_block**-0.5)


def test_heads_do_not_mix():
    first, second = data(0, 6, 6), data(1, 6, 3)
    both = optimal_pair(torch.cat([gram(first), gram(second)]), gram(data(2, 6, 6)).repeat(2, 1, 1))
    alone = optimal_pair(gram(second), gram(data(2, 6, 6)))
    product = both[0][1] @ both[1][1].T
    assert torch.allclose(both[2][1], alone[2][0])
    assert torch.allclose(product, alone[0][0] @ alone[1][0].T)
