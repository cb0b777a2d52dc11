"""Rows and averages of a study, against numpy on constructed runs with ragged layers."""

import numpy as np
import pytest

from kvprof.analysis.stability_study import FIGURES, RankChoice, average, compare
from tests.analysis.rotations import factors, gram_of, haar, planar, run

KEYS = {
    "pair", "source", "target", "tokens", "seq_len_source", "seq_len_target", "seed", "layer",
    "kv_head", "rank", "removal_rate", "ratio", "ratio_sign_aligned", "ratio_cluster_aligned",
    "subspace_distance", "principal_angle", "extra_energy_loss", "extra_score_error",
    "extra_output_error", "own_energy_loss",
}  # fmt: skip
#: Heads and width of each layer: layers differ, and the middle one is narrower than some ranks.
LAYERS = [(2, 16), (3, 8), (1, 16)]
CHOICES = [RankChoice(rank=4), RankChoice(rank=12), RankChoice(removal_rate=0.2)]


def spectrum(heads: int, width: int) -> np.ndarray:
    return np.logspace(0, -2, width)[None] * np.linspace(1, 3, heads)[:, None]


def target_bases() -> list[np.ndarray]:
    return [
        haar(width, 10 + i, heads).reshape(heads, width, width)
        for i, (heads, width) in enumerate(LAYERS)
    ]


def source_bases(angle: float, seed: int) -> list[np.ndarray]:
    """The target's bases, turned a little in three planes and with some columns reversed."""
    turned = []
    for (heads, width), basis in zip(LAYERS, target_bases(), strict=True):
        flips = np.diag(np.where(np.random.default_rng(seed).random(width) < 0.3, -1.0, 1.0))
        turns = [
            planar(width, 3, 4, its) @ planar(width, 0, 7, its / 2) @ flips
            for its in angle * (1 + 0.1 * seed) * np.linspace(1, 0.5, heads)
        ]
        turned.append(basis @ np.stack(turns))
    return turned


def layer_factors(bases: list[np.ndarray], scale: float = 1.0):
    values = [spectrum(*shape) for shape in LAYERS]
    grams = [scale * gram_of(b, v) for b, v in zip(bases, values, strict=True)]
    left = [gram_of(b, v**2 + 0.1) for b, v in zip(bases, values, strict=True)]
    right = [gram_of(np.roll(b, 1, -1), v) for b, v in zip(bases, values, strict=True)]
    return factors(*grams, left=left, right=right)


@pytest.fixture(scope="module")
def target():
    return run(
        "prose",
        {64: layer_factors(source_bases(1.0, 9)), 512: layer_factors(target_bases())},
        seed=None,
    )


@pytest.fixture(scope="module")
def sources():
    def one(seed: int):
        angles = {128: 0.6, 256: 0.2}
        snapshots = {t: layer_factors(source_bases(angle, seed)) for t, angle in angles.items()}
        return run("random", snapshots, seed=seed)

    return [one(0), one(1)]


@pytest.fixture(scope="module")
def comparisons(sources, target):
    return [compare(source, sources, target, "qk", CHOICES) for source in sources]


def lost(gram, basis, rank):
    removed = np.eye(len(gram)) - basis[:, :rank] @ basis[:, :rank].T
    return np.trace(removed @ gram @ removed) / np.trace(gram)


def score_error(left, right, basis, rank):
    removed = np.eye(len(left)) - basis[:, :rank] @ basis[:, :rank].T
    return np.sqrt(np.trace(removed @ left @ removed @ right) / np.trace(left @ right))


def expected_row(row, choice, target_factors):
    """Every figure of one row from numpy, given the bases that the run was made of."""
    layer, head = row["layer"], row["kv_head"]
    _, width = LAYERS[layer]
    own = target_bases()[layer][head]
    angle = {128: 0.6, 256: 0.2}[row["tokens"]]
    offline = source_bases(angle, row["seed"])[layer][head]
    values = np.sqrt(spectrum(*LAYERS[layer])[head])
    rank = min(choice.rank or 0, width)
    if choice.removal_rate is not None:
        rank = next(
            r for r in range(1, width + 1) if values[r:].sum() <= choice.removal_rate * values.sum()
        )
    gram, left, right = (
        part[layer][head].numpy()
        for part in (target_factors.gram, target_factors.left, target_factors.right)
    )
    p, q = (b[:, :rank] @ b[:, :rank].T for b in (offline, own))
    cosines = np.linalg.svd(offline[:, :rank].T @ own[:, :rank], compute_uv=False)
    signs = np.sign((offline * own).sum(0))
    energies = [lost(gram, basis, rank) for basis in (offline, own)]
    errors = [score_error(left, right, basis, rank) for basis in (offline, own)]
    full = rank == width
    return {
        "rank": rank,
        # The papers' columns as LAPACK happens to sign them: only the aligned one is known here.
        "ratio_sign_aligned": np.abs(offline * signs - own).mean() / np.abs(own).mean(),
        "subspace_distance": 0.0
        if full
        else np.linalg.norm(p - q) / np.sqrt(2 * min(rank, width - rank)),
        "principal_angle": 0.0 if full else np.arccos(min(cosines[-1], 1.0)),
        "extra_energy_loss": 0.0 if full else (energies[0] - energies[1]) / energies[1],
        "extra_score_error": 0.0 if full else (errors[0] - errors[1]) / errors[1],
    }


