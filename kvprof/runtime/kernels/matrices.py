"""A layer's bases, laid out as the kernels and what comes behind them take them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan, Placement, ValuePlan
from kvprof.models.layout import LayerLayout

__all__ = ["Matrices", "Ups", "exact_matrices", "matrices_of"]


@dataclass(frozen=True, eq=False)
class Ups:
    """Heads of one rank, whose outputs are turned back together.

    Attributes
    ----------
    columns : Tensor
        Theirs in a row of outputs, ``[n * G * r]``.
    up : Tensor
        ``[n, r, d]``.
    """

    columns: Tensor
    up: Tensor


@dataclass(frozen=True, eq=False)
class Matrices:
    """A layer's bases as the kernels take them.

    Attributes
    ----------
    queries, keys : BasisSet
        A head that is stored as it is, or that a folded projection has turned already, has columns
        of the identity.
    values : BasisSet or None
        None where values come as they are to be stored.
    columns : Tensor or None
        The columns of a folded projection's output that are latents; None for all.
    ups : list of Ups
        Empty where outputs stay as they are.
    order : Tensor or None
        From the heads of all `ups`, one after another, to those of the model.
    """

    queries: Any
    keys: Any
    values: Any
    columns: Tensor | None
    ups: list[Ups]
    order: Tensor | None


def matrices_of(
    layer: LayerPlan, facts: LayerLayout, device: torch.device, dtype: torch.dtype
) -> Matrices:
    """Return a layer's matrices, where and in what the layer runs.

    Parameters
    ----------
    layer : LayerPlan
    facts : LayerLayout
        The model's layer.
    device, dtype
    """
    from kvprof.kernels.project.bases import basis_set

    keys, values = layer.keys, layer.values
    downs = [_down(group, keys.fold_down) for group in keys.groups]
    ups = [_up(group, keys) for group in keys.groups]
    value_bases = columns = None
    if values.projected and not values.fold_down:
        value_bases = basis_set(
            [_down(group, False) for group in values.groups], dtype=dtype, device=device
        )
    elif values.projected:
        columns = torch.tensor(
            [g.first * g.head_dim + c for g in values.groups for c in range(g.rank)],
            device=device,
        )
    found: list[Ups] = []
    order = None
    if values.projected and not values.fold_up:
        found, order = _turned_back(values, facts.group, device, dtype)
    return Matrices(
        queries=basis_set(ups, dtype=dtype, device=device),
        keys=basis_set(downs, dtype=dtype, device=device),
        values=value_bases, columns=columns, ups=found, order=order,
    )  # fmt: skip


def exact_matrices(facts: LayerLayout, device: torch.device, dtype: torch.dtype) -> Matrices:
    """Return what stores heads as they are."""
    from kvprof.kernels.project.bases import basis_set

    keys, values = (
        basis_set([torch.eye(width)] * facts.num_kv_heads, dtype=dtype, device=device)
        for width in (facts.qk_head_dim, facts.v_head_dim)
    )
    return Matrices(queries=keys, keys=keys, values=values, columns=None, ups=[], order=None)


def _turned_back(
    values: ValuePlan, query_heads: int, device: torch.device, dtype: torch.dtype
) -> tuple[list[Ups], Tensor | None]:
    begins, ranks = [0], dict[int, list[HeadGroup]]()
    for group in values.groups:
        begins.append(begins[-1] + query_heads * group.rank)
        ranks.setdefault(group.rank, []).append(group)
    found = []
    for members in ranks.values():
        columns = [c for g in members for c in range(begins[g.first], begins[g.first + 1])]
        matrices = [_eye(g).T if g.up is None else g.up.T for g in members]
        up = torch.stack(matrices).to(device, dtype)
        found.append(Ups(torch.tensor(columns, device=device), up))
    if len(found) == 1:
        return found, None
    order = torch.tensor([g.first for members in ranks.values() for g in members])
    return found, order.argsort().to(device)


def _eye(group: HeadGroup) -> Tensor:
    return torch.eye(group.head_dim)[:, : group.rank]


def _down(group: HeadGroup, folded: bool) -> Tensor:
    """Return what a head is multiplied with before it is stored."""
    return _eye(group) if folded or group.down is None else group.down


def _up(group: HeadGroup, keys: KeyPlan) -> Tensor:
    """Return what a query is multiplied with."""
    if keys.placement is Placement.NONE or keys.fold_up or group.up is None:
        return _eye(group)
    return group.up
