"""Finds the weights of single heads inside the projections of Q, K and V, fused or not."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvprof.errors import UsageError
from kvprof.models.layout import LayerLayout

__all__ = ["head_columns"]


def head_columns(
    model: PreTrainedModel, facts: LayerLayout, kind: str, heads: Sequence[int]
) -> tuple[str, Tensor]:
    """Find the output columns of heads of Q, K or V, and the projection that they are in.

    Parameters
    ----------
    model : PreTrainedModel
    facts : LayerLayout
        Of the layer.
    kind : str
        ``q``, ``k`` or ``v``.
    heads : sequence of int
        Query heads for ``q``, KV heads otherwise.

    Returns
    -------
    name : str
        Of the projection in the model.
    columns : Tensor
        Indices into the projection's output, head after head; rows of an ``nn.Linear``'s weight.

    Raises
    ------
    UsageError
        Where the layer has no plain projection of them.
    """
    if facts.value_projection is None:
        raise UsageError(f"layer {facts.index} has no plain projection of {kind.upper()}")
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
                f"layer {facts.index}: its projection of {kind.upper()} cannot be found beside "
                f"{stem}"
            )
        starts = [h * width for h in heads]
    columns = torch.cat([torch.arange(start, start + width) for start in starts])
    return f"{facts.attention}.{name}", columns
