"""Caches as an engine allocates them, held against what vLLM's own planner said."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from kvprof.errors import UsageError
from kvprof.methods.engine_cache import cache_layers, plan_pool, text_config

TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("vllm-cache-plans.json").read_text())


def difference(cell: dict[str, Any]) -> float:
    """Return by what share the tokens that fit differ from vLLM's."""
    layers = cache_layers(text_config(TABLE["configs"][cell["model"]]))
    pool = plan_pool(layers, cell["dtype"], step_tokens=TABLE["step_tokens"])
    users = pool.users(cell["available"], cell["context"])
    return abs(int(users * cell["context"]) / cell["tokens"] - 1)


def test_tokens_that_fit_are_vllms() -> None:
    """Within 1 % in the median and 3 % at worst, of every family, type and length."""
    found = [difference(cell) for cell in TABLE["cells"]]
    assert len(found) >= 30
    assert statistics.median(found) < 0.01
    assert max(found) < 0.03


@pytest.mark.parametrize("refused", TABLE["refused"])
def test_what_vllm_refuses_is_refused(refused: str) -> None:
    model, dtype = refused.split()
    with pytest.raises(UsageError, match=dtype):
        plan_pool(cache_layers(text_config(TABLE["configs"][model])), dtype)


def test_the_table_has_every_family() -> None:
    kinds = {TABLE["configs"][cell["model"]]["model_type"] for cell in TABLE["cells"]}
    assert {"qwen3", "gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3", "qwen3_next"} < kinds


_LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64}
_MAMBA: dict[str, Any] = {
    **{"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "attention"]},
    **{"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 16},
    **{"n_groups": 1, "conv_kernel": 4},
}
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an encoder and a decoder": ({**_LLAMA, "is_encoder_decoder": True}, "encoder-decoder"),
    "no such family": ({"model_type": "nosuch"}, "nosuch"),
    "layers are missing": ({"model_type": "llama"}, "num_hidden_layers"),
    "a state of another kind": ({**_LLAMA, "ssm_state_size": 16}, "ssm_state_size"),
    "an unknown attention": ({**_LLAMA, "layer_types": ["odd_attention"] * 4}, "odd_attention"),
    "too few layer types": ({**_LLAMA, "layer_types": ["full_attention"]}, "layer_types"),
    "a window without size": ({**_LLAMA, "layer_types": ["sliding_attention"] * 4}, "sliding_"),
    "a hybrid without its state": ({"model_type": "jamba", "num_hidden_layers": 8}, "mamba_"),
    "a width beyond all": ({**_LLAMA, "hidden_size": 10**300}, "another than expected"),
    "a negative size": ({**_LLAMA, "num_key_value_heads": -2}, "another than expected"),
    "no number of states": ({**_MAMBA, "state_copies": "x"}, "another than expected"),
    "layers that loop": ({"model_type": "dory", "num_hidden_layers": 2}, "recurrent_loops"),
    "values of a width": ({"model_type": "mimo_v2_flash", "num_hidden_layers": 2}, "v_head_dim"),
    "an indexed cache": ({"model_type": "deepseek_v32", "num_hidden_layers": 2}, "deepseek_v32"),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_is_not_counted_is_refused_in_a_line(name: str) -> None:
    config, said = _REFUSED[name]
    with pytest.raises(UsageError, match=said) as problem:
        cache_layers(text_config(config))
    assert "\n" not in str(problem.value)


_GEMMA3 = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
_FALCON = {"model_type": "falcon", **dict.fromkeys(("num_hidden_layers", "num_kv_heads"), 8)}
_FALCON |= {"multi_query": True, "num_attention_heads": 128, "hidden_size": 8192}
_GEMMA4 = {
    **{"model_type": "gemma4_text", "num_hidden_layers": 2, "hidden_size": 64},
    **{"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
    "layer_types": ["sliding_attention", "full_attention"],
}
#: A config, and heads and width of its layers of full attention.
_COUNTED: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "its class' defaults": ({"model_type": "gemma3", "text_config": _GEMMA3}, [(4, 256)] * 5),
    "a window that is turned off": (
        {**_LLAMA, "model_type": "mistral", "sliding_window": None},
        [(8, 2)] * 4,
    ),
    "one head for all": (_FALCON, [(1, 64)] * 8),
    "a new decoder's heads": (_FALCON | {"new_decoder_architecture": True}, [(8, 64)] * 8),
    "a layer's own": (
        _GEMMA4 | {"per_layer_config": {"01": {"head_dim": 32, "num_key_value_heads": 1}}},
        [(1, 32)],
    ),
    "a wide last layer": (_GEMMA4 | {"layer_types": ["sliding_attention"] * 2}, [(2, 512)]),
    "another layer's own": (_GEMMA4 | {"per_layer_config": {"0": {"head_dim": 32}}}, [(2, 16)]),
    "layers by their types alone": (_MAMBA, [(8, 128)]),
    "layers by another name": ({**_LLAMA, "model_type": "exaone", "num_layers": 2}, [(8, 2)] * 2),
    "layers without rotation": (
        {**_LLAMA, "model_type": "llama4_text", "no_rope_layers": [1, 0, 0, 1]},
        [(8, 128)] * 2,
    ),
}


@pytest.mark.parametrize("name", _COUNTED)
def test_heads_are_counted_as_the_config_and_its_class_have_them(name: str) -> None:
    config, wanted = _COUNTED[name]
    layers = cache_layers(text_config(config))
    assert [(one.heads, one.width) for one in layers if one.kind == "full"] == wanted
