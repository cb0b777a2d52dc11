"""What every way to run an attention layer on kvprof's kernels shares.

The order differs from `kvprof.runtime.layer`'s, which attends first: a pass's own tokens are stored
as they are attended to, so one store serves both.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout
from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan, Placement, ValuePlan
from kvprof.models.layout import LayerLayout
from kvprof.runtime.attention import Bundle
from kvprof.runtime.backends.state import KernelPass, KernelState, KernelStore
from kvprof.runtime.cache import RowGroup
from kvprof.runtime.clock import part
from kvprof.runtime.tensors import unflatten

__all__ = ["KernelLayer", "Matrices", "Ups", "cut", "exact_matrices", "matrices_of"]

# --- A layer's bases, laid out as the kernels and what comes behind them take them.


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
        values=value_bases,
        columns=columns,
        ups=found,
        order=order,
    )


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


class KernelLayer(ABC):
    """Executes one layer of a plan on the kernels.

    Parameters
    ----------
    layer : LayerPlan
    facts : LayerLayout
        The model's layer.
    """

    def __init__(self, layer: LayerPlan, facts: LayerLayout) -> None:
        self.layer = layer
        self.facts = facts
        # A layer that is stored as it is has nothing compressed, however its tokens are written.
        sides = (*layer.keys.groups, *layer.values.groups)
        self._storing = "attention" if all(group.identity for group in sides) else "compress"
        self._turns = layer.values.projected and not layer.values.fold_up
        self._matrices: dict[tuple[torch.device, torch.dtype], Matrices] = {}

    @abstractmethod
    def new_store(self, capacity: int | None) -> KernelStore:
        """Return an empty store; `capacity` is a static cache's, in tokens."""

    @abstractmethod
    def run(
        self,
        store: KernelStore,
        state: KernelState,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
        reach: int | None,
    ) -> Tensor:
        """Store and attend; return the heads' outputs side by side, ``[batch, t, Σ_h w_h]``.

        Parameters
        ----------
        store : KernelStore
            That `new_store` made.
        state : KernelState
            With the pass begun.
        query, key, value : Tensor
            ``[batch, heads, t, width]`` as the attention function got them.
        options : dict
            The attention function's other arguments.
        reach : int or None
            Longest sequence that is to come, where it is known.

        Raises
        ------
        UsageError
            When a static cache is too small.
        """

    @abstractmethod
    def cohorts(
        self,
        store: KernelStore,
        state: KernelState,
        total: int,
        bundles: tuple[list[Bundle], list[Bundle]],
    ) -> list[RowGroup]:
        """Return what a store holds as `kvprof.runtime.layer` keeps it.

        Parameters
        ----------
        store : KernelStore
        state : KernelState
            Of tokens so far.
        total : int
            Tokens so far, padding included.
        bundles : pair of list of Bundle
            Of the keys and of the values.
        """

    def _projected(
        self,
        layout: RaggedLayout,
        buffer: Tensor,
        start: Tensor,
        passing: KernelPass,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        matrices: Matrices | None = None,
    ) -> Tensor:
        """Store a pass's keys and values; return its queries, ``[batch, t, Σ_g G·dk_g]``."""
        from kvprof.kernels.project.step import project_step  # Triton is for Linux only

        if matrices is None:
            matrices = self._prepared(query.device, query.dtype)
        with part(self._storing):
            values = _as_stored(value, matrices)
            projected: Tensor = project_step(
                query.transpose(1, 2),
                key.transpose(1, 2),
                values,
                matrices.keys,
                layout,
                buffer,
                start,
                query_bases=matrices.queries,
                value_bases=matrices.values,
                valid=passing.hidden,
            )
            return projected

    def _kept(
        self,
        layout: RaggedLayout,
        buffer: Tensor,
        start: Tensor,
        passing: KernelPass,
        key: Tensor,
        value: Tensor,
    ) -> None:
        """Store a pass's keys and values."""
        from kvprof.kernels.project import step  # Triton is for Linux only

        matrices = self._prepared(key.device, key.dtype)
        with part(self._storing):
            where = (layout, buffer, start)
            step.project_keys(key.transpose(1, 2), matrices.keys, *where, valid=passing.hidden)
            values = _as_stored(value, matrices)
            if matrices.values is None:
                step.store_values(values, *where, valid=passing.hidden)
            else:
                step.project_values(values, matrices.values, *where, valid=passing.hidden)

    def _scoring(self, options: dict[str, Any]) -> dict[str, Any]:
        scaling, sinks = options.get("scaling"), options.get("s_aux")
        if sinks is not None:
            sinks = sinks.float().reshape(self.facts.num_kv_heads, self.facts.group)
        return {
            "scaling": self.facts.scaling if scaling is None else float(scaling),
            "softcap": float(options.get("softcap") or 0.0),
            "sinks": sinks,
        }

    def _in_heads(self, output: Tensor) -> Tensor:
        """Turn latents back into heads, which no projection does behind the attention."""
        matrices = self._prepared(output.device, output.dtype)
        group, turned = self.facts.group, []
        for ups in matrices.ups:
            heads, rank, width = ups.up.shape
            own = output if matrices.order is None else output.index_select(-1, ups.columns)
            own = unflatten(own, -1, (heads, group, rank)).permute(2, 0, 1, 3, 4)
            flat = own.reshape(heads, -1, rank) @ ups.up
            shape = (heads, *output.shape[:2], group, width)
            turned.append(flat.view(shape).permute(1, 2, 0, 3, 4))
        result = torch.cat(turned, dim=2)
        if matrices.order is not None:
            result = result.index_select(2, matrices.order)
        return result.flatten(2)

    def _prepared(self, device: torch.device, dtype: torch.dtype) -> Matrices:
        key = device, dtype
        if key not in self._matrices:
            # Not as inference tensors: they outlive the mode they were made in.
            with torch.inference_mode(False):
                self._matrices[key] = matrices_of(self.layer, self.facts, device, dtype)
        return self._matrices[key]


def _as_stored(value: Tensor, matrices: Matrices) -> Tensor:
    """Return values as the kernels take them: heads to be projected, or latents side by side."""
    values = value.transpose(1, 2)
    if matrices.values is not None:
        return values
    values = values.flatten(2)
    return values if matrices.columns is None else values.index_select(-1, matrices.columns)


def cut(step: Any, lengths: Tensor) -> Any:
    """Return how a decoding step's work is cut, timed as scheduling."""
    with part("schedule"):
        schedule: Any = step.cut(lengths)
    return schedule
