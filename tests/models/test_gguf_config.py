"""A GGUF file is the model that it describes, whatever transformers leaves out of it.

Models are built by transformers from settings that are no class's defaults, written as llama.cpp's
converter writes them, and read again: the logits are the same, or the file is refused.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvprof.benchmark.shapes import shape_of_config
from kvprof.errors import KvprofError, UsageError
from kvprof.models.gguf import ARCHITECTURES
from kvprof.models.load import load_model
from tests.models.gguf_files import write_llama

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

VOCABULARY, LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, INNER = 96, 3, 64, 4, 2, 16, 80
#: What every model here is, by transformers' names.
COMMON = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INNER,
    "max_position_embeddings": 600,
    "tie_word_embeddings": False,
}
#: The same by llama.cpp's.
SAID = {
    "block_count": LAYERS,
    "embedding_length": WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "feed_forward_length": INNER,
    "context_length": 600,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def gemma3_rope(full: Mapping[str, Any]) -> dict[str, Any]:
    return {"full_attention": dict(full), "sliding_attention": rope(10_000.0)}


#: What most say, by transformers' names and by llama.cpp's; and heads of 32.
BASE = {"rms_norm_eps": 1e-3, "rope_parameters": rope(500.0)}
RMS = {"attention.layer_norm_rms_epsilon": 1e-3, "rope.freq_base": 500.0}
PLAIN = {"attention.layer_norm_epsilon": 1e-3, "rope.freq_base": 500.0}
WIDE = {"attention.key_length": 32, "attention.value_length": 32}
LINEAR = {"rope_type": "linear", "factor": 4.0}
SAID_LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SAID_EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48}
WINDOWS = {"head_dim": 32, "sliding_window": 5, "tie_word_embeddings": True}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}


def part(share: float) -> dict[str, Any]:
    """Turn a share of a head's dimensions."""
    return {"rope_parameters": rope(500.0, partial_rotary_factor=share)}


