"""Models that give a token three positions (M-RoPE): the mean turns by the model's own tables."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvprof.methods.family import MethodInputs
from kvprof.methods.registry import plan_family
from kvprof.models.load import wrap_model
from kvprof.moments.collect import CollectOptions, collect_moments
from kvprof.runtime.compressed import compressed
from kvprof.sources.grammar import parse_source
from tests.methods.models import FINE
from tests.models.tiny import seeded, token_ids

_TEXT = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_SEEING = {"depth": 1, "hidden_size": 64, "intermediate_size": 16, "num_heads": 2,
           "out_hidden_size": 64}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ({}, {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2}),
    "qwen2_5_vl": ({}, _SEEING),
    "qwen3_vl": ({"mrope_interleaved": True}, {**_SEEING, "deepstack_visual_indexes": [0]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_at_rate_0_a_centred_plan_is_the_model(kind: str) -> None:
    """Text, whose three positions are one, and positions of an image, which are not."""
    rope, vision = KINDS[kind]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], **rope}
    text = {**_TEXT, "rope_parameters": rope}
    seeded(0)
    config = CONFIG_MAPPING[kind](text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5 if "embed" not in name else 0.5)
            elif "k_proj.bias" in name or "k_norm" in name:  # a mean that is worth taking
                weight.add_(torch.randn_like(weight))
    loaded = wrap_model(model)
    *_, moments = collect_moments(loaded, parse_source("random:256"), CollectOptions(256, 64))
    inputs = MethodInputs(loaded.layout, loaded.fingerprint, moments)
    plan = plan_family("kq", inputs, **FINE, centre=True).build(0.0)
    assert all(x.centre is not None and bool(x.centre.keys.any()) for x in plan.layers)
    ids = token_ids(1, 20)
    axes = torch.stack([torch.arange(20), torch.arange(20) // 4, torch.arange(20) % 4])[:, None]
    options = {"max_new_tokens": 8, "do_sample": False}
    with torch.inference_mode():
        written = model.generate(ids, **options)
        seen = model(ids, position_ids=axes).logits
        assert not torch.allclose(seen, model(ids).logits, atol=1e-2)
        with compressed(loaded, plan, "off"):
            assert torch.equal(model.generate(ids, **options), written)
            assert torch.allclose(model(ids, position_ids=axes).logits, seen, atol=1e-4)
