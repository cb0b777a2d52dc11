"""An attention layer whose keys are rebuilt before RoPE (Palu), on kvprof's kernels.

A decoding step rebuilds, rotates and multiplies in one kernel (`kvprof.kernels.reconstruct`). A
prompt's keys are rebuilt once, into planes that last as long as its attention: a kernel that
rebuilt them for every block of queries would do so hundreds of times.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvprof.errors import FailedError
from kvprof.kernels.planes import RaggedLayout, chunks
from kvprof.methods.plan import HeadGroup, LayerPlan
from kvprof.models.interface import Rotation, before_rotation
from kvprof.models.layout import LayerLayout
from kvprof.runtime.attention import Bundle
from kvprof.runtime.backends.layer import KernelLayer
from kvprof.runtime.backends.ragged import PlaneStore, plane_row_groups
from kvprof.runtime.backends.rebuilt_tables import RotaryForm, SlotTable, rotary_form
from kvprof.runtime.backends.state import KernelPass, KernelState, KernelStore
from kvprof.runtime.cache import RowGroup
from kvprof.runtime.clock import part
from kvprof.runtime.rotary import angles
from kvprof.runtime.tensors import is_capturing, unflatten

__all__ = [
    "FoldedKernelLayer",
    "LatentKernelLayer",
    "LatentMatrices",
    "RebuiltKernelLayer",
    "latent_matrices",
    "prefilled",
]

# --- The bases of latents that KV heads share, laid out as the kernels take them.


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


# --- An attention layer whose KV heads share latents, on kvprof's kernels: store, attend, turn
# back.


class LatentKernelLayer(KernelLayer):
    """A layer whose tokens are stored alike, at full precision, as latents of groups of KV heads.

    All groups of the keys and of the values have as many heads.
    """

    def __init__(self, layer: LayerPlan, facts: LayerLayout) -> None:
        super().__init__(layer, facts)
        self._latent_matrices: dict[tuple[torch.device, torch.dtype], LatentMatrices] = {}

    @property
    def heads(self) -> int:
        """KV heads that share a latent, n."""
        return self.layer.keys.groups[0].heads

    def new_store(self, capacity: int | None) -> PlaneStore:
        """Return an empty store; `capacity` is a static cache's, in tokens."""
        return PlaneStore(
            tuple(group.rank for group in self.layer.keys.groups),
            tuple(group.rank for group in self.layer.values.groups),
            self.heads * self.facts.group,
            None,
            capacity,
        )

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
        """Store and attend."""
        assert isinstance(store, PlaneStore)
        batch, _, tokens, _ = query.shape
        most = max(1, state.past + tokens - min(state.first))
        layout = store.make_room(batch, most, reach, query.device, query.dtype)
        passing = state.on(query.device)
        stored = self._stored_keys(state, query, key)
        self._store(layout, store.buffer, passing, stored, value)
        output = self._attended(layout, store.buffer, state, passing, query, self._scoring(options))
        if self._turns:
            with part("decompress"):
                output = self._in_heads(output)
        if passing.hidden is not None:
            output = output.masked_fill(passing.padding(), 0)
        return output

    def _stored_keys(self, state: KernelState, query: Tensor, key: Tensor) -> Tensor:
        """Return the keys that are to be compressed, ``[batch, KV heads, t, d]``."""
        return key

    @abstractmethod
    def _attended(
        self,
        layout: RaggedLayout,
        buffer: Tensor,
        state: KernelState,
        passing: KernelPass,
        query: Tensor,
        scoring: dict[str, Any],
    ) -> Tensor:
        """Attend to what is stored, the pass's own tokens included: ``[batch, t, Σ_h r_h]``."""

    def _store(
        self, layout: RaggedLayout, buffer: Tensor, passing: KernelPass, key: Tensor, value: Tensor
    ) -> None:
        from kvprof.kernels.project import step  # Triton is for Linux only

        matrices = self._latents(key.device, key.dtype)
        groups, start, hidden = layout.heads, passing.start, passing.hidden
        with part(self._storing):
            keys = unflatten(key.transpose(1, 2).flatten(2), -1, (groups, -1))
            keys = keys[..., : matrices.depth]
            step.project_keys(keys, matrices.keys, layout, buffer, start, valid=hidden)
            values = value.transpose(1, 2).flatten(2)
            if matrices.values is not None:
                values = unflatten(values, -1, (groups, -1))
                step.project_values(values, matrices.values, layout, buffer, start, valid=hidden)
                return
            if matrices.columns is not None:
                values = values.index_select(-1, matrices.columns)
            step.store_values(values, layout, buffer, start, valid=hidden)

    def _in_heads(self, output: Tensor) -> Tensor:
        """Turn latents back into heads, which no projection does behind the attention."""
        matrices = self._latents(output.device, output.dtype)
        group, turned = self.facts.group, []
        widths = [len(up) * group * up.shape[1] for up in matrices.value_ups]
        for own, up in zip(torch.split(output, widths, dim=-1), matrices.value_ups, strict=True):
            heads, rank, width = up.shape
            latents = unflatten(own, -1, (heads, group, rank)).permute(2, 0, 1, 3, 4)
            flat = latents.reshape(heads, -1, rank) @ up
            shape = (heads, *output.shape[:2], group * width)
            turned.append(flat.view(shape).permute(1, 2, 0, 3).flatten(2))
        return torch.cat(turned, dim=-1)

    def _latents(self, device: torch.device, dtype: torch.dtype) -> LatentMatrices:
        key = device, dtype
        if key not in self._latent_matrices:
            # Not as inference tensors: they outlive the mode they were made in.
            with torch.inference_mode(False):
                self._latent_matrices[key] = latent_matrices(self.layer, self.facts, device, dtype)
        return self._latent_matrices[key]

    def cohorts(
        self,
        store: KernelStore,
        state: KernelState,
        total: int,
        bundles: tuple[list[Bundle], list[Bundle]],
    ) -> list[RowGroup]:
        """Return what a store holds as `kvprof.runtime.layer` keeps it."""
        assert isinstance(store, PlaneStore)
        return plane_row_groups(store, state.seen(total), bundles, self.heads)


