"""What a forward pass brings to the kernels, and the slots in which its tokens' angles stay."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.models.interface import RotaryTable, Rotation, rotary_angles
from kvprof.runtime.tensors import is_capturing

if TYPE_CHECKING:  # Triton is for Linux only
    from kvprof.kernels.split_kv import Schedule

__all__ = ["KernelMetadata", "SlotTable", "SlotTables"]


@dataclass(eq=False)
class KernelMetadata:
    """What kernels read of one forward pass, on one device."""

    tokens: int  # new tokens of every row, padding included
    #: `[batch]` int32: how many of a row's first ones are padding; None where none is.
    hidden: Tensor | None
    #: `[batch]` int32: real tokens that each row had had before, and has had afterwards.
    start: Tensor
    after: Tensor
    #: How the work of decoding steps is cut, by the step.
    schedules: dict[Any, "Schedule"] = field(default_factory=dict)
    _known: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` gives, computed for the first layer that asks."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def slots(self, window: int | None) -> Tensor:
        """Return the slot of each row's next token, ``[batch]`` int32."""
        if window is None:
            return self.start
        slots: Tensor = self.once(("slots", window), lambda: self.start % window)
        return slots

    def lengths(self, window: int | None) -> Tensor:
        """Return how many slots a decoding query sees, ``[batch]`` int32; 1 for padding."""
        if window is None and self.hidden is None:
            return self.after
        lengths: Tensor = self.once(("lengths", window), lambda: self.after.clamp(1, window))
        return lengths

    def padding(self) -> Tensor:
        """Return which of the pass's tokens are padding, ``[batch, tokens, 1]`` bool."""
        assert self.hidden is not None
        hidden = self.hidden
        token = torch.arange(self.tokens, device=hidden.device)
        found: Tensor = self.once("padding", lambda: (token < hidden[:, None]).unsqueeze(-1))
        return found


# --- The angles of every stored token, slot by slot, as the model itself rotated that token.
#
# Rebuilt keys are rotated by the cosines and sines that the model's rotary function got in the pass
# that the token came in: no position is computed here, so rows with positions of their own and
# scalings that change with the length need nothing special. Tables are working memory, no part of
# the cache (`RotaryTable`).


@dataclass(eq=False)
class SlotTable:
    """Cosines and sines of one way to rotate."""

    #: `[2, rows, capacity + 1, width]`: cosines and sines. One row serves a batch whose rows are
    #: rotated alike. The last slot takes what has no other: padding.
    both: Tensor
    checked: bool = False  # whether they were seen to rotate keys as the model does
    captured: bool = False  # whether a CUDA graph reads them where they lie

    @property
    def cos(self) -> Tensor:
        """``[rows, capacity + 1, width]``."""
        return self.both[0]

    @property
    def sin(self) -> Tensor:
        """``[rows, capacity + 1, width]``."""
        return self.both[1]

    def served(self) -> tuple[Tensor, Tensor]:
        """Return both as a decoding kernel takes them, without a batch where one row serves all."""
        cos, sin = self.both
        return (cos[0], sin[0]) if len(cos) == 1 else (cos, sin)

    def fit(self, rows: int, capacity: int) -> None:
        """Make room for `rows` rows of `capacity` tokens; what is there stays."""
        old = self.both
        if old.shape[1] == rows and old.shape[2] > capacity:
            return
        if is_capturing(old.device):
            raise UsageError(
                "a CUDA graph cannot allocate RoPE tables; capture a static cache "
                "(new_cache(capacity=...)) after one ordinary step with the same position_ids"
            )
        if self.captured:
            raise UsageError(
                "a CUDA graph reads this cache's RoPE tables, so its padding cannot change; make "
                "a new cache and capture it"
            )
        slots = max(old.shape[2], capacity + 1)
        self.both = _empty((2, rows, slots, old.shape[3]), old, old.dtype)
        if old.shape[1] in (1, rows):  # else of another batch, before the cache was emptied
            self.both[:, :, : old.shape[2] - 1] = old[:, :, :-1]

    def write(self, cos: Tensor, sin: Tensor, slots: Tensor) -> None:
        """Put a pass's angles ``[rows or 1, tokens, width]`` into slots ``[rows, tokens]``."""
        last = self.both.shape[2] - 1
        slots = slots[: self.both.shape[1]].clamp(max=last).long()
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        fresh = torch.stack([cos, sin]).to(self.both.dtype)
        self.both[:, rows, slots] = fresh.expand(-1, len(slots), -1, -1)

    def select(self, index: Tensor) -> None:
        """Make row i what row ``index[i]`` was."""
        if self.both.shape[1] == 1:
            return
        moved = self.both.index_select(1, index)
        if moved.shape != self.both.shape:
            self.both = _empty(tuple(moved.shape), moved, moved.dtype)
        self.both.copy_(moved)

    def unslotted(self, first: Sequence[int], total: int) -> RotaryTable:
        """Return the angles by position in the padded sequence, zeros where there is padding."""
        device = self.both.device
        begins = torch.tensor(first, device=device)[:, None]
        slots = torch.arange(total, device=device) - begins
        rows = torch.arange(len(first), device=device)[:, None]
        if self.both.shape[1] == 1:
            rows = torch.zeros_like(rows)
        found = self.both[:, rows, slots.clamp(min=0)]
        found = torch.where((slots >= 0)[..., None], found, 0)
        return RotaryTable(found[0], found[1])


