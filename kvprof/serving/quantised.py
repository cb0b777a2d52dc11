"""A step of an engine over pages of quantised latents.

A step's tokens are projected once, into a pool of pages of the step's own, and quantised from there
into the engine's. Every query reads every token as its page gives it back, its own too, where the
plan's rule would show that one as it is: so no border of a chunk, no prefix that is found again and
no preemption changes an answer. Sequences that decode attend to their pages. Over these no kernel
has several queries of a sequence attend, so what they read is dequantised first: tokens of prompts
of which nothing came before back into the step's own pool, where all of them attend together, and
all tokens of a sequence that goes on into planes, sequence by sequence.

In a CUDA graph (`kvprof.serving.captured_step`) nothing is the host's: every token sees what came
before as a row of a decoding step, so that a chunk's past is read once for each of its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvprof.kernels.dispatch import uses_triton
from kvprof.kernels.planes import RaggedLayout, chunks, row_stride
from kvprof.kernels.prefill.rows import RowsStep, rows_step
from kvprof.kernels.project.step import project_step
from kvprof.kernels.quantized.append import addresses_of, read, write
from kvprof.kernels.quantized.layout import SegmentsLayout
from kvprof.kernels.quantized.moving import token_move, token_restore
from kvprof.kernels.quantized.step import SegmentsStep, segments_step
from kvprof.kernels.split_kv import Attended
from kvprof.serving.captured_step import CudaGraphStep, most_own_pages, own_columns
from kvprof.serving.pages import quantised_layout
from kvprof.serving.steps import PAGE_TOKENS, EngineStep, ServedLayer, filled_up

__all__ = ["QuantisedSteps", "own_pages", "quantised_steps"]

# Tokens by which planes for a context grow, and that torch dequantises at once: where each value
# lies takes eight bytes meanwhile.
_PIECE = 4096


class _Own(NamedTuple):
    """Where a step's tokens lie in its own pool."""

    slots: Tensor  # `[tokens]` int64; -1 for padding
    first: int  # of the prompts of which nothing came before, and whose pages are their own
    stop: int
    table: Tensor | None  # `[stop - first, pages]` int32: which these are


