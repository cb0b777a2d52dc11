"""Capture is right on every architecture, changes nothing, and cannot fail silently."""

from types import FunctionType

import pytest
import torch
from transformers import BertConfig, BertLMHeadModel
from transformers.models.llama.modeling_llama import LlamaAttention

from kvprof.errors import FailedError, UsageError
from kvprof.models import interface
from kvprof.models.interface import text_decoder
from kvprof.models.load import wrap_model
from kvprof.moments.collect import Tap, capture, run_batch
from tests.models.independent import vectors
from tests.models.tiny import ARCHITECTURES, MLA, UNSUPPORTED, tiny, token_ids

_PARTS = ("q", "k", "v", "q_pre", "k_pre")


def _taps(loaded, ids, **options) -> list[Tap]:
    taps: list[Tap] = []
    with capture(loaded, taps.append, **options):
        run_batch(loaded, ids)
    return taps


@pytest.mark.parametrize("arch", ARCHITECTURES + MLA)
def test_captured_vectors_equal_an_independent_computation(arch):
    loaded, ids = wrap_model(tiny(arch)), token_ids()
    taps = _taps(loaded, ids, pre_rope=True)
    assert [tap.layer for tap in taps] == [0, 1, 2]
    expected = vectors(arch, loaded.model, [x.attention for x in loaded.layout.layers], ids)
    for tap, wanted in zip(taps, expected, strict=True):
        facts = loaded.layout.layers[tap.layer]
        assert tap.q.shape == (2, facts.num_heads, 20, facts.qk_head_dim)
        assert tap.k.shape == (2, facts.num_kv_heads, 20, facts.qk_head_dim)
        assert tap.v.shape == (2, facts.num_kv_heads, 20, facts.v_head_dim)
        for name, reference in zip(_PARTS, wanted, strict=True):
            got = getattr(tap, name)
            assert not got.requires_grad
            error = (got.double() - reference.double()).abs().max()
            assert error < 2e-5 * reference.abs().max(), (arch, tap.layer, name)
        turned = bool(facts.rotary_dim)
        assert torch.equal(tap.k, tap.k_pre) is not turned


@pytest.mark.parametrize("arch", ARCHITECTURES + MLA)
def test_what_heads_put_out_is_what_the_output_projection_gets(arch):
    loaded, given = wrap_model(tiny(arch)), []
    projections = [
        (x.index, loaded.model.get_submodule(f"{x.attention}.{x.output_projection}"))
        for x in loaded.layout.layers
        if x.output_projection is not None
    ]
    hooks = [
        module.register_forward_pre_hook(
            lambda _, inputs, index=index: given.append((index, inputs))
        )
        for index, module in projections
    ]
    taps = _taps(loaded, token_ids())
    for hook in hooks:
        hook.remove()
    assert len(given) == len(projections)
    for index, (wanted,) in given:
        facts, found = loaded.layout.layers[index], taps[index].o
        assert found.shape == (2, facts.num_heads, 20, facts.v_head_dim)
        assert torch.equal(found.transpose(1, 2).flatten(2), wanted)


@pytest.mark.parametrize("arch", ARCHITECTURES + MLA)
def test_logits_do_not_change(arch):
    model, ids = tiny(arch), token_ids(length=24)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0  # left padding: the mask function under kvprof's name must see it
    with torch.no_grad():
        before = model(ids, use_cache=False).logits, model(ids, attention_mask=mask).logits
        loaded, seen = wrap_model(model), []
        with capture(loaded, lambda tap: seen.append(tap.layer), pre_rope=True):
            during = (
                model(ids, use_cache=False).logits,
                model(ids, attention_mask=mask, use_cache=False).logits,
            )
        after = model(ids, use_cache=False).logits
    assert seen == [0, 1, 2, 0, 1, 2]
    assert torch.equal(before[0], during[0])
    assert torch.equal(before[0], after)
    torch.testing.assert_close(before[1][mask.bool()], during[1][mask.bool()])
    assert model.config._attn_implementation in ("sdpa", "eager")


def test_a_later_token_changes_no_earlier_vector():
    loaded, ids = wrap_model(tiny("Gemma2")), token_ids(1, 24)
    changed = ids.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 90
    for one, other in zip(_taps(loaded, ids), _taps(loaded, changed), strict=True):
        for name in ("q", "k", "v"):
            a, b = getattr(one, name), getattr(other, name)
            assert torch.equal(a[:, :, :12], b[:, :, :12])
            assert not torch.equal(a[:, :, 12:], b[:, :, 12:])


