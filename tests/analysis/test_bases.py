"""What a truncated basis loses, against projecting the vectors themselves at every rank."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.analysis.bases import eigenbasis, lost_energy, lost_product


def data(seed: int, tokens: int, width: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(tokens, width)) * np.logspace(0, -2, width)


def rotation(seed: int, width: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(width, width)))[0]


@settings(max_examples=25)
@given(width=st.integers(1, 9), tokens=st.integers(1, 20), seed=st.integers(0, 50))
def test_losses_equal_explicit_projections_at_every_rank(width, tokens, seed):
    x, y = data(seed, tokens, width), data(seed + 1, tokens + 2, width)
    basis = rotation(seed + 2, width)
    gram_x, gram_y = torch.from_numpy(x.T @ x), torch.from_numpy(y.T @ y)
    energy = lost_energy(gram_x, torch.from_numpy(basis)).numpy()
    product = lost_product(gram_x, gram_y, torch.from_numpy(basis)).numpy()
    assert energy.shape == product.shape == (width + 1,)
    for rank in range(width + 1):
        projection = basis[:, :rank] @ basis[:, :rank].T
        lost = np.linalg.norm(x - x @ projection) ** 2 / np.linalg.norm(x) ** 2
        assert energy[rank] == pytest.approx(lost, abs=1e-12)
        scores = np.linalg.norm(x @ y.T - x @ projection @ y.T) ** 2 / np.linalg.norm(x @ y.T) ** 2
        # Nearly orthogonal factors cancel; the bound follows the cancellation.
        slack = 1e-13 * (np.linalg.norm(x) * np.linalg.norm(y) / np.linalg.norm(x @ y.T)) ** 2
        assert product[rank] == pytest.approx(scores, abs=1e-12 + slack)
    assert energy[-1] == 0.0
    assert product[-1] == 0.0


def test_the_eigenbasis_holds_the_right_singular_vectors_and_leaves_the_least():
    x = data(3, 40, 8) @ rotation(4, 8)
    gram = torch.from_numpy(x.T @ x)
    values, basis = eigenbasis(gram)
    _, singular, right = np.linalg.svd(x)
    np.testing.assert_allclose(values.sqrt(), singular, rtol=1e-9)
    np.testing.assert_allclose(np.abs(right @ basis.numpy()), np.eye(8), atol=1e-9)
    best = lost_energy(gram, basis)
    tail = [np.sum(singular[r:] ** 2) / np.sum(singular**2) for r in range(9)]
    np.testing.assert_allclose(best, tail, atol=1e-14)
    for seed in range(5):
        other = lost_energy(gram, torch.from_numpy(rotation(seed, 8)))
        assert torch.all(other >= best - 1e-15)


def test_small_losses_are_not_drowned_by_the_large_ones():
    scale = torch.logspace(0, -6, 8, dtype=torch.float64)
    gram = torch.diag(scale.square())
    lost = lost_energy(gram, torch.eye(8, dtype=torch.float64))
    exact = [float(scale[r:].square().sum() / scale.square().sum()) for r in range(8)]
    np.testing.assert_allclose(lost[:-1], exact, rtol=1e-14)


def test_many_heads_at_once_equal_one_by_one():
    grams = torch.stack(
        [torch.from_numpy(x.T @ x) for x in (data(seed, 30, 6) for seed in range(12))]
    ).view(3, 4, 6, 6)
    values, basis = eigenbasis(grams)
    assert values.shape == (3, 4, 6)
    together = lost_energy(grams, basis)
    for layer in range(3):
        for head in range(4):
            own_values, own = eigenbasis(grams[layer, head])
            assert torch.equal(own_values, values[layer, head])
            assert torch.equal(own, basis[layer, head])
            torch.testing.assert_close(
                lost_energy(grams[layer, head], own), together[layer, head], rtol=1e-12, atol=0
            )


def test_a_head_without_energy_loses_nothing():
    zero, basis = torch.zeros(4, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    assert lost_energy(zero, basis).tolist() == [0.0] * 5
    assert lost_product(zero, zero, basis).tolist() == [0.0] * 5
