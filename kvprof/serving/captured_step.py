"""A step of an engine that a CUDA graph captures: only its room is the host's.

Which sequences decode, where each one's new tokens begin and how long it is are numbers on the
device, so the graph that was captured of one batch runs any other of no more tokens and sequences.

Over latents as they are every sequence has a place among those that decode and among those with
several new tokens, and has nothing to do in one of them. Over quantised latents every token has a
row of its own in a decoding step: it sees there what its sequence had before the step, or, where it
is the only new one, all of it. The others' new tokens attend to one another in the step's own pool
of pages, as they were stored, and both are combined by their logarithms. Where keys are rebuilt,
those with several new tokens attend over rebuilt pages, of which there are as many as one sequence
may fill; the tokens of those that find no room there decode, each as a row of its own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprof.kernels.prefill.rows import RowsCut, RowsStep
from kvprof.kernels.quantized.step import SegmentsStep
from kvprof.serving.steps import PAGE_TOKENS, EngineStep

__all__ = [
    "CudaGraphStep",
    "OwnPages",
    "RebuiltPages",
    "captured_step",
    "most_own_pages",
    "own_columns",
]


@dataclass(frozen=True, eq=False)
class _Numbers:
    """What layers share of a step, worked out on the device."""

    token: Tensor  # `[tokens]` int32, their numbers
    lengths: Tensor  # `[decodes]` int32, tokens of sequences that decode, 0 for others
    #: `[rows + 1]` int32, where the new tokens of the others begin; those that decode have none.
    starts: Tensor
    others: Tensor  # `[tokens, 1]` bool, whose tokens these are


@dataclass(frozen=True, eq=False)
class OwnPages:
    """A step's tokens in its own pool of pages, and what came before them."""

    slots: Tensor  # `[tokens]` int64, where each lies in the pool; -1 for padding
    table: Tensor  # `[rows, pages]` int32, the pages of each sequence that does not decode
    lengths: Tensor  # `[rows]` int32, its new tokens; 0 for those that decode
    seen: Tensor  # `[tokens, most pages]` int32, the engine's pages of each token's sequence


@dataclass(frozen=True, eq=False)
class RebuiltPages:
    """Which pages are rebuilt, and what tokens see of them or of the engine's."""

    pages: Tensor  # `[room]` rows of `kvprof.kernels.reconstruct.rebuild_config.SeenPage`, int32
    table: Tensor  # `[rows, room]` int32, where each sequence's pages lie among these
    #: `[rows]` int32, tokens of sequences with several new ones whose pages are rebuilt; 0 for all
    #: others.
    lengths: Tensor
    attends: Tensor  # `[tokens, 1]` bool, whose tokens these are
    seen: Tensor  # `[tokens]` int32, how many tokens each of the others sees; else 0
    tables: Tensor  # `[tokens, most pages]` int32, the engine's pages of each token's sequence