def prefilled(
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    state: KernelState,
    passing: KernelPass,
    scoring: dict[str, Any],
) -> Tensor:
    """Attend with several tokens to planes that hold every token of every row, theirs included.

    Parameters
    ----------
    query : Tensor
        ``[batch, t, Σ_g G·dk_g]``.
    buffer, layout
        The planes.
    state : KernelState
    passing : KernelPass
    scoring : dict
        Scaling, soft-cap and sinks.
    """
    from kvprof.kernels.prefill.step import prefill  # Triton is for Linux only

    lengths = state.seen(state.past + passing.tokens)
    output: Tensor = prefill(
        query,
        buffer,
        layout,
        passing.after,
        **scoring,
        path="quick",  # as in kvprof.runtime.backends.ragged
        host_lengths=lengths if min(lengths) else None,
    )
    return output


# --- Latents that KV heads share and that queries meet as they are, on kvprof's kernels.


class FoldedKernelLayer(LatentKernelLayer):
    """A layer whose shared latents are never rebuilt."""

    def _attended(
        self,
        layout: RaggedLayout,
        buffer: Tensor,
        state: KernelState,
        passing: KernelPass,
        query: Tensor,
        scoring: dict[str, Any],
    ) -> Tensor:
        from kvprof.kernels.project.step import project_queries  # Triton is for Linux only

        if scoring["sinks"] is not None:
            scoring = {**scoring, "sinks": scoring["sinks"].reshape(layout.heads, layout.group)}
        matrices = self._latents(query.device, query.dtype)
        # Every KV head has rows of its own in its group's matrix.
        widths = matrices.queries.widths
        by_head = RaggedLayout(widths, widths, self.facts.group, layout.batch, layout.capacity)
        with part(self._storing):
            turned = project_queries(query.transpose(1, 2), matrices.queries, by_head)
        if passing.tokens > 1:
            return prefilled(turned, buffer, layout, state, passing, scoring)
        step = state.step(layout, query.device, None)

        def cut() -> Any:
            with part("schedule"):
                return step.cut(passing.lengths(None))

        schedule = passing.once((layout, None), cut)
        output: Tensor = step.run(turned[:, 0], buffer, schedule, **scoring)
        return output.unsqueeze(1)


# Tokens whose keys are rebuilt at once: what that leaves behind is small beside the planes.
_BLOCK = 4096
# Tokens that show whether keys turn as the kernels think; a wrong form is wrong by a factor.
_LOOKED_AT, _FAR = 64, 0.05


