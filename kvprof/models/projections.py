"""The weights of single heads inside the projections of Q, K, V and the output, fused or not."""

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvprof.errors import UsageError
from kvprof.models.layout import LayerLayout, ModelLayout
from kvprof.models.weights import projection_matrix

__all__ = ["head_columns", "output_slices", "projection_biases", "value_weight"]


def output_slices(model: PreTrainedModel, layout: ModelLayout, layer: int) -> Tensor:
    """Return each head's slice of the output projection, ``W_O^h``."""
    facts = layout.layers[layer]
    if facts.output_projection is None:
        raise UsageError(
            f"{layout.architecture}: pair vo is not defined: head outputs do not enter W_O directly"
        )
    module = model.get_submodule(facts.attention).get_submodule(facts.output_projection)
    matrix = projection_matrix(module, facts.num_heads * facts.v_head_dim)
    return matrix.view(facts.num_heads, facts.v_head_dim, -1)


def value_weight(model: PreTrainedModel, layout: ModelLayout, layer: int) -> Tensor:
    """Return each KV head's value projection, ``W_V``."""
    facts = layout.layers[layer]
    if facts.mla:
        raise UsageError(
            f"{layout.architecture}: pair w_v is not defined: multi-head latent attention expands "
            "V from a latent"
        )
    if facts.value_projection is None:
        raise UsageError(
            f"{layout.architecture}: pair w_v is not defined: V is not a linear projection of the "
            "layer's input"
        )
    module = model.get_submodule(facts.attention).get_submodule(facts.value_projection)
    matrix = projection_matrix(module, layout.hidden_size)
    heads, width = facts.num_kv_heads, facts.v_head_dim
    if facts.value_interleaved:
        per_head = matrix.view(layout.hidden_size, heads, -1)[..., -width:]
    else:
        per_head = matrix[:, -heads * width :].view(layout.hidden_size, heads, width)
    return per_head.transpose(0, 1).contiguous()


def projection_biases(model: PreTrainedModel, facts: LayerLayout) -> dict[str, Tensor]:
    """Return what projections add to each head of ``k`` and ``v``, ``[num_kv_heads, d]`` float64.

    Left out where a norm follows.
    """
    found = {}
    if facts.biased and not facts.mla and not facts.shared:
        for kind in ("v",) if facts.qk_norm else ("k", "v"):
            with suppress(UsageError):  # keys whose projection is not known keep theirs
                name, columns = head_columns(model, facts, kind, range(facts.num_kv_heads))
                bias = getattr(model.get_submodule(name), "bias", None)
                if bias is not None and bool(bias.any()):
                    own = bias.detach()[columns.to(bias.device)].to(torch.float64)
                    found[kind] = own.view(facts.num_kv_heads, -1)
    return found


def head_columns(
    model: PreTrainedModel, facts: LayerLayout, kind: str, heads: Sequence[int]
) -> tuple[str, Tensor]:
    """Find the output columns of heads of Q, K or V, and the projection that they are in."""
    if facts.value_projection is None:
        raise UsageError(f"layer {facts.index} has no linear projection of {kind.upper()}")
    qk, v = facts.qk_head_dim, facts.v_head_dim
    width = v if kind == "v" else qk
    attention = model.get_submodule(facts.attention)
    if facts.fused_qkv:
        name = facts.value_projection
        if facts.value_interleaved:  # q, k, v of one head after the other
            share = facts.group * qk + qk + v
            inside = {"q": 0, "k": share - v - qk, "v": share - v}[kind]
            starts = [
                h // facts.group * share + h % facts.group * qk
                if kind == "q"
                else h * share + inside
                for h in heads
            ]
        else:
            first_k = facts.num_heads * qk
            first = {"q": 0, "k": first_k, "v": first_k + facts.num_kv_heads * qk}[kind]
            starts = [first + h * width for h in heads]
    else:
        stem = facts.value_projection
        name = stem if kind == "v" else stem.replace("v_proj", f"{kind}_proj")
        if kind != "v" and (name == stem or not hasattr(attention, name)):
            raise UsageError(
                f"layer {facts.index}: its projection of {kind.upper()} was not found next to "
                f"{stem}"
            )
        starts = [h * width for h in heads]
    columns = torch.cat([torch.arange(start, start + width) for start in starts])
    return f"{facts.attention}.{name}", columns
