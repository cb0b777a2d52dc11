"""What the model's own cache stores is what counts as uncompressed; who can run compressed."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvprof.errors import UsageError
from kvprof.methods.accounting import bytes_at, dim_rate, full_bytes
from kvprof.methods.family import MethodInputs
from kvprof.methods.registry import plan_family
from kvprof.models.load import wrap_model
from kvprof.models.probe import inspect_layout
from kvprof.runtime import compressed as module
from kvprof.runtime.compressed import check_runs, compressed, refusal
from tests.models.tiny import ARCHITECTURES, CHUNKED, UNCOMPRESSED, tiny, token_ids
from tests.runtime.plans import loaded, make_plan, ragged


def stored_by_transformers(model, tokens: int) -> int:
    """Bytes of keys and values in transformers' own cache, after a prefill and one step."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids = token_ids(1, tokens)
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        model(ids[:, -1:], past_key_values=cache)
    sides = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(side.nbytes for side in sides if side is not None)


@pytest.mark.parametrize("arch", ARCHITECTURES + CHUNKED + UNCOMPRESSED)
@pytest.mark.parametrize("tokens", [4, 40])
def test_full_width_is_what_the_model_itself_stores(arch, tokens):
    model = loaded(arch)
    plan = plan_family("full", MethodInputs(model.layout, model.fingerprint)).build(0.0)
    wanted = stored_by_transformers(model.model, tokens)
    assert full_bytes(plan, tokens, itemsize=4) == wanted
    assert bytes_at(plan, tokens, itemsize=4).total == wanted
    assert dim_rate(plan) == 0


@pytest.mark.parametrize("tokens", [3, 7, 8, 15, 30])
def test_chunked_attention_is_exact_at_full_rank_and_counted_below(tokens):
    model = loaded("Llama4")  # chunks of 7
    ids = token_ids(1, tokens + 9)
    with torch.no_grad():
        wanted = model.model(ids).logits
    for plan, exact in ((make_plan(model), True), (make_plan(model, ranks=ragged), False)):
        with compressed(model, plan) as session, torch.no_grad():
            cache = session.new_cache()
            rows = [model.model(ids[:, :tokens], past_key_values=cache).logits]
            for place in range(tokens, tokens + 9):
                step = model.model(ids[:, place : place + 1], past_key_values=cache)
                rows.append(step.logits)
        assert cache.nbytes == bytes_at(plan, tokens + 9, itemsize=4).total
        close = torch.allclose(torch.cat(rows, 1), wanted, atol=1e-3, rtol=1e-3)
        assert close is exact
    assert all(reason and "mask" in reason for reason in _reasons(model)[::2])


def _reasons(model):
    plan = make_plan(model)
    with compressed(model, plan) as session:
        return session.route.reasons


@pytest.mark.parametrize("arch", UNCOMPRESSED)
def test_what_cannot_run_is_refused_when_it_is_opened(arch):
    model = loaded(arch)
    what = {"Gemma3n": "another layer", "FalconH1": "recurrent state"}[arch]
    with pytest.raises(UsageError, match=what):
        check_runs(model)
    plan = plan_family("full", MethodInputs(model.layout, model.fingerprint)).build(0.0)
    with pytest.raises(UsageError, match=what), compressed(model, plan):
        pass


def test_what_fails_in_a_pass_or_gives_other_logits_is_refused(monkeypatch):
    model = wrap_model(tiny("Llama"))
    passes = []

    def counted(*args, **kwargs):
        passes.append(args)

    handle = model.model.register_forward_pre_hook(counted)
    assert refusal(model) is None
    assert refusal(model) is None
    handle.remove()
    assert len(passes) == 4  # once: its own pass, a prefill, two steps

    lossy = wrap_model(tiny("Llama"))
    monkeypatch.setattr(module, "_turned", lambda loaded: make_plan(loaded, ranks=ragged))
    reason = refusal(lossy)
    assert reason is not None
    assert "differ" in reason
    monkeypatch.undo()

    broken = wrap_model(tiny("Llama", seed=2))
    inner = broken.model.model.layers[1].self_attn
    forward = inner.forward

    def failing(*args, past_key_values=None, **kwargs):
        if past_key_values is not None:
            past_key_values.layers[1].conv_states  # noqa: B018 - of a cache of another kind
        return forward(*args, past_key_values=past_key_values, **kwargs)

    inner.forward = failing
    reason = refusal(broken)
    assert reason is not None
    assert "conv_states" in reason


def test_layers_that_share_or_keep_states_are_marked():
    gemma, falcon = (inspect_layout(tiny(arch)).layers for arch in ("Gemma3n", "FalconH1"))
    assert [layer.shared for layer in gemma] == [False, False, True, True]
    assert all(layer.recurrent for layer in falcon)