class RebuiltKernelLayer(LatentKernelLayer):
    """A layer whose latents are from before RoPE."""

    def __init__(self, layer: LayerPlan, facts: LayerLayout) -> None:
        super().__init__(layer, facts)
        self._steps: dict[tuple[torch.device, torch.dtype], Any] = {}

    def _stored_keys(self, state: KernelState, query: Tensor, key: Tensor) -> Tensor:
        rotation, facts = self._rotation(state), self.facts
        assert facts.rotary_offset is not None  # the support table has seen to it
        return before_rotation(rotation, query, key, facts.rotary_offset, facts.rotary_transposed)[
            1
        ]

    def _rotation(self, state: KernelState) -> Rotation:
        assert state.rotation is not None  # the session gives it to every layer that rebuilds
        return state.rotation

    def _attended(
        self,
        layout: RaggedLayout,
        buffer: Tensor,
        state: KernelState,
        passing: KernelPass,
        query: Tensor,
        scoring: dict[str, Any],
    ) -> Tensor:
        rotation = self._rotation(state)
        form = self._form(rotation)
        aligned = len(set(state.first)) == 1
        with part("decompress"):
            table = state.tables.extended(
                self.facts.index, rotation, passing, aligned, layout.capacity, query.dtype
            )
        if not table.checked and not is_capturing(query.device):
            self._check(rotation, form)
            table.checked = True
        if passing.tokens > 1:
            with part("decompress"):
                whole, planes = self._rebuilt(layout, buffer, state, passing, form, table)
            turned = query.transpose(1, 2).flatten(2)
            return prefilled(turned, planes, whole, state, passing, scoring)
        device, dtype = query.device, query.dtype
        # Kept by the cache: a graph of its steps reads their tables.
        step = state.prepared(
            ("rebuilt", self.facts.index, device, dtype),
            layout,
            lambda: self._step(layout, form, device, dtype),
        )

        def cut() -> Any:
            with part("schedule"):
                return step.cut(passing.lengths(None))

        # Layers of the same widths and heads share it, though not their matrices.
        schedule = passing.once((layout, self.heads, self.facts.qk_head_dim, "rebuilt"), cut)
        sinks = scoring["sinks"]
        if sinks is not None:
            scoring = {**scoring, "sinks": sinks.reshape(layout.heads, layout.group)}
        turned = query.transpose(1, 2).flatten(1)
        cos, sin = (form.pairs(own) for own in table.served())
        output: Tensor = step.run(turned, buffer, schedule, cos, sin, **scoring)
        return output.unsqueeze(1)

    def _form(self, rotation: Rotation) -> RotaryForm:
        facts = self.facts
        form = rotary_form(rotation.function, facts.rotary_dim, facts.rotary_transposed)
        if form is None:
            raise FailedError(
                f"layer {facts.index}: its keys are rotated in a form that the kernels do not "
                "know; run it with kernels='off'"
            )
        return form

    def _check(self, rotation: Rotation, form: RotaryForm) -> None:
        """See to it that the model's tables mean what the form says; waits for the device."""
        transposed = self.facts.rotary_transposed
        given = rotation.args[1] if len(rotation.args) > 1 else rotation.kwargs["k"]
        before, after = (
            (states.transpose(1, 2) if transposed else states)[:, :, -_LOOKED_AT:]
            for states in (given, rotation.result[1])
        )
        tables = angles(rotation, -1)
        cos, sin = (form.pairs(table)[:, None, -_LOOKED_AT:] for table in (tables.cos, tables.sin))
        apart = (form.turned(before, cos, sin) - after).float().norm()
        if not bool(apart <= _FAR * after.float().norm()):
            raise FailedError(
                f"layer {self.facts.index}: the model rotates its keys by other angles than the "
                "kernels would; run it with kernels='off'"
            )

    def _rebuilt(
        self,
        layout: RaggedLayout,
        buffer: Tensor,
        state: KernelState,
        passing: KernelPass,
        form: RotaryForm,
        table: SlotTable,
    ) -> tuple[RaggedLayout, Tensor]:
        """Return planes of whole rotated keys and of latent values, a head for every KV head."""
        heads, width = self.heads, self.facts.qk_head_dim
        tokens = max(1, *state.seen(state.past + passing.tokens))
        widths = tuple(rank for rank in layout.value_widths for _ in range(heads))
        whole = RaggedLayout((width,) * len(widths), widths, self.facts.group, layout.batch, tokens)
        planes = buffer.new_empty(whole.elements)
        cos, sin = (form.pairs(own)[:, :tokens, None] for own in (table.cos, table.sin))
        for group, up in enumerate(self._latents(buffer.device, buffer.dtype).key_ups):
            keys, values = layout.planes(buffer, group)
            own = [whole.planes(planes, group * heads + head) for head in range(heads)]
            for _, copies in own:
                for new, old in zip(copies, values, strict=True):
                    new.copy_(old[:, :tokens])
            for start in range(0, tokens, _BLOCK):
                at = slice(start, min(start + _BLOCK, tokens))
                joined = torch.cat([plane[:, at] for plane in keys], dim=-1) @ up.mT
                turned = form.turned(unflatten(joined, -1, (heads, width)), cos[:, at], sin[:, at])
                for head, (rebuilt, _) in enumerate(own):
                    columns = torch.split(turned[:, :, head], list(chunks(width)), dim=-1)
                    for plane, chunk in zip(rebuilt, columns, strict=True):
                        plane[:, at] = chunk
        return whole, planes

    def _step(
        self, layout: RaggedLayout, form: RotaryForm, device: torch.device, dtype: torch.dtype
    ) -> Any:
        """Return a decoding step for a layout; what rebuilds the keys is arranged once."""
        from kvprof.kernels.reconstruct.step import reconstruct_step  # Triton is for Linux only

        known = self._steps.get((device, dtype))
        # Not as inference tensors: steps outlive the mode they were made in.
        with torch.inference_mode(False):
            if known is None:
                known = reconstruct_step(
                    layout,
                    self._latents(device, dtype).key_ups,
                    self.facts.qk_head_dim,
                    self.heads,
                    device,
                    interleaved=form.interleaved,
                    rotary_dim=form.width,
                    # Interpreted kernels have none.
                    multiprocessors=None if device.type == "cuda" else 1,
                )
                self._steps[device, dtype] = known
            if known.form.layout == layout:
                return known
            made = replace(known.form, batch=layout.batch, capacity=layout.capacity)
            return replace(known, form=made, groups=made.table().to(device))
