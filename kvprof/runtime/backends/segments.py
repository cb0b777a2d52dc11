"""An attention layer whose tokens are quantised or lose rank as they age, on kvprof's kernels.

A decoding step stores its own token at full precision, attends to all segments in one pass, and
moves on what has grown old by it, so that a query sees what `kvprof.runtime.layer` shows it. So
does a query of a pass over several tokens where the plan reads by age: it attends twice, to what it
reads as it is, which is a sliding window, and, once the pass is stored, to all older tokens as they
come back. Otherwise a pass attends to its own latents, or exactly where the plan is lazy (TALE
§2.1), before any is cut or quantised.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout, in_rows
from kvprof.kernels.project.step import project_step
from kvprof.kernels.quantized.append import Addresses, addresses_of, write
from kvprof.kernels.quantized.layout import HeadConfig, SegmentsLayout
from kvprof.kernels.quantized.operand_layout import PLACES, WIDEST_PLANE
from kvprof.methods.plan import LayerPlan, Plan
from kvprof.methods.tokens import segments
from kvprof.models.layout import LayerLayout
from kvprof.runtime.attention import GroupStack
from kvprof.runtime.backends.layer import KernelLayer, attended, by_latent, combined, prefilled
from kvprof.runtime.backends.matrices import Matrices, exact_matrices
from kvprof.runtime.backends.ragged import rows_alike
from kvprof.runtime.backends.segment_store import (
    SegmentStore,
    cut_rows,
    fill_rows,
    formats_of,
    rows_of,
    stages_of,
)
from kvprof.runtime.backends.slots import KernelMetadata
from kvprof.runtime.backends.stages import Step
from kvprof.runtime.backends.state import KernelState, KernelStore
from kvprof.runtime.clock import part
from kvprof.runtime.codecs import PLAIN, Codec, RowRms, codec_for
from kvprof.runtime.rows import Part, RowGroup, plain_part
from kvprof.runtime.tensors import aside, is_capturing

__all__ = ["SegmentKernelLayer"]


@dataclass(frozen=True, eq=False)
class _Addressed:
    """A move between addresses, which torch carries out."""

    source: Addresses
    target: Addresses


@dataclass(frozen=True, eq=False)
class _StepSchedule:
    """What a decoding step does to layers that are stored alike."""

    step: Step
    #: Where the step's own token goes, or what takes it there in one launch; None where the
    #: projection stores it there by itself.
    newest: Any
    moves: list[Any]  # the same of each of the step's moves


class SegmentKernelLayer(KernelLayer):
    """A layer whose tokens are stored in several ways.

    Parameters
    ----------
    plan : Plan
    layer : LayerPlan
        One of its layers, without a sliding window.
    facts : LayerLayout
        The model's layer.
    """

    form = "segments"

    def __init__(self, plan: Plan, layer: LayerPlan, facts: LayerLayout) -> None:
        super().__init__(plan, layer, facts)
        self.stages = stages_of(plan)
        self._formats = formats_of(plan, layer)
        self._moving = "quantise" if plan.quantiser is not None else "compress"
        self._exact: dict[tuple[torch.device, torch.dtype], Matrices] = {}
        self._masks: dict[tuple[int, torch.device], Tensor] = {}

    @property
    def configs(self) -> set[HeadConfig]:
        """What stored heads are like, their keys and values in every segment."""
        return set(zip(*(form.kinds for form in self._formats), strict=True))

    def new_store(self, capacity: int | None) -> SegmentStore:
        """Return an empty store; `capacity` is a static cache's, in tokens."""
        return SegmentStore(self.stages, self._formats, self.facts.group, capacity)

    def _attended(
        self,
        store: SegmentStore,
        state: KernelState,
        metadata: KernelMetadata,
        states: tuple[Tensor, Tensor, Tensor],
        scoring: dict[str, Any],
    ) -> Tensor:
        if metadata.tokens > 1 and self.plan.by_age:
            return self._read_by_age(store, state, metadata, states, scoring)
        if metadata.tokens > 1:
            return self._prefilled(store, state, metadata, states, scoring)
        return self._stepped(store, state, metadata, states, scoring)

    # A decoding step.

    def _stepped(
        self,
        store: SegmentStore,
        state: KernelState,
        metadata: KernelMetadata,
        states: tuple[Tensor, Tensor, Tensor],
        scoring: dict[str, Any],
    ) -> Tensor:
        layout = store.layout
        assert layout is not None
        step_plan = metadata.once(
            (layout, self.stages), lambda: self._step_plan(store, layout, metadata)
        )
        if step_plan.newest is None:
            queries = self._projected_into(store.buffer, layout, step_plan.step.newest, *states)
        else:
            queries = self._projected_apart(store, metadata, step_plan, *states)
        device = store.buffer.device
        step = state.segments_step(layout, device)
        if is_capturing(device):
            state.held.append((step_plan, step))  # a replay reads what they hold
        schedule = state.cut(metadata, step, lambda: step_plan.step.lengths, store.capacity)
        output: Tensor = step.run(queries[:, 0], store.buffer, schedule, **scoring)
        with part(self._moving), aside(device):
            for (before, source, after, target), move in zip(
                step_plan.step.moves, step_plan.moves, strict=True
            ):
                if isinstance(move, _Addressed):
                    store.move(move.source, move.target, before, after)
                else:
                    move.run(store.buffer, None, source, target)
        return output.unsqueeze(1)

    def _projected_apart(
        self,
        store: SegmentStore,
        metadata: KernelMetadata,
        step_plan: _StepSchedule,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Project the step's token to planes of its own and store it from there."""
        own = self._dense(len(metadata.start), 1)
        buffer = query.new_empty(own.elements)
        first = metadata.once("nowhere yet", lambda: torch.zeros_like(metadata.start))
        queries = self._projected(own, buffer, first, metadata, query, key, value)
        low = step_plan.step.low
        with part(self._storing):
            if isinstance(step_plan.newest, Addresses):
                keys, values = rows_of(own, buffer, 0, 1)
                if low is not None:
                    keys, values = (
                        rows.masked_fill(self._behind(side, rows.device) & low[:, None, None], 0)
                        for side, rows in enumerate((keys, values))
                    )
                write(store.buffer, step_plan.newest, keys, values)
            else:
                step_plan.newest.run(store.buffer, buffer, first, step_plan.step.newest, low)
        return queries

    def _projected_into(
        self,
        buffer: Tensor,
        layout: SegmentsLayout,
        newest: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        """Project the step's token directly into segment 0, saving one launch per layer."""
        matrices = self._prepared(query.device, query.dtype)
        exact = layout.segments[0]
        with part(self._storing):
            projected: Tensor = project_step(
                query.transpose(1, 2),
                key.transpose(1, 2),
                by_latent(value, layout.heads),
                matrices.keys,
                self._dense(layout.batch, PLACES * exact.slots),
                in_rows(buffer, layout.batch).view(layout.dtype),
                newest,
                query_bases=matrices.queries,
                value_bases=matrices.values,
                blocks=exact.blocks,
                widest=WIDEST_PLANE,
            )
        return projected

    def _step_plan(
        self, store: SegmentStore, layout: SegmentsLayout, metadata: KernelMetadata
    ) -> _StepSchedule:
        from kvprof.kernels.dispatch import uses_triton  # Triton is for Linux only
        from kvprof.kernels.quantized.moving import full_precision, token_move

        with part("schedule"):
            device = metadata.start.device
            # Slots are the same in all layers that have as much room.
            step: Step = metadata.once(
                (self.stages, store.capacity),
                lambda: self.stages.step(metadata.start, metadata.hidden, store.capacity),
            )

            def at(segment: int, slots: Tensor) -> Addresses:
                return addresses_of(layout, segment, slots[:, None])

            fused = uses_triton(device)
            moves = [
                token_move(layout, after, before, device)
                if fused and full_precision(layout, before)
                else _Addressed(at(before, source), at(after, target))
                for before, source, after, target in step.moves
            ]
            exact = layout.segments[0]
            if fused and step.low is None and exact.layout.capacity <= PLACES * exact.slots:
                return _StepSchedule(step, None, moves)
            if fused:
                planes = self._dense(layout.batch, 1)
                return _StepSchedule(step, token_move(layout, 0, planes, device), moves)
            return _StepSchedule(step, at(0, step.newest), moves)

    def _behind(self, side: int, device: torch.device) -> Tensor:
        """Return which columns of the top level the lowest one lacks, ``[Σ width]`` bool."""
        key = side, device
        if key not in self._masks:
            tops, lows = (
                form.value_widths if side else form.key_widths
                for form in (self._formats[0], self._formats[-1])
            )
            kept = [c >= low for top, low in zip(tops, lows, strict=True) for c in range(top)]
            with torch.inference_mode(False):
                self._masks[key] = torch.tensor(kept, device=device)
        return self._masks[key]

    # A prompt.

    def _read_by_age(
        self,
        store: SegmentStore,
        state: KernelState,
        metadata: KernelMetadata,
        states: tuple[Tensor, Tensor, Tensor],
        scoring: dict[str, Any],
    ) -> Tensor:
        """Attend to the newest tokens as they are, store the pass's own, attend to older ones."""
        old, new = state.seen(state.past), state.seen(state.past + metadata.tokens)
        layout = self._dense(len(old), max(1, *new))
        buffer = states[0].new_zeros(layout.elements)
        if max(old):
            store.give_to(layout, buffer, [0] * len(old), old, metadata.once)
        queries = self._projected(layout, buffer, metadata.start, metadata, *states)
        lengths, exact = metadata.after, self.stages.window + 1  # a query's own token too
        recent = attended(queries, buffer, layout, lengths, scoring, exact)
        with part(self._moving):
            self._take(store, layout, buffer, old, new, metadata)
            store.give_to(layout, buffer, [store.lasting(n) for n in old], new, metadata.once)
        # What a sink takes it has taken.
        older = attended(queries, buffer, layout, lengths - exact, {**scoring, "sinks": None})
        with part("merge"):
            return combined(layout, recent, older)

    def _take(
        self,
        store: SegmentStore,
        layout: RaggedLayout,
        buffer: Tensor,
        old: list[int],
        new: list[int],
        metadata: KernelMetadata,
    ) -> None:
        """Store the pass's own tokens."""
        from kvprof.kernels.dispatch import uses_triton  # Triton is for Linux only

        if uses_triton(buffer.device):
            store.take_from(layout, buffer, old, new, metadata.once)
        else:
            first = min(old)
            store.take(*rows_of(layout, buffer, first, max(new)), first, old, new)

    def _prefilled(
        self,
        store: SegmentStore,
        state: KernelState,
        metadata: KernelMetadata,
        states: tuple[Tensor, Tensor, Tensor],
        scoring: dict[str, Any],
    ) -> Tensor:
        """Attend to what is stored and to the pass's own tokens, then store these."""
        old, new = state.seen(state.past), state.seen(state.past + metadata.tokens)
        past, total = max(old), max(1, *new)
        layout = self._dense(len(old), total)
        buffer = states[0].new_zeros(layout.elements)
        stored = store.rows_until(past, old) if past else None
        if self.plan.lazy:
            heads = self._heads(len(old), total)
            space = states[0].new_zeros(heads.elements)
            if stored is not None:
                fill_rows(heads, space, *self._rebuilt(*stored))
            projected = self._projected(
                heads, space, metadata.start, metadata, *states, matrices=self._exactly(states[0])
            )
            self._kept(layout, buffer, metadata.start, metadata, *states[1:])
        else:
            heads, space = layout, buffer
            if stored is not None:
                fill_rows(layout, buffer, *stored)
            projected = self._projected(layout, buffer, metadata.start, metadata, *states)
            if self.stages.two:
                self._cut_old(store, layout, buffer, metadata, old, new)
        output = prefilled(projected, space, heads, metadata.after, new, scoring)
        with part(self._moving):
            self._take(store, layout, buffer, old, new, metadata)
        return output

    def _cut_old(
        self,
        store: SegmentStore,
        layout: RaggedLayout,
        buffer: Tensor,
        metadata: KernelMetadata,
        old: list[int],
        new: list[int],
    ) -> None:
        """Cut the pass's own tokens to the ranks that they will have after it."""
        slots = metadata.once(("cut", self.stages), lambda: store.at(0, max(new), new)[-1])
        if slots is None:
            return
        starts = torch.tensor(old, device=slots.device)[:, None]
        fresh = torch.arange(slots.shape[1], device=slots.device) >= starts
        low, lows = self._formats[-1], (slots >= 0) & fresh
        cut_rows(layout, buffer, lows, list(low.key_widths), list(low.value_widths))

    def _rebuilt(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the heads that stored rows stand for, side by side."""
        found = []
        for rows, side in ((keys, self.layer.keys), (values, self.layer.values)):
            begin, heads = 0, []
            for group in side.groups:
                own = rows[..., begin : begin + group.rank]
                begin += group.rank
                up = None if group.up is None else group.up.to(rows.device, rows.dtype)
                heads.append(own if up is None else own @ up.T)
            found.append(torch.cat(heads, dim=-1))
        return found[0], found[1]

    def _dense(self, batch: int, capacity: int) -> RaggedLayout:
        top = self._formats[0]
        return RaggedLayout(top.key_widths, top.value_widths, self.facts.group, batch, capacity)

    def _heads(self, batch: int, capacity: int) -> RaggedLayout:
        heads, facts = self.facts.num_kv_heads, self.facts
        widths = (facts.qk_head_dim,) * heads, (facts.v_head_dim,) * heads
        return RaggedLayout(*widths, facts.group, batch, capacity)

    def _exactly(self, states: Tensor) -> Matrices:
        key = states.device, states.dtype
        if key not in self._exact:
            with torch.inference_mode(False):
                self._exact[key] = exact_matrices(self.facts, *key)
        return self._exact[key]

    # Back to torch.

    def row_groups(
        self,
        store: KernelStore,
        state: KernelState,
        total: int,
        stacks: tuple[list[GroupStack], list[GroupStack]],
    ) -> list[RowGroup]:
        """Return what a store holds as `kvprof.runtime.layer` keeps it."""
        assert isinstance(store, SegmentStore)
        seen = state.seen(total)
        if not max(seen):
            return []
        rows = store.rows_until(max(seen), seen)
        scales = store.scales_until(max(seen), seen)
        found = []
        for tokens, members in rows_alike(seen).items():
            row_group = RowGroup(members, tokens)
            for name, whole, scale, own in zip(
                ("keys", "values"), rows, scales, stacks, strict=True
            ):
                side = getattr(self.layer, name)
                begins = [0]
                for group in side.groups:
                    begins.append(begins[-1] + group.rank)
                kept = getattr(row_group, name)
                for stack in own:
                    heads = [slice(begins[head], begins[head + 1]) for head in stack.kv_heads]
                    latents = [whole[members, :tokens, columns] for columns in heads]
                    had = None
                    if scale is not None:
                        had = scale[members, :tokens][..., list(stack.kv_heads)].mT[..., None]
                    parts = self._parts(torch.stack(latents, dim=1), had, stack, name, tokens)
                    kept.append(parts)
            found.append(row_group)
        return found

    def _parts(
        self, latents: Tensor, scales: Tensor | None, stack: GroupStack, side: str, tokens: int
    ) -> list[Any]:
        """Return latents in order, ``[rows, g, tokens, r]``, with their scales where needed."""
        found, quantiser = [], self.plan.quantiser
        for segment in segments(self.plan, self.layer, tokens):
            codec: Codec = PLAIN
            if segment.quantised and stack.quantised and quantiser is not None:
                codec = codec_for(
                    quantiser, getattr(quantiser, side), segment.level, stack.column_bits
                )
            width = stack.ranks[segment.level]
            rows = latents[:, :, segment.start : segment.stop, :width]
            if scales is None or not isinstance(codec, RowRms):
                found.append(plain_part(rows).recoded(codec, width))
                continue
            stored = codec.encode(rows, scales[:, :, segment.start : segment.stop])
            found.append(Part(codec, width, segment.tokens, rows.dtype, stored))
        return found
