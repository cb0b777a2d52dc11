"""Queries that ``up`` was folded into (Palu eq. 7): they meet latents, and nothing is rebuilt."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout


def folded_queries(
    query: Tensor, up: Sequence[Tensor], layout: RaggedLayout, heads_per_group: int
) -> Tensor:
    """Return ``q_h @ up_j`` of every query head h of KV head j, ``[batch, Σ_groups n·G·r_k]``."""
    head_dim = up[0].shape[0] // heads_per_group
    split = query.view(layout.batch, layout.heads, heads_per_group, -1, head_dim)
    found = [
        # [batch, n, G, d] @ [n, d, r_k]
        (split[:, group] @ matrix.view(heads_per_group, head_dim, -1)).flatten(1)
        for group, matrix in enumerate(up)
    ]
    return torch.cat(found, dim=1)
