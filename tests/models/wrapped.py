"""Tiny wrappers of vision-language models around a text decoder, weights drawn at random."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models.folder import byte_tokenizer
from tests.models.tiny import VOCABULARY, seeded

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY + 3, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 2,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
_SEEING: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 8, "depth": 2, "num_heads": 2, "out_hidden_size": 64,
    "head_dim": 32,
}  # fmt: skip
_M_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
# What differs from the two, and where the wrapper says which token is an image.
_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model"}, "image_token_index"),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral"}, "image_token_index"),
    "gemma3": ({}, {}, "image_token_index"),
    "internvl": ({"model_type": "qwen2"},
                 {"image_size": [16, 16], "patch_size": [8, 8]}, "image_token_id"),
    "idefics3": ({"model_type": "llama"}, {}, "image_token_id"),
    "qwen2_5_vl": ({"rope_parameters": _M_ROPE}, {}, "image_token_id"),
    "qwen3_vl": ({"rope_parameters": _M_ROPE}, {"deepstack_visual_indexes": [0]},
                 "image_token_id"),
}  # fmt: skip
WRAPPERS = list(_KINDS)


def wrapped(kind: str) -> PreTrainedModel:
    """Build a wrapper; of its text decoder's vocabulary the last three tokens are no text's."""
    text, seeing, image = _KINDS[kind]
    config = CONFIG_MAPPING[kind](
        text_config={**_TEXT, **text}, vision_config={**_SEEING, **seeing}, **{image: VOCABULARY}
    )
    with torch.random.fork_rng(devices=[]):
        seeded(0)
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() >= 2:
                    weight.normal_(0, weight.shape[-1] ** -0.5 if "embed" not in name else 0.5)
    return model


def alone(model: PreTrainedModel) -> PreTrainedModel:
    """Return a wrapper's text decoder and head as a model of its own."""
    text = AutoModelForCausalLM.from_config(model.config.text_config, dtype=torch.float32).eval()
    text.model.load_state_dict(model.get_decoder().state_dict())
    text.lm_head.load_state_dict(model.lm_head.state_dict())
    return text


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Write a model and a byte tokenizer into a folder."""
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
