"""Each figure equals its closed form, or numpy's own computation, on rotations that are known."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import subspace_angles

from kvprof.analysis.stability import (
    HAAR_RATIO,
    align_clusters,
    align_signs,
    cluster_sizes,
    clusters,
    column_ratio,
    extra_loss,
    loss,
    principal_angle,
    relative_extra,
    seed_perturbation,
    subspace_distance,
)
from tests.analysis.rotations import block_rotation, gram_of, haar, planar, tensor

EXACT = {"abs": 1e-8, "rel": 0}


def ratio(source, target) -> float:
    found = column_ratio(tensor(source)[None], tensor(target)[None])
    return float(found.delta / found.epsilon)


def sign_aligned(source, target) -> float:
    aligned = align_signs(tensor(source)[None], tensor(target)[None])
    return ratio(aligned[0].numpy(), target)


def overlap(source, target) -> torch.Tensor:
    return tensor(source).mT @ tensor(target)


def groups_of(starts) -> list[list[int]]:
    """Turn the first columns of one head's groups into lists of columns."""
    columns = [[c for c, first in enumerate(starts) if first == its] for its in sorted({*starts})]
    assert [group[0] for group in columns] == sorted({*starts})
    return columns


def starts_of(groups) -> torch.Tensor:
    return torch.tensor([group[0] for group in groups for _ in group])


def cluster_aligned(source, target, groups) -> np.ndarray:
    starts = starts_of(groups)[None]
    return align_clusters(tensor(source)[None], tensor(target)[None], starts)[0].numpy()


@settings(max_examples=30)
@given(
    width=st.integers(2, 12),
    rank=st.integers(1, 11),
    angle=st.floats(-np.pi / 2, np.pi / 2),
    seed=st.integers(0, 9),
)
def test_a_rotation_across_the_cut_has_its_closed_form(width, rank, angle, seed):
    rank = min(rank, width - 1)
    target = haar(width, seed)
    source = target @ planar(width, rank - 1, rank, angle)
    sine = abs(np.sin(angle))
    for r in range(1, width + 1):
        across = r == rank
        distance = float(subspace_distance(overlap(source, target), r))
        norm = np.sqrt(min(r, width - r)) if r < width else 1.0
        assert distance == pytest.approx(sine / norm if across else 0.0, **EXACT)
        found = float(principal_angle(overlap(source, target), r))
        assert found == pytest.approx(abs(angle) if across else 0.0, **EXACT)

    values = np.linspace(2.0, 0.5, width)
    gram = tensor(gram_of(target, values))
    own, offline = (loss(gram, gram, gram, tensor(b)) for b in (target, source))
    extra = extra_loss(offline, own)
    gap, tail = values[rank - 1] - values[rank], values[rank:].sum()
    expected = np.sin(angle) ** 2 * gap / tail
    for r in range(width + 1):
        wanted = expected if r == rank else 0.0
        assert float(extra.energy[r]) == pytest.approx(wanted, **EXACT)


@settings(max_examples=20)
@given(width=st.integers(2, 10), seed=st.integers(0, 99))
def test_figures_of_any_two_bases_equal_projectors_and_scipy_angles(width, seed):
    source, target = haar(width, seed), haar(width, seed + 1000)
    for rank in range(1, width + 1):
        p, q = (b[:, :rank] @ b[:, :rank].T for b in (source, target))
        exact = np.linalg.norm(p - q) / np.sqrt(2 * max(min(rank, width - rank), 1))
        found = float(subspace_distance(overlap(source, target), rank))
        assert found == pytest.approx(exact if rank < width else 0.0, **EXACT)
        angle = subspace_angles(source[:, :rank], target[:, :rank]).max() if rank < width else 0.0
        found = float(principal_angle(overlap(source, target), rank))
        assert found == pytest.approx(angle, **EXACT)
    assert ratio(source, target) == pytest.approx(
        np.abs(source - target).mean() / np.abs(target).mean(), **EXACT
    )


def test_full_rank_differs_in_nothing():
    source, target = haar(6, 0, 3), haar(6, 1, 3)
    assert subspace_distance(overlap(source, target), 6).tolist() == [0.0] * 3
    assert principal_angle(overlap(source, target), 6).tolist() == [0.0] * 3
    gram = tensor(gram_of(haar(6, 2, 3), np.linspace(2, 1, 6)))
    extra = extra_loss(
        *(loss(gram, gram, gram, basis) for basis in (tensor(source), tensor(target)))
    )
    assert extra.energy[:, -1].tolist() == [0.0] * 3
    assert extra.product[:, -1].tolist() == [0.0] * 3


