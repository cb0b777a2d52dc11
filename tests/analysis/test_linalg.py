"""Batches spread over threads equal torch's own, and leave torch's thread count alone."""

import threading

import pytest
import torch

from kvprof.analysis import bases, linalg
from kvprof.analysis.linalg import column_signs, eigh, few_threads, map_threads, svd


@pytest.fixture(params=[1, 3])
def threads(request):
    usual = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(usual)


def symmetric(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64)
    return half + half.mT


@pytest.mark.parametrize("shape", [(6,), (1, 6), (5, 3, 6), (2, 40, 8), (0, 4)])
@pytest.mark.parametrize("alike", ["none", "ends", "all"])
def test_decompositions_of_any_batch_equal_torchs_own(threads, shape, alike):
    matrices = symmetric(*shape)
    if alike == "all" and matrices.numel():
        matrices = matrices.reshape(-1, *matrices.shape[-2:])[0].expand_as(matrices).clone()
    elif alike == "ends" and len(shape) > 2 and matrices.numel():
        matrices[-1, -1] = matrices[0, 0]
    values, vectors = eigh(matrices)
    assert torch.allclose(values, torch.linalg.eigvalsh(matrices), atol=1e-12)
    assert torch.allclose(vectors * values.unsqueeze(-2) @ vectors.mT, matrices, atol=1e-12)
    tall = matrices[..., :3]
    left, singular, right = svd(tall)
    assert left.shape == tall.shape
    assert torch.allclose(singular, torch.linalg.svdvals(tall), atol=1e-12)
    assert torch.allclose(left * singular.unsqueeze(-2) @ right, tall, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_bases_do_not_depend_on_the_signs_that_lapack_answers_with(monkeypatch, seed):
    """Eigenvectors and singular vectors come back turned round by chance; bases stay."""
    half = symmetric(3, 8)[..., :6]
    grams = half @ half.mT  # rank 6 of 8: a null space is completed too
    other = symmetric(3, 8) @ symmetric(3, 8)
    made = [
        lambda: bases.eigenbasis(other)[1:],
        lambda: bases.optimal_pair(grams, other)[:2],
        lambda: bases.optimal_pair(other, grams)[:2],
        lambda: bases.whitened_pair(other)[:2],
    ]
    known = [make() for make in made]
    generator = torch.Generator().manual_seed(seed)

    def chance(width: int) -> torch.Tensor:
        return torch.randint(0, 2, (width,), generator=generator) * 2.0 - 1.0

    def turned_eigh(matrices):
        values, vectors = linalg.eigh(matrices)
        return values, vectors * chance(vectors.shape[-1])

    def turned_svd(matrices):
        left, values, right = linalg.svd(matrices)
        signs = chance(values.shape[-1])
        return left * signs, values, right * signs.unsqueeze(-1)

    monkeypatch.setattr(bases, "eigh", turned_eigh)
    monkeypatch.setattr(bases, "svd", turned_svd)
    for make, parts in zip(made, known, strict=True):
        for found, wanted in zip(make(), parts, strict=True):
            # The null space, whose eigenvalues are equal, is settled by no sign: 6 of 8 columns.
            assert torch.allclose(found[..., :6], wanted[..., :6], atol=1e-9)


def test_a_columns_first_largest_entry_is_positive_also_when_two_are_as_large():
    halves = torch.tensor([[0.5, -0.5 - 1e-12], [-0.5, 0.5], [0.1, 0.0]], dtype=torch.float64)
    assert column_signs(halves).tolist() == [[1.0, -1.0]]
    assert column_signs(halves * torch.tensor([1.0, 1 + 1e-9])).tolist() == [[1.0, -1.0]]
    assert column_signs(-halves).tolist() == [[-1.0, 1.0]]
    assert column_signs(torch.zeros(2, 3, 4)).tolist() == [[[1.0] * 4]] * 2


def test_items_come_back_in_order_from_threads_that_use_one_core_each(threads):
    ran = map_threads(lambda item: (item, torch.get_num_threads()), range(50))
    assert ran == [(item, 1) for item in range(50)]


def test_the_thread_count_of_this_thread_and_of_later_ones_stays(threads):
    map_threads(abs, range(10))
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert (torch.get_num_threads(), later) == (threads, [threads])


def test_a_batch_inside_a_batch_does_not_wait_for_itself(threads):
    inner = map_threads(lambda item: sum(map_threads(abs, range(item))), range(20))
    assert inner == [sum(range(item)) for item in range(20)]


def test_an_error_in_a_thread_reaches_the_caller(threads):
    with pytest.raises(ZeroDivisionError):
        map_threads(lambda item: 1 // item, range(8))


def test_few_threads_are_put_back_also_after_an_error():
    seen = []

    def fail():
        seen.append(torch.get_num_threads())
        raise ValueError("inside")

    before = torch.get_num_threads()
    try:
        for threads, expected in ((7, 4), (1, 1)):
            torch.set_num_threads(threads)
            with pytest.raises(ValueError, match="inside"), few_threads():
                fail()
            assert seen.pop() == expected
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
