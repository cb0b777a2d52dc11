"""One pass through a real decoder gives the moments of exactly the tokens that it was given."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from kvprof.analysis.pairs import pair_gram
from kvprof.analysis.spectrum import singular_values
from kvprof.commands.loading import defined_pairs
from kvprof.errors import FailedError, UsageError
from kvprof.models.load import wrap_model
from kvprof.moments import collect
from kvprof.moments.collect import collect_moments, count_tokens, model_tokens, undefined_pairs
from kvprof.sources.grammar import file_source
from kvprof.sources.windows import batches, windows
from tests.analysis import stacked
from tests.analysis.passes import RANDOM, SEQ_LEN, ids_file, last, options, same
from tests.models.independent import vectors
from tests.models.tiny import ARCHITECTURES, CONTEXT, MLA, tiny


@pytest.fixture(scope="module")
def llama():
    return wrap_model(tiny("Llama"))


def output_rows(loaded, layer) -> np.ndarray:
    """Every query head's rows of the output projection, ``[heads, d_v, hidden]``."""
    module = loaded.model.get_submodule(layer.attention)
    weight = next(
        getattr(module, name).weight
        for name in ("o_proj", "out_proj", "c_proj", "dense")
        if hasattr(module, name)
    ).double()
    rows = weight if type(getattr(module, "c_proj", None)).__name__ == "Conv1D" else weight.T
    return rows.detach().reshape(layer.num_heads, layer.v_head_dim, -1).numpy()


@pytest.mark.parametrize("arch", ARCHITECTURES + MLA)
def test_singular_values_equal_the_svd_of_everything_stacked(arch):
    loaded = wrap_model(tiny(arch))
    names = [layer.attention for layer in loaded.layout.layers]
    # One sequence, fewer tokens than dimensions; no multiple of the batch; a shorter last one.
    for tokens, skip_first in ((5, 0), (3 * SEQ_LEN * 2, 0), (100, 0), (100, 2)):
        settings = options(tokens, skip_first=skip_first, pre_rope=True, seed=tokens)
        moments = last(loaded, RANDOM, settings)
        drawn = windows(RANDOM, model_tokens(loaded), tokens=tokens, seq_len=SEQ_LEN, seed=tokens)
        seen = [
            vectors(arch, loaded.model, names, torch.from_numpy(ids)) for ids in batches(drawn, 3)
        ]
        for index, layer in enumerate(loaded.layout.layers):
            whole = {
                key: stacked.rows([one[index][i] for one in seen], skip_first=skip_first)
                for i, key in enumerate(stacked.KEYS)
            }
            w_o = output_rows(loaded, layer)
            assert moments.tokens == whole["k"].shape[1]
            for pair in ("qk", "vo", "q", "k", "v", "q_pre", "k_pre"):
                ours = singular_values(pair_gram(moments, index, pair))
                for head in range(layer.num_kv_heads):
                    rows = stacked.pair_rows(whole, w_o, pair, head, weight_tokens=8192)
                    stacked.close_to_largest(ours[head], stacked.singular_values(rows))
            raw = singular_values(pair_gram(moments, index, "vo", value_weight_tokens=None))
            rows = stacked.pair_rows(whole, w_o, "vo", 0, weight_tokens=None)
            stacked.close_to_largest(raw[0], stacked.singular_values(rows))


def test_the_weights_own_spectrum(llama):
    moments = last(llama, RANDOM, options(16))
    weight = llama.model.model.layers[1].self_attn.v_proj.weight.double().numpy(force=True)
    ours = singular_values(pair_gram(moments, 1, "w_v"))
    for head in range(2):
        exact = np.linalg.svd(weight[16 * head : 16 * (head + 1)], compute_uv=False)
        stacked.close_to_largest(ours[head], exact)


def test_two_runs_are_the_same_to_the_last_bit(llama):
    first, again = (last(llama, RANDOM, options(100, seed=3)) for _ in range(2))
    assert same(first, again)
    assert not same(first, last(llama, RANDOM, options(100, seed=4)))


def test_how_tokens_are_batched_does_not_matter(llama):
    whole = last(llama, RANDOM, options(100, batch_size=100))
    for batch_size in (1, 2, 5):
        other = last(llama, RANDOM, options(100, batch_size=batch_size))
        assert (other.tokens, other.sequences) == (whole.tokens, whole.sequences)
        for a, b in zip(whole.layers, other.layers, strict=True):
            for key in a.rest:
                # The forward pass itself rounds to float32 differently in another batch.
                torch.testing.assert_close(a.gram(key), b.gram(key), rtol=1e-5, atol=1e-4)


