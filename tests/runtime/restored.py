"""A model whose own cache holds what numpy makes of a prompt's, stored across layers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvprof.methods.across import LayerGroup
from kvprof.moments.collect import capture, run_batch
from tests.methods.models import model
from tests.models.tiny import token_ids

PROMPT = 40

#: Keys before RoPE and values of every layer, ``[B, heads, T, d]``.
States = dict[str, list[np.ndarray]]


def prompts(rows: int, tokens: int = PROMPT) -> Tensor:
    """Return prompts and the token that is decoded after each."""
    return token_ids(rows, tokens + 1)


def held(arch: str, ids: Tensor) -> States:
    """Return what a model holds of its prompts."""
    found: States = {"keys": [], "values": []}

    def receive(tap: Any) -> None:
        found["keys"].append(tap.k_pre.double().numpy())
        found["values"].append(tap.v.double().numpy())

    with capture(model(arch), receive, pre_rope=True):
        run_batch(model(arch), ids)
    return found


def restore(
    states: States,
    group: LayerGroup,
    tokens: slice,
    back: Callable[[np.ndarray, LayerGroup], np.ndarray],
) -> None:
    """Put in place of some tokens' rows ``[n, w]`` of a group what they come back as."""
    own = states[group.side]
    for row in range(len(own[0])):
        heads = [own[x][row, :, tokens] for x in group.layers]
        rows = np.concatenate([h.transpose(1, 0, 2).reshape(h.shape[1], -1) for h in heads], 1)
        found, start = back(rows, group), 0
        for layer in group.layers:
            h = own[layer][row]
            part = found[:, start : start + h.shape[0] * h.shape[2]]
            start += part.shape[1]
            h[:, tokens] = part.reshape(-1, h.shape[0], h.shape[2]).transpose(1, 0, 2)


def rotated(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotate ``[B, heads, T, d]`` as Llama does."""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(x.shape[2]), theta ** (-np.arange(half) / half))
    cos, sin = np.cos(angles), np.sin(angles)
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def check_decoded(found: Tensor, ids: Tensor, states: States, *, within: float) -> Tensor:
    """Hold logits ``[B, V]`` of a decoded token against Llama's with `states` in its own cache.

    They may lie `within` a share of what storing costs, which must be something. Returned are the
    prompt's own logits, ``[B, T, V]``.
    """
    llama = model("Llama").model
    theta = llama.config.rope_parameters["rope_theta"]
    with torch.no_grad():
        prompt = llama(ids[:, :-1], use_cache=True)
        cache = prompt.past_key_values
        untouched = llama(ids[:, -1:], past_key_values=cache).logits[:, -1]
        cache.crop(-1)
        for layer, keys, values in zip(cache.layers, states["keys"], states["values"], strict=True):
            layer.keys = torch.from_numpy(rotated(keys, theta)).float()
            layer.values = torch.from_numpy(values).float()
        wanted = llama(ids[:, -1:], past_key_values=cache).logits[:, -1]
    spread = float((wanted - untouched).norm())
    assert spread > 0.01 * float(wanted.norm())  # storing costs something
    assert float((found - wanted).norm()) < within * spread
    logits: Tensor = prompt.logits
    return logits
