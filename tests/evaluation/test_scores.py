import numpy as np
import pytest
import torch

from kvprof.evaluation.scores import divergence, perplexity, target_scores


def test_divergence_is_the_sum_over_the_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    base, other = (torch.randn(3, 50, generator=generator, dtype=torch.float64) for _ in range(2))
    p, q = (np.exp(x.numpy()) / np.exp(x.numpy()).sum(-1, keepdims=True) for x in (base, other))
    wanted = (p * np.log(p / q)).sum(-1)
    found = divergence(base.log_softmax(-1), other.log_softmax(-1))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_divergence_of_what_cannot_come_is_nothing() -> None:
    base = torch.tensor([0.0, 0.0, float("-inf")]).log_softmax(-1)
    other = torch.tensor([0.0, 0.0, 1.0]).log_softmax(-1)
    assert divergence(base, other).item() == pytest.approx(np.log((2 + np.e) / 2), rel=1e-6)
    assert divergence(base, base).item() == 0


def test_scores_of_the_target() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    correct, loss = target_scores(logits.log_softmax(-1), torch.tensor([1, 2]))
    assert correct.tolist() == [True, False]
    wanted = [np.log(1 + np.e**2 + np.e) - 2, np.log(np.e**3 + 2)]
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    assert perplexity(np.array(wanted)) == pytest.approx(np.exp(np.mean(wanted)))