class SlotTables:
    """The tables of one cache; layers that rotate alike share one."""

    def __init__(self) -> None:
        self._of: dict[int, SlotTable] = {}

    def extended(
        self,
        layer: int,
        rotation: Rotation,
        metadata: KernelMetadata,
        aligned: bool,
        capacity: int,
        dtype: torch.dtype,
    ) -> SlotTable:
        """Return a layer's table with the angles of the pass under way."""
        given = rotary_angles(rotation, -1)
        source = rotation.args[2] if len(rotation.args) > 2 else rotation.kwargs["cos"]

        def written() -> tuple[Tensor, SlotTable]:
            batch, known = len(metadata.start), self._of.get(layer)
            rows = 1 if aligned and len(given.cos) == 1 else batch
            if known is None:
                # What the kernels read: their own dtype or float32.
                kept = dtype if given.cos.dtype == dtype else torch.float32
                shape = (2, rows, capacity + 1, given.cos.shape[-1])
                table = SlotTable(_empty(shape, given.cos, kept))
            elif known in metadata.once("tables", list):
                # Layers that shared a table, and turn by angles of their own from this pass on.
                both = _empty(tuple(known.both.shape), known.both, known.both.dtype)
                table = SlotTable(both.copy_(known.both), known.checked)
            else:
                table = known
            table.fit(batch if table.both.shape[1] == batch else rows, capacity)
            table.captured |= is_capturing(table.both.device)
            table.write(given.cos, given.sin, _slots(metadata))
            metadata.once("tables", list).append(table)
            return source, table  # the source is held: no other tensor may get its identity

        known: tuple[Tensor, SlotTable] = metadata.once(("angles", id(source)), written)
        self._of[layer] = known[1]
        return known[1]

    def all(self) -> list[SlotTable]:
        """Return every table once."""
        return list({id(table): table for table in self._of.values()}.values())

    def select(self, index: Sequence[int]) -> None:
        """Make row i what row ``index[i]`` was."""
        for table in self.all():
            table.select(torch.tensor(index, dtype=torch.int64, device=table.both.device))

    def unslotted(self, first: Sequence[int], total: int) -> list[tuple[list[int], RotaryTable]]:
        """Return every table as the torch path keeps it, with the layers that share it."""
        if not first:  # nothing stored
            return []
        return [
            (
                [layer for layer, own in self._of.items() if own is table],
                table.unslotted(first, total),
            )
            for table in self.all()
        ]


def _empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    # Not as inference tensors: a cache outlives the mode it was made in.
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=like.device)


def _slots(metadata: KernelMetadata) -> Tensor:
    """Return the slot of every token of a pass, ``[batch, tokens]``; of padding none there is."""

    def made() -> Tensor:
        token = torch.arange(metadata.tokens, dtype=torch.int32, device=metadata.start.device)
        slots = metadata.start[:, None] + token
        if metadata.hidden is None:
            return slots
        hidden = metadata.hidden[:, None]
        return torch.where(token < hidden, torch.iinfo(torch.int32).max, slots - hidden)

    found: Tensor = metadata.once("slots", made)
    return found
