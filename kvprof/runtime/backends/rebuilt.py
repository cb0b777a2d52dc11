"""Attention layers in which KV heads share latents (Palu), on kvprof's kernels.

A decoding step rebuilds, rotates and multiplies keys in one kernel (`kvprof.kernels.reconstruct`).
A prompt's keys are rebuilt once, into temporary planes.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvprof.errors import FailedError
from kvprof.kernels.planes import RaggedLayout, chunks
from kvprof.kernels.project.step import project_queries
from kvprof.methods.plan import LayerPlan, Plan
from kvprof.models.interface import Rotation, before_rotation, rotary_angles
from kvprof.models.layout import LayerLayout
from kvprof.runtime.backends.layer import cut, prefilled
from kvprof.runtime.backends.matrices import by_head
from kvprof.runtime.backends.ragged import PlaneKernelLayer, PlaneStore
from kvprof.runtime.backends.rotary import RotaryForm, rotary_form
from kvprof.runtime.backends.slots import KernelMetadata, SlotTable
from kvprof.runtime.backends.state import KernelState
from kvprof.runtime.clock import part
from kvprof.runtime.tensors import is_capturing, unflatten

__all__ = [
    "FoldedKernelLayer",
    "LatentKernelLayer",
    "RebuiltKernelLayer",
]

# --- Latents that KV heads share: never rebuilt, or rebuilt from before RoPE.


class LatentKernelLayer(PlaneKernelLayer):
    """A layer that stores unquantised latents of groups of KV heads, all of one size."""

    narrow = True

    def _shared(self, scoring: dict[str, Any], layout: RaggedLayout) -> dict[str, Any]:
        """Return sinks by latent, as the kernels over these planes take them."""
        sinks = scoring["sinks"]
        if sinks is None:
            return scoring
        return {**scoring, "sinks": sinks.reshape(layout.heads, layout.group)}


class FoldedKernelLayer(LatentKernelLayer):
    """A layer whose shared latents are met by queries as they are, and never rebuilt."""

    def _attended(
        self,
        store: PlaneStore,
        state: KernelState,
        metadata: KernelMetadata,
        states: tuple[Tensor, Tensor, Tensor],
        scoring: dict[str, Any],
    ) -> Tensor:
        query, layout, buffer = states[0], store.layout, store.buffer
        assert layout is not None
        self._kept(layout, buffer, metadata.start, metadata, *states[1:])
        scoring = self._shared(scoring, layout)
        queries = self._prepared(query.device, query.dtype).queries
        # Every KV head has rows of its own in its group's matrix.
        widths = queries.widths
        each = RaggedLayout(widths, widths, self.facts.group, layout.batch, layout.capacity)
        with part(self._storing):
            projected = project_queries(query.transpose(1, 2), queries, each)
        if metadata.tokens > 1:
            lengths = state.seen(state.past + metadata.tokens)
            return prefilled(projected, buffer, layout, metadata.after, lengths, scoring)
        step = state.step(layout, query.device, None)
        schedule = state.cut(metadata, step, lambda: metadata.lengths(None), None)
        output: Tensor = step.run(projected[:, 0], buffer, schedule, **scoring)
        return output.unsqueeze(1)


# Tokens whose keys are rebuilt at once: what that leaves behind is small beside the planes.
_BLOCK = 4096
# Tokens that show whether keys turn as the kernels think; a wrong form is wrong by a factor.
_LOOKED_AT, _FAR = 64, 0.05


class RebuiltKernelLayer(LatentKernelLayer):
    """A layer whose latents are from before RoPE."""

    form = "latents"

    def __init__(self, plan: Plan, layer: LayerPlan, facts: LayerLayout) -> None:
        super().__init__(plan, layer, facts)
        self._steps: dict[tuple[torch.device, torch.dtype], Any] = {}
        self._key_ups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}

    def _ups(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Return what turns each group's latent into its keys, ``[n * d, r]``."""
        key = device, dtype
        if key not in self._key_ups:
            with torch.inference_mode(False):
                self._key_ups[key] = [
                    torch.cat(by_head(group)).to(device, dtype) for group in self.layer.keys.groups
                ]
        return self._key_ups[key]

    def _attended(
        self,
        store: PlaneStore,
        state: KernelState,
        metadata: KernelMetadata,
        states: tuple[Tensor, Tensor, Tensor],
        scoring: dict[str, Any],
    ) -> Tensor:
        layout, buffer = store.layout, store.buffer
        assert layout is not None
        query, key, value = states
        self._kept(
            layout,
            buffer,
            metadata.start,
            metadata,
            self._before_rotation(state, query, key),
            value,
        )
        rotation = self._rotation(state)
        form = self._form(rotation)
        aligned = len(set(state.first)) == 1
        with part("decompress"):
            table = state.tables.extended(
                self.facts.index, rotation, metadata, aligned, layout.capacity, query.dtype
            )
        if not table.checked and not is_capturing(query.device):
            self._check(rotation, form)
            table.checked = True
        if metadata.tokens > 1:
            with part("decompress"):
                whole, planes = self._rebuilt(layout, buffer, state, metadata, form, table)
            lengths = state.seen(state.past + metadata.tokens)
            whole_query = query.transpose(1, 2).flatten(2)
            return prefilled(whole_query, planes, whole, metadata.after, lengths, scoring)
        device, dtype = query.device, query.dtype
        # Kept by the cache: a graph of its steps reads their tables.
        step = state.prepared(
            ("rebuilt", self.facts.index, device, dtype),
            layout,
            lambda: self._step(layout, form, device, dtype),
        )
        # Layers of the same widths and heads share it, though not their matrices.
        schedule = metadata.once(
            (layout, self.heads, self.facts.qk_head_dim, "rebuilt"),
            lambda: cut(step, metadata.lengths(None)),
        )
        cos, sin = (form.pairs(own) for own in table.served())
        output: Tensor = step.run(
            query.transpose(1, 2).flatten(1),
            buffer,
            schedule,
            cos,
            sin,
            **self._shared(scoring, layout),
        )
        return output.unsqueeze(1)

    def _before_rotation(self, state: KernelState, query: Tensor, key: Tensor) -> Tensor:
        rotation, facts = self._rotation(state), self.facts
        assert facts.rotary_offset is not None  # why_not has seen to it
        return before_rotation(rotation, query, key, facts.rotary_offset, facts.rotary_transposed)[
            1
        ]

    def _rotation(self, state: KernelState) -> Rotation:
        assert state.rotation is not None  # the session gives it to every layer that rebuilds
        return state.rotation

    def _form(self, rotation: Rotation) -> RotaryForm:
        facts = self.facts
        form = rotary_form(rotation.function, facts.rotary_dim, facts.rotary_transposed)
        if form is None:
            raise FailedError(
                f"layer {facts.index}: the kernels do not support its rotary embedding; use "
                "kernels='off'"
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
        tables = rotary_angles(rotation, -1)
        cos, sin = (form.pairs(table)[:, None, -_LOOKED_AT:] for table in (tables.cos, tables.sin))
        apart = (form.rotated(before, cos, sin) - after).float().norm()
        if not bool(apart <= _FAR * after.float().norm()):
            raise FailedError(
                f"layer {self.facts.index}: the kernels would compute other RoPE angles than the "
                "model; use kernels='off'"
            )

    def _rebuilt(
        self,
        layout: RaggedLayout,
        buffer: Tensor,
        state: KernelState,
        metadata: KernelMetadata,
        form: RotaryForm,
        table: SlotTable,
    ) -> tuple[RaggedLayout, Tensor]:
        """Return planes of whole rotated keys and of latent values, a head for every KV head."""
        heads, width = self.heads, self.facts.qk_head_dim
        tokens = max(1, *state.seen(state.past + metadata.tokens))
        widths = tuple(rank for rank in layout.value_widths for _ in range(heads))
        whole = RaggedLayout((width,) * len(widths), widths, self.facts.group, layout.batch, tokens)
        planes = buffer.new_empty(whole.elements)
        cos, sin = (form.pairs(own)[:, :tokens, None] for own in (table.cos, table.sin))
        for group, up in enumerate(self._ups(buffer.device, buffer.dtype)):
            keys, values = layout.planes(buffer, group)
            own = [whole.planes(planes, group * heads + head) for head in range(heads)]
            for _, copies in own:
                for new, old in zip(copies, values, strict=True):
                    new.copy_(old[:, :tokens])
            for start in range(0, tokens, _BLOCK):
                at = slice(start, min(start + _BLOCK, tokens))
                joined = torch.cat([plane[:, at] for plane in keys], dim=-1) @ up.mT
                rotated = form.rotated(
                    unflatten(joined, -1, (heads, width)), cos[:, at], sin[:, at]
                )
                for head, (rebuilt, _) in enumerate(own):
                    columns = torch.split(rotated[:, :, head], list(chunks(width)), dim=-1)
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
                    self._ups(device, dtype),
                    self.facts.qk_head_dim,
                    self.heads,
                    device,
                    interleaved=form.interleaved,
                    rotary_dim=form.width,
                    # Interpreted kernels have none.
                    multiprocessors=None if device.type == "cuda" else 1,
                )
                self._steps[device, dtype] = known
            if known.config.layout == layout:
                return known
            made = replace(known.config, batch=layout.batch, capacity=layout.capacity)
            return replace(known, config=made, groups=made.table().to(device))