def test_every_row_equals_numpy_and_carries_the_keys_of_a_curve(comparisons, target):
    heads = sum(heads for heads, _ in LAYERS)
    own = target.largest("qk")
    for seed, comparison in enumerate(comparisons):
        assert len(comparison.rows) == 2 * heads * len(CHOICES)
        places = {(r["tokens"], r["layer"], r["kv_head"]) for r in comparison.rows}
        assert len(places) == 2 * heads
        for row, asked in zip(comparison.rows, comparison.asked, strict=True):
            assert set(row) == KEYS
            assert (row["pair"], row["source"], row["target"]) == ("qk", "random", "prose")
            assert (row["seed"], row["seq_len_source"], row["seq_len_target"]) == (seed, 64, 64)
            choice = next(
                c for c in CHOICES if (c.rank, c.removal_rate) == (asked, row["removal_rate"])
            )
            for key, value in expected_row(row, choice, own).items():
                # Angles near 0 are known only to the root of rounding through their cosine.
                slack = 1e-7 if key == "principal_angle" else 1e-8
                assert row[key] == pytest.approx(value, abs=slack, rel=1e-8), (key, row)
            assert row["extra_output_error"] is None
            assert row["ratio"] >= row["ratio_sign_aligned"] - 0.02
            assert row["ratio_sign_aligned"] >= row["ratio_cluster_aligned"] - 0.02


def test_the_rank_of_a_removal_rate_is_the_datasets_own(sources, target):
    steep = [np.ones((h, w)) * 1e-12 for h, w in LAYERS]
    for layer in steep:
        layer[:, 0] = 1.0
    flat = {
        128: factors(*(gram_of(b, s) for b, s in zip(source_bases(0.1, 0), steep, strict=True)))
    }
    with_flat = compare(run("random", flat), [], target, "qk", CHOICES)
    usual = compare(sources[0], [], target, "qk", CHOICES)
    for a, b in zip(with_flat.rows, usual.rows, strict=False):
        assert (a["layer"], a["kv_head"], a["rank"]) == (b["layer"], b["kv_head"], b["rank"])


def test_a_dataset_against_itself_differs_in_nothing(target):
    same = compare(target, [target, target], target, "qk", CHOICES)
    rows = [row for row in same.rows if row["tokens"] == 512]
    assert rows
    for row in rows:
        for figure in FIGURES:
            assert row[figure] is None or abs(row[figure]) < 1e-12, (figure, row[figure])
        assert row["ratio"] == 0.0
    assert any(row["subspace_distance"] > 0.01 for row in same.rows if row["tokens"] == 64)


def test_without_a_second_seed_there_is_no_cluster_alignment(sources, target):
    for siblings in ([], [sources[0]]):
        alone = compare(sources[0], siblings, target, "qk", CHOICES)
        assert all(row["ratio_cluster_aligned"] is None for row in alone.rows)
        assert alone.cluster_sizes == {}
        points = list(average([alone]))
        assert all(p["ratio_cluster_aligned"] is None for p in points)
        assert all("ratio_cluster_aligned" not in p["spread"] for p in points)


def test_cluster_sizes_count_every_column_once(comparisons):
    columns = sum(heads * width for heads, width in LAYERS)
    for comparison in comparisons:
        assert set(comparison.cluster_sizes) == {128, 256}
        for sizes in comparison.cluster_sizes.values():
            assert sum(size * number for size, number in sizes.items()) == columns


