"""The projection's RoPE against the rotary functions of the models themselves."""

from importlib import import_module

import pytest
import torch

from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.project.bases import basis_set
from kvprof.kernels.project.reference import reference_project, reference_store
from kvprof.kernels.project.step import project_step
from kvprof.models.interface import Rotation, rotated

BATCH, TOKENS, HEADS, WIDTH = 2, 9, 3, 64


def model_function(model: str):
    module = import_module(f"transformers.models.{model}.modeling_{model}")
    return module.apply_rotary_pos_emb


def angles(dim: int) -> torch.Tensor:
    """Angles per pair, sequences at places of their own."""
    place = torch.arange(TOKENS)[None] + torch.tensor([[3], [40_000]])
    return place[..., None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)


def halves(angle: torch.Tensor) -> torch.Tensor:
    return torch.cat((angle, angle), dim=-1)


def neighbours(angle: torch.Tensor) -> torch.Tensor:
    return angle.repeat_interleave(2, dim=-1)


def pairs(angle: torch.Tensor) -> torch.Tensor:
    return angle


# Model, dimensions that turn, where they begin, how the model's table and ours hold the angles,
# neighbours as pairs, whether the function sees the turning slice only, and heads after tokens.
SCHEMES = {
    "llama": ("llama", 64, 0, halves, halves, False, False, False),
    "llama, a table per pair": ("llama", 64, 0, halves, pairs, False, False, False),
    "llama, tokens before heads": ("llama", 64, 0, halves, halves, False, False, True),
    "the last dimensions, as in MLA": ("llama", 16, 48, halves, halves, False, True, False),
    "the first dimensions": ("llama", 24, 0, halves, halves, False, True, False),
    "phi3, partial": ("phi3", 48, 0, halves, halves, False, False, False),
    "gpt-neox, partial": ("gpt_neox", 16, 0, halves, halves, False, False, False),
    "gpt-oss": ("gpt_oss", 64, 0, pairs, pairs, False, False, False),
    "cohere": ("cohere", 64, 0, neighbours, neighbours, True, False, False),
    "glm, partial": ("glm", 32, 0, halves, pairs, True, False, False),
}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_states_turn_as_the_model_turns_them(scheme):
    model, dim, offset, theirs, ours, interleaved, sliced, transposed = scheme
    generator = torch.Generator().manual_seed(7)
    keys = torch.randn(BATCH, HEADS, TOKENS, WIDTH, generator=generator)
    angle = angles(dim)
    cos, sin = theirs(angle).cos(), theirs(angle).sin()
    seen = keys[..., offset : offset + dim] if sliced else keys
    seen = seen.transpose(1, 2) if transposed else seen
    kwargs = {"unsqueeze_dim": 2} if transposed else {}
    call = Rotation(model_function(model), (seen, seen, cos, sin), kwargs, None)
    wanted = rotated(call, keys[:, None], cos[:, None], sin[:, None], offset, transposed)
    turned = wanted[:, 0].transpose(1, 2)
    assert not torch.allclose(turned, keys.transpose(1, 2), atol=0.1)

    layout = RaggedLayout((48, 16, 64), (16, 16, 16), 1, BATCH, 20)
    bases = [torch.randn(WIDTH, width, generator=generator) / 8 for width in layout.key_widths]
    buffer = torch.zeros(layout.elements)
    start = torch.tensor([4, 11], dtype=torch.int32)
    states = keys.transpose(1, 2)
    queries = project_step(
        states,
        states,
        torch.zeros(BATCH, TOKENS, sum(layout.value_widths)),
        basis_set(bases),
        layout,
        buffer,
        start,
        cos=ours(angle).cos(),
        sin=ours(angle).sin(),
        rotary_dim=dim,
        offset=offset,
        interleaved=interleaved,
    )
    empty = torch.zeros(layout.elements)
    latents = reference_project(turned, bases)
    stored = reference_store(layout, empty, latents, None, [4, 11])
    assert float((buffer - stored).abs().max()) < 1e-5
    assert float((queries - torch.cat(latents, dim=-1)).abs().max()) < 1e-5