def test_many_heads_at_once_equal_one_by_one():
    source, target = haar(8, 3, 10), haar(8, 4, 10)
    source[4:] = target[4:] @ planar(8, 1, 2, 0.3)  # small and large angles in one batch
    for rank in (2, 5):
        distance = subspace_distance(overlap(source, target), rank)
        angle = principal_angle(overlap(source, target), rank)
        for head in range(10):
            alone = overlap(source[head], target[head]), rank
            assert float(distance[head]) == pytest.approx(float(subspace_distance(*alone)), **EXACT)
            assert float(angle[head]) == pytest.approx(float(principal_angle(*alone)), **EXACT)


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-7, 0.78, np.pi / 2 - 1e-8, np.pi / 2])
def test_angles_near_zero_and_near_a_right_angle_are_exact(angle):
    target = haar(8, 7)
    source = target @ planar(8, 2, 3, angle)
    found = float(principal_angle(overlap(source, target), 3))
    assert found == pytest.approx(angle, abs=1e-14)


def test_sign_flips_cost_nothing_once_aligned_and_show_before():
    target = haar(10, 0)
    flips = np.where(np.random.default_rng(0).random(10) < 0.5, -1.0, 1.0)
    source = target * flips
    assert ratio(source, target) == pytest.approx(
        2 * np.abs(target[:, flips < 0]).sum() / np.abs(target).sum(), **EXACT
    )
    assert sign_aligned(source, target) == 0.0
    assert float(subspace_distance(overlap(source, target), 4)) < 1e-14


def test_cluster_alignment_undoes_a_rotation_inside_a_cluster_and_only_there():
    width = 32
    target = haar(width, 1)
    values = np.linspace(10, 1, width)
    values[8:12] = values[8]  # four exactly equal values; the cap is d / 8 = 4
    groups = groups_of(
        clusters(tensor(values), torch.full((width - 1,), 1e-6, dtype=torch.float64)).tolist()
    )
    assert [group for group in groups if len(group) > 1] == [[8, 9, 10, 11]]

    inside = target @ block_rotation(width, [8, 9, 10, 11], 2)
    assert sign_aligned(inside, target) > 0.05
    assert np.abs(cluster_aligned(inside, target, groups) - target).max() < 1e-13
    for rank in (8, 12):  # a cut at the cluster's edge sees nothing
        assert float(subspace_distance(overlap(inside, target), rank)) < 1e-13

    across = target @ planar(width, 11, 12, 0.4)
    aligned = cluster_aligned(across, target, groups)
    assert np.abs(aligned[:, 12] - across[:, 12]).max() < 1e-14
    # The part of column 11 outside the cluster's span stays outside.
    outside = aligned[:, 8:12] - target[:, 8:12] @ (target[:, 8:12].T @ aligned[:, 8:12])
    assert np.linalg.norm(outside) == pytest.approx(np.sin(0.4), **EXACT)


def test_mixing_exactly_equal_directions_across_the_cut_moves_the_subspace_at_no_cost():
    target = haar(8, 6)
    values = np.array([8.0, 7, 6, 4, 4, 2, 1, 0.5])
    source = target @ planar(8, 3, 4, 0.9)
    gram = tensor(gram_of(target, values))
    extra = extra_loss(*(loss(gram, gram, gram, tensor(b)) for b in (source, target)))
    assert float(subspace_distance(overlap(source, target), 4)) == pytest.approx(
        np.sin(0.9) / 2, **EXACT
    )
    assert float(extra.energy[4]) == pytest.approx(0.0, **EXACT)
    assert float(extra.product[4]) == pytest.approx(0.0, **EXACT)
    groups = groups_of(
        clusters(tensor(values), torch.full((7,), 1e-9, dtype=torch.float64)).tolist()
    )
    assert max(map(len, groups)) == 1, "at d = 8 a cluster of two would be wider than d/8"


