"""Plain float64 attention over segments: what the kernels are held against."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvprof.kernels.planes import of_sequence
from kvprof.kernels.quantized.layout import SegmentsLayout

__all__ = ["reference_segments"]


def reference_segments(
    query: Tensor,
    buffer: Tensor,
    layout: SegmentsLayout,
    lengths: Sequence[Sequence[int]],
    scaling: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Return one decoding step's attention, ``[rows, Σ_g G·dv_g]`` float64.

    Parameters
    ----------
    query : Tensor
        ``[rows, Σ_g G·dk_g]``, dk of the widest segment.
    buffer : Tensor
    layout : SegmentsLayout
    lengths : sequence of sequence of int
        Tokens of each segment and row.
    scaling, softcap : float
    sinks : Tensor, optional
        ``[heads, G]`` logits.
    table : Tensor, optional
        ``[rows, most pages]``: the pages of each row, where the layout is of a pool.
    """
    wide = layout.widest
    output = query.new_zeros(len(query), wide.output_offsets[-1], dtype=torch.float64)
    for head in range(layout.heads):
        states = [layout.head(buffer, number, head) for number in range(len(layout.segments))]
        queries = query[:, slice(*wide.query_offsets[head : head + 2])].double()
        queries = queries.view(len(query), layout.group, -1)
        for row in range(len(query)):
            scores, values = [], []
            for (keys, own), tokens in zip(states, lengths, strict=True):
                keys, own = (
                    of_sequence(side, row, table, tokens[row]).double() for side in (keys, own)
                )
                scores.append(queries[row][:, : keys.shape[-1]] @ keys.T * scaling)
                values.append(pad(own, (0, wide.value_widths[head] - own.shape[-1])))
            logits = torch.cat(scores, dim=-1)
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            if sinks is not None:
                logits = torch.cat([logits, sinks[head].double()[:, None]], dim=-1)
            if not logits.shape[-1]:
                continue
            weights = torch.softmax(logits, dim=-1)[:, : sum(tokens[row] for tokens in lengths)]
            result = weights @ torch.cat(values)
            output[row, slice(*wide.output_offsets[head : head + 2])] = result.flatten()
    return output
