"""A step of an engine over pages of quantised latents.

A step's tokens are projected into planes of the step's own, and quantised from there into their
pages. Sequences that decode attend to their pages, their new token among them: what it is in the
page, quantised, where the plan's rule would show it as it is for that one step. A chunk of a prompt
attends to its own tokens as they are and to those before it as the pages give them back; for that
there is no kernel over pages, so they are dequantised into planes first, sequence by sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from kvprof.kernels.dispatch import uses_triton
from kvprof.kernels.planes import RaggedLayout, chunks, row_stride
from kvprof.kernels.prefill.rows import RowsCut, RowsStep, rows_step
from kvprof.kernels.project.step import project_step
from kvprof.kernels.segments.append import addresses_of, read, write
from kvprof.kernels.segments.layout import SegmentsLayout
from kvprof.kernels.segments.moving import token_move
from kvprof.kernels.segments.step import SegmentsStep, segments_step
from kvprof.runtime.clock import part
from kvprof.serving.pages import quantised_layout
from kvprof.serving.steps import EngineStep, ServedLayer, filled_up

__all__ = ["QuantisedSteps", "quantised_steps"]

# Tokens that are dequantised together, and by which planes for a context grow.
_PIECE = 4096


@dataclass(frozen=True, eq=False)
class QuantisedSteps:
    """What a layer runs over pages of quantised latents.

    Attributes
    ----------
    layer : ServedLayer
    layout : SegmentsLayout
        Of the pool.
    planes : RaggedLayout
        Of a step's own tokens, a row each.
    scratch : Tensor
        Room for these planes, which all layers use in turn.
    decode : SegmentsStep
        Of one sequence; `replace` makes those of more.
    """

    layer: ServedLayer
    layout: SegmentsLayout
    planes: RaggedLayout
    scratch: Tensor
    decode: SegmentsStep

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.layout.batch

    @cached_property
    def _rows(self) -> Tensor:
        """The slots of a step's tokens in planes of their own, one in each row."""
        return torch.arange(self.planes.batch, device=self.scratch.device)

    @cached_property
    def _first(self) -> Tensor:
        return torch.zeros_like(self._rows)

    @property
    def _own(self) -> Tensor:
        return self.scratch[: self.planes.elements]

    def attend(
        self, step: EngineStep, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Do what `kvprof.serving.steps.attend` says."""
        cache, found = self.layer.attention.kv_cache, []
        rows = self._rows[: len(query)]
        projected = self._projected(query, key, value, self.planes, self._own, slots=rows)
        # Before anything is read: a sequence may share pages that this very step fills.
        with part("quantise"):
            self._store(step, len(query))
        if step.decodes:
            decode = replace(self.decode, rows=step.decodes)
            schedule, table = step.schedule(self.decode), step.table[: step.decodes]
            with part("attention"):
                own = projected[: step.decodes]
                found.append(decode.run(own, cache, schedule, scale, table=table))
        for row in range(step.decodes, step.rows):
            found.append(self._chunk(step, row, query, key, value, scale))
        return filled_up(found, len(query))

    def _projected(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: RaggedLayout,
        planes: Tensor,
        *,
        start: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        with part("compress"):
            made: Tensor = project_step(
                query[None],
                key[None],
                value[None],
                self.layer.keys,
                layout,
                planes,
                start,
                query_bases=self.layer.queries,
                slots=slots,
            )[0]
        return made

    def _store(self, step: EngineStep, tokens: int) -> None:
        """Quantise the step's tokens into their pages."""
        cache, own = self.layer.attention.kv_cache, self.layout.segments[0]
        slots = step.slots[:tokens]
        if not uses_triton(cache.device):
            addresses = addresses_of(
                self.layout, 0, slots[None], stride=row_stride(cache, self.pages)
            )
            sides = zip(
                *(self.planes.head(self._own, head) for head in range(self.planes.heads)),
                strict=True,
            )
            keys, values = (torch.cat(side, dim=-1)[: len(slots), 0][None] for side in sides)
            write(cache, addresses, keys, values)
            return
        move = token_move(self.layout, 0, self.planes, cache.device)
        origins = self._first[:tokens]

        def apart() -> list[Tensor]:
            # No two tokens of a move may share a byte. Those of sequences of their own do not.
            if step.rows == step.decodes:
                return [slots]
            within = slots % own.slots
            return [torch.where(within == slot, slots, -1) for slot in range(own.slots)]

        for targets in step.once(("moves", own.slots, tokens), apart):
            move.run(cache, self._own, origins, targets)

    def _chunk(
        self,
        step: EngineStep,
        row: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
    ) -> Tensor:
        """Attend from several new tokens of a sequence."""
        first, stop, length = *step.host_starts[row : row + 2], step.host_lengths[row]
        past, device = length - (stop - first), query.device
        layout = self.layer.layout(1, -(-length // _PIECE) * _PIECE)
        planes = self.scratch.new_empty(layout.elements)
        with part("quantise"):
            for begin in range(0, past, _PIECE):
                self._restore(step, row, begin, min(begin + _PIECE, past), layout, planes)
        numbers = step.once("chunks", lambda: _numbers(step))
        start, lengths, starts = numbers[row - step.decodes]
        states = query[first:stop], key[first:stop], value[first:stop]
        projected = self._projected(*states, layout, planes, start=start)
        attending = _attending(layout, device, self.scratch.dtype)

        def made() -> RowsCut:
            with part("schedule"):
                return attending.cut(starts, lengths, stop - first)

        cut = step.once((attending.heights, row), made)
        with part("attention"):
            return attending.run(projected, planes, cut, scale)

    def _restore(
        self,
        step: EngineStep,
        row: int,
        begin: int,
        stop: int,
        layout: RaggedLayout,
        planes: Tensor,
    ) -> None:
        """Dequantise tokens ``begin … stop - 1`` of a sequence into planes."""
        cache, page = self.layer.attention.kv_cache, self.layout.segments[0].capacity

        def made() -> Tensor:
            tokens = torch.arange(begin, stop, device=cache.device)
            return step.table[row].long()[tokens // page] * page + tokens % page

        slots = step.once(("restored", page, row, begin), made)
        addresses = addresses_of(self.layout, 0, slots[None], stride=row_stride(cache, self.pages))
        for side, states in enumerate(read(cache, addresses)):
            widths = (layout.key_widths, layout.value_widths)[side]
            parts = torch.split(states.to(planes.dtype), list(widths), dim=-1)
            for head, latent in enumerate(parts):
                own = layout.planes(planes, head)[side]
                cut = torch.split(latent, list(chunks(widths[head])), dim=-1)
                for plane, piece in zip(own, cut, strict=True):
                    plane[:, begin:stop] = piece


def _numbers(step: EngineStep) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return of each chunk its first token, its sequence's length, and where its rows begin.

    They are worked out on the device: of numbers that come from the host it would wait for each.
    Each begins at a multiple of 16 bytes, as `EngineStep.pages_of` says why.
    """
    starts = step.starts[step.decodes : step.rows + 1]
    lengths = step.lengths[step.decodes : step.rows]
    new = starts[1:] - starts[:-1]
    numbers = new.new_zeros(len(new), 3, 4)
    numbers[:, 0, 0] = lengths - new
    numbers[:, 1, 0] = lengths
    numbers[:, 2, 1] = new
    return [(own[0, :1], own[1, :1], own[2, :2]) for own in numbers.unbind()]


@lru_cache(maxsize=1024)
def _attending(layout: RaggedLayout, device: torch.device, dtype: torch.dtype) -> RowsStep:
    """Return what attends over a layer's tokens at full precision: its tables go to the device."""
    return rows_step(layout, device, dtype)


def quantised_steps(
    layer: ServedLayer,
    page: int,
    most_tokens: int,
    scratch: Tensor,
    kinds: Sequence[tuple[int, int]] | None,
) -> QuantisedSteps:
    """Prepare a layer's steps over the pages that the engine has given it.

    Parameters
    ----------
    layer : ServedLayer
    page : int
        Tokens of a page.
    most_tokens : int
        Of a step of the engine.
    scratch : Tensor
        In the model's dtype.
    kinds : sequence of (key width, value width) or None
        Of the heads of all layers, where one kernel serves them.
    """
    cache = layer.attention.kv_cache
    assert layer.codes is not None
    layout = quantised_layout(layer.layout(len(cache), page), layer.codes, scratch.dtype)
    shared = None if kinds is None else [(kind,) for kind in kinds]
    decode = segments_step(layout, cache.device, rows=1, kinds=shared)
    return QuantisedSteps(layer, layout, layer.layout(most_tokens, 1), scratch, decode)
