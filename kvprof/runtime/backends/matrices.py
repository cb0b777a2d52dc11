"""A layer's bases, laid out as the kernels and what comes behind them take them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprof.kernels.project.bases import BasisSet, basis_set
from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan
from kvprof.models.layout import LayerLayout

__all__ = [
    "Matrices",
    "by_head",
    "exact_matrices",
    "matrices_of",
]


@dataclass(frozen=True, eq=False)
class Ups:
    """KV heads of one rank, whose outputs become heads again together."""

    columns: Tensor  # theirs in a row of outputs, `[n * G * r]`
    up: Tensor  # `[n, r, d]`


@dataclass(frozen=True, eq=False)
class Matrices:
    """A layer's bases as the kernels take them, per group of the n KV heads that share a latent."""

    queries: BasisSet  # `[d, r]` per KV head; a scale of its keys is in it
    #: `[depth, r]` per group. A head that is stored as it is, or that a folded projection has
    #: compressed already, has columns of the identity.
    keys: BasisSet
    #: `[n * d, r]` per group; None where values come as they are to be stored.
    values: BasisSet | None
    ups: list[Ups]  # empty where outputs stay as they are
    order: Tensor | None  # from the heads of all `ups`, one after another, to those of the model


def matrices_of(
    layer: LayerPlan,
    facts: LayerLayout,
    device: torch.device,
    dtype: torch.dtype,
    *,
    narrow: bool = False,
) -> Matrices:
    """Return a layer's matrices, where and in what the layer runs."""
    keys, values = layer.keys, layer.values
    depth = keys.groups[0].width
    if narrow and keys.fold_down:
        depth = max(group.rank for group in keys.groups)
    value_bases = None
    scaled = any(group.scale != 1 for group in values.groups)
    if scaled or (values.projected and not values.fold_down):
        value_bases = basis_set(
            [_down(group, False) for group in values.groups], dtype=dtype, device=device
        )
    found: list[Ups] = []
    order = None
    if values.projected and not values.fold_up:
        found, order = _value_ups(values.groups, facts.group, device, dtype)
    return Matrices(
        queries=basis_set(
            [up for group in keys.groups for up in _met(group, keys)], dtype=dtype, device=device
        ),
        keys=basis_set(
            [_down(group, keys.fold_down)[:depth] for group in keys.groups],
            dtype=dtype,
            device=device,
        ),
        values=value_bases,
        ups=found,
        order=order,
    )


def exact_matrices(facts: LayerLayout, device: torch.device, dtype: torch.dtype) -> Matrices:
    """Return what stores heads as they are."""
    keys, values = (
        basis_set([torch.eye(width)] * facts.num_kv_heads, dtype=dtype, device=device)
        for width in (facts.qk_head_dim, facts.v_head_dim)
    )
    return Matrices(queries=keys, keys=keys, values=values, ups=[], order=None)


def _value_ups(
    groups: Sequence[HeadGroup], query_heads: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[Ups], Tensor | None]:
    # Per rank: each KV head, its columns in a row of outputs, and its matrix.
    ranks: dict[int, list[tuple[int, range, Tensor]]] = {}
    begin = 0
    for group in groups:
        for head, up in enumerate(by_head(group), group.first):
            end = begin + query_heads * group.rank
            ranks.setdefault(group.rank, []).append((head, range(begin, end), up.T))
            begin = end
    found = []
    for members in ranks.values():
        columns = [column for _, own, _ in members for column in own]
        up = torch.stack([matrix for _, _, matrix in members]).to(device, dtype)
        found.append(Ups(torch.tensor(columns, device=device), up))
    if len(found) == 1:
        return found, None
    order = torch.tensor([head for members in ranks.values() for head, _, _ in members])
    return found, order.argsort().to(device)


def _eye(height: int, width: int) -> Tensor:
    return torch.eye(max(height, width))[:height, :width]


def _down(group: HeadGroup, folded: bool) -> Tensor:
    """Return what a group's heads, side by side, are multiplied with before they are stored."""
    if folded or group.down is None:
        return _eye(group.width, group.rank) / group.scale
    return group.down


def by_head(group: HeadGroup) -> tuple[Tensor, ...]:
    """Return what turns a group's latent into each of its heads, ``[d, r]``."""
    up = group.scale * _eye(group.width, group.rank) if group.up is None else group.up
    return up.view(group.heads, -1, group.rank).unbind()


def _met(group: HeadGroup, keys: KeyPlan) -> Sequence[Tensor]:
    """Return what the queries of each of a group's KV heads are multiplied with, ``[d, r]``."""
    if keys.fold_up:
        return [_eye(group.head_dim, group.rank)] * group.heads
    return by_head(group)