#: llama.cpp's architecture, transformers' class, what its config has and what the file says.
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        *("llama", "llama", {**BASE, "head_dim": 32}),
        {**RMS, **WIDE, "rope.dimension_count": 32},
    ),
    "llama, factors": (
        *("llama", "llama", {**BASE, "head_dim": 32, "rope_parameters": rope(500.0) | LLAMA3}),
        {**RMS, **WIDE, "rope.dimension_count": 32},
    ),
    "llama, linear": (
        *("llama", "llama", {**BASE, "rope_parameters": rope(500.0) | LINEAR}),
        {**RMS, **SAID_LINEAR, "rope.dimension_count": HEAD},
    ),
    "qwen2": ("qwen2", "qwen2", BASE, RMS),
    "qwen3": ("qwen3", "qwen3", {**BASE, "head_dim": 32}, {**RMS, **WIDE}),
    "qwen2moe": (
        *("qwen2moe", "qwen2_moe", {**BASE, **EXPERTS, "shared_expert_intermediate_size": 40}),
        {**RMS, **SAID_EXPERTS, "expert_shared_feed_forward_length": 40},
    ),
    "qwen3moe": (
        *("qwen3moe", "qwen3_moe", {**BASE, **EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
        {**RMS, **WIDE, **SAID_EXPERTS},
    ),
    "phi3": (
        *("phi3", "phi3", {**BASE, **part(0.5), "sliding_window": 5, "pad_token_id": 0}),
        {**RMS, "rope.dimension_count": HEAD // 2, "attention.sliding_window": 5},
    ),
    "gemma2": (
        *("gemma2", "gemma2", {**BASE, **WINDOWS, **CAPS, "query_pre_attn_scalar": 32}),
        {**RMS, **WIDE, **CAPS, "attention.sliding_window": 5},
    ),
    "gemma2 of 46 layers": (
        *("gemma2", "gemma2"),
        {**BASE, **WINDOWS, "num_hidden_layers": 46, "query_pre_attn_scalar": WIDTH // HEADS},
        {**RMS, **WIDE, "block_count": 46, "attention.sliding_window": 5},
    ),
    "gemma3": (
        *("gemma3", "gemma3_text"),
        {
            **{**BASE, **WINDOWS, "num_hidden_layers": 7, "query_pre_attn_scalar": 32},
            "rope_parameters": gemma3_rope(rope(500.0) | LINEAR),
        },
        {**RMS, **WIDE, **SAID_LINEAR, "block_count": 7, "attention.sliding_window": 5},
    ),
    "starcoder2": (
        *("starcoder2", "starcoder2", {"norm_epsilon": 1e-3, "rope_parameters": rope(500.0)}),
        PLAIN,
    ),
    "stablelm": (
        *("stablelm", "stablelm", {"layer_norm_eps": 1e-3, **part(0.5), "use_qkv_bias": True}),
        {**PLAIN, "rope.dimension_count": HEAD // 2, "use_parallel_residual": False},
    ),
    "nemotron": (
        *("nemotron", "nemotron", {"norm_eps": 1e-3, **part(0.25)}),
        {**PLAIN, "rope.dimension_count": HEAD // 4},
    ),
    "gpt2": (
        *("gpt2", "gpt2"),
        {"layer_norm_epsilon": 1e-3, "n_positions": 600, "tie_word_embeddings": True},
        {
            **{"attention.layer_norm_epsilon": 1e-3, "attention.head_count_kv": HEADS},
            "feed_forward_length": 4 * WIDTH,
        },
    ),
}


def original(kind: str, settings: Mapping[str, Any]) -> Any:
    """Return a model of random weights, its norms and biases random too."""
    torch.manual_seed(7)
    common = dict(COMMON)
    if kind == "gpt2":  # under names of its own
        for name in ("num_key_value_heads", "intermediate_size", "max_position_embeddings"):
            del common[name]
    config = AutoConfig.for_model(kind, **{**common, **settings}, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


@cache
def names_of(architecture: str) -> Any:
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(known[architecture], 64)


def stored(architecture: str, name: str, weight: torch.Tensor) -> dict[str, np.ndarray]:
    """Return a weight as llama.cpp's converter stores it, by its name in the file."""
    array = weight.detach().float().numpy()
    if name.endswith("experts.gate_up_proj"):
        block = f"blk.{name.split('.')[2]}."
        gate, up = np.split(array, 2, axis=1)
        return {f"{block}ffn_gate_exps.weight": gate, f"{block}ffn_up_exps.weight": up}
    if name.endswith("experts.down_proj"):
        return {f"blk.{name.split('.')[2]}.ffn_down_exps.weight": array}
    base, _, suffix = name.rpartition(".")
    new = f"{names_of(architecture).get_name(base)}.{suffix}"
    if architecture == "llama" and (".attn_q." in new or ".attn_k." in new):
        heads = HEADS if ".attn_q." in new else KV_HEADS
        halves = array.reshape(heads, 2, -1, *array.shape[1:])
        array = halves.swapaxes(1, 2).reshape(array.shape)
    if architecture in ("gemma2", "gemma3", "nemotron") and "norm.weight" in new:
        array = array + 1
    if architecture == "gpt2" and array.ndim == 2 and new.startswith("blk."):
        array = array.T
    if "ffn_gate_inp_shexp" in new:
        array = array.squeeze(0)
    return {new: array}


def write(
    path: Path, name: str, *, keys: Mapping[str, Any] | None = None, extra: Any = None
) -> tuple[Path, Any]:
    """Write a model of `MODELS` and return it with the file; `keys` are said otherwise."""
    architecture, kind, settings, said = MODELS[name]
    model = original(kind, settings)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**SAID, **said, **(keys or {})}.items():
        if value is not None:
            writer.add_key_value(f"{architecture}.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(33 + i) for i in range(VOCABULARY)])
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    for key, weight in model.state_dict().items():
        if key in tied or "rotary_emb" in key or key.endswith(".attn.bias"):
            continue
        for new, array in stored(architecture, key, weight).items():
            writer.add_tensor(new, np.ascontiguousarray(array, dtype=np.float32))
    if settings.get("rope_parameters", {}).get("rope_type") == "llama3":
        plain = 500.0 ** (-torch.arange(0, 32, 2) / 32)
        factors = (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)
        writer.add_tensor("rope_freqs.weight", factors)
    for key, array in (extra or {}).items():
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model


def test_every_architecture_that_is_read_was_held_against_its_logits() -> None:
    assert {(architecture, kind) for architecture, kind, _, _ in MODELS.values()} == set(
        ARCHITECTURES.items()
    )


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow if " of " in one else ()) for one in MODELS]
)
def test_the_file_is_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    path, model = write(tmp_path / "x.gguf", name)
    loaded = load_model(str(path), device="cpu")
    ids = torch.randint(3, VOCABULARY, (2, 200), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, found = model(ids).logits, loaded.model(ids).logits
    assert torch.allclose(found, expected, atol=1e-3 * float(expected.abs().max()))
    assert float(expected.std()) > 0.1


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama", {"attention.value_length": 8}),
        ("llama", {"attention.sliding_window": 64}),
        ("llama", {"attn_logit_softcapping": 30.0}),
        ("llama", {"attention.scale": 0.5}),
        ("llama", {"a_key_that_nobody_reads": 16.0}),
        ("llama", {"attention.causal": False}),
        ("llama", {"rope.scaling.type": "yarn"}),
        ("qwen3", {"attention.head_count_kv": [2, 2, 1]}),
        ("gemma3", {"attention.sliding_window": None}),
        ("gemma2", {"attention.sliding_window_pattern": 3}),
        ("gemma3", {"rope.freq_base_swa": 500.0}),
        ("qwen3moe", {"expert_gating_func": 2}),
        ("llama", {"attention.layer_norm_rms_epsilon": None}),
        ("llama", {"rope.freq_base": 0.0}),
    ],
)
def test_what_transformers_cannot_be_told_is_refused(
    name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    path, _ = write(tmp_path / "x.gguf", name, keys=keys)
    with pytest.raises(KvprofError, match=next(iter(keys)).rsplit(".", 1)[-1][:8] + "|num_key_v"):
        load_model(str(path), device="cpu")


def test_bench_times_the_shape_that_the_file_says(tmp_path: Path) -> None:
    path, _ = write(tmp_path / "x.gguf", "gemma2")
    shape = shape_of_config(str(path))
    assert (shape.head_dim, shape.sliding_window, shape.softcap) == (32, 5, 2.0)


@pytest.mark.parametrize(
    "factors", [np.linspace(1, 8, 8) ** 2, np.zeros(8), np.full(8, np.nan), np.linspace(0.5, 1, 8)]
)
def test_factors_that_are_not_llama_3s_are_refused(factors: np.ndarray, tmp_path: Path) -> None:
    given = {"rope_freqs.weight": factors.astype(np.float32)}
    path = write_llama(tmp_path / "x.gguf", extra=given)
    with pytest.raises(UsageError):
        load_model(str(path), device="cpu")


def test_factors_of_one_change_nothing(tmp_path: Path) -> None:
    ones = np.ones(8, np.float32)
    path = write_llama(tmp_path / "y.gguf", extra={"rope_freqs.weight": ones})
    rope = load_model(str(path), device="cpu").model.config.rope_parameters
    assert rope["rope_type"] == "default"


def test_a_name_that_makes_another_class_of_it_is_refused(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "x.gguf", keys={"general.name": "mistral"})
    with pytest.raises(UsageError):
        load_model(str(path), device="cpu")


def test_texts_end_where_the_file_says(tmp_path: Path) -> None:
    plain = load_model(str(write_llama(tmp_path / "a.gguf")), device="cpu")
    assert plain.model.generation_config.eos_token_id == 2
    assert plain.model.generation_config.pad_token_id is None
    turns = write_llama(tmp_path / "b.gguf", keys={"tokenizer.ggml.eot_token_id": 5})
    assert load_model(str(turns), device="cpu").model.generation_config.eos_token_id == [2, 5]
    none = write_llama(tmp_path / "c.gguf", tokenizer=False)
    assert load_model(str(none), device="cpu").model.generation_config.eos_token_id is None