def test_seeds_that_agree_join_no_columns_and_those_that_differ_do(target):
    def sibling(noise: float, seed: int):
        bases = target_bases()
        generator = np.random.default_rng(seed)
        grams = []
        for basis, shape in zip(bases, LAYERS, strict=True):
            change = generator.normal(size=basis.shape) * noise
            grams.append(gram_of(basis, spectrum(*shape)) + change + np.swapaxes(change, -1, -2))
        return run("random", {512: factors(*grams)}, seed=seed)

    quiet = compare(
        *(lambda s: (s[0], s))([sibling(1e-9, i) for i in (0, 1)]), target, "qk", CHOICES
    )
    assert set(quiet.cluster_sizes[512]) == {1}
    noisy = compare(
        *(lambda s: (s[0], s))([sibling(0.5, i) for i in (0, 1)]), target, "qk", CHOICES
    )
    assert max(noisy.cluster_sizes[512]) == 2  # an eighth of 16
    heads = {row["layer"] for row in noisy.rows}
    assert heads == {0, 1, 2}


@pytest.mark.parametrize(
    ("pair", "filled"),
    [
        ("qk", "extra_score_error"),
        ("k", "extra_score_error"),
        ("vo", "extra_output_error"),
        ("v", "extra_output_error"),
    ],
)
def test_each_pair_has_the_error_of_its_own_product(pair, filled, target):
    own = run("prose", {512: layer_factors(target_bases())}, pair=pair)
    other = run("random", {128: layer_factors(source_bases(0.3, 0))}, pair=pair)
    empty = ({"extra_score_error", "extra_output_error"} - {filled}).pop()
    for row in compare(other, [], own, pair, CHOICES).rows:
        assert row[empty] is None
        assert row[filled] is not None


def test_an_average_is_a_ratio_of_means_and_a_mean_of_the_rest(comparisons):
    points = list(average(comparisons))
    assert len(points) == 2 * len(CHOICES), "one per token count and rank choice, ragged or not"
    heads = sum(heads for heads, _ in LAYERS)
    bases = target_bases()
    for point in points:
        assert set(point) >= KEYS | {"spread"}
        assert point["layer"] is None
        assert point["kv_head"] is None
        assert point["seed"] is None
        assert point["heads_and_seeds"] == 2 * heads
        asked = point["removal_rate"] is None and (4 if point["rank"] == 4 else 12)
        members = [
            row
            for c in comparisons
            for row, its in zip(c.rows, c.asked, strict=True)
            if row["tokens"] == point["tokens"] and (its or False) == asked
        ]
        assert len(members) == 2 * heads
        # ε is known from the target itself, δ of a row follows from its ratio.
        epsilon = [np.abs(bases[row["layer"]][row["kv_head"]]).mean() for row in members]
        for figure in FIGURES:
            samples = [row[figure] for row in members]
            if samples[0] is None:
                assert point[figure] is None
                continue
            expected = np.mean(samples)
            if figure.startswith("ratio"):
                deltas = [ratio * e for ratio, e in zip(samples, epsilon, strict=True)]
                expected = np.sum(deltas) / np.sum(epsilon)
            assert point[figure] == pytest.approx(expected, rel=1e-9, abs=1e-12), figure
            assert point["spread"][figure] == pytest.approx(
                np.percentile(samples, [2.5, 97.5]), rel=1e-12, abs=1e-15
            )
        assert point["rank"] == pytest.approx(np.mean([row["rank"] for row in members]))


def test_a_ratio_of_means_is_not_the_mean_of_ratios(comparisons):
    """Otherwise the test above could not tell the two apart."""
    rows = [r for r in comparisons[0].rows if r["tokens"] == 128 and r["removal_rate"] is None]
    point = next(p for p in average(comparisons[:1]) if p["tokens"] == 128)
    mean = np.mean([row["ratio_sign_aligned"] for row in rows])
    assert abs(point["ratio_sign_aligned"] - mean) > 1e-4


def test_removal_zero_keeps_what_the_moments_resolve_and_no_noise():
    rank_two = np.zeros((1, 8))
    rank_two[0, :2] = 1.0, 0.5
    noisy = gram_of(haar(8, 0)[None], rank_two)
    noisy += 1e-17 * np.random.default_rng(0).normal(size=noisy.shape)
    one = run("random", {64: factors((noisy + np.swapaxes(noisy, -1, -2)) / 2)})
    row = compare(one, [], one, "qk", [RankChoice(removal_rate=0.0)]).rows[0]
    assert row["rank"] == 2


def test_the_own_loss_stands_beside_the_extra_one(sources, target):
    result = compare(sources[0], [], target, "qk", CHOICES[:1])
    for row in result.rows:
        gram = target.largest("qk").gram[row["layer"]][row["kv_head"]].numpy()
        values = np.linalg.eigvalsh(gram)[::-1]
        assert row["own_energy_loss"] == pytest.approx(values[4:].sum() / values.sum(), abs=1e-12)
    point = next(iter(average([result])))
    assert point["own_energy_loss"] == pytest.approx(
        np.mean([row["own_energy_loss"] for row in result.rows if row["tokens"] == point["tokens"]])
    )
