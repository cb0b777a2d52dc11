"""Where a layer has no RoPE nothing is rebuilt: ``up`` is folded into the queries (Palu eq. 7)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout

if TYPE_CHECKING:
    from kvprof.kernels.decode.step import DecodeStep
    from kvprof.kernels.parts import Schedule

__all__ = ["folded_queries", "without_rope"]


def folded_queries(
    query: Tensor, up: Sequence[Tensor], layout: RaggedLayout, heads_per_group: int
) -> Tensor:
    """Return ``q_h @ up_j`` of every query head h of KV head j, ``[batch, Σ_groups n·G·r_k]``.

    Parameters
    ----------
    query : Tensor
        ``[batch, KV heads · G · d]``, head after head.
    up : sequence of Tensor
        Per group ``[n·d, r_k]`` in the dtype of `query`.
    layout : RaggedLayout
        Of the latents, with ``group`` = n·G.
    heads_per_group : int
        n.

    Raises
    ------
    UsageError
        When shapes do not fit.
    """
    rows = {matrix.shape[0] for matrix in up}
    widths = tuple(matrix.shape[1] for matrix in up)
    if len(rows) != 1 or widths != layout.key_widths or layout.group % heads_per_group:
        raise UsageError(
            f"matrices {[tuple(matrix.shape) for matrix in up]} fold into no queries of "
            f"{layout.group // heads_per_group} heads for each of {heads_per_group} KV heads that "
            f"meet latents of widths {layout.key_widths}"
        )
    head_dim = rows.pop() // heads_per_group
    wanted = (layout.batch, layout.heads * layout.group * head_dim)
    if tuple(query.shape) != wanted:
        raise UsageError(f"queries of shape {tuple(query.shape)} do not fit; {wanted} does")
    split = query.view(layout.batch, layout.heads, heads_per_group, -1, head_dim)
    found = [
        # [batch, n, G, d] @ [n, d, r_k]
        (split[:, group] @ matrix.view(heads_per_group, head_dim, -1)).flatten(1)
        for group, matrix in enumerate(up)
    ]
    return torch.cat(found, dim=1)


def without_rope(
    step: "DecodeStep",
    query: Tensor,
    up: Sequence[Tensor],
    heads_per_group: int,
    buffer: Tensor,
    schedule: "Schedule",
    scaling: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return a step's attention over latents of a layer without RoPE.

    The scores are ``(q_h @ up_j) @ zᵀ``, so this is plain decode over latents as keys and values.

    Parameters
    ----------
    step : DecodeStep
        Of the latents' layout (`kvprof.kernels.decode.step.decode_step`): ``group`` is n·G.
    query, up, heads_per_group
        As for `folded_queries`.
    buffer, schedule, scaling, softcap, sinks
        As for `DecodeStep.run`; sinks ``[groups, n·G]``.

    Returns
    -------
    Tensor
        ``[batch, Σ_groups n·G·r_v]``, as of `kvprof.kernels.reconstruct.step.ReconstructStep.run`.
    """
    folded = folded_queries(query, up, step.layout, heads_per_group)
    return step.run(folded, buffer, schedule, scaling, softcap=softcap, sinks=sinks)
