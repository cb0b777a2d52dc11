"""The passes of a study: as few as possible, each on its own tokens; and one study in full."""

import numpy as np
import pytest
import torch

from kvprof.analysis.pairs import pair_gram
from kvprof.analysis.stability import pair_factors
from kvprof.analysis.stability_data import stability_data
from kvprof.analysis.stability_study import FIGURES, RankChoice
from kvprof.errors import UsageError
from kvprof.models.load import wrap_model
from kvprof.moments import collect
from kvprof.moments.collect import CollectOptions, collect_moments
from kvprof.moments.files import save_moments
from kvprof.moments.stability_passes import Pass, StudyPlan, plan_passes, run_pass
from kvprof.sources.grammar import Source, SourceKind, file_source
from tests.models.tiny import tiny

RANDOM = Source(SourceKind.RANDOM, "random")
PROSE = Source(SourceKind.EMBEDDED, "prose")
CODE = Source(SourceKind.EMBEDDED, "code")
SAVED = Source(SourceKind.MOMENTS, "m.safetensors")


def plan(source=RANDOM, targets=(PROSE, CODE), **others) -> StudyPlan:
    settings = {
        "pairs": ("qk", "vo"),
        "counts": (64, 128, 256),
        "target_tokens": 256,
        "seeds": (0, 1, 2),
        "seq_len": 16,
        "target_seq_len": 16,
        **others,
    }
    return StudyPlan(source=source, targets=targets, **settings)


def summary(passes: list[Pass]):
    return [(one.role, one.source.name, one.seed) for one in passes]


def test_random_tokens_are_their_own_noise_floor():
    passes = plan_passes(plan())
    assert summary(passes) == [
        ("target", "prose", 4), ("source", "random", 0), ("target", "code", 4),
        ("source", "random", 1), ("source", "random", 2),
    ]  # fmt: skip
    for one in passes:
        wanted = (256,) if one.role == "target" else (64, 128, 256)
        assert (one.snapshots, one.tokens, one.seq_len) == (wanted, 256, 16)


def test_a_single_seed_or_a_text_gets_a_noise_floor_of_its_own():
    one_seed = plan_passes(plan(seeds=(0,)))
    assert summary(one_seed)[-1] == ("noise", "random", 1)
    text = plan_passes(plan(source=CODE, targets=(PROSE,)))
    assert summary(text) == [
        ("target", "prose", 4),
        ("source", "code", 0),
        ("noise", "random", 0),
        ("noise", "random", 1),
    ]


@pytest.mark.parametrize("seeds", [(0,), (0, 1), (0, 1, 2, 3)])
def test_a_random_dataset_never_shares_a_seed_with_a_random_source(seeds):
    for source in (RANDOM, CODE):
        passes = plan_passes(plan(source=source, targets=(RANDOM,), seeds=seeds))
        targets = {one.seed for one in passes if one.role == "target"}
        others = {one.seed for one in passes if one.role in ("source", "noise")}
        assert not targets & others
        noise = [one.seed for one in passes if one.role == "noise"]
        assert len(set(noise)) == len(noise)


@pytest.mark.parametrize(
    ("lengths", "twice"), [((16, 16), False), ((16, 32), False), ((16, 48), True), ((48, 16), True)]
)
def test_lengths_more_than_twice_apart_are_told_apart_by_a_run_of_both(lengths, twice):
    seq_len, target_seq_len = lengths
    passes = plan_passes(
        plan(seq_len=seq_len, target_seq_len=target_seq_len, targets=(PROSE, SAVED))
    )
    short = [one for one in passes if one.role == "target_short"]
    assert [(one.source.name, one.seq_len) for one in short] == (
        [("prose", seq_len)] if twice else []
    )
    assert {one.seq_len for one in passes if one.role == "target"} == {target_seq_len}


@pytest.fixture(scope="module")
def llama():
    return wrap_model(tiny("Llama", seed=2))


def run(loaded, one: Pass, **options):
    return run_pass(loaded, one, ("qk", "vo", "k", "v"), batch_size=4, **options)


