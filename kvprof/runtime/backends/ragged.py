"""An attention layer that stores all tokens in one format, on kvprof's kernels.

A row stores token i, counted from its first real token, in slot i. A layer with a sliding window of
W tokens stores it in slot i mod W. Padding is not stored.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout
from kvprof.runtime.attention import GroupStack
from kvprof.runtime.backends.layer import KernelLayer, prefilled
from kvprof.runtime.backends.slots import KernelMetadata
from kvprof.runtime.backends.state import KernelState, KernelStore, next_capacity
from kvprof.runtime.cache import check_room
from kvprof.runtime.rows import RowGroup, plain_part

__all__ = ["PlaneKernelLayer", "PlaneStore", "RaggedKernelLayer", "planes_of", "rows_alike"]

# --- What a layer stores: planes for all rows.


def planes_of(layout: RaggedLayout, buffer: Tensor) -> Iterator[Tensor]:
    """Yield every plane of a buffer, ``[batch, capacity, chunk]``, as a view."""
    for head in range(layout.heads):
        for side in layout.planes(buffer, head):
            yield from side


class PlaneStore(KernelStore):
    """One layer's planes."""

    def __init__(
        self,
        key_widths: tuple[int, ...],  # per KV head
        value_widths: tuple[int, ...],
        group: int,  # query heads per KV head
        window: int | None,
        #: Tokens per sequence to make room for at once; None grows with the sequence.
        capacity: int | None,
    ) -> None:
        super().__init__(capacity)
        self.window = window  # the layer's sliding window, in tokens
        self.layout: RaggedLayout | None = None  # none before the first token
        self._widths = (key_widths, value_widths, group)

    @property
    def rows(self) -> int:
        """Sequences."""
        return 0 if self.layout is None else self.layout.batch

    @property
    def room(self) -> float:
        """Tokens of a row that it has room for where it lies; without end for a whole window."""
        held = 0 if self.layout is None else self.layout.capacity
        return math.inf if self.window is not None and held >= self.window else held

    @property
    def heads(self) -> int:
        """Stored heads, or latents that several heads share."""
        return len(self._widths[0])

    def layout_for(self, batch: int, capacity: int) -> RaggedLayout:
        """Return how the same heads lie for other rows."""
        return RaggedLayout(*self._widths, batch, capacity)

    def make_room(
        self, batch: int, tokens: int, reach: int | None, device: torch.device, dtype: torch.dtype
    ) -> RaggedLayout:
        """See to it that every row has slots for its first `tokens` tokens; return the layout."""
        check_room(self._fixed, tokens)
        if self.layout is not None and self.layout.batch != batch:
            self.layout = None  # a static cache that was emptied for another batch
        wanted = tokens if self.window is None else min(tokens, self.window)
        if self.layout is not None and self.layout.capacity >= wanted:
            return self.layout
        self._may_grow(device)
        layout = self.layout_for(batch, self._next_capacity(wanted, reach))
        # Not as inference tensors: a cache outlives the mode it was made in.
        with torch.inference_mode(False):
            buffer = torch.empty(layout.elements, dtype=dtype, device=device)
        if self.layout is not None:
            old = planes_of(self.layout, self.buffer)
            for new, before in zip(planes_of(layout, buffer), old, strict=True):
                new[:, : before.shape[1]].copy_(before)
        self.layout, self.buffer = layout, buffer
        return layout

    def _next_capacity(self, wanted: int, reach: int | None) -> int:
        held = 0 if self.layout is None else self.layout.capacity
        room = self._fixed or next_capacity(held, wanted, reach)
        return room if self.window is None else min(room, self.window)

    def select(self, index: list[int]) -> None:
        """Make row i what row ``index[i]`` was."""
        if self.layout is None:
            return
        rows = torch.tensor(index, device=self.buffer.device)
        layout = self.layout_for(len(index), self.layout.capacity)
        old = planes_of(self.layout, self.buffer)
        if layout == self.layout:
            # In place, plane by plane: beams are reordered at every step.
            for plane in old:
                plane.copy_(plane.index_select(0, rows))
            return
        self._may_move()
        with torch.inference_mode(False):
            buffer = torch.empty(layout.elements, dtype=self.buffer.dtype, device=rows.device)
        for new, before in zip(planes_of(layout, buffer), old, strict=True):
            new.copy_(before.index_select(0, rows))
        self.layout, self.buffer = layout, buffer

    def clear(self) -> None:
        """Forget all tokens; a static cache keeps its room."""
        if self._fixed is None:
            self.layout, self.buffer = None, torch.empty(0)

    def bytes_at(self, seen: list[int]) -> int:
        """Return the bytes stored for rows of `seen` tokens each."""
        if self.window is not None:
            seen = [min(tokens, self.window - 1) for tokens in seen]
        width = sum(self._widths[0]) + sum(self._widths[1])
        return sum(seen) * width * self.buffer.itemsize

    # Windows: a pass over several tokens wants them in the order of time.

    def unrolled(self, start: Tensor, past: int, tokens: int) -> tuple[RaggedLayout, Tensor]:
        """Return planes that begin with a row's stored tokens in order, with room for more."""
        assert self.layout is not None
        assert self.window is not None
        layout = self.layout_for(self.layout.batch, past + tokens)
        buffer = self.buffer.new_empty(layout.elements)
        if past:
            first = start.long() - start.clamp(max=self.window - 1)
            slots = (first[:, None] + torch.arange(past, device=start.device)) % self.window
            slots = slots.clamp(max=self.layout.capacity - 1)  # behind a row's end is anything
            ring = planes_of(self.layout, self.buffer)
            for new, before in zip(planes_of(layout, buffer), ring, strict=True):
                new[:, :past] = _picked(before, slots)
        return layout, buffer

    def roll(self, layout: RaggedLayout, buffer: Tensor, start: Tensor, after: Tensor) -> None:
        """Take the newest tokens of what `unrolled` gave out, now filled, back into the ring."""
        assert self.layout is not None
        assert self.window is not None
        slots = torch.arange(self.layout.capacity, device=start.device)
        newest = after.long()[:, None] - 1
        # The newest token that belongs in each slot; a slot that has none gets anything.
        tokens = newest - (newest - slots) % self.window
        first = (start.long() - start.clamp(max=self.window - 1))[:, None]
        where = (tokens - first).clamp(0, layout.capacity - 1)
        filled = planes_of(layout, buffer)
        for ring, plane in zip(planes_of(self.layout, self.buffer), filled, strict=True):
            ring.copy_(_picked(plane, where))

    def head_rows(self, head: int, row: int, seen: int) -> tuple[Tensor, Tensor]:
        """Return a head's stored keys and values of one row in order, ``[stored, width]`` each."""
        assert self.layout is not None
        first = 0 if self.window is None else max(0, seen - self.window + 1)
        slots = torch.arange(first, seen, device=self.buffer.device)
        slots = slots if self.window is None else slots % self.window
        keys, values = self.layout.planes(self.buffer, head)
        found = [torch.cat([p[row] for p in side], dim=-1)[slots] for side in (keys, values)]
        return found[0], found[1]


