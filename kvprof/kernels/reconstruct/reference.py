"""Plain float64 attention over rebuilt keys: what the kernels are held against."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout, of_sequence
from kvprof.kernels.reconstruct.rebuild_config import halves

__all__ = ["reference_reconstruct", "turned"]


def turned(keys: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """Rotate the first `rotary_dim` columns of keys.

    Parameters
    ----------
    keys : Tensor
        ``[…, tokens, d]``.
    cos, sin : Tensor
        ``[…, tokens, rotary_dim / 2]``.
    rotary_dim, interleaved
        See `kvprof.kernels.reconstruct.step.reconstruct_step`.
    """
    result = keys.clone()
    first, second = halves(rotary_dim, interleaved)
    result[..., first] = keys[..., first] * cos - keys[..., second] * sin
    result[..., second] = keys[..., second] * cos + keys[..., first] * sin
    return result


def reference_reconstruct(
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    up: Sequence[Tensor],
    heads_per_group: int,
    lengths: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    scaling: float,
    *,
    interleaved: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Return one decoding step's attention, ``[rows, Σ_groups n·G·r_v]`` float64.

    Parameters
    ----------
    query, buffer, layout, up, heads_per_group, cos, sin
        As `kvprof.kernels.reconstruct.step` takes them.
    scaling, interleaved, softcap, sinks, table
        As `kvprof.kernels.reconstruct.step` takes them.
    lengths : sequence of int
        Tokens of each sequence that count.
    """
    output = query.new_zeros(len(query), layout.output_offsets[-1], dtype=torch.float64)
    queries = query.double().view(
        len(query), layout.heads, heads_per_group, -1, up[0].shape[0] // heads_per_group
    )
    tables = [table.double().expand(len(query), -1, -1) for table in (cos, sin)]
    rotary_dim = 2 * cos.shape[-1]
    for group in range(layout.heads):
        latents, values = (states.double() for states in layout.head(buffer, group))
        own = up[group].double().view(heads_per_group, -1, layout.key_widths[group])
        for row, length in enumerate(lengths):
            cosines, sines = (table[row, :length] for table in tables)
            stored, weighted = (
                of_sequence(states, row, table, length) for states in (latents, values)
            )
            rebuilt = stored @ own.mT
            keys = turned(rebuilt, cosines, sines, rotary_dim, interleaved)
            scores = queries[row, group] @ keys.mT * scaling
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                sink = sinks[group].double().view(heads_per_group, -1, 1)
                scores = torch.cat([scores, sink], -1)
            weights = torch.softmax(scores, dim=-1)[..., :length]
            result = (weights @ weighted).flatten()
            output[row, slice(*layout.output_offsets[group : group + 2])] = result
    return output