def own_pages(layer: ServedLayer, most_tokens: int, captured: tuple[int, int]) -> RaggedLayout:
    """Return the pool of a step's own tokens: all that they may fill.

    Those of a step that is no graph fill as many pages as they have tokens for, and as many again;
    what finds no page there goes another way. A graph's batches find one always.
    """
    pages = max(2 * -(-most_tokens // PAGE_TOKENS) + 1, most_own_pages(*captured))
    return layer.layout(pages, PAGE_TOKENS)


@dataclass(frozen=True, eq=False)
class QuantisedSteps:
    """What a layer runs over pages of quantised latents."""

    layer: ServedLayer
    layout: SegmentsLayout  # of the pool
    own: RaggedLayout  # of a step's own tokens (`own_pages`)
    scratch: Tensor  # room for them, which all layers use in turn
    #: Over the engine's pages, and over the step's own; of one sequence, `replace` makes those of
    #: more.
    decode: SegmentsStep
    rows: RowsStep

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.layout.batch

    @property
    def _planes(self) -> Tensor:
        return self.scratch[: self.own.elements]

    def attend(
        self, step: EngineStep, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Do what `kvprof.serving.steps.attend` says."""
        if isinstance(step, CudaGraphStep):
            return self._captured(step, query, key, value, scale)
        cache, found = self.layer.attention.kv_cache, []
        own = step.once("own", lambda: _own(step, len(query), self.own.batch))
        projected = self._projected(query, key, value, own.slots)
        # Before anything is read: a sequence may share pages that this very step fills.
        self._store(step, own.slots)
        if own.first < own.stop:
            self._restore(step.slots[: len(query)], own.slots, self.own, self._planes)
        if step.decodes:
            decode = replace(self.decode, rows=step.decodes)
            schedule, table = step.schedule(self.decode), step.table[: step.decodes]
            mine = projected[: step.decodes]
            found.append(decode.run(mine, cache, schedule, scale, table=table))
        row = step.decodes
        while row < step.rows:
            if row == own.first < own.stop:
                found.append(self._whole(step, own, projected, scale))
                row = own.stop
            else:
                found.append(self._chunk(step, row, projected, scale))
                row += 1
        return filled_up(found, len(query))

    def _captured(
        self, step: CudaGraphStep, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Attend from every token to what came before, and from those of prompts to their own."""
        layer, pages = self.layer, self.own.batch
        own = step.own(pages)
        projected = self._projected(query, key, value, own.slots)
        self._store(step, own.slots)
        self._restore(step.slots[: len(query)], own.slots, self.own, self._planes)
        rows, tokens = replace(self.rows, rows=step.rows), len(query)
        cut = step.cut_rows(rows, own.lengths)
        logs = step.sums(len(layer.value_widths) * layer.group)
        decode, schedule = replace(self.decode, rows=tokens), step.schedule(self.decode)
        mine = rows.run(projected, self._planes, cut, scale, table=own.table, logs=logs)
        found: Tensor = decode.run(
            projected,
            layer.attention.kv_cache,
            schedule,
            scale,
            table=own.seen,
            beside=Attended(mine, logs),
        )
        return found

    def _whole(self, step: EngineStep, own: _Own, projected: Tensor, scale: float) -> Tensor:
        """Attend from prompts of which nothing came before, in the step's own pages."""
        first, stop = own.first, own.stop
        begin, end = step.host_starts[first], step.host_starts[stop]
        rows = replace(self.rows, rows=stop - first)
        cut = step.cut(rows, end - begin, first, stop)
        found: Tensor = rows.run(projected[begin:end], self._planes, cut, scale, table=own.table)
        return found

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> Tensor:
        """Project a step's keys and values into its own pool; return its queries."""
        made: Tensor = project_step(
            query[None],
            key[None],
            value[None],
            self.layer.keys,
            self.own,
            self._planes,
            None,
            query_bases=self.layer.queries,
            slots=slots,
        )[0]
        return made

    def _store(self, step: EngineStep, origins: Tensor) -> None:
        """Quantise the step's tokens into their pages."""
        cache = self.layer.attention.kv_cache
        slots = step.slots[: len(origins)]
        if not uses_triton(cache.device):
            addresses = addresses_of(
                self.layout, 0, slots[None], stride=row_stride(cache, self.pages)
            )
            sides = zip(
                *(self.own.head(self._planes, head) for head in range(self.own.heads)), strict=True
            )
            # Padding is not stored, wherever it lies.
            at = origins.clamp(min=0)
            keys, values = (torch.cat(side, dim=-1).flatten(0, 1)[at][None] for side in sides)
            write(cache, addresses, keys, values)
            return
        move = token_move(self.layout, 0, self.own, cache.device)
        # A sequence's tokens follow one another, in the step as in its pages.
        move.run(cache, self._planes, origins, slots, pooled=True)

    def _chunk(self, step: EngineStep, row: int, projected: Tensor, scale: float) -> Tensor:
        """Attend from several new tokens of a sequence."""
        first, stop, length = *step.host_starts[row : row + 2], step.host_lengths[row]
        device, page = projected.device, self.layout.segments[0].capacity
        layout = self.layer.layout(1, -(-length // _PIECE) * _PIECE)
        planes = self.scratch.new_empty(layout.elements)

        def made() -> tuple[Tensor, Tensor]:
            tokens = torch.arange(length, device=device)
            return step.table[row].long()[tokens // page] * page + tokens % page, tokens

        self._restore(*step.once(("restored", page, row), made), layout, planes)
        numbers = step.once("chunks", lambda: _numbers(step))
        lengths, starts = numbers[row - step.decodes]
        attending = _attending(layout, device, self.scratch.dtype)
        key_of, tokens = (attending.heights, row), stop - first
        cut = step.once(key_of, lambda: attending.cut(starts, lengths, tokens))
        return attending.run(projected[first:stop], planes, cut, scale)

    def _restore(
        self, slots: Tensor, targets: Tensor, layout: RaggedLayout, planes: Tensor
    ) -> None:
        """Dequantise tokens from their slots of the pool to slots of planes; -1 is padding."""
        cache = self.layer.attention.kv_cache
        if uses_triton(cache.device):
            restore = token_restore(self.layout, 0, layout, cache.device)
            restore.run(planes, cache, slots, targets, layout.batch)
            return
        there = (slots >= 0) & (targets >= 0)
        for piece, to in zip(slots[there].split(_PIECE), targets[there].split(_PIECE), strict=True):
            self._read(piece, to, layout, planes)

    def _read(self, slots: Tensor, targets: Tensor, layout: RaggedLayout, planes: Tensor) -> None:
        """Dequantise tokens by torch."""
        cache = self.layer.attention.kv_cache
        addresses = addresses_of(self.layout, 0, slots[None], stride=row_stride(cache, self.pages))
        rows, places = targets // layout.capacity, targets % layout.capacity
        for side, states in enumerate(read(cache, addresses)):
            widths = (layout.key_widths, layout.value_widths)[side]
            parts = torch.split(states.to(planes.dtype), list(widths), dim=-1)
            for head, latent in enumerate(parts):
                own = layout.planes(planes, head)[side]
                cut = torch.split(latent, list(chunks(widths[head])), dim=-1)
                for plane, piece in zip(own, cut, strict=True):
                    plane[rows, places] = piece[0]


def _own(step: EngineStep, tokens: int, pages: int) -> _Own:
    """Lay a step's tokens into its own pool; the numbers are worked out on the device.

    Prompts of which nothing came before have pages of their own, those that stand together in the
    step and find room. All other tokens lie side by side before them.
    """
    device = step.starts.device
    order = torch.arange(tokens, device=device)
    if step.rows == step.decodes:
        return _Own(order, step.rows, step.rows, None)
    starts, count = step.host_starts, step.host_starts[step.rows]
    new = [stop - start for start, stop in pairwise(starts[: step.rows + 1])]
    fresh = [row >= step.decodes and step.host_lengths[row] == new[row] for row in range(step.rows)]
    first = fresh.index(True) if True in fresh else step.rows
    filled, stop = -(-count // PAGE_TOKENS), first
    # As if all tokens lay before them: it is known where they begin, whatever is left out.
    while stop < step.rows and fresh[stop]:
        filled += -(-new[stop] // PAGE_TOKENS)
        if filled > pages:
            break
        stop += 1
    if first == stop:
        return _Own(_padded(order, count), first, first, None)
    counts = step.starts[1 : step.rows + 1] - step.starts[: step.rows]
    row = torch.arange(step.rows, device=device)
    apart = (row >= first) & (row < stop)
    filling = ((counts + PAGE_TOKENS - 1) // PAGE_TOKENS).masked_fill(~apart, 0)
    beside = counts.masked_fill(apart, 0)
    before = -(-count // PAGE_TOKENS)
    page = before + filling.cumsum(0) - filling
    begin = torch.where(apart, page * PAGE_TOKENS, beside.cumsum(0) - beside)
    moved = (begin - step.starts[: step.rows]).repeat_interleave(counts, output_size=count)
    slots = order.clone()
    slots[:count] += moved
    columns = torch.arange(own_columns(pages), device=device)
    table = (page[first:stop, None] + columns).clamp(max=pages - 1).int()
    return _Own(_padded(slots, count), first, stop, table)


def _padded(slots: Tensor, count: int) -> Tensor:
    """Return slots whose last ones are no token's."""
    slots[count:] = -1
    return slots


def _numbers(step: EngineStep) -> list[tuple[Tensor, Tensor]]:
    """Return of each chunk its sequence's length, and where its rows begin.

    They are worked out on the device: of numbers that come from the host it would wait for each.
    Each begins at a multiple of 16 bytes, as `EngineStep.pages_of` says why.
    """
    starts = step.starts[step.decodes : step.rows + 1]
    lengths = step.lengths[step.decodes : step.rows]
    new = starts[1:] - starts[:-1]
    numbers = new.new_zeros(len(new), 2, 4)
    numbers[:, 0, 0] = lengths
    numbers[:, 1, 1] = new
    return [(own[0, :1], own[1, :2]) for own in numbers.unbind()]


@lru_cache(maxsize=1024)
def _attending(layout: RaggedLayout, device: torch.device, dtype: torch.dtype) -> RowsStep:
    """Return what attends over a layer's tokens at full precision: its tables go to the device."""
    return rows_step(layout, device, dtype)


def quantised_steps(
    layer: ServedLayer,
    page: int,
    most_tokens: int,
    captured: tuple[int, int],
    scratch: Tensor,
    configs: Sequence[tuple[int, int]] | None,
    pairs: Sequence[tuple[int, int]],
) -> QuantisedSteps:
    """Prepare a layer's steps over the pages that the engine has given it."""
    cache = layer.attention.kv_cache
    assert layer.codes is not None
    layout = quantised_layout(layer.layout(len(cache), page), layer.codes, scratch.dtype)
    shared = None if configs is None else [(pair,) for pair in configs]
    decode = segments_step(layout, cache.device, rows=1, configs=shared)
    own = own_pages(layer, most_tokens, captured)
    rows = rows_step(own, cache.device, scratch.dtype, page_tokens=PAGE_TOKENS, rows=1, pairs=pairs)
    return QuantisedSteps(layer, layout, own, scratch, decode, rows)
