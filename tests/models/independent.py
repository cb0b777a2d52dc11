"""Q, K and V of a tiny model another way than kvprof's: hooks on projections, RoPE by formula."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

Vectors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, q_pre, k_pre


def rope(x: Tensor, theta: float, dims: int, *, interleaved: bool = False) -> Tensor:
    """Turn the first `dims` dimensions of ``[B, H, T, d]`` in float64, positions from 0."""
    position = torch.arange(x.shape[2], dtype=torch.float64)
    frequency = theta ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    angle = position[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    turning, rest = x[..., :dims].double(), x[..., dims:].double()
    if interleaved:
        a, b = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turning[..., : dims // 2], turning[..., dims // 2 :]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([turned, rest], dim=-1)


def heads(flat: Tensor, count: int) -> Tensor:
    return flat.unflatten(-1, (count, -1)).transpose(1, 2)


def _theta(config: Any, layer: int) -> float:
    parameters = config.rope_parameters
    if "rope_theta" not in parameters:  # Gemma3: one set for each kind of layer
        parameters = parameters[config.layer_types[layer]]
    return float(parameters["rope_theta"])


def _vectors(
    arch: str, attention: nn.Module, seen: dict[str, Tensor], config: Any, layer: int
) -> Vectors:
    H = config.num_attention_heads
    G = getattr(config, "num_key_value_heads", None) or H
    if arch in ("DeepseekV2", "DeepseekV3"):
        return _latent(arch, seen, config, layer)
    if arch == "Phi3":
        d = config.hidden_size // H
        q, k, v = seen["qkv_proj"].split([H * d, G * d, G * d], dim=-1)
        q, k, v = heads(q, H), heads(k, G), heads(v, G)
    elif arch == "GPTNeoX":
        q, k, v = heads(seen["query_key_value"], H).chunk(3, dim=-1)
    elif arch == "GPT2":
        q, k, v = (heads(x, H) for x in seen["c_attn"].chunk(3, dim=-1))
    else:
        q, k, v = seen["q_proj"], seen["k_proj"], seen["v_proj"]
        if arch == "Olmo2":
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k, v = heads(q, H), heads(k, G), heads(v, G)
    if arch in ("Qwen3", "Gemma3"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    if arch == "Cohere":
        q = attention.q_norm(q.transpose(1, 2)).transpose(1, 2)
        k = attention.k_norm(k.transpose(1, 2)).transpose(1, 2)
    if arch == "StableLm":
        q, k = attention.q_layernorm(q), attention.k_layernorm(k)
    if arch == "OPT":
        q = q * q.shape[-1] ** -0.5
    if arch in ("OPT", "GPT2") or (arch == "SmolLM3" and not config.no_rope_layers[layer]):
        return q, k, v, q, k
    dims = q.shape[-1] // 4 if arch in ("GPTNeoX", "StableLm") else q.shape[-1]
    turn: Callable[[Tensor], Tensor] = lambda x: rope(  # noqa: E731
        x, _theta(config, layer), dims, interleaved=arch == "Cohere"
    )
    return turn(q), turn(k), v, q, k


def _latent(arch: str, seen: dict[str, Tensor], config: Any, layer: int) -> Vectors:
    H, nope, turning = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    q = heads(seen["q_b_proj"], H)
    kv = heads(seen["kv_b_proj"].reshape(*seen["q_b_proj"].shape[:2], -1), H)
    k_nope, v = kv[..., :nope], kv[..., nope:]
    k_rope = seen["kv_a_proj_with_mqa"][..., None, -turning:].transpose(1, 2).expand(-1, H, -1, -1)
    k = torch.cat([k_nope, k_rope], dim=-1)

    def turn(x: Tensor) -> Tensor:
        turned = rope(x[..., nope:], _theta(config, layer), turning, interleaved=True)
        if arch == "DeepseekV3":  # it gathers the even dimensions before the odd ones
            turned = torch.cat([turned[..., ::2], turned[..., 1::2]], dim=-1)
        return torch.cat([x[..., :nope].double(), turned], dim=-1)

    return turn(q), turn(k), v, q, k


def vectors(arch: str, model: PreTrainedModel, names: list[str], ids: Tensor) -> list[Vectors]:
    """Compute every layer's vectors; `names` are the attention modules' in the model."""
    seen: list[dict[str, Tensor]] = [{} for _ in names]
    handles = []
    for index, name in enumerate(names):
        for child, module in model.get_submodule(name).named_children():

            def keep(m: nn.Module, a: Any, out: Any, *, i: int = index, c: str = child) -> None:
                seen[i][c] = out

            handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model(ids, use_cache=False)
        for handle in handles:
            handle.remove()
        return [
            _vectors(arch, model.get_submodule(name), seen[i], model.config, i)
            for i, name in enumerate(names)
        ]