def _picked(plane: Tensor, slots: Tensor) -> Tensor:
    """Take tokens ``slots [batch, N]`` out of ``[batch, capacity, chunk]``."""
    return plane.gather(1, slots[..., None].expand(-1, -1, plane.shape[-1]))


def rows_alike(seen: Sequence[int]) -> dict[int, list[int]]:
    """Return the rows that have had as many tokens, by that number; without rows of none."""
    together: dict[int, list[int]] = {}
    for row, tokens in enumerate(seen):
        if tokens:
            together.setdefault(tokens, []).append(row)
    return together


class PlaneKernelLayer(KernelLayer):
    """A layer whose tokens are all stored alike, at full precision."""

    form = "ragged"

    @property
    def heads(self) -> int:
        """KV heads that share a latent, n; as many in every group of the keys and of the values."""
        return self.layer.keys.groups[0].heads

    @property
    def pairs(self) -> set[tuple[int, int]]:
        """The widths that stored heads have, of keys and values."""
        keys, values = self.layer.keys.groups, self.layer.values.groups
        return {(key.rank, value.rank) for key, value in zip(keys, values, strict=True)}

    def new_store(self, capacity: int | None) -> PlaneStore:
        """Return an empty store; `capacity` is a static cache's, in tokens."""
        return PlaneStore(
            tuple(group.rank for group in self.layer.keys.groups),
            tuple(group.rank for group in self.layer.values.groups),
            self.heads * self.facts.group,
            self.layer.sliding_window,
            capacity,
        )

    def row_groups(
        self,
        store: KernelStore,
        state: KernelState,
        total: int,
        stacks: tuple[list[GroupStack], list[GroupStack]],
    ) -> list[RowGroup]:
        """Return what a store holds as `kvprof.runtime.layer` keeps it."""
        assert isinstance(store, PlaneStore)
        found = []
        for tokens, rows in rows_alike(state.seen(total)).items():
            group = RowGroup(rows, tokens)
            latents = [
                [store.head_rows(number, row, tokens) for row in rows]
                for number in range(store.heads)
            ]
            for side, kept in enumerate((group.keys, group.values)):
                for stack in stacks[side]:
                    numbers = [head // self.heads for head in stack.kv_heads[:: self.heads]]
                    own = [torch.stack([pair[side] for pair in latents[n]]) for n in numbers]
                    kept.append([plain_part(torch.stack(own, dim=1))])
            found.append(group)
        return found


class RaggedKernelLayer(PlaneKernelLayer):
    """A layer whose heads each have planes of their own width, or a ring in a sliding window."""

    def _attended(
        self,
        store: PlaneStore,
        state: KernelState,
        metadata: KernelMetadata,
        states: tuple[Tensor, Tensor, Tensor],
        scoring: dict[str, Any],
    ) -> Tensor:
        if metadata.tokens > 1:
            return self._prefilled(store, state, metadata, states, scoring)
        layout, window = store.layout, self.layer.sliding_window
        assert layout is not None
        projected = self._projected(layout, store.buffer, metadata.slots(window), metadata, *states)
        step = state.step(layout, projected.device, window)
        schedule = state.cut(metadata, step, lambda: metadata.lengths(window), window)
        output: Tensor = step.run(projected[:, 0], store.buffer, schedule, **scoring)
        return output.unsqueeze(1)

    def _prefilled(
        self,
        store: PlaneStore,
        state: KernelState,
        metadata: KernelMetadata,
        states: tuple[Tensor, Tensor, Tensor],
        scoring: dict[str, Any],
    ) -> Tensor:
        """Store and attend to several tokens."""
        layout, window, tokens = store.layout, self.layer.sliding_window, metadata.tokens
        assert layout is not None
        buffer, start, lengths = store.buffer, metadata.start, metadata.after
        seen = state.seen(state.past)
        fresh = [b - a for a, b in zip(seen, state.seen(state.past + tokens), strict=True)]
        if window is not None:
            # What lies in a ring is in no order of time, and the pass may be longer than the ring.
            past = max(0, min(state.past - min(state.first), window - 1))
            layout, buffer = store.unrolled(metadata.start, past, tokens)
            start = metadata.once(("kept", window), lambda: metadata.start.clamp(max=window - 1))
            lengths = metadata.once(
                ("reached", window), lambda: start + (metadata.after - metadata.start)
            )
            seen = [min(old, window - 1) for old in seen]
        host_lengths = [old + new for old, new in zip(seen, fresh, strict=True)]
        projected = self._projected(layout, buffer, start, metadata, *states)
        output = prefilled(projected, buffer, layout, lengths, host_lengths, scoring, window)
        if window is not None:
            store.roll(layout, buffer, metadata.start, metadata.after)
        return output
