"""Caches as an engine allocates them, held against what vLLM's own planner said."""

import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvprof.errors import UsageError
from kvprof.methods.engine_cache import cache_layers, plan_pool

TABLE = Path(__file__).parent / "vllm-cache-plans.json"


@cache
def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text("utf-8"))
    return found


def difference(cell: dict[str, Any]) -> float:
    """Return by what share the tokens that fit differ from vLLM's."""
    layers = cache_layers(table()["configs"][cell["model"]])
    pool = plan_pool(layers, cell["dtype"], step_tokens=table()["step_tokens"])
    return abs(pool.tokens(cell["available"], cell["context"]) / cell["tokens"] - 1)


def test_tokens_that_fit_are_vllms() -> None:
    """Within 1 % in the median and 3 % at worst, of every family, type and length."""
    found = [difference(cell) for cell in table()["cells"]]
    assert len(found) >= 30
    assert statistics.median(found) < 0.01
    assert max(found) < 0.03


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3", "qwen3_next"]
)
def test_the_table_has_every_family(kind: str) -> None:
    counted = {cell["model"] for cell in table()["cells"]}
    assert kind in {table()["configs"][name]["model_type"] for name in counted}


_LLAMA = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64}
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such family": ({"model_type": "nosuch"}, "nosuch"),
    "layers are missing": ({"model_type": "llama"}, "num_hidden_layers"),
    "an encoder and a decoder": ({"model_type": "t5", "is_encoder_decoder": True}, "t5"),
    "a state of another kind": ({**_LLAMA, "ssm_state_size": 16}, "ssm_state_size"),
    "an unknown attention": ({**_LLAMA, "layer_types": ["odd_attention"] * 4}, "odd_attention"),
    "too few layer types": ({**_LLAMA, "layer_types": ["full_attention"]}, "layer_types"),
    "a window without its size": (
        {**_LLAMA, "layer_types": ["sliding_attention"] * 4},
        "sliding_window",
    ),
    "a hybrid without its state": ({"model_type": "jamba", "num_hidden_layers": 8}, "mamba_"),
    "a width that is text": ({**_LLAMA, "hidden_size": "wide"}, "config.json"),
    "no layers": ({**_LLAMA, "num_hidden_layers": 0}, "num_hidden_layers"),
    "an indexed cache": ({"model_type": "deepseek_v32", "num_hidden_layers": 2}, "deepseek_v32"),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_is_not_counted_is_refused_in_a_line(name: str) -> None:
    config, said = _REFUSED[name]
    with pytest.raises(UsageError, match=said) as problem:
        cache_layers(config)
    assert "\n" not in str(problem.value)


def test_a_decoder_within_a_config_is_counted_with_its_class_defaults() -> None:
    inner = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    layers = cache_layers({"model_type": "gemma3", "text_config": inner})
    assert [one.kind for one in layers].count("full") == 5
    assert {(one.heads, one.width) for one in layers} == {(4, 256)}


def test_layers_of_their_own_width_are_counted_as_such() -> None:
    each = {"1": {"head_dim": 32, "num_key_value_heads": 1}}
    types = ["sliding_attention", "full_attention"]
    layers = cache_layers(
        {
            **{"model_type": "gemma4_text", "num_hidden_layers": 2, "hidden_size": 64},
            **{"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
            **{"layer_types": types, "per_layer_config": each},
        }
    )
    assert [(one.heads, one.width) for one in layers] == [(2, 16), (1, 32)]