def test_snapshots_equal_separate_runs_and_cost_no_extra_pass(llama, monkeypatch):
    calls = []
    run_batch = collect.run_batch
    monkeypatch.setattr(
        collect, "run_batch", lambda m, ids: (calls.append(ids.numel()), run_batch(m, ids))
    )
    stops = [SEQ_LEN, 4 * SEQ_LEN, 7 * SEQ_LEN]
    # One sequence to a batch, so that the runs share their batches and agree to the last bit.
    settings = options(7 * SEQ_LEN, batch_size=1)
    swept = list(collect_moments(llama, RANDOM, settings, snapshots=stops))
    assert sum(calls) == 7 * SEQ_LEN
    assert [moments.tokens for moments in swept] == stops
    for moments in swept:
        alone = last(llama, RANDOM, options(moments.tokens, batch_size=1))
        assert same(moments, alone)
        assert moments.info == alone.info
        assert moments.complete


def test_a_snapshot_in_the_middle_of_a_batch_ends_it(llama):
    swept = list(
        collect_moments(llama, RANDOM, options(96, batch_size=4), snapshots=[32, 48, 96, 48])
    )
    assert [moments.tokens for moments in swept] == [32, 48, 96]
    assert [moments.sequences for moments in swept] == [2, 3, 6]
    for a, b in pairwise(swept):
        assert float(a.layers[0].gram("k").sum()) != float(b.layers[0].gram("k").sum())


def test_progress_counts_every_token(llama):
    told = []
    last(llama, RANDOM, options(100), advance=told.append)
    assert sum(told) == 100
    assert told == [48, 48, 4]


def test_stopping_keeps_what_was_counted(llama):
    asked = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) == 2

    found = list(
        collect_moments(llama, RANDOM, options(160, batch_size=2), snapshots=[64], should_stop=stop)
    )
    # The snapshot was reached with the batch in hand, so it is not lost.
    assert [(moments.tokens, moments.complete) for moments in found] == [(64, True), (64, False)]
    alone = last(llama, RANDOM, options(64, batch_size=2))
    for moments in found:
        assert same(moments, alone)
    assert len(asked) == 2


def test_stopping_at_the_very_end_is_no_interruption(llama):
    moments = last(llama, RANDOM, options(32, batch_size=2), should_stop=lambda: True)
    assert moments.complete


def test_nothing_leaks_while_a_consumer_works_on_a_snapshot(llama):
    stream = collect_moments(llama, RANDOM, options(64, batch_size=1), snapshots=[16])
    first = next(stream)
    assert not torch.is_inference_mode_enabled()
    first.layers[0].rest["k"].requires_grad_()  # an ordinary tensor of the consumer's own
    stream.close()
    assert llama.model.config._attn_implementation in ("sdpa", "eager")
    assert same(last(llama, RANDOM, options(32)), last(llama, RANDOM, options(32)))


def test_the_positions_and_what_was_run_are_written_down(llama):
    moments = last(llama, RANDOM, options(100, skip_first=3, seed=9))
    assert moments.info["positions"] == "3-15"
    assert moments.info["seed"] == 9
    assert moments.info["source"] == "random"
    assert (moments.info["seq_len"], moments.info["skip_first"]) == (16, 3)
    assert moments.info["dtype"] == "float32"
    assert moments.fingerprint == llama.fingerprint
    # Six whole sequences lose three positions each, the last one has four tokens.
    assert (moments.tokens, moments.sequences) == (6 * 13 + 1, 0)


def test_expanded_heads_of_mla_are_labelled():
    moments = last(wrap_model(tiny("DeepseekV3")), RANDOM, options(16))
    assert "MLA" in moments.info["labels"][0]


def test_memory_does_not_depend_on_the_number_of_tokens(llama):
    few, many = (last(llama, RANDOM, options(tokens)) for tokens in (16, 480))
    assert stacked.held_bytes(few) == stacked.held_bytes(many)


