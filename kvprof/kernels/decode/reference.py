"""Plain float64 attention over a ragged layer: what the kernels are held against."""

import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout

__all__ = ["reference_decode"]


def reference_decode(
    query: Tensor, buffer: Tensor, layout: RaggedLayout, lengths: list[int], scaling: float
) -> Tensor:
    """Return one decoding step's attention, ``[batch, Σ_g G·dv_g]`` float64.

    Parameters
    ----------
    query : Tensor
        ``[batch, Σ_g G·dk_g]``.
    buffer : Tensor
        From `RaggedLayout.packed`.
    layout : RaggedLayout
    lengths : list of int
        Tokens of each sequence that count.
    scaling : float
        Factor of ``q · k``.
    """
    output = query.new_zeros(layout.batch, layout.output_offsets[-1], dtype=torch.float64)
    for head in range(layout.heads):
        keys, values = (states.double() for states in layout.head(buffer, head))
        queries = query[:, slice(*layout.query_offsets[head : head + 2])].double()
        queries = queries.view(layout.batch, layout.group, -1)
        for row, length in enumerate(lengths):
            scores = queries[row] @ keys[row, :length].T * scaling
            result = torch.softmax(scores, dim=-1) @ values[row, :length]
            output[row, slice(*layout.output_offsets[head : head + 2])] = result.flatten()
    return output
