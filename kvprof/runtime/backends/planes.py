"""What a layer stores for the kernels: planes for all rows, each row as long as its own tokens.

Token i of a row, counted from its first real one, lies in slot i, or in a layer with a sliding
window of W tokens in slot i mod W: a ring, which after every step holds exactly the W tokens that
the step's query sees, in an order that attention does not care about. Padding is stored nowhere.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.runtime.backends.store import KernelStore, next_capacity
from kvprof.runtime.cohort import Cohort
from kvprof.runtime.graphs import is_capturing
from kvprof.runtime.heads import Bundle
from kvprof.runtime.parts import plain_part

__all__ = ["PlaneStore", "plane_cohorts", "planes_of", "rows_alike"]


def planes_of(layout: RaggedLayout, buffer: Tensor) -> Iterator[Tensor]:
    """Yield every plane of a buffer, ``[batch, capacity, chunk]``, as a view."""
    for head in range(layout.heads):
        for side in layout.planes(buffer, head):
            yield from side


class PlaneStore(KernelStore):
    """One layer's planes.

    Parameters
    ----------
    key_widths, value_widths : tuple of int
        Per KV head.
    group : int
        Query heads per KV head.
    window : int or None
        The layer's sliding window, in tokens.
    capacity : int or None
        Tokens per sequence to make room for at once; None grows with the sequence.

    Attributes
    ----------
    layout : RaggedLayout or None
        None before the first token.
    """

    def __init__(
        self,
        key_widths: tuple[int, ...],
        value_widths: tuple[int, ...],
        group: int,
        window: int | None,
        capacity: int | None,
    ) -> None:
        super().__init__()
        self.window = window
        self.layout: RaggedLayout | None = None
        self._widths = (key_widths, value_widths, group)
        self._fixed = capacity

    @property
    def rows(self) -> int:
        """Sequences."""
        return 0 if self.layout is None else self.layout.batch

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
        """See to it that every row has slots for its first `tokens` tokens; return the layout.

        Parameters
        ----------
        batch : int
        tokens : int
            Most that a row may have had after the pass.
        reach : int or None
            Longest sequence that is to come, where it is known.
        device, dtype
            Of the states.

        Raises
        ------
        UsageError
            When a static cache is too small, or room is wanted while a CUDA graph is captured.
        """
        if self._fixed is not None and tokens > self._fixed:
            raise UsageError(
                f"the static cache has room for {self._fixed} tokens, not for {tokens}"
            )
        if self.layout is not None and self.layout.batch != batch:
            self.layout = None  # a static cache that was emptied for another batch
        wanted = tokens if self.window is None else min(tokens, self.window)
        if self.layout is not None and self.layout.capacity >= wanted:
            return self.layout
        if is_capturing(device):
            raise UsageError(
                "a CUDA graph cannot make room in a cache; capture a step of a static cache "
                "(new_cache(capacity=...)) that has run once before"
            )
        layout = self.layout_for(batch, self._next_capacity(wanted, reach))
        self._may_move()
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
        """Return the bytes of what is stored of rows that have had `seen` tokens each.

        A ring's oldest token is seen by no later query: it is not stored, only not yet overwritten.
        """
        if self.window is not None:
            seen = [min(tokens, self.window - 1) for tokens in seen]
        width = sum(self._widths[0]) + sum(self._widths[1])
        return sum(seen) * width * self.buffer.itemsize

    # Windows: a pass over several tokens wants them in the order of time.

    def unrolled(self, start: Tensor, past: int, tokens: int) -> tuple[RaggedLayout, Tensor]:
        """Return planes that begin with a row's stored tokens in order, with room for more.

        Parameters
        ----------
        start : Tensor
            ``[batch]`` int32, tokens that each row has had.
        past : int
            Most tokens of a row that are still wanted, at most ``window - 1``.
        tokens : int
            Slots to leave free behind them.
        """
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
        """Take the newest tokens of what `unrolled` gave out, now filled, back into the ring.

        Parameters
        ----------
        layout, buffer
            The filled planes.
        start, after : Tensor
            ``[batch]`` int32, tokens that each row had had before the pass, and has had now.
        """
        assert self.layout is not None
        assert self.window is not None
        slots = torch.arange(self.layout.capacity, device=start.device)
        newest = after.long()[:, None] - 1
        # The newest token that belongs in each slot; a slot that has none gets anything.
        tokens = newest - (newest - slots) % self.window
        first = (start.long() - start.clamp(max=self.window - 1))[:, None]
        places = (tokens - first).clamp(0, layout.capacity - 1)
        filled = planes_of(layout, buffer)
        for ring, plane in zip(planes_of(self.layout, self.buffer), filled, strict=True):
            ring.copy_(_picked(plane, places))

    def head_rows(self, head: int, row: int, seen: int) -> tuple[Tensor, Tensor]:
        """Return a head's stored keys and values of one row in order, ``[stored, width]`` each.

        Parameters
        ----------
        head, row : int
        seen : int
            Tokens that the row has had.
        """
        assert self.layout is not None
        first = 0 if self.window is None else max(0, seen - self.window + 1)
        slots = torch.arange(first, seen, device=self.buffer.device)
        slots = slots if self.window is None else slots % self.window
        keys, values = self.layout.planes(self.buffer, head)
        found = [torch.cat([p[row] for p in side], dim=-1)[slots] for side in (keys, values)]
        return found[0], found[1]


def _picked(plane: Tensor, places: Tensor) -> Tensor:
    """Take tokens ``places [batch, N]`` out of ``[batch, capacity, chunk]``."""
    return plane.gather(1, places[..., None].expand(-1, -1, plane.shape[-1]))


# --- What the kernels have stored, as the layers that run on torch keep it.


def rows_alike(seen: Sequence[int]) -> dict[int, list[int]]:
    """Return the rows that have had as many tokens, by that number; rows without any are left out.

    Parameters
    ----------
    seen : sequence of int
        Tokens of each row.
    """
    together: dict[int, list[int]] = {}
    for row, tokens in enumerate(seen):
        if tokens:
            together.setdefault(tokens, []).append(row)
    return together


def plane_cohorts(
    store: PlaneStore, seen: Sequence[int], bundles: tuple[list[Bundle], list[Bundle]], heads: int
) -> list[Cohort]:
    """Return planes as cohorts of rows.

    Parameters
    ----------
    store : PlaneStore
    seen : sequence of int
        Tokens of each row.
    bundles : pair of list of Bundle
        Of the keys and of the values.
    heads : int
        KV heads that share a latent, which is one of the store's heads.
    """
    found = []
    for tokens, rows in rows_alike(seen).items():
        cohort = Cohort(rows, tokens)
        latents = [
            [store.head_rows(number, row, tokens) for row in rows] for number in range(store.heads)
        ]
        for place, kept in enumerate((cohort.keys, cohort.values)):
            for bundle in bundles[place]:
                numbers = [head // heads for head in bundle.kv_heads[::heads]]
                own = [torch.stack([pair[place] for pair in latents[n]]) for n in numbers]
                kept.append([plain_part(torch.stack(own, dim=1))])
        found.append(cohort)
    return found