@pytest.mark.parametrize("length", [1, 5])
def test_values_that_are_not_finite_are_refused(tmp_path, length):
    model = tiny("Llama", seed=7)
    loaded = wrap_model(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = float("nan")
    fine = ids_file(tmp_path, [4] * length)
    assert last(loaded, fine, options(None)).tokens == length
    # Alone it is only ever a first position.
    broken = ids_file(tmp_path, [50] + [4] * (length - 1))
    with pytest.raises(FailedError, match=r"layer 0 is not finite"):
        last(loaded, broken, options(None))


def refuse_to_run(monkeypatch):
    def run(*_):
        raise AssertionError("the model ran")

    monkeypatch.setattr(collect, "run_batch", run)


def test_what_cannot_work_is_found_out_before_the_model_runs(llama, tmp_path, monkeypatch):
    refuse_to_run(monkeypatch)
    with pytest.raises(UsageError, match=f"--seq-len 129 exceeds the context of .*, {CONTEXT}"):
        count_tokens(llama, RANDOM, options(500, seq_len=CONTEXT + 1))
    with pytest.raises(UsageError, match="--skip-first 16 is not below"):
        count_tokens(llama, RANDOM, options(500, skip_first=16))
    source = ids_file(tmp_path, [3, 4, 5], [6])
    with pytest.raises(UsageError):
        count_tokens(llama, source, options(5))
    with pytest.raises(UsageError, match="2 tokens end inside a sequence of 3"):
        last(llama, source, options(None), snapshots=[2])
    with pytest.raises(UsageError):
        count_tokens(llama, ids_file(tmp_path, [97]), options(None))
    text = tmp_path / "a.txt"
    text.write_text("words")
    with pytest.raises(UsageError, match="has no tokenizer"):
        count_tokens(llama, file_source([text], token_ids=False), options(None))


def test_skipping_more_than_every_sequence_has_is_refused(llama, tmp_path):
    source = ids_file(tmp_path, [3, 4], [5])
    with pytest.raises(UsageError, match="lower --skip-first"):
        last(llama, source, options(None, skip_first=2))


def test_counts_are_told_beforehand(llama, tmp_path):
    assert count_tokens(llama, RANDOM, options(100)) == 100
    assert count_tokens(llama, ids_file(tmp_path, [3, 4, 5], [6]), options(None)) == 4
    assert count_tokens(llama, ids_file(tmp_path, [3, 4, 5], [6]), options(2)) == 2


def test_a_model_on_another_seed_has_another_fingerprint(llama):
    other = wrap_model(tiny("Llama", seed=1))
    assert last(other, RANDOM, options(16)).fingerprint != llama.fingerprint


def test_pairs_before_rope_are_kept_only_when_asked_for(llama):
    assert set(last(llama, RANDOM, options(16)).layers[0].rest) == {"q", "k", "v"}
    with_pre = replace(options(16), pre_rope=True)
    assert set(last(llama, RANDOM, with_pre).layers[0].rest) == set(stacked.KEYS)


def odd_projections(*, gated: bool, normalised: bool):
    """A model in which what comes between heads and weights is no plain projection."""
    model = tiny("Llama")
    for layer in model.model.layers:
        attention = layer.self_attn
        if gated:
            attention.o_proj = nn.Sequential(nn.LayerNorm(64), attention.o_proj)
        if normalised:
            attention.v_proj = nn.Sequential(attention.v_proj, nn.LayerNorm(32))
    return wrap_model(model)


@pytest.mark.parametrize(
    ("gated", "normalised", "lacking"),
    [(True, False, ("vo",)), (False, True, ("w_v",)), (True, True, ("vo", "w_v"))],
)
def test_a_model_without_slices_of_a_weight_loses_that_pair_only(gated, normalised, lacking):
    loaded = odd_projections(gated=gated, normalised=normalised)
    assert undefined_pairs(loaded.layout) == lacking
    moments = last(loaded, RANDOM, options(64))
    for pair in ("qk", "k", "v"):
        assert torch.isfinite(pair_gram(moments, 0, pair)).all()
    for pair in lacking:
        with pytest.raises(UsageError, match=pair):
            pair_gram(moments, 0, pair)
    kept = [pair for pair in ("qk", "vo", "w_v") if pair not in lacking]
    warnings: list[str] = []
    given = {"asked": False, "warnings": warnings}
    assert list(defined_pairs(loaded, ("qk", "vo", "w_v"), **given)) == kept
    assert len(warnings) == 1
    assert all(pair in warnings[0] for pair in lacking)
    with pytest.raises(UsageError, match=lacking[0]):
        defined_pairs(loaded, ("qk", *lacking), asked=True, warnings=[])
