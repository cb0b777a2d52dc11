"""Plain float64 attention of a prompt over a ragged layer: what the kernels are held against."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout, of_sequence

__all__ = ["reference_prefill", "reference_rows"]


def reference_prefill(
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    lengths: Sequence[int],
    scaling: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Return causal attention of new tokens, ``[batch, tokens, Σ_g G·dv_g]`` float64.

    Parameters
    ----------
    query : Tensor
        ``[batch, tokens, Σ_g G·dk_g]``; query ``i`` stands at ``lengths[b] - tokens + i``, and is
        padding where that is negative.
    buffer : Tensor
        From `RaggedLayout.packed`.
    layout : RaggedLayout
    lengths : sequence of int
        Tokens of each sequence, the new ones included.
    scaling : float
        Factor of ``q · k``.
    softcap : float
        Scores become ``softcap · tanh(score / softcap)``; 0 leaves them.
    sinks : Tensor, optional
        ``[heads, G]``: a further logit per query head that takes weight and gives nothing.
    window : int
        Tokens that a token sees, itself included; 0 for all.
    """
    batch, tokens, _ = query.shape
    starts = [row * tokens for row in range(batch + 1)]
    found = reference_rows(
        query.flatten(0, 1),
        buffer,
        layout,
        starts,
        lengths,
        scaling,
        softcap=softcap,
        sinks=sinks,
        window=window,
    )
    return found.view(batch, tokens, -1)


def reference_rows(
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    starts: Sequence[int],
    lengths: Sequence[int],
    scaling: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int = 0,
    table: Tensor | None = None,
) -> Tensor:
    """Return causal attention of unlike numbers of new tokens, ``[tokens, Σ_g G·dv_g]`` float64.

    Parameters
    ----------
    query : Tensor
        ``[tokens, Σ_g G·dk_g]``, of all sequences one after another.
    starts : sequence of int
        Where each sequence's new tokens begin, and where the last one's end.
    table : Tensor, optional
        ``[rows, most pages]``: the pages of each sequence, where the layout is of a pool.
    buffer, layout, lengths, scaling, softcap, sinks, window
        As for `reference_prefill`.
    """
    group = layout.group
    output = query.new_zeros(len(query), layout.output_offsets[-1], dtype=torch.float64)
    for head in range(layout.heads):
        stored = [states.double() for states in layout.head(buffer, head)]
        queries = query[:, slice(*layout.query_offsets[head : head + 2])].double()
        queries = queries.view(len(query), group, -1)
        for row, length in enumerate(lengths):
            keys, values = (of_sequence(states, row, table, length) for states in stored)
            past = length - (starts[row + 1] - starts[row])
            new = slice(starts[row] + max(0, -past), starts[row + 1])
            positions = torch.arange(max(0, past), length, device=query.device)
            places = torch.arange(length, device=query.device)
            seen = places <= positions[:, None]
            if window:
                seen &= places > positions[:, None] - window
            scores = torch.einsum("tgk,nk->gtn", queries[new], keys) * scaling
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, float("-inf"))
            if sinks is not None:
                sink = sinks[head].double()[:, None, None].expand(-1, len(positions), 1)
                scores = torch.cat([scores, sink], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., :length]
            result = torch.einsum("gtn,nv->tgv", weights, values)
            output[new, slice(*layout.output_offsets[head : head + 2])] = result.flatten(1)
    return output
