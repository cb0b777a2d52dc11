"""The data of a stability result, from constructed runs."""

import json

import numpy as np
import pytest

from kvprof.analysis.stability_data import stability_data
from kvprof.analysis.stability_study import RankChoice
from kvprof.results.stability import NOISE_FLOOR
from tests.analysis.rotations import factors, gram_of, haar, planar, run

CHOICES = [RankChoice(rank=4), RankChoice(rank=8), RankChoice(removal_rate=0.1)]
VALUES = np.logspace(0, -1.5, 16)[None]


def turned(angle: float):
    """One head whose basis is turned by `angle` across rank 8."""
    return factors(gram_of(haar(16, 0)[None] @ planar(16, 7, 8, angle), VALUES))


def random_run(seed: int, angles: dict[int, float]):
    return run("random", {tokens: turned(a) for tokens, a in angles.items()}, seed=seed)


@pytest.fixture
def falling():
    """Seeds whose angle halves at each doubling, then stays."""
    angles = {1024: 0.4, 2048: 0.2, 4096: 0.1, 8192: 0.1}
    return [random_run(seed, angles) for seed in range(3)]


def dataset(name: str = "prose", angle: float = 0.0, seq_len: int = 64):
    made = run(name, {8192: turned(angle)}, seed=None)
    made.seq_len = seq_len
    return made


def study(sources, noise=(), targets=None, short=(), random_source=True):
    return stability_data(
        sources, noise, targets or [dataset()], short, ["qk"], CHOICES, random_source=random_source
    )


def test_everything_is_json_and_there_is_a_curve_for_the_noise_floor(falling):
    data, warnings = study(falling)
    json.dumps(data, allow_nan=False)
    assert warnings == []
    averages = [row for row in data["curves"] if row["layer"] is None]
    assert {row["target"] for row in averages} == {"prose", NOISE_FLOOR}
    assert len(averages) == 2 * 4 * len(CHOICES)
    heads = [row for row in data["curves"] if row["layer"] is not None]
    assert len(heads) == 2 * 3 * 4 * len(CHOICES)
    # Every seed here saw the same: the floor is nothing at the largest count.
    floor = [r for r in averages if r["target"] == NOISE_FLOOR and r["tokens"] == 8192]
    assert max(row["extra_energy_loss"] for row in floor) < 1e-12


def test_the_recommendation_follows_the_cost_at_half_the_width(falling):
    data, _ = study(falling)
    found = data["recommendation"]
    assert (found["tokens"], found["stopped_falling"]) == (4096, True)
    first = found["pairs"]["qk"]["evidence"][0]
    gap, tail = VALUES[0, 7] - VALUES[0, 8], VALUES[0, 8:].sum()
    assert first["cost_before"] == pytest.approx(np.sin(0.4) ** 2 * gap / tail, rel=1e-8)


def test_noise_runs_stand_in_when_the_source_is_text_or_has_one_seed(falling):
    noise = [random_run(seed, {8192: 0.3 * seed}) for seed in range(2)]
    text = run("text", {4096: turned(0.1), 8192: turned(0.1)}, seed=None)
    data, warnings = study([text], noise, random_source=False)
    assert warnings == []
    assert any(row["target"] == NOISE_FLOOR for row in data["curves"])
    assert {claim["paper"].split()[0] for claim in data["claims"]} == {"ZACK"}
    floor = [r for r in data["curves"] if r["target"] == NOISE_FLOOR and r["layer"] is not None]
    # One seed is judged by the other one's data, never by its own.
    assert {row["seed"] for row in floor} == {0}
    at_the_cut = [row["subspace_distance"] for row in floor if row["rank"] == 8]
    assert at_the_cut == pytest.approx([np.sin(0.3) / np.sqrt(8)], abs=1e-8)
    _, warnings = study(falling[:1])
    assert warnings == ["no noise floor: it requires the model and two seeds of random tokens"]


def test_one_token_count_recommends_nothing():
    data, _ = study([random_run(0, {8192: 0.1}), random_run(1, {8192: 0.2})])
    assert data["recommendation"] is None


def test_the_recommendation_serves_every_pair_and_averages_datasets():
    angles = {1024: 0.4, 2048: 0.2, 4096: 0.05}
    sources = [random_run(seed, angles) for seed in range(2)]
    targets = [dataset("prose"), dataset("code", angle=0.4)]
    data, _ = study(sources, targets=targets)
    costs = data["recommendation"]["pairs"]["qk"]["evidence"][-1]["cost_after"]
    gap, tail = VALUES[0, 7] - VALUES[0, 8], VALUES[0, 8:].sum()
    each = [np.sin(angle) ** 2 * gap / tail for angle in (0.05, 0.35)]
    assert costs == pytest.approx(np.mean(each), rel=1e-8)


def test_a_cost_that_comes_from_the_length_is_warned_about(falling):
    long, short = dataset(angle=0.9, seq_len=2048), dataset(angle=0.0)
    data, warnings = study(falling, targets=[long], short=[short])
    (row,) = data["lengths"]
    assert (row["seq_len_source"], row["seq_len_target"], row["tokens"]) == (64, 2048, 8192)
    gap, tail = VALUES[0, 7] - VALUES[0, 8], VALUES[0, 8:].sum()
    assert row["cost"] == pytest.approx(np.sin(0.8) ** 2 * gap / tail, rel=1e-8)
    assert row["cost_same_length"] == pytest.approx(np.sin(0.1) ** 2 * gap / tail, rel=1e-8)
    assert len(warnings) == 1
    assert "at sequence length 2,048," in warnings[0]
    _, quiet = study(falling, targets=[dataset(angle=0.0, seq_len=2048)], short=[short])
    assert quiet == [], "no warning where the length costs nothing"


def test_cluster_sizes_add_up_over_seeds(falling):
    data, _ = study(falling)
    rows = [row for row in data["clusters"] if row["target"] == "prose"]
    assert [row["tokens"] for row in rows] == [1024, 2048, 4096, 8192]
    for row in rows:
        assert sum(int(size) * number for size, number in row["sizes"].items()) == 3 * 16