def most_own_pages(tokens: int, rows: int) -> int:
    """Return the pages of a step's own pool that any of its batches may fill."""
    # Those that decode side by side, then whole pages, of which each sequence's last is not full.
    return 2 * -(-tokens // PAGE_TOKENS) + min(tokens, rows)


def own_columns(pages: int) -> int:
    """Return the columns of a table of own pages, always the same: kernels are compiled for it."""
    return -(-pages // 16) * 16


class CudaGraphStep(EngineStep):
    """A step of which the host knows the room alone, no batch; see `captured_step`."""

    @property
    def _numbers(self) -> _Numbers:
        return self.once("numbers", self._worked_out)

    def _worked_out(self) -> _Numbers:
        starts, device = self.starts, self.starts.device
        row = torch.arange(self.rows, dtype=torch.int32, device=device)
        token = torch.arange(len(self.slots), dtype=torch.int32, device=device)
        # The first sequence with more new tokens than one, or none. No number is read from the
        # host, not even one that stands here: a copy of it would not be held by a graph.
        decoding = starts[1:] - starts[:-1] == 1
        first = row.masked_fill(decoding, self.rows).amin()
        lengths = self.lengths[: self.decodes].masked_fill(row[: self.decodes] >= first, 0)
        others = (token >= first) & (token < starts[-1])
        return _Numbers(token, lengths, torch.maximum(starts, first), others[:, None])

    def decoding(self, step: Any) -> Tensor:
        """Return the tokens of each row of a decoding step; 0 where it has nothing to do."""
        if isinstance(step, SegmentsStep):
            return self.once("seen", self._seen)
        return self._numbers.lengths

    def _sequences(self) -> Tensor:
        """Return each token's sequence, int64; padding may have any."""

        def made() -> Tensor:
            found = torch.searchsorted(self.starts[1:], self._numbers.token, right=True)
            return found.clamp(max=self.rows - 1)

        return self.once("sequences", made)

    def _seen(self) -> Tensor:
        """Return how many tokens each token sees in the engine's pages, ``[tokens]`` int32."""
        numbers, sequences = self._numbers, self._sequences()
        before = self.lengths - (numbers.starts[1:] - numbers.starts[:-1])
        return before[sequences].masked_fill(numbers.token >= self.starts[-1], 0)

    def own(self, pages: int) -> OwnPages:
        """Return where the step's tokens lie in its own pool, and what they see of the engine's."""
        assert pages >= most_own_pages(len(self.slots), self.rows)

        def made() -> OwnPages:
            numbers, sequences, token = self._numbers, self._sequences(), self._numbers.token
            lengths = numbers.starts[1:] - numbers.starts[:-1]
            filling = (lengths + (PAGE_TOKENS - 1)) // PAGE_TOKENS
            page = filling.cumsum(0) - filling + -(-len(token) // PAGE_TOKENS)
            within = token - numbers.starts[:-1][sequences]
            slots = torch.where(numbers.others[:, 0], page[sequences] * PAGE_TOKENS + within, token)
            columns = torch.arange(own_columns(pages), device=self.starts.device)
            table = (page[:, None] + columns).clamp(max=pages - 1).int()
            slots = slots.masked_fill(token >= self.starts[-1], -1)
            return OwnPages(slots, table, lengths, self.table[sequences])

        return self.once(("own", pages), made)

    def rebuilt(self, room: int, page: int) -> RebuiltPages:
        """Return which pages are rebuilt for sequences with several new tokens, in turn."""

        def made() -> RebuiltPages:
            numbers, sequences, token = self._numbers, self._sequences(), self._numbers.token
            several = numbers.starts[1:] > numbers.starts[:-1]
            filling = ((self.lengths + (page - 1)) // page).masked_fill(~several, 0)
            stop = filling.cumsum(0, dtype=torch.int32)
            begin, fits = stop - filling, several & (stop <= room)
            number = torch.arange(room, dtype=torch.int32, device=self.starts.device)
            own = torch.searchsorted(stop, number, right=True).clamp(max=self.rows - 1)
            place = number - begin[own]
            columns = place.clamp(0, self.table.shape[1] - 1)
            there = (number < stop[-1]) & fits[own]
            pages = self.table[own, columns].masked_fill(~there, -1)
            table = (begin[:, None] + number).clamp(max=room - 1)
            attends = fits[sequences] & numbers.others[:, 0]
            past = self.lengths - (self.starts[1:] - self.starts[:-1])
            seen = (past - self.starts[:-1])[sequences] + token + 1
            seen = seen.masked_fill(attends | (token >= self.starts[-1]), 0)
            return RebuiltPages(
                torch.stack([pages, place * page], dim=1).int(),
                table,
                self.lengths.masked_fill(~fits, 0),
                attends[:, None],
                seen.int(),
                self.table[sequences],
            )

        return self.once(("rebuilt", room, page), made)

    def cut_rows(self, step: RowsStep, lengths: Tensor) -> RowsCut:
        """Return how the rows of several new tokens are cut, for all layers alike."""
        return self.once(
            (step.heights, id(lengths)),
            lambda: step.cut(self._numbers.starts, lengths, len(self.slots)),
        )

    def sums(self, columns: int) -> Tensor:
        """Return ``[tokens, columns]`` float32 for others' log2-sum-exp; -inf elsewhere."""
        shape, device = (len(self.slots), columns), self.starts.device
        return self.once(("sums", columns), lambda: torch.full(shape, float("-inf"), device=device))

    def joined(self, decoded: Tensor, attended: Tensor) -> Tensor:
        """Return each token's output, and zeros for padding."""
        others, count = self._numbers.others, len(decoded)
        front = attended[:count]
        torch.where(others[:count], front, decoded, out=front)
        if count < len(attended):
            attended[count:].masked_fill_(self.once(("decoded", count), lambda: ~others[count:]), 0)
        return attended


def captured_step(
    alike: dict[Any, tuple[list[Any], Tensor]],
    slots: Tensor,
    table: Tensor,
    starts: Tensor,
    lengths: Tensor,
) -> CudaGraphStep:
    """Return a step in the form that a graph holds."""
    rows = len(lengths)
    # A sequence that decodes has its token at its own number, so there are no more than tokens.
    return CudaGraphStep(alike, slots, table, starts, lengths, min(rows, len(slots)), rows)