@pytest.mark.parametrize("arch", ["Gemma2", "GptOss"])
def test_eager_attention_in_slices_of_queries_is_the_same(arch, monkeypatch):
    loaded, ids = wrap_model(tiny(arch)), token_ids(length=23)
    whole = _taps(loaded, ids)
    monkeypatch.setattr(interface, "_EAGER_SCORES", 2 * 4 * 23 * 5)
    for one, other in zip(whole, _taps(loaded, ids), strict=True):
        torch.testing.assert_close(one.q, other.q)


@pytest.mark.parametrize("arch", UNSUPPORTED)
def test_what_cannot_be_tapped_is_refused_in_one_line(arch):
    model = tiny(arch)
    before = model.config._attn_implementation
    with pytest.raises(UsageError, match=rf"^{type(model).__name__} is not supported: .*") as info:
        wrap_model(model)
    assert "\n" not in str(info.value)
    assert model.config._attn_implementation == before


def test_attention_and_rotary_function_are_put_back_after_an_exception():
    loaded = wrap_model(tiny("Llama"))
    space = interface.forward_namespace(loaded.model.model.layers[0].self_attn)
    rotary = space["apply_rotary_pos_emb"]

    def fail(tap):
        raise RuntimeError("mine")

    with capture(loaded, fail, pre_rope=True):
        assert space["apply_rotary_pos_emb"] is not rotary
    with pytest.raises(RuntimeError, match="mine"), capture(loaded, fail, pre_rope=True):
        run_batch(loaded, token_ids())
    assert space["apply_rotary_pos_emb"] is rotary
    assert loaded.model.config._attn_implementation == "sdpa"
    assert not interface._active
    assert not loaded.model.model._forward_hooks
    assert len(_taps(loaded, token_ids())) == 3


def test_a_cache_that_holds_a_past_is_refused():
    loaded, ids = wrap_model(tiny("Llama")), token_ids()
    with torch.no_grad():
        past = loaded.model(ids).past_key_values
        with pytest.raises(UsageError, match="use_cache=False"), capture(loaded, lambda tap: None):
            loaded.model(ids[:, :1], past_key_values=past)


def test_captures_do_not_nest():
    loaded = wrap_model(tiny("Llama"))
    with (
        capture(loaded, lambda tap: None),
        pytest.raises(UsageError),
        capture(loaded, lambda tap: None),
    ):
        pass
    assert loaded.model.config._attn_implementation == "sdpa"


def test_a_layer_that_does_not_fire_is_an_error(monkeypatch):
    loaded = wrap_model(tiny("Llama"))
    attention = loaded.model.model.layers[1].self_attn
    monkeypatch.setattr(attention, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.raises(FailedError):
        _taps(loaded, token_ids())


def _rotate_under_another_name(monkeypatch):
    """Give Llama a rotary function whose name kvprof does not know."""
    forward = LlamaAttention.forward
    code = forward.__code__
    names = tuple("turn" if n == "apply_rotary_pos_emb" else n for n in code.co_names)
    space = dict(forward.__globals__)
    space["turn"] = space.pop("apply_rotary_pos_emb")
    changed = FunctionType(code.replace(co_names=names), space, "forward", forward.__defaults__)
    monkeypatch.setattr(LlamaAttention, "forward", changed)


def test_unknown_rotation_refuses_only_the_vectors_before_it(monkeypatch):
    wanted = _taps(wrap_model(tiny("Llama")), token_ids())
    _rotate_under_another_name(monkeypatch)
    loaded = wrap_model(tiny("Llama"))
    assert loaded.layout.layers[0].position == "rope"
    with (
        pytest.raises(UsageError, match="q_pre and k_pre"),
        capture(loaded, lambda tap: None, pre_rope=True),
    ):
        pass
    for one, other in zip(wanted, _taps(loaded, token_ids()), strict=True):
        assert torch.equal(one.k, other.k)


def test_run_batch_computes_no_logits():
    loaded, calls = wrap_model(tiny("Gemma2")), []
    loaded.model.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    run_batch(loaded, token_ids())
    assert not calls
    assert text_decoder(loaded.model) is loaded.model.model


def test_a_model_that_attends_to_later_tokens_is_refused():
    config = BertConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    with pytest.raises(UsageError):
        wrap_model(BertLMHeadModel(config))
