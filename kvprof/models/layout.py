"""How a decoder's attention is built: heads, widths, positions, and where its projections lie."""

from dataclasses import dataclass

__all__ = ["LayerLayout", "ModelLayout"]


@dataclass(frozen=True)
class LayerLayout:
    """One layer's attention."""

    index: int  # index of the layer, from 0
    num_heads: int  # query heads and KV heads; their quotient is the `group`
    num_kv_heads: int
    qk_head_dim: int  # widths of one head's Q and K, and of its V
    v_head_dim: int
    #: `rope`, `partial_rope`, `none`, `learned` (absolute embeddings added to the input) or
    #: `alibi`.
    position: str
    rotary_dim: int  # how many of `qk_head_dim` dimensions are rotated
    qk_norm: bool  # whether Q and K are normalised or clamped; whether V shares their projection
    fused_qkv: bool
    #: Tokens that the model's own cache is for: keys a query sees, or a chunk of chunked attention.
    #: It keeps one fewer between passes.
    sliding_window: int | None
    softcap: float | None  # cap of the scores
    #: Learned attention sinks; multi-head latent attention, whose captured K and V are *expanded*
    #: heads.
    sinks: bool
    mla: bool
    scaling: float  # factor of `Q @ K.T` (1 where the model scales Q itself)
    attention: str = ""  # the attention module's name in the model
    #: Names inside the attention module; None where no plain projection gives the output or V.
    output_projection: str | None = None
    value_projection: str | None = None
    biased: bool = False  # whether the projection of V adds a bias
    value_interleaved: bool = False  # whether a fused projection lays out q, k, v head by head
    #: Where the slice that goes through the rotary function starts; None where Q and K before RoPE
    #: cannot be had.
    rotary_offset: int | None = None
    rotary_transposed: bool = False  # whether the rotary function sees `[B, T, heads, width]`
    #: Of each pair of dimensions that RoPE turns into each other `(x, y, s, column)`, as
    #: `kvprof.analysis.rotary.RotaryPairs` has them; empty without RoPE, None where the rotation is
    #: not of that form or there are no weights to find out on.
    rotary_pairs: tuple[tuple[int, int, int, int], ...] | None = None
    #: Whether the mask hides more than what is later or outside `sliding_window` (chunked
    #: attention, a window in a cache that keeps everything).
    masked: bool = False
    #: Whether it attends to another layer's keys and values, and the model's own cache keeps none
    #: for it.
    shared: bool = False
    #: Whether the model's own cache keeps a recurrent state beside keys and values.
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
                    f"layer {layer.index} has a recurrent state (hybrid model), which a "
                    "compressed cache cannot store"
                )
            if layer.shared:
                return (
                    f"layer {layer.index} attends to another layer's keys and values, which a "
                    "compressed cache cannot share"
                )
        return None
