"""The models that this recipe trains, by name."""

from __future__ import annotations

from batches import BOS, CONTEXT, EOS, PAD
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import PreTrainedModel


def _llama(
    vocabulary: int, hidden: int, layers: int, intermediate: int, heads: int = 8
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=128,
        intermediate_size=intermediate,
        max_position_embeddings=CONTEXT,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def make_config(name: str, vocabulary: int) -> LlamaConfig | GPT2Config:
    """Return a configuration: ``reference``, ``large``, ``learned-positions`` or ``tiny``."""
    if name == "reference":
        return _llama(vocabulary, hidden=512, layers=6, intermediate=768)
    if name == "large":
        return _llama(vocabulary, hidden=768, layers=12, intermediate=2048)
    if name == "tiny":
        return _llama(vocabulary, hidden=64, layers=2, intermediate=96, heads=2)
    if name == "learned-positions":
        return GPT2Config(
            vocab_size=vocabulary,
            n_positions=CONTEXT,
            n_embd=512,
            n_layer=6,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    raise ValueError(f"no model called {name!r}")


def make_model(config: LlamaConfig | GPT2Config) -> PreTrainedModel:
    """Build a model with fresh weights; residual outputs start smaller in deeper models."""
    kind = GPT2LMHeadModel if isinstance(config, GPT2Config) else LlamaForCausalLM
    model = kind(config)
    scale = (2 * config.num_hidden_layers) ** -0.5
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(scale)
    return model
