"""An attention layer whose keys are rebuilt before RoPE (Palu), on kvprof's kernels.

A decoding step rebuilds, rotates and multiplies in one kernel (`kvprof.kernels.reconstruct`). A
prompt's keys are rebuilt once, into planes that last as long as its attention: a kernel that
rebuilt them for every block of queries would do so hundreds of times.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvprof.errors import FailedError
from kvprof.kernels.planes import RaggedLayout, chunks
from kvprof.methods.plan import LayerPlan
from kvprof.models.interface import Rotation
from kvprof.models.layout import LayerLayout
from kvprof.models.rotation import before_rotation
from kvprof.runtime.clock import part
from kvprof.runtime.graphs import is_capturing
from kvprof.runtime.kernels.rebuilt_latents import LatentKernelLayer, prefilled
from kvprof.runtime.kernels.rebuilt_rotary import RotaryForm, rotary_form
from kvprof.runtime.kernels.rebuilt_tables import SlotTable
from kvprof.runtime.kernels.state import KernelPass, KernelState
from kvprof.runtime.rotary import angles
from kvprof.runtime.shapes import unflatten

__all__ = ["RebuiltKernelLayer"]

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
        return before_rotation(
            rotation, query, key, facts.rotary_offset, facts.rotary_transposed
        )[1]  # fmt: skip

    def _rotation(self, state: KernelState) -> Rotation:
        assert state.rotation is not None  # the session gives it to every layer that rebuilds
        return state.rotation

    def _attended(
        self, layout: RaggedLayout, buffer: Tensor, state: KernelState, passing: KernelPass,
        query: Tensor, scoring: dict[str, Any],
    ) -> Tensor:  # fmt: skip
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
            ("rebuilt", self.facts.index, device, dtype), layout,
            lambda: self._step(layout, form, device, dtype),
        )  # fmt: skip

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
        self, layout: RaggedLayout, buffer: Tensor, state: KernelState, passing: KernelPass,
        form: RotaryForm, table: SlotTable,
    ) -> tuple[RaggedLayout, Tensor]:  # fmt: skip
        """Return planes of whole rotated keys and of latent values, a head for every KV head."""
        heads, width = self.heads, self.facts.qk_head_dim
        tokens = max(1, *state.seen(state.past + passing.tokens))
        widths = tuple(rank for rank in layout.value_widths for _ in range(heads))
        whole = RaggedLayout(
            (width,) * len(widths), widths, self.facts.group, layout.batch, tokens
        )  # fmt: skip
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
                turned = form.turned(
                    unflatten(joined, -1, (heads, width)), cos[:, at], sin[:, at]
                )  # fmt: skip
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
                    layout, self._latents(device, dtype).key_ups, self.facts.qk_head_dim,
                    self.heads, device, interleaved=form.interleaved, rotary_dim=form.width,
                    # Interpreted kernels have none.
                    multiprocessors=None if device.type == "cuda" else 1,
                )  # fmt: skip
                self._steps[device, dtype] = known
            if known.form.layout == layout:
                return known
            made = replace(known.form, batch=layout.batch, capacity=layout.capacity)
            return replace(known, form=made, groups=made.table().to(device))
