"""Tiny random-weight models of many architectures, for any test that needs a real decoder.

``tiny("Llama")`` builds one in milliseconds; overrides go into its config. Weights are seeded and
large enough that attention is far from uniform, so that a wrong mask or a lost rotation shows.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 97
CONTEXT = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "head_dim": 8,
}  # fmt: skip

# model_type and what differs from _COMMON; head_dim is set where it need not be hidden / heads.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {"head_dim": 16}),
    "Mistral": ("mistral", {"head_dim": 16, "sliding_window": 6}),
    "Mixtral": ("mixtral", {**_EXPERTS, "head_dim": 16}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {"head_dim": 16}),
    "Phi3": ("phi3", {}),
    "Gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20}),
    "Gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20,
                               "layer_types": ["sliding_attention", "full_attention",
                                               "sliding_attention"]}),
    "GPTNeoX": ("gpt_neox", {"num_key_value_heads": None, "hidden_size": 64}),
    "StableLm": ("stablelm", {"qk_layernorm": True, "hidden_size": 64}),
    "OPT": ("opt", {"num_key_value_heads": None, "ffn_dim": 64, "word_embed_proj_dim": 48,
                    "intermediate_size": None}),
    "GPT2": ("gpt2", {"num_key_value_heads": None, "intermediate_size": None}),
    "GptOss": ("gpt_oss", {**_EXPERTS, "head_dim": 16, "sliding_window": 6,
                           "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
                           "layer_types": ["sliding_attention", "full_attention",
                                           "sliding_attention"]}),
    "Cohere": ("cohere", {"use_qk_norm": True}),
    "Olmo2": ("olmo2", {}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "DeepseekV2": ("deepseek_v2", _MLA),
    "DeepseekV3": ("deepseek_v3", _MLA),
    "Llama4": ("llama4_text", {**_EXPERTS, "head_dim": 16, "attention_chunk_size": 7,
                               "intermediate_size_mlp": 32, "no_rope_layers": [1, 0, 1]}),
    # opened, but not run compressed: layers that share keys, or keep a recurrent state
    "Gemma3n": ("gemma3n_text", {"head_dim": 16, "sliding_window": 6, "num_hidden_layers": 4,
                                 "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 97,
                                 "hidden_size_per_layer_input": 8, "laurel_rank": 4,
                                 "altup_num_inputs": 2, "intermediate_size": [64] * 4,
                                 "activation_sparsity_pattern": None,
                                 "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "FalconH1": ("falcon_h1", {"head_dim": 16, "mamba_n_heads": 4, "mamba_d_head": 24,
                               "mamba_d_ssm": 96, "mamba_d_state": 8, "mamba_n_groups": 1,
                               "mamba_chunk_size": 8}),
    # what the heads put out is gated, or normalised, before the output projection
    "Afmoe": ("afmoe", {"head_dim": 16, "sliding_window": 6, "num_experts": 4,
                        "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                        "num_dense_layers": 1, "layer_types": ["full_attention"] * 3}),
    "BitNet": ("bitnet", {}),
    # queries, keys and values are clamped
    "Olmo": ("olmo", {"clip_qkv": 0.1}),
    # keys that are no token's own
    "DeepseekV4": ("deepseek_v4", {**_MLA, "head_dim": 16, "num_key_value_heads": 1,
                                   "index_n_heads": 2, "index_head_dim": 8, "o_groups": 2,
                                   "o_lora_rank": 8, "n_group": None, "topk_group": None,
                                   "layer_types": ["compressed_sparse_attention",
                                                   "heavily_compressed_attention",
                                                   "sliding_attention"],
                                   "mlp_layer_types": ["moe"] * 3}),
    # not reachable through the attention interface, or not attention in every layer
    "Falcon": ("falcon", {"num_key_value_heads": None}),
    "Bloom": ("bloom", {"num_key_value_heads": None}),
    "GPTJ": ("gptj", {"num_key_value_heads": None, "rotary_dim": 8}),
    "Mpt": ("mpt", {"num_key_value_heads": None}),
    "Lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "Qwen3Next": ("qwen3_next", {**_EXPERTS, "head_dim": 16, "num_experts": 4,
                                 "moe_intermediate_size": 16, "linear_num_value_heads": 4,
                                 "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8,
                                 "linear_num_key_heads": 2, "linear_value_head_dim": 8,
                                 "layer_types": ["linear_attention", "full_attention",
                                                 "linear_attention"]}),
}  # fmt: skip

MLA = ["DeepseekV2", "DeepseekV3"]
CHUNKED = ["Llama4"]
UNCOMPRESSED = ["Gemma3n", "FalconH1"]
GATED = ["Afmoe", "BitNet"]
CLAMPED = ["Olmo"]
UNSUPPORTED = ["Falcon", "Bloom", "GPTJ", "Mpt", "Lfm2", "Qwen3Next", "DeepseekV4"]
ARCHITECTURES = [
    arch
    for arch in _CONFIGS
    if arch not in (*MLA, *CHUNKED, *UNCOMPRESSED, *GATED, *CLAMPED, *UNSUPPORTED)
]


def two_layers(arch: str) -> dict[str, Any]:
    """Return what makes a model of two layers, of two kinds where its architecture has two.

    Where layers share keys it keeps the four that it has.
    """
    if arch == "Gemma3n":
        return {}
    kinds = _CONFIGS[arch][1]
    own = {name: kinds[name][:2] for name in ("layer_types", "no_rope_layers") if name in kinds}
    return {"num_hidden_layers": 2, **own}


def seeded(number: int) -> None:
    """Seed the CPU's random numbers alone.

    ``torch.manual_seed`` writes down, for each kind of device that is not there, who asked.
    """
    torch.default_generator.manual_seed(number)


def tiny(arch: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a tiny model of an architecture in float32 on the CPU, in eval mode.

    Parameters
    ----------
    arch : str
        One of `ARCHITECTURES` or of the lists before it.
    seed : int
        Of the random weights.
    **overrides
        Entries of its config.
    """
    model_type, differences = _CONFIGS[arch]
    wanted = {**_COMMON, **differences, **overrides}
    config = CONFIG_MAPPING[model_type](**{k: v for k, v in wanted.items() if v is not None})
    with torch.random.fork_rng(devices=[]):
        seeded(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() >= 2:
                    weight.normal_(0, weight.shape[-1] ** -0.5 if "embed" not in name else 0.5)
                else:  # biases, norms and sinks away from their neutral values
                    weight.add_(0.2 * torch.randn_like(weight))
    return model.eval()


def token_ids(batch: int = 2, length: int = 20, *, seed: int = 0) -> torch.Tensor:
    """Draw ids of ordinary tokens, ``[batch, length]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)
