"""A step of an engine over pages of latents from before RoPE, whose keys are rebuilt at every use.

Sequences that decode rebuild, rotate and multiply in one kernel over their pages. For chunks of
prompts the keys of all pages that they see are rebuilt once, into pages of working memory which
all layers use in turn, as kvprof's own runtime does for a prompt: a kernel that rebuilt them for
every block of queries would do so hundreds of times. As many sequences go together as have no more
pages than the longest one may have.

Latents of V that several heads share may be wider than a head (Palu §3.2). Folded into W_O they
would make it, and what prompts attend to, as many times larger; so W_O stays as it is there, values
are rebuilt beside the keys, and what decoding gives is multiplied afterwards.

In a CUDA graph (`kvprof.serving.captured_step`) there are as many pages of working memory, and
sequences whose pages find none there decode token by token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvprof.kernels.dispatch import multiprocessors_of, uses_triton
from kvprof.kernels.planes import RaggedLayout, chunks
from kvprof.kernels.prefill.rows import RowsStep, rows_step
from kvprof.kernels.project.step import project_keys, store_values
from kvprof.kernels.reconstruct.pages import PageRebuild, page_rebuild
from kvprof.kernels.reconstruct.step import ReconstructStep, reconstruct_step
from kvprof.runtime.tensors import unflatten
from kvprof.serving.captured_step import CudaGraphStep
from kvprof.serving.steps import EngineStep, Rebuilding, ServedLayer, filled_up

__all__ = ["RebuiltSteps", "rebuilt_steps"]

# Tokens whose keys torch rebuilds at once: what that leaves behind is small beside the pages.
_BLOCK = 4096


@dataclass(frozen=True, eq=False)
class _Seen:
    """What chunks of prompts see, one page after another."""

    pages: Tensor  # `[n]` rows of `kvprof.kernels.reconstruct.rebuild_config.SeenPage`, int32
    table: Tensor  # `[sequences, most pages]` int32: where each sequence's pages lie among these


@dataclass(frozen=True, eq=False)
class RebuiltSteps:
    """What a layer runs over pages of latents from before RoPE."""

    layer: ServedLayer
    layout: RaggedLayout  # of the pool
    rebuilding: Rebuilding
    latents: ReconstructStep  # over the pool, and over pages of rebuilt keys; of one sequence
    rows: RowsStep
    rebuild: PageRebuild  # from the one to the other
    room: int  # pages that the longest sequence fills
    scratch: Tensor  # room for as many rebuilt ones, which all layers use in turn

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.layout.batch

    @property
    def decode(self) -> None:
        """Layers of the same widths share a cut; no launch cuts for layers that differ."""
        return

    def attend(
        self, step: EngineStep, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Do what `kvprof.serving.steps.attend` says."""
        keys, slots = self.layer.keys, step.slots[: len(query)]
        where, latents = (self.layout, self.layer.attention.kv_cache, None), len(keys.widths)
        project_keys(_by_latent(key, latents)[..., : keys.depth], keys, *where, slots=slots)
        store_values(_by_latent(value, latents), *where, slots=slots)
        if isinstance(step, CudaGraphStep):
            return self._captured(step, query.flatten(1), scale)
        found = []
        if step.decodes:
            own, table = query[: step.decodes].flatten(1), step.table[: step.decodes]
            found.append(self._decoded(step, own, step.lengths[: step.decodes], table, scale))
        for first, stop in self._together(step):
            own = query[step.host_starts[first] : step.host_starts[stop]]
            found.append(self._chunks(step, first, stop, own.flatten(1), scale))
        return filled_up(found, len(query))

    def _captured(self, step: CudaGraphStep, query: Tensor, scale: float) -> Tensor:
        """Attend from all tokens over rebuilt pages, and from all over the engine's."""
        seen = step.rebuilt(self.room, self.layout.capacity)
        layout = replace(self.rows.layout, batch=self.room)
        planes = self._rebuilt(seen.pages, layout)
        rows = replace(self.rows, layout=layout, rows=step.rows)
        cut = step.cut_rows(rows, seen.lengths)
        attended = rows.run(query, planes, cut, scale, table=seen.table)
        decoded = self._decoded(step, query, seen.seen, seen.tables, scale)
        return torch.where(seen.attends, attended, decoded)

    def _values(self, latents: Tensor) -> Tensor:
        """Return the values of what was decoded, which V's latents are where W_O takes them."""
        if not self.rebuilding.lifts:
            return latents
        found = latents.new_empty(len(latents), self.layer.outputs)
        begin = first = 0
        for lift in self.rebuilding.lifts:
            heads, width, depth = lift.shape
            own, begin = latents[:, begin : begin + heads * width], begin + heads * width
            made, first = found[:, first : first + heads * depth], first + heads * depth
            # Head by head in place: nothing is copied to lie side by side.
            given, wanted = (unflatten(one, 1, (heads, -1)).transpose(0, 1) for one in (own, made))
            torch.bmm(given, lift, out=wanted)
        return found

    def _decoded(
        self, step: EngineStep, query: Tensor, lengths: Tensor, table: Tensor, scale: float
    ) -> Tensor:
        """Decode rows of so many tokens each."""
        rebuilding, config = self.rebuilding, replace(self.latents.config, sequences=len(query))
        decode = replace(self.latents, config=config)
        cut = step.once(config, lambda: decode.cut(lengths))
        found: Tensor = decode.run(
            query,
            self.layer.attention.kv_cache,
            cut,
            rebuilding.cos,
            rebuilding.sin,
            scale,
            table=table,
        )
        return self._values(found)

    def _together(self, step: EngineStep) -> Iterator[tuple[int, int]]:
        """Yield which sequences with several new tokens go together, first … stop - 1."""
        first, pages = step.decodes, 0
        for row in range(first, step.rows):
            own = self._filled(step.host_lengths[row])
            if row > first and pages + own > self.room:
                yield first, row
                first, pages = row, 0
            pages += own
        if step.rows > first:
            yield first, step.rows

    def _chunks(
        self, step: EngineStep, first: int, stop: int, query: Tensor, scale: float
    ) -> Tensor:
        """Attend from several new tokens of each of some sequences."""
        seen = step.once(("seen", first, stop), lambda: self._seen(step, first, stop))
        layout = replace(self.rows.layout, batch=len(seen.pages))
        planes = self._rebuilt(seen.pages, layout)
        rows = replace(self.rows, layout=layout, rows=stop - first)
        cut = step.cut(rows, len(query), first, stop)
        found: Tensor = rows.run(query, planes, cut, scale, table=seen.table)
        return found

    def _filled(self, length: int) -> int:
        """Return the pages of a sequence."""
        return max(1, -(-length // self.layout.capacity))

    def _seen(self, step: EngineStep, first: int, stop: int) -> _Seen:
        page, device = self.layout.capacity, step.table.device
        counts = [self._filled(length) for length in step.host_lengths[first:stop]]
        whole, begins = torch.arange(max(counts), dtype=torch.int32), [0, *accumulate(counts)]
        # Made on the host and copied together: which pages of the table these are, and the rest.
        rows = torch.repeat_interleave(torch.arange(first, stop), torch.tensor(counts))
        columns = torch.cat([whole[:count] for count in counts])
        table = whole + torch.tensor(begins[:-1], dtype=torch.int32)[:, None]
        table = table.clamp(max=begins[-1] - 1)
        numbers = torch.cat([rows.int(), columns, table.flatten()]).to(device)
        row, column, places = numbers.split([len(rows), len(columns), table.numel()])
        pages = torch.stack([step.table[row, column].int(), column * page], dim=1)
        # Beginning at a multiple of 16 bytes, as `EngineStep.pages_of` says why.
        return _Seen(pages, places.view(table.shape).clone())

    def _rebuilt(self, seen: Tensor, layout: RaggedLayout) -> Tensor:
        """Return pages of whole rotated keys and of values or their latents, by KV head."""
        cache, rebuilding = self.layer.attention.kv_cache, self.rebuilding
        planes = self.scratch[: layout.elements]
        if uses_triton(cache.device):
            self.rebuild.run(planes, cache, seen, rebuilding.cos, rebuilding.sin)
            return planes
        for start in range(0, layout.batch, block := max(1, _BLOCK // layout.capacity)):
            self._rebuild(planes, layout, slice(start, start + block), seen)
        return planes

    def _rebuild(self, planes: Tensor, layout: RaggedLayout, at: slice, seen: Tensor) -> None:
        """Rebuild some pages by torch."""
        cache, rebuilding = self.layer.attention.kv_cache, self.rebuilding
        heads, width = rebuilding.heads, rebuilding.head_dim
        pages, begins = seen[at].long().clamp(min=0).unbind(1)
        positions = begins[:, None] + torch.arange(layout.capacity, device=begins.device)
        # Behind a sequence's end, and there alone, lie positions that no token may have.
        positions = positions.clamp(max=len(rebuilding.cos) - 1)
        angles = rebuilding.cos[positions][:, :, None], rebuilding.sin[positions][:, :, None]
        for latent, up in enumerate(rebuilding.ups):
            keys, values = (
                torch.cat([plane[pages] for plane in side], dim=-1)
                for side in self.layout.planes(cache, latent)
            )
            rotated = rebuilding.form.rotated(unflatten(keys @ up.mT, -1, (heads, width)), *angles)
            states = values[:, :, None].expand(-1, -1, heads, -1)
            if rebuilding.value_ups:
                states = unflatten(values @ rebuilding.value_ups[latent].mT, -1, (heads, width))
            for head in range(heads):
                own = layout.planes(planes, latent * heads + head)
                for side, made in zip(own, (rotated, states), strict=True):
                    columns = torch.split(made[:, :, head], list(chunks(made.shape[-1])), dim=-1)
                    for plane, chunk in zip(side, columns, strict=True):
                        plane[at] = chunk


def _by_latent(states: Tensor, latents: int) -> Tensor:
    """Lay the heads that share a latent side by side: ``[1, tokens, latents, n * d]``."""
    found: Tensor = unflatten(states.flatten(1), 1, (latents, -1))
    return found.unsqueeze(0)


def rebuilt_steps(
    layer: ServedLayer,
    page: int,
    longest: int,
    configs: tuple[tuple[int, int], ...],
    scratch: Tensor,
) -> RebuiltSteps:
    """Prepare a layer's steps over the pages that the engine has given it."""
    cache, rebuilding = layer.attention.kv_cache, layer.rebuilding
    assert rebuilding is not None
    layout, device = layer.layout(len(cache), page), cache.device
    how: dict[str, Any] = {"page_tokens": page, "rows": 1}
    latents = reconstruct_step(
        layout,
        rebuilding.ups,
        rebuilding.head_dim,
        rebuilding.heads,
        device,
        multiprocessors=multiprocessors_of(device),
        interleaved=rebuilding.form.interleaved,
        rotary_dim=rebuilding.form.width,
        most_tokens=longest,
        **how,
    )
    whole = layer.whole(1, page)
    rows = rows_step(whole, device, cache.dtype, pairs=configs, **how)
    rebuild = page_rebuild(latents, whole, rebuilding.value_ups)
    room = -(-longest // page)
    return RebuiltSteps(layer, layout, rebuilding, latents, rows, rebuild, room, scratch)