def test_one_pass_serves_every_count_and_pair(llama, monkeypatch):
    seen = []
    run_batch = collect.run_batch
    monkeypatch.setattr(
        collect, "run_batch", lambda m, ids: (seen.append(ids.numel()), run_batch(m, ids))
    )
    found, fingerprint = run(llama, plan_passes(plan())[1])
    assert sum(seen) == 256
    assert fingerprint == llama.fingerprint
    assert (found.name, found.seed, found.seq_len) == ("random", 0, 16)
    assert list(found.snapshots) == [64, 128, 256]
    assert all(set(pairs) == {"qk", "vo", "k", "v"} for pairs in found.snapshots.values())


def test_factors_do_not_grow_with_the_number_of_tokens(llama):
    *_, moments = collect_moments(llama, RANDOM, CollectOptions(tokens=256, seq_len=16))
    layer = moments.layers[1]
    q, k, v = (layer.grouped(key) / 256 for key in ("q", "k", "v"))
    for pair, gram, left, right in (
        ("qk", q + k, q, k),
        ("k", k, q, k),
        ("v", v, v, layer.c_o),
        ("vo", 8192 * v + layer.c_o, v, layer.c_o),
    ):
        found = pair_factors(moments, pair)
        for ours, exact in ((found.gram, gram), (found.left, left), (found.right, right)):
            torch.testing.assert_close(ours[1], exact, rtol=1e-12, atol=0)
        torch.testing.assert_close(
            found.gram[1] * (1 if pair == "vo" else 256), pair_gram(moments, 1, pair)
        )
    with pytest.raises(UsageError, match="'w_v' has no basis to compare"):
        pair_factors(moments, "w_v")


def test_an_interrupted_pass_keeps_the_counts_it_reached(llama):
    asked = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) >= 2

    found, _ = run(llama, plan_passes(plan())[1], should_stop=stop)
    assert list(found.snapshots) == [64, 128]


def test_saved_moments_stand_in_for_a_pass(llama, tmp_path):
    *_, moments = collect_moments(llama, RANDOM, CollectOptions(tokens=256, seq_len=16))
    path = tmp_path / "m.safetensors"
    save_moments(moments, path)
    one = Pass("target", Source(SourceKind.MOMENTS, path.name, (path,)), 0, 99, 64, (64,))
    found, fingerprint = run(None, one)
    assert list(found.snapshots) == [256]
    assert (found.seed, found.seq_len, fingerprint) == (None, 16, llama.fingerprint)
    with pytest.raises(UsageError):
        run(None, one, fingerprint="0" * 32)


def test_a_study_of_a_real_decoder_end_to_end(llama, tmp_path):
    """A dataset against itself is free, another one costs, and the counts are those asked for."""
    ids = np.random.default_rng(0).integers(3, 30, size=(16, 16))
    np.save(tmp_path / "a.npy", ids)
    dataset = file_source([tmp_path / "a.npy"], token_ids=True)
    its_plan = plan(source=dataset, targets=(dataset,), seeds=(0,))
    runs: dict[str, list] = {}
    for one in plan_passes(its_plan):
        runs.setdefault(one.role, []).append(run(llama, one)[0])
    data, _ = stability_data(
        runs["source"],
        runs["noise"],
        runs["target"],
        [],
        its_plan.pairs,
        [RankChoice(rank=4), RankChoice(removal_rate=0.1)],
        random_source=False,
    )
    own = [r for r in data["curves"] if r["target"] == "a.npy" and r["layer"] is not None]
    assert len(own) == 2 * 3 * 2 * 3 * 2  # pairs, layers, heads, counts, ranks
    for row in own:
        if row["tokens"] == 256:
            assert all(abs(row[figure]) < 1e-9 for figure in FIGURES if row[figure] is not None)
    fewer = [r["extra_energy_loss"] for r in own if r["tokens"] == 64]
    assert np.mean(fewer) > 1e-3
    floor = [r for r in data["curves"] if r["target"] != "a.npy" and r["layer"] is not None]
    assert np.mean([r["extra_energy_loss"] for r in floor]) > 1e-4
