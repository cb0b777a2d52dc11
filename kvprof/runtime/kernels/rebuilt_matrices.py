"""The bases of latents that KV heads share, laid out as the kernels take them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprof.methods.plan import HeadGroup, LayerPlan
from kvprof.models.layout import LayerLayout

__all__ = ["LatentMatrices", "latent_matrices"]


@dataclass(frozen=True, eq=False)
class LatentMatrices:
    """A layer's bases, per group of KV heads.

    Attributes
    ----------
    depth : int
        How many of a group's columns meet `keys`: where W_K is folded, only those that hold latents
        in some group.
    keys : BasisSet
        ``[depth, r_k]`` per group.
    key_ups : list of Tensor
        ``[n * d, r_k]`` per group.
    queries : BasisSet
        ``[d, r_k]`` per KV head, for queries that meet latents.
    values : BasisSet or None
        ``[n * d, r_v]`` per group; None where values come as they are to be stored.
    columns : Tensor or None
        The columns of a folded W_V's output that are latents; None for all.
    value_ups : list of Tensor
        ``[n, r_v, d]`` per group.
    """

    depth: int
    keys: Any
    key_ups: list[Tensor]
    queries: Any
    values: Any
    columns: Tensor | None
    value_ups: list[Tensor]


def latent_matrices(
    layer: LayerPlan, facts: LayerLayout, device: torch.device, dtype: torch.dtype
) -> LatentMatrices:
    """Return a layer's matrices, where and in what the layer runs.

    Parameters
    ----------
    layer : LayerPlan
        With as many KV heads in every group of the keys and of the values.
    facts : LayerLayout
        The model's layer.
    device, dtype
    """
    from kvprof.kernels.project.bases import basis_set

    keys, values = layer.keys, layer.values
    depth = max(group.rank for group in keys.groups) if keys.fold_down else keys.groups[0].width
    downs = [
        torch.eye(depth)[:, : group.rank] if keys.fold_down else _down(group)
        for group in keys.groups
    ]
    key_ups = [_up(group) for group in keys.groups]
    met = [
        _eye(facts.qk_head_dim, group.rank) if keys.fold_up else head
        for group, up in zip(keys.groups, key_ups, strict=True)
        for head in up.view(group.heads, -1, group.rank)
    ]
    value_bases = columns = None
    if values.projected and not values.fold_down:
        value_bases = basis_set([_down(g) for g in values.groups], dtype=dtype, device=device)
    elif values.projected:
        columns = torch.tensor(
            [g.first * g.head_dim + c for g in values.groups for c in range(g.rank)], device=device
        )
    return LatentMatrices(
        depth=depth,
        keys=basis_set(downs, dtype=dtype, device=device),
        key_ups=[up.to(device, dtype) for up in key_ups],
        queries=basis_set(met, dtype=dtype, device=device),
        values=value_bases,
        columns=columns,
        value_ups=[
            _up(group).view(group.heads, -1, group.rank).mT.to(device, dtype)
            for group in values.groups
        ],
    )


def _eye(height: int, width: int) -> Tensor:
    return torch.eye(max(height, width))[:height, :width]


def _down(group: HeadGroup) -> Tensor:
    return _eye(group.width, group.rank) if group.down is None else group.down


def _up(group: HeadGroup) -> Tensor:
    return _eye(group.width, group.rank) if group.up is None else group.up
