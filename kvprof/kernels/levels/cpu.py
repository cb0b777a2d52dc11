"""Attention over segments without a GPU: blocks are dequantised and attended to as they pass."""

import torch
from torch import Tensor

from kvprof.kernels.levels.layout import LevelsLayout
from kvprof.kernels.levels.side import PLACES

__all__ = ["levels_cpu"]

#: Tokens that are dequantised at once: their keys and values stay in a core's cache.
_BLOCK = 2048


def levels_cpu(
    query: Tensor,
    buffer: Tensor,
    layout: LevelsLayout,
    lengths: Tensor,
    scaling: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return one decoding step's attention, ``[batch, Σ_g G·dv_g]`` in the dtype of `query`.

    All sequences of a block are dequantised and multiplied together, in float32 on all threads.

    Parameters
    ----------
    query : Tensor
        ``[batch, Σ_g G·dk_g]``, dk of the widest segment.
    buffer : Tensor
        From `LevelsLayout.packed`.
    layout : LevelsLayout
    lengths : Tensor
        ``[segments, batch]`` integers, clamped to what there is room for. A row without tokens gets
        zeros.
    scaling : float
        Factor of ``q · k``.
    softcap : float
        0 for none.
    sinks : Tensor, optional
        ``[heads, G]`` float32 logits.
    """
    wide = layout.widest
    output = query.new_empty(layout.batch, wide.output_offsets[-1])
    for head in range(layout.heads):
        queries = query[:, slice(*wide.query_offsets[head : head + 2])].float() * scaling
        queries = queries.view(layout.batch, layout.group, -1)
        shape = (layout.batch, layout.group)
        top = query.new_full(shape, float("-inf"), dtype=torch.float32)
        total = query.new_zeros(shape, dtype=torch.float32)
        if sinks is not None:
            top, total = sinks[head].float().expand(shape), total + 1.0
        found = query.new_zeros(*shape, wide.value_widths[head], dtype=torch.float32)
        for segment, tokens in enumerate(lengths):
            top, total = _segment(
                queries, buffer, layout, segment, head, tokens, softcap, top, total, found
            )
        share = torch.where(total > 0, 1.0 / total, 0.0)
        result = (found * share[..., None]).flatten(1).to(query.dtype)
        output[:, slice(*wide.output_offsets[head : head + 2])] = result
    return output


def _segment(
    queries: Tensor,
    buffer: Tensor,
    layout: LevelsLayout,
    segment: int,
    head: int,
    tokens: Tensor,
    softcap: float,
    top: Tensor,
    total: Tensor,
    found: Tensor,
) -> tuple[Tensor, Tensor]:
    """Go on with a segment: highest score and total weight; `found` is added to in place."""
    own = layout.segments[segment]
    sides = layout.sides(segment, head)
    pairs = list(zip(sides, layout.blocks(buffer, segment, head), strict=True))
    block = PLACES * own.slots
    tokens = tokens.clamp(0, own.layout.capacity)
    longest = int(tokens.max())
    step = max(1, _BLOCK // block)
    for begin in range(0, -(-longest // block), step):
        keys, values = (side.load(blocks[:, begin : begin + step]) for side, blocks in pairs)
        place = begin * block + torch.arange(keys.shape[1], device=queries.device)
        there = place < tokens[:, None]
        scores = queries[..., : keys.shape[-1]] @ keys.mT
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~there[:, None], float("-inf"))
        # What lies behind a context may be no number, and zero times that is none either.
        values = values.masked_fill(~there[..., None], 0.0)
        higher = torch.maximum(top, scores.amax(-1))
        base = torch.where(higher.isinf(), 0.0, higher)
        fade = torch.exp(top - base)
        weights = torch.exp(scores - base[..., None])
        total = total * fade + weights.sum(-1)
        found *= fade[..., None]
        found[..., : values.shape[-1]] += weights @ values
        top = higher
    return top, total
