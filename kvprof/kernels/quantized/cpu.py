"""Attention over segments without a GPU: block after block, dequantised in the products."""

import math

import torch
from torch import Tensor

from kvprof.kernels.quantized.layout import SegmentsLayout
from kvprof.kernels.quantized.operand_layout import PLACES, OperandLayout
from kvprof.kernels.split_kv import Attended

__all__ = ["segments_cpu"]

#: Tokens at once: few enough for a core's cache, enough to hide what a call costs.
_BLOCK = 4096


def segments_cpu(
    query: Tensor,  # `[rows, Σ_g G·dk_g]`, dk of the widest segment
    buffer: Tensor,  # from `SegmentsLayout.packed`
    layout: SegmentsLayout,
    #: `[segments, rows]` integers, clamped to what there is room for. A row without tokens gets
    #: zeros.
    lengths: Tensor,
    scaling: float,  # factor of `q · k`
    *,
    softcap: float = 0.0,  # 0 for none
    sinks: Tensor | None = None,  # `[heads, G]` float32 logits
    table: Tensor | None = None,  # `[rows, most pages]` int32, where the layout is of a pool
    beside: Attended | None = None,  # A further part of every row
) -> Tensor:
    """Return one decoding step's attention, ``[rows, Σ_g G·dv_g]`` in the dtype of `query`."""
    wide = layout.widest
    output = query.new_empty(len(query), wide.output_offsets[-1])
    for head in range(layout.heads):
        queries = query[:, slice(*wide.query_offsets[head : head + 2])].float() * scaling
        queries = queries.view(len(query), layout.group, -1)
        shape = (len(query), layout.group)
        top = query.new_full(shape, float("-inf"), dtype=torch.float32)
        total = query.new_zeros(shape, dtype=torch.float32)
        if sinks is not None:
            top, total = sinks[head].float().expand(shape), total + 1.0
        found = query.new_zeros(*shape, wide.value_widths[head], dtype=torch.float32)
        if beside is not None:
            columns = slice(*wide.output_offsets[head : head + 2])
            own = beside.output[:, columns].float().view(found.shape)
            logs = beside.logs.view(len(query), layout.heads, -1)[:, head] * math.log(2.0)
            top = torch.logaddexp(top, logs)
            seen = logs > float("-inf")
            found = torch.where(seen[..., None], own * torch.exp(logs - top)[..., None], found)
            total = torch.where(top > float("-inf"), 1.0, 0.0)
        for segment, tokens in enumerate(lengths):
            top, total = _segment(
                queries, buffer, layout, segment, head, tokens, softcap, top, total, found, table
            )
        share = torch.where(total > 0, 1.0 / total, 0.0)
        result = (found * share[..., None]).flatten(1).to(query.dtype)
        output[:, slice(*wide.output_offsets[head : head + 2])] = result
    return output


def _segment(
    queries: Tensor,
    buffer: Tensor,
    layout: SegmentsLayout,
    segment: int,
    head: int,
    tokens: Tensor,
    softcap: float,
    top: Tensor,
    total: Tensor,
    found: Tensor,
    table: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Go on with a segment: highest score and total weight; `found` is added to in place."""
    own = layout.segments[segment]
    sides = layout.sides(segment, head)
    pairs = list(zip(sides, layout.blocks(buffer, segment, head), strict=True))
    block = PLACES * own.slots
    room = own.layout.capacity * (1 if table is None else table.shape[1])
    tokens = tokens.clamp(0, room)
    longest = int(tokens.max())
    step = max(1, _BLOCK // block)
    if table is not None:
        # What a table names behind a row's last page may be anything.
        pages = table[:, : -(-longest // own.layout.capacity)].long().clamp(0, layout.batch - 1)
        pairs = [(side, blocks[pages].flatten(1, 2)) for side, blocks in pairs]
    # Tokens in the order in which they are stored: by block, then slot, then place.
    inside = torch.arange(block, device=queries.device).view(PLACES, own.slots).T.flatten()
    for begin in range(0, -(-longest // block), step):
        (keys, key_blocks), (values, value_blocks) = (
            (side, blocks[:, begin : begin + step]) for side, blocks in pairs
        )
        count = torch.arange(begin, begin + key_blocks.shape[1], device=queries.device)
        there = (count[:, None] * block + inside).flatten() < tokens[:, None]
        scores = _scores(keys, key_blocks, queries)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~there[:, None], float("-inf"))
        higher = torch.maximum(top, scores.amax(-1))
        base = higher.masked_fill(higher.isinf(), 0.0)
        fade = torch.exp(top - base)
        weights = torch.exp(scores - base[..., None])
        total = total * fade + weights.sum(-1)
        found *= fade[..., None]
        found[..., : values.width] += _weighted(values, value_blocks, weights, there)
        top = higher
    return top, total


def _columns(side: OperandLayout, group: int) -> slice:
    width = side.columns or side.width
    return slice(group * width, (group + 1) * width)


def _scores(side: OperandLayout, blocks: Tensor, queries: Tensor) -> Tensor:
    """Return ``[batch, G, tokens]``; scales and middles are applied to products of codes."""
    codes, scale, middle = side.raw(blocks)
    queries = queries[..., : side.width]
    if scale is None:
        return queries @ codes.mT
    found = queries.new_zeros(*queries.shape[:2], codes.shape[1])
    for group in range(side.groups):
        part = queries[..., _columns(side, group)]
        found.addcmul_(part @ codes[..., _columns(side, group)].mT, scale[:, group, None])
        if middle is not None:
            found.addcmul_(part.sum(-1, keepdim=True), middle[:, group, None])
    return found


def _weighted(side: OperandLayout, blocks: Tensor, weights: Tensor, there: Tensor) -> Tensor:
    """Return ``[batch, G, width]``; what lies behind a context may be no number."""
    codes, scale, middle = side.raw(blocks)
    if scale is None:
        return weights @ codes.masked_fill_(~there[..., None], 0.0)
    parts = []
    for group in range(side.groups):
        own_scale = scale[:, group].masked_fill(~there, 0.0)
        product = (weights * own_scale[:, None]) @ codes[..., _columns(side, group)]
        if middle is not None:
            product = product + weights @ middle[:, group].masked_fill(~there, 0.0)[..., None]
        parts.append(product)
    return torch.cat(parts, dim=-1)
