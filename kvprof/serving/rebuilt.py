"""A step of an engine over pages of latents from before RoPE, whose keys are rebuilt at every use.

Sequences that decode rebuild, rotate and multiply in one kernel over their pages. For chunks of
prompts the keys of all pages that they see are rebuilt once, into pages of working memory which
last as long as a layer's attention, as kvprof's own runtime does for a prompt: a kernel that
rebuilt them for every block of queries would do so hundreds of times. As many sequences go together
as have no more tokens than the longest one may have.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvprof.kernels.dispatch import multiprocessors_of
from kvprof.kernels.parts import Schedule
from kvprof.kernels.planes import RaggedLayout, chunks
from kvprof.kernels.prefill.rows import RowsStep, rows_step
from kvprof.kernels.project.step import project_keys, store_values
from kvprof.kernels.reconstruct.step import ReconstructStep, reconstruct_step
from kvprof.runtime.clock import part
from kvprof.runtime.tensors import unflatten
from kvprof.serving.steps import EngineStep, Rebuilding, ServedLayer, filled_up

__all__ = ["RebuiltSteps", "rebuilt_steps"]

# Tokens whose keys are rebuilt at once: what that leaves behind is small beside the pages.
_BLOCK = 4096


@dataclass(frozen=True, eq=False)
class _Seen:
    """What chunks of prompts see, one page after another.

    Attributes
    ----------
    pages : Tensor
        ``[n]`` int64, in the pool.
    cos, sin : Tensor
        ``[n, tokens of a page, rotary width / 2]``.
    table : Tensor
        ``[sequences, most pages]`` int32: where each sequence's pages lie among these.
    """

    pages: Tensor
    cos: Tensor
    sin: Tensor
    table: Tensor


@dataclass(frozen=True, eq=False)
class RebuiltSteps:
    """What a layer runs over pages of latents from before RoPE.

    Attributes
    ----------
    layer : ServedLayer
    layout : RaggedLayout
        Of the pool.
    rebuilding : Rebuilding
    latents, rows : ReconstructStep, RowsStep
        Over the pool, and over pages of rebuilt keys; of one sequence.
    """

    layer: ServedLayer
    layout: RaggedLayout
    rebuilding: Rebuilding
    latents: ReconstructStep
    rows: RowsStep

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
        with part("compress"):
            project_keys(_by_latent(key, latents)[..., : keys.depth], keys, *where, slots=slots)
            store_values(_by_latent(value, latents), *where, slots=slots)
        found = []
        if step.decodes:
            found.append(self._decoded(step, query[: step.decodes].flatten(1), scale))
        for first, stop in self._together(step):
            own = query[step.host_starts[first] : step.host_starts[stop]]
            found.append(self._chunks(step, first, stop, own.flatten(1), scale))
        return filled_up(found, len(query))

    def _decoded(self, step: EngineStep, query: Tensor, scale: float) -> Tensor:
        rebuilding, form = self.rebuilding, replace(self.latents.form, sequences=step.decodes)
        decode = replace(self.latents, form=form)

        def schedule() -> Schedule:
            with part("schedule"):
                return decode.cut(step.lengths[: step.decodes])

        cut = step.once(form, schedule)
        with part("attention"):
            found: Tensor = decode.run(
                query,
                self.layer.attention.kv_cache,
                cut,
                rebuilding.cos,
                rebuilding.sin,
                scale,
                table=step.table[: step.decodes],
            )
        return found

    def _together(self, step: EngineStep) -> Iterator[tuple[int, int]]:
        """Yield which sequences with several new tokens go together, first … stop - 1."""
        most, first, tokens = self.latents.form.most, step.decodes, 0
        for row in range(first, step.rows):
            length = step.host_lengths[row]
            if row > first and tokens + length > most:
                yield first, row
                first, tokens = row, 0
            tokens += length
        if step.rows > first:
            yield first, step.rows

    def _chunks(
        self, step: EngineStep, first: int, stop: int, query: Tensor, scale: float
    ) -> Tensor:
        """Attend from several new tokens of each of some sequences."""
        angles = self.rebuilding.cos.data_ptr()
        with part("decompress"):
            seen = step.once((angles, first, stop), lambda: self._seen(step, first, stop))
        layout = replace(self.rows.layout, batch=len(seen.pages))
        with part("decompress"):
            planes = self._rebuilt(seen, layout)
        rows = replace(self.rows, layout=layout, rows=stop - first)
        cut = step.cut(rows, len(query), first, stop)
        with part("attention"):
            found: Tensor = rows.run(query, planes, cut, scale, table=seen.table)
        return found

    def _seen(self, step: EngineStep, first: int, stop: int) -> _Seen:
        page, device = self.layout.capacity, step.table.device
        counts = [max(1, -(-length // page)) for length in step.host_lengths[first:stop]]
        pages = [
            step.table[row, :count] for row, count in zip(range(first, stop), counts, strict=True)
        ]
        tokens = torch.arange(page * max(counts), device=device)
        # Behind a sequence's end, and there alone, lie positions that no token may have.
        by_page = tokens.clamp(max=len(self.rebuilding.cos) - 1).view(-1, page)
        positions = torch.cat([by_page[:count] for count in counts])
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        begin = 0
        for row, count in enumerate(counts):
            table[row, :count] = torch.arange(begin, begin + count)
            begin += count
        cos, sin = self.rebuilding.cos[positions], self.rebuilding.sin[positions]
        return _Seen(torch.cat(pages).long(), cos, sin, table.to(device))

    def _rebuilt(self, seen: _Seen, layout: RaggedLayout) -> Tensor:
        """Return pages of whole rotated keys and of latent values, a head for every KV head."""
        cache, rebuilding = self.layer.attention.kv_cache, self.rebuilding
        heads, width = rebuilding.heads, rebuilding.head_dim
        planes: Tensor = cache.new_empty(layout.elements)
        block = max(1, _BLOCK // layout.capacity)
        for latent, up in enumerate(rebuilding.ups):
            keys, values = self.layout.planes(cache, latent)
            own = [layout.planes(planes, latent * heads + head) for head in range(heads)]
            for start in range(0, layout.batch, block):
                at = slice(start, start + block)
                pages = seen.pages[at]
                for number, plane in enumerate(values):
                    stored = plane[pages]
                    for _, copies in own:
                        copies[number][at] = stored
                joined = torch.cat([plane[pages] for plane in keys], dim=-1) @ up.mT
                angles = seen.cos[at, :, None], seen.sin[at, :, None]
                rotated = rebuilding.form.rotated(unflatten(joined, -1, (heads, width)), *angles)
                for head, (rebuilt, _) in enumerate(own):
                    columns = torch.split(rotated[:, :, head], list(chunks(width)), dim=-1)
                    for plane, chunk in zip(rebuilt, columns, strict=True):
                        plane[at] = chunk
        return planes


def _by_latent(states: Tensor, latents: int) -> Tensor:
    """Lay the heads that share a latent side by side: ``[1, tokens, latents, n * d]``."""
    found: Tensor = unflatten(states.flatten(1), 1, (latents, -1))
    return found.unsqueeze(0)


def rebuilt_steps(
    layer: ServedLayer, page: int, longest: int, kinds: tuple[tuple[int, int], ...]
) -> RebuiltSteps:
    """Prepare a layer's steps over the pages that the engine has given it.

    Parameters
    ----------
    layer : ServedLayer
    page : int
        Tokens of a page.
    longest : int
        Tokens that a sequence may have.
    kinds : tuple of (key width, value width)
        Of the heads of all layers whose keys are rebuilt.
    """
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
    rows = rows_step(layer.whole(1, page), device, cache.dtype, pairs=kinds, **how)
    return RebuiltSteps(layer, layout, rebuilding, latents, rows)
