"""How a decoder's attention is built: heads, widths, positions, and where its projections lie."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvprof.errors import UsageError
from kvprof.models.weights import projection_matrix

__all__ = [
    "LayerLayout",
    "ModelLayout",
    "head_columns",
    "output_slices",
    "value_weight",
]


@dataclass(frozen=True)
class LayerLayout:
    """One layer's attention.

    Attributes
    ----------
    index : int
        Index of the layer, from 0.
    num_heads, num_kv_heads : int
        Query heads and KV heads; their quotient is the `group`.
    qk_head_dim, v_head_dim : int
        Widths of one head's Q and K, and of its V.
    position : str
        ``rope``, ``partial_rope``, ``none``, ``learned`` (absolute embeddings added to the input)
        or ``alibi``.
    rotary_dim : int
        How many of `qk_head_dim` dimensions are rotated.
    qk_norm, fused_qkv : bool
        Whether Q and K are normalised; whether V shares one projection with K or Q.
    sliding_window : int or None
        Tokens that the model's own cache is for: keys a query sees, or a chunk of chunked
        attention. It keeps one fewer between passes.
    softcap : float or None
        Cap of the scores.
    sinks, mla : bool
        Learned attention sinks; multi-head latent attention, whose captured K and V are *expanded*
        heads.
    scaling : float
        Factor of ``Q @ K.T`` (1 where the model scales Q itself).
    attention : str
        The attention module's name in the model.
    output_projection, value_projection : str or None
        Names inside the attention module; None where no plain projection gives the output or V.
    value_interleaved : bool
        Whether a fused projection lays out q, k, v head by head.
    rotary_offset : int or None
        Where the slice that goes through the rotary function starts; None where Q and K before
        RoPE cannot be had.
    rotary_transposed : bool
        Whether the rotary function sees ``[B, T, heads, width]``.
    masked : bool
        Whether the mask hides more than what is later or outside `sliding_window` (chunked
        attention, a window in a cache that keeps everything).
    shared : bool
        Whether it attends to another layer's keys and values, and the model's own cache keeps none
        for it.
    recurrent : bool
        Whether the model's own cache keeps a recurrent state beside keys and values.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    position: str
    rotary_dim: int
    qk_norm: bool
    fused_qkv: bool
    sliding_window: int | None
    softcap: float | None
    sinks: bool
    mla: bool
    scaling: float
    attention: str = ""
    output_projection: str | None = None
    value_projection: str | None = None
    value_interleaved: bool = False
    rotary_offset: int | None = None
    rotary_transposed: bool = False
    masked: bool = False
    shared: bool = False
    recurrent: bool = False

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class ModelLayout:
    """All layers of a decoder; `architecture` is the model's class name."""

    layers: tuple[LayerLayout, ...]
    hidden_size: int
    architecture: str

    @property
    def unstorable(self) -> str | None:
        """Why a compressed cache cannot hold all that the layers keep; None where it can."""
        for layer in self.layers:
            if layer.recurrent:
                return (
                    f"layer {layer.index} keeps a recurrent state beside its keys and values (a "
                    "hybrid model), which a compressed cache has no place for"
                )
            if layer.shared:
                return (
                    f"layer {layer.index} attends to the keys and values of another layer, which a "
                    "compressed cache hands to nobody else"
                )
        return None


def output_slices(model: PreTrainedModel, layout: ModelLayout, layer: int) -> Tensor:
    """Return each head's slice of the output projection, ``W_O^h``.

    Returns
    -------
    Tensor
        ``[num_heads, v_head_dim, hidden]``; head h adds ``out_h @ W_O^h`` to the residual stream.

    Raises
    ------
    UsageError
        When the heads' outputs do not go straight into a linear projection (gated attention).
    """
    facts = layout.layers[layer]
    if facts.output_projection is None:
        raise UsageError(
            f"{layout.architecture}: what its heads put out does not go straight into an output "
            "projection, so W_O has no slice per head (pair vo is not defined)"
        )
    module = model.get_submodule(facts.attention).get_submodule(facts.output_projection)
    matrix = projection_matrix(module, facts.num_heads * facts.v_head_dim)
    return matrix.view(facts.num_heads, facts.v_head_dim, -1)


def value_weight(model: PreTrainedModel, layout: ModelLayout, layer: int) -> Tensor:
    """Return each KV head's value projection, ``W_V``.

    Returns
    -------
    Tensor
        ``[num_kv_heads, hidden, v_head_dim]``; ``x @ W`` is V without its bias.

    Raises
    ------
    UsageError
        For MLA, and wherever V is not a plain projection of the layer's input.
    """
    facts = layout.layers[layer]
    if facts.mla:
        raise UsageError(
            f"{layout.architecture} has multi-head latent attention: V is expanded from a latent, "
            "so there is no weight from the hidden state to V (pair w_v is not defined)"
        )
    if facts.value_projection is None:
        raise UsageError(
            f"{layout.architecture}: V is not a plain projection of the layer's input "
            "(pair w_v is not defined)"
        )
    module = model.get_submodule(facts.attention).get_submodule(facts.value_projection)
    matrix = projection_matrix(module, layout.hidden_size)
    heads, width = facts.num_kv_heads, facts.v_head_dim
    if facts.value_interleaved:
        per_head = matrix.view(layout.hidden_size, heads, -1)[..., -width:]
    else:
        per_head = matrix[:, -heads * width :].view(layout.hidden_size, heads, width)
    return per_head.transpose(0, 1).contiguous()


# --- The weights of single heads inside the projections of Q, K and V, fused or not.


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
