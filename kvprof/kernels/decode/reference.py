"""Plain float64 attention over a ragged layer: what the kernels are held against."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout, of_sequence

__all__ = ["reference_decode"]


def reference_decode(
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    lengths: Sequence[int],
    scaling: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    starts: Sequence[int] | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Return one decoding step's attention, ``[rows, Σ_g G·dv_g]`` float64.

    Parameters
    ----------
    query : Tensor
        ``[rows, Σ_g G·dk_g]``.
    buffer : Tensor
        From `RaggedLayout.packed`.
    layout : RaggedLayout
    lengths : sequence of int
        Tokens of each row that count; a row of 0 gets zeros.
    scaling : float
        Factor of ``q · k``.
    softcap : float
        Scores become ``softcap · tanh(score / softcap)``; 0 leaves them.
    sinks : Tensor, optional
        ``[heads, G]``: a further logit per query head, without a value.
    starts : sequence of int, optional
        First visible token of each row.
    table : Tensor, optional
        ``[rows, most pages]``: the pages of each row, where the layout is of a pool.
    """
    output = query.new_zeros(len(query), layout.output_offsets[-1], dtype=torch.float64)
    for head in range(layout.heads):
        stored = [states.double() for states in layout.head(buffer, head)]
        queries = query[:, slice(*layout.query_offsets[head : head + 2])].double()
        queries = queries.view(len(query), layout.group, -1)
        for row, length in enumerate(lengths):
            keys, values = (of_sequence(states, row, table, length) for states in stored)
            seen = slice(0 if starts is None else starts[row], length)
            scores = queries[row] @ keys[seen].T * scaling
            if softcap > 0.0:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head].double()[:, None]], dim=-1)
            if scores.shape[-1] == 0:
                continue
            weights = torch.softmax(scores, dim=-1)[:, : len(values[seen])]
            output[row, slice(*layout.output_offsets[head : head + 2])] = (
                weights @ values[seen]
            ).flatten()
    return output
