"""Keys rebuilt by the kernel's CPU path are rotated as real models' own rotary functions do it."""

import pytest
import torch
from transformers import CohereConfig, GPTNeoXConfig, LlamaConfig
from transformers.models.cohere import modeling_cohere
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.reconstruct.step import reconstruct_step
from kvprof.models.interface import Rotation, rotated

HEADS, GROUP, DIM, TOKENS, RANK = 2, 2, 64, 90, 48
SIZES = {"hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 131072}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
PLAIN = {"rope_type": "default", "rope_theta": 75000.0}


def llama(parameters):
    config = LlamaConfig(**SIZES, num_key_value_heads=4, rope_parameters=parameters)
    return modeling_llama, modeling_llama.LlamaRotaryEmbedding(config)


def neox(parameters):
    config = GPTNeoXConfig(**SIZES, rope_parameters=parameters)
    return modeling_gpt_neox, modeling_gpt_neox.GPTNeoXRotaryEmbedding(config)


def cohere(parameters):
    config = CohereConfig(**SIZES, num_key_value_heads=4, rope_parameters=parameters)
    return modeling_cohere, modeling_cohere.CohereRotaryEmbedding(config)


@pytest.mark.parametrize(
    ("model", "parameters", "interleaved", "rotary_dim"),
    [
        (llama, LLAMA3, False, 64),
        (llama, YARN, False, 64),
        (neox, PARTIAL, False, 16),
        (cohere, PLAIN, True, 64),
    ],
    ids=["llama3", "yarn", "partial", "interleaved"],
)
def test_rebuilt_keys_are_rotated_as_the_model_does_it(model, parameters, interleaved, rotary_dim):
    generator = torch.Generator().manual_seed(7)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    module, embedding = model(parameters)
    # Positions of two sequences, one padded on the left, far enough for scaling to matter.
    positions = torch.stack([torch.arange(TOKENS) * 300, (torch.arange(TOKENS) - 5).clamp(0)])
    cos, sin = embedding(random(1), positions)
    assert cos.shape == (2, TOKENS, rotary_dim)

    latents, up = random(2, TOKENS, RANK), random(HEADS * DIM, RANK) * RANK**-0.5
    rebuilt = (latents @ up.T).view(2, TOKENS, HEADS, DIM).permute(0, 2, 1, 3)
    query = random(2, HEADS * GROUP, DIM)
    result = module.apply_rotary_pos_emb(rebuilt, rebuilt, cos, sin)
    rotation = Rotation(module.apply_rotary_pos_emb, (rebuilt, rebuilt, cos, sin), {}, result)
    # [rows, groups, heads, tokens, d]; cos and sin [rows, groups, tokens, width].
    keys = rotated(rotation, rebuilt[:, None], cos[:, None], sin[:, None], 0, False)[:, 0]
    scores = query.view(2, HEADS, GROUP, DIM) @ keys.mT * 0.125
    values = random(2, TOKENS, RANK)
    wanted = torch.softmax(scores, -1).flatten(1, 2) @ values

    layout = RaggedLayout((RANK,), (RANK,), HEADS * GROUP, 2, TOKENS)
    step = reconstruct_step(
        layout, [up], DIM, HEADS, "cpu", interleaved=interleaved, rotary_dim=rotary_dim
    )
    places = slice(0, None, 2) if interleaved else slice(0, rotary_dim // 2)
    found = step.run(
        query.flatten(1),
        layout.packed([latents], [values]),
        step.cut([TOKENS, TOKENS]),
        cos[..., places],
        sin[..., places],
        0.125,
    )
    assert torch.allclose(found.view_as(wanted), wanted, atol=2e-5)
    # The test can fail: without the rotation the result is another one.
    still = (torch.ones_like(cos[..., places]), torch.zeros_like(sin[..., places]))
    unturned = step.run(
        query.flatten(1),
        layout.packed([latents], [values]),
        step.cut([TOKENS, TOKENS]),
        *still,
        0.125,
    )
    assert not torch.allclose(unturned.view_as(wanted), wanted, atol=1e-2)
