"""What the layout claims, against what the modules do."""

import pytest
import torch
from torch import nn

from kvprof.errors import UsageError
from kvprof.models.probe import inspect_layout
from kvprof.models.projections import output_slices, value_weight
from tests.models.tiny import ARCHITECTURES, MLA, tiny, token_ids

# position, rotary dimensions, QK-norm, fused, windows of the three layers, soft cap, sinks
_EXPECTED = {
    "Llama": ("rope", 16, False, False, (None, None, None), None, False),
    "Mistral": ("rope", 16, False, False, (6, 6, 6), None, False),
    "Mixtral": ("rope", 16, False, False, (None, None, None), None, False),
    "Qwen2": ("rope", 12, False, False, (None, None, None), None, False),
    "Qwen3": ("rope", 16, True, False, (None, None, None), None, False),
    "Phi3": ("rope", 12, False, True, (None, None, None), None, False),
    "Gemma2": ("rope", 16, False, False, (6, None, 6), 50.0, False),
    "Gemma3": ("rope", 16, True, False, (6, None, 6), None, False),
    "GPTNeoX": ("partial_rope", 4, False, True, (None, None, None), None, False),
    "StableLm": ("partial_rope", 4, True, False, (None, None, None), None, False),
    "OPT": ("learned", 0, False, False, (None, None, None), None, False),
    "GPT2": ("learned", 0, False, True, (None, None, None), None, False),
    "GptOss": ("rope", 16, False, False, (6, None, 6), None, True),
    "Cohere": ("rope", 12, True, False, (None, None, None), None, False),
    "Olmo2": ("rope", 12, True, False, (None, None, None), None, False),
    "SmolLM3": ("rope", 12, False, False, (None, None, None), None, False),
    "DeepseekV2": ("partial_rope", 8, False, False, (None, None, None), None, False),
    "DeepseekV3": ("partial_rope", 8, False, False, (None, None, None), None, False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("arch", ARCHITECTURES + MLA)
def test_facts(arch, dtype):
    layout = inspect_layout(tiny(arch).to(dtype))
    assert layout.architecture == type(tiny(arch)).__name__
    position, rotary_dim, qk_norm, fused, windows, softcap, sinks = _EXPECTED[arch]
    for layer, window in zip(layout.layers, windows, strict=True):
        without = arch == "SmolLM3" and layer.index == 1
        assert layer.position == ("none" if without else position)
        assert layer.rotary_dim == (0 if without else rotary_dim)
        assert layer.rotary_offset == (12 if arch in MLA else 0)
        assert (layer.qk_norm, layer.fused_qkv, layer.sliding_window) == (qk_norm, fused, window)
        assert (layer.softcap, layer.sinks, layer.mla) == (softcap, sinks, arch in MLA)
        assert layer.num_heads == 4
        assert layer.group == layer.num_heads // layer.num_kv_heads
    scaling = {"OPT": 1.0, "Gemma2": 20**-0.5, "Gemma3": 20**-0.5}.get(arch)
    assert layout.layers[0].scaling == pytest.approx(
        scaling or layout.layers[0].qk_head_dim ** -0.5
    )


@pytest.mark.parametrize("arch", ARCHITECTURES + MLA)
def test_projections_split_into_heads(arch):
    model = tiny(arch)
    layout = inspect_layout(model)
    facts = layout.layers[2]
    attention = model.get_submodule(facts.attention)
    seen = {}
    keep = lambda name: lambda module, args, out: seen.update({name: (args[0], out)})  # noqa: E731
    out_module = attention.get_submodule(facts.output_projection)
    value_module = attention.get_submodule(facts.value_projection)
    out_module.register_forward_hook(keep("out"))
    value_module.register_forward_hook(keep("value"))
    values = []

    from kvprof.models.interface import intercept

    with torch.no_grad(), intercept(model, lambda call: values.append(call.value), rotary=False):
        model(token_ids(), use_cache=False)

    slices = output_slices(model, layout, 2)
    assert slices.shape == (facts.num_heads, facts.v_head_dim, layout.hidden_size)
    source, result = seen["out"]
    per_head = source.unflatten(-1, (facts.num_heads, facts.v_head_dim))
    summed = torch.einsum("bthd,hdm->btm", per_head, slices)
    bias = 0 if getattr(out_module, "bias", None) is None else out_module.bias
    torch.testing.assert_close(summed + bias, result, rtol=1e-4, atol=1e-5)

    if facts.mla:
        with pytest.raises(UsageError, match="latent"):
            value_weight(model, layout, 2)
        return
    weight = value_weight(model, layout, 2)
    assert weight.shape == (facts.num_kv_heads, layout.hidden_size, facts.v_head_dim)
    x = seen["value"][0]
    zero = torch.einsum("btm,hmd->bhtd", x[:, :1], weight)
    without_bias = torch.einsum("btm,hmd->bhtd", x, weight)
    # the bias drops out of differences between tokens
    torch.testing.assert_close(
        without_bias - zero, values[2] - values[2][:, :, :1], rtol=1e-4, atol=1e-4
    )


class _Scaled(nn.Linear):
    """A linear map whose weight is not its matrix, as in quantised modules."""

    def forward(self, x):
        return 2 * super().forward(x) - self.bias


def test_a_projection_of_unknown_storage_is_read_by_what_it_does():
    model = tiny("OPT")
    layout = inspect_layout(model)
    plain = output_slices(model, layout, 0)
    module = model.model.decoder.layers[0].self_attn
    scaled = _Scaled(48, 48)
    scaled.load_state_dict(module.out_proj.state_dict())
    module.out_proj = scaled
    torch.testing.assert_close(output_slices(model, layout, 0), 2 * plain)


def test_heads_that_are_gated_before_the_projection_have_no_slices():
    model = tiny("Llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj = nn.Sequential(nn.LayerNorm(64), layer.self_attn.o_proj)
    layout = inspect_layout(model)
    with pytest.raises(UsageError, match="pair vo is not defined"):
        output_slices(model, layout, 0)
    assert layout.layers[0].value_projection == "v_proj"


def test_a_normalised_value_has_no_weight():
    model = tiny("Llama")
    for layer in model.model.layers:
        layer.self_attn.v_proj = nn.Sequential(layer.self_attn.v_proj, nn.LayerNorm(32))
    with pytest.raises(UsageError, match="w_v is not defined"):
        value_weight(model, inspect_layout(model), 0)