def test_columns_of_near_equal_values_that_changed_places_are_put_back():
    target = haar(16, 3)
    values = np.linspace(8, 1, 16)
    values[5] = values[4] * (1 - 1e-12)
    swapped = target[:, [0, 1, 2, 3, 5, 4, *range(6, 16)]]
    groups = groups_of(
        clusters(tensor(values), torch.full((15,), 1e-9, dtype=torch.float64)).tolist()
    )
    assert [4, 5] in groups
    assert sign_aligned(swapped, target) > 0.1
    assert np.abs(cluster_aligned(swapped, target, groups) - target).max() < 1e-13


def test_alignment_of_many_heads_uses_each_heads_own_clusters():
    target = haar(16, 4, 5)
    groups = []
    source = target.copy()
    for head in range(5):
        pair = [2 * head, 2 * head + 1]
        source[head] = target[head] @ block_rotation(16, pair, head)
        groups.append(
            [[c] for c in range(2 * head)] + [pair] + [[c] for c in range(pair[1] + 1, 16)]
        )
    source[:, :, 15] *= -1
    aligned = align_clusters(
        tensor(source), tensor(target), torch.stack([starts_of(head) for head in groups])
    )
    assert float((aligned - tensor(target)).abs().max()) < 1e-13


@given(
    width=st.integers(1, 80),
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.0, 0.01, 0.1, 1.0, 1e9]),
)
def test_clusters_partition_the_columns_and_stay_narrow(width, seed, scale):
    generator = np.random.default_rng(seed)
    values = np.sort(generator.random(width))[::-1].copy()
    noise = generator.random(max(width - 1, 0)) * scale
    groups = groups_of(clusters(tensor(values), tensor(noise)).tolist())
    assert [column for group in groups for column in group] == list(range(width))
    assert max(len(group) for group in groups) <= max(1, width // 8)
    for group in groups:
        for column in group[:-1]:
            assert values[column] - values[column + 1] <= noise[column]
    for before, after in pairwise(groups):  # a cut is at a wide gap, or where the cap is reached
        last = before[-1]
        apart = values[last] - values[after[0]] > noise[last]
        assert apart or len(before) == max(1, width // 8)


def test_clusters_of_many_heads_are_each_heads_own_and_so_are_their_sizes():
    generator = np.random.default_rng(0)
    values = tensor(-np.sort(-generator.random((3, 40))))
    noise = tensor(generator.random((3, 39)) * 0.05)
    starts = clusters(values, noise)
    sizes = cluster_sizes(starts)
    assert int(sizes.max()) == 5, "an eighth"
    for head in range(3):
        assert starts[head].tolist() == clusters(values[head], noise[head]).tolist()
        groups = groups_of(starts[head].tolist())
        assert sizes[head].tolist() == [len(group) for group in groups for _ in group]


def test_every_head_is_looked_at_at_its_own_rank():
    width, ranks = 12, [3, 9, 12, 3, 7, 1]
    source, target = haar(width, 3, 6), haar(width, 4, 6)
    source[3] = target[3] @ planar(width, 2, 3, 0.2)  # a small angle beside a large one of a rank
    both = overlap(source, target)
    angles, distances = principal_angle(both, ranks), subspace_distance(both, ranks)
    for head, rank in enumerate(ranks):
        alone = both[head], rank
        assert float(angles[head]) == pytest.approx(float(principal_angle(*alone)), **EXACT)
        assert float(distances[head]) == pytest.approx(float(subspace_distance(*alone)), **EXACT)
    assert float(angles[2]) == 0.0
    assert float(angles[3]) == pytest.approx(0.2, **EXACT)
    expected = subspace_angles(source[1][:, :9], target[1][:, :9]).max()
    assert float(angles[1]) == pytest.approx(expected, **EXACT)


@pytest.mark.parametrize("width", [64, 128])
def test_unrelated_bases_never_look_aligned(width):
    source, target = haar(width, 10, 6), haar(width, 11, 6)
    found = column_ratio(tensor(source), tensor(target))
    assert (found.delta / found.epsilon).numpy() == pytest.approx(HAAR_RATIO[0], abs=0.03)
    signed = column_ratio(align_signs(tensor(source), tensor(target)), tensor(target))
    assert (signed.delta / signed.epsilon).numpy() == pytest.approx(HAAR_RATIO[1], abs=0.03)
    # The most that alignment may do: every gap is below the noise, so clusters are as wide as
    # they may be.
    groups = groups_of(
        clusters(torch.zeros(width).double(), torch.ones(width - 1).double()).tolist()
    )
    aligned = align_clusters(tensor(source), tensor(target), torch.stack([starts_of(groups)] * 6))
    clustered = column_ratio(aligned, tensor(target))
    assert float((clustered.delta / clustered.epsilon).min()) > 1.1
    for rank in (width // 4, width // 2):
        # E ‖P − P̂‖² = 2r − 2r²/d for independent subspaces.
        expected = np.sqrt((rank - rank**2 / width) / min(rank, width - rank))
        distance = subspace_distance(overlap(source, target), rank)
        assert distance.numpy() == pytest.approx(expected, abs=0.04)
        assert float(principal_angle(overlap(source, target), rank).min()) > 1.2


def test_the_perturbation_of_a_change_of_seed_has_its_closed_form():
    target = haar(5, 5, 2)
    rotated = np.swapaxes(target, -1, -2)
    base = np.diag([9.0, 7, 5, 3, 1])
    changes = []
    for seed in range(3):
        noise = np.random.default_rng(seed).normal(size=(2, 5, 5))
        changes.append(noise + np.swapaxes(noise, -1, -2))
    grams = np.stack([target @ (base + change) @ rotated for change in changes])
    found = seed_perturbation(tensor(grams), tensor(target)).numpy()
    for head in range(2):
        for column in range(4):
            steps = [
                changes[a][head, column, column + 1] - changes[b][head, column, column + 1]
                for a, b in ((0, 1), (0, 2), (1, 2))
            ]
            assert found[head, column] == pytest.approx(np.sqrt(np.mean(np.square(steps))), **EXACT)
    same = np.stack([grams[0]] * 3)
    assert seed_perturbation(tensor(same), tensor(target)).abs().max() == 0


def test_the_perturbation_predicts_how_far_neighbours_turn():
    """First-order theory: the angle is the perturbation over the gap."""
    target, gap = np.eye(4), 1.0
    values = np.array([4.0, 4 - gap, 1.0, 0.5])
    change = np.zeros((4, 4))
    change[0, 1] = change[1, 0] = 1e-4
    grams = np.stack([np.diag(values), np.diag(values) + change])
    predicted = float(seed_perturbation(tensor(grams), tensor(target))[0]) / gap
    turned = np.linalg.eigh(grams[1])[1][:, ::-1]
    assert float(principal_angle(overlap(turned, target), 1)) == pytest.approx(predicted, rel=1e-6)


def test_extra_is_relative_above_the_floor_and_absolute_below():
    own = torch.tensor([0.5, 1.0001e-6, 1e-6, 1e-9, 0.0], dtype=torch.float64)
    offline = own + torch.tensor([0.05, 1e-6, 1e-6, 1e-7, 1e-8], dtype=torch.float64)
    found = relative_extra(offline, own).tolist()
    assert found == pytest.approx([0.1, 1 / 1.0001, 1e-6, 1e-7, 1e-8], rel=1e-9)


@settings(max_examples=15)
@given(width=st.integers(2, 8), seed=st.integers(0, 99))
def test_the_cost_equals_projecting_the_vectors_themselves(width, seed):
    generator = np.random.default_rng(seed)
    scale = np.logspace(0, -1, width)
    q, k = generator.normal(size=(40, width)) * scale, generator.normal(size=(30, width)) * scale
    both = np.concatenate([q, k])
    own_basis, offline_basis = np.linalg.eigh(both.T @ both)[1][:, ::-1], haar(width, seed)
    gram, left, right = (tensor(x.T @ x) for x in (both, q, k))
    own, offline = (loss(gram, left, right, tensor(b)) for b in (own_basis, offline_basis))
    extra = extra_loss(offline, own)
    for rank in range(width):
        lost = []
        for basis in (own_basis, offline_basis):
            removed = np.eye(width) - basis[:, :rank] @ basis[:, :rank].T
            lost.append(
                (
                    np.linalg.norm(both @ removed) ** 2 / np.linalg.norm(both) ** 2,
                    np.linalg.norm(q @ removed @ k.T) / np.linalg.norm(q @ k.T),
                )
            )
        for found, part in ((extra.energy, 0), (extra.product, 1)):
            expected = (lost[1][part] - lost[0][part]) / lost[0][part]
            assert float(found[rank]) == pytest.approx(expected, abs=1e-8, rel=1e-8)
        assert float(extra.energy[rank]) >= -1e-12, "no basis loses less energy than its own"
