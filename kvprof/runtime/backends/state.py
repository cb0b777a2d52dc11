"""What the layers of one cache share when they run on the kernels: counts of tokens, cut work.

All layers see the same tokens, so how many each row has had, which slots a pass fills and how a
decoding step is cut are computed once per pass, on the device: nothing waits for the host, and a
CUDA graph that holds a step counts for itself when it is replayed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.segments.layout import HeadKind, SegmentsLayout
from kvprof.models.interface import Rotation
from kvprof.runtime.clock import part
from kvprof.runtime.rotary import RotaryTable, angles
from kvprof.runtime.tensors import is_capturing

if TYPE_CHECKING:
    from kvprof.kernels.parts import Schedule  # Triton is for Linux only

__all__ = [
    "KernelPass",
    "KernelState",
    "KernelStore",
    "ModelKinds",
    "SlotTable",
    "SlotTables",
    "check_room",
    "next_capacity",
]

# --- What a layer's store is, whichever kernels it is for.


# Room is made for whole tiles of tokens.
_TILE = 64


def next_capacity(held: int, wanted: int, reach: int | None) -> int:
    """Return for how many tokens to make room where `wanted` are to come.

    Parameters
    ----------
    held : int
        That there is room for now.
    wanted : int
    reach : int or None
        Longest sequence that is to come, where it is known.
    """
    if reach is not None and reach >= wanted:
        # What generation will never reach is not worth holding, but for whole tiles: kernels are
        # compiled anew for a room of another divisibility.
        return -(-min(2 * wanted, reach) // _TILE) * _TILE
    return -(-max(wanted, 2 * held) // _TILE) * _TILE


def check_room(capacity: int | None, tokens: int) -> None:
    """Refuse more tokens than a static cache of `capacity` tokens has room for.

    Raises
    ------
    UsageError
    """
    if capacity is not None and tokens > capacity:
        raise UsageError(f"the static cache has room for {capacity} tokens, not for {tokens}")


class KernelStore(ABC):
    """What one layer stores for the kernels: one tensor for all rows of a batch.

    Parameters
    ----------
    capacity : int or None
        Tokens per sequence to make room for at once; None grows with the sequence.

    Attributes
    ----------
    buffer : Tensor
        Empty before the first token.
    captured : bool
        Whether a CUDA graph reads and writes the buffer where it lies.
    """

    def __init__(self, capacity: int | None) -> None:
        self.buffer: Tensor = torch.empty(0)
        self.captured = False
        self._fixed = capacity

    def _may_grow(self, device: torch.device) -> None:
        """Refuse to make room in the middle of a CUDA graph, or away from where one writes.

        Raises
        ------
        UsageError
        """
        if is_capturing(device):
            raise UsageError(
                "a CUDA graph cannot make room in a cache; capture a step of a static cache "
                "(new_cache(capacity=...)) that has run once before"
            )
        self._may_move()

    def _may_move(self) -> None:
        """Refuse to lay the tokens elsewhere where a CUDA graph would go on writing here.

        Raises
        ------
        UsageError
        """
        if self.captured:
            raise UsageError(
                "a CUDA graph writes into this cache, which another number of sequences needs "
                "elsewhere; make a new cache for them, and capture a step of it"
            )

    @property
    @abstractmethod
    def rows(self) -> int:
        """Sequences that it has room for; 0 before the first token."""

    @property
    @abstractmethod
    def room(self) -> float:
        """Tokens of a row that it has room for where it lies; without end for a whole window."""

    @abstractmethod
    def make_room(
        self, batch: int, tokens: int, reach: int | None, device: torch.device, dtype: torch.dtype
    ) -> Any:
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

    @abstractmethod
    def select(self, index: list[int]) -> None:
        """Make row i what row ``index[i]`` was."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all tokens; a static cache keeps its room."""

    @abstractmethod
    def bytes_at(self, seen: list[int]) -> int:
        """Return the bytes of what is stored of rows that have had `seen` tokens each."""


@dataclass(eq=False)
class KernelPass:
    """One forward pass, on one device.

    Attributes
    ----------
    tokens : int
        New tokens of every row, padding included.
    hidden : Tensor or None
        ``[batch]`` int32: how many of a row's first ones are padding; None where none is.
    start, after : Tensor
        ``[batch]`` int32: real tokens that each row had had before, and has had afterwards.
    schedules : dict
        How the work of decoding steps is cut, by the step.
    """

    tokens: int
    hidden: Tensor | None
    start: Tensor
    after: Tensor
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
        """Return how many slots a decoding step's query sees, ``[batch]`` int32.

        A row that is padding still sees one, whatever lies there; nobody reads its result.
        """
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

# Rebuilt keys are rotated by the cosines and sines that the model's rotary function got in the pass
# that the token came in: no position is computed here, so rows with positions of their own and
# scalings that change with the length need nothing special. Tables are working memory, no part of
# the cache (`kvprof.runtime.rotary`).


@dataclass(eq=False)
class SlotTable:
    """Cosines and sines of one way to rotate.

    Attributes
    ----------
    both : Tensor
        ``[2, rows, capacity + 1, width]``: cosines and sines. One row serves a batch whose rows
        are rotated alike. The last slot takes what has no other: padding.
    checked : bool
        Whether they were seen to rotate keys as the model does.
    captured : bool
        Whether a CUDA graph reads them where they lie.
    """

    both: Tensor
    checked: bool = False
    captured: bool = False

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
                "a CUDA graph cannot make room for the angles of rebuilt keys; capture a step of "
                "a static cache (new_cache(capacity=...)) that has run once before, with the same "
                "position_ids"
            )
        if self.captured:
            raise UsageError(
                "a CUDA graph reads this cache's angles, which rows that are padded otherwise "
                "cannot share; make a new cache for them, and capture a step of it"
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
        """Return the angles by position in the padded sequence, zeros where there is padding.

        Parameters
        ----------
        first : sequence of int
            Where each row's first real token stands.
        total : int
            Tokens so far, padding included.
        """
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
        passing: KernelPass,
        aligned: bool,
        capacity: int,
        dtype: torch.dtype,
    ) -> SlotTable:
        """Return a layer's table with the angles of the pass under way.

        Parameters
        ----------
        layer : int
        rotation : Rotation
            The layer's call of the model's rotary function.
        passing : KernelPass
        aligned : bool
            Whether all rows have their first real token at the same position.
        capacity : int
            Slots that the layer has room for.
        dtype : torch.dtype
            Of the states.

        Raises
        ------
        UsageError
            For a function without tables, and when a CUDA graph would have to make room.
        """
        given = angles(rotation, -1)
        source = rotation.args[2] if len(rotation.args) > 2 else rotation.kwargs["cos"]

        def written() -> tuple[Tensor, SlotTable]:
            batch, known = len(passing.start), self._of.get(layer)
            rows = 1 if aligned and len(given.cos) == 1 else batch
            if known is None:
                # What the kernels read: their own dtype or float32.
                kept = dtype if given.cos.dtype == dtype else torch.float32
                shape = (2, rows, capacity + 1, given.cos.shape[-1])
                table = SlotTable(_empty(shape, given.cos, kept))
            elif known in passing.once("tables", list):
                # Layers that shared a table, and turn by angles of their own from this pass on.
                both = _empty(tuple(known.both.shape), known.both, known.both.dtype)
                table = SlotTable(both.copy_(known.both), known.checked)
            else:
                table = known
            table.fit(batch if table.both.shape[1] == batch else rows, capacity)
            table.captured |= is_capturing(table.both.device)
            table.write(given.cos, given.sin, _slots(passing))
            passing.once("tables", list).append(table)
            return source, table  # the source is held: no other tensor may get its identity

        known: tuple[Tensor, SlotTable] = passing.once(("angles", id(source)), written)
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


def _slots(passing: KernelPass) -> Tensor:
    """Return the slot of every token of a pass, ``[batch, tokens]``; of padding none there is."""

    def made() -> Tensor:
        token = torch.arange(passing.tokens, dtype=torch.int32, device=passing.start.device)
        slots = passing.start[:, None] + token
        if passing.hidden is None:
            return slots
        hidden = passing.hidden[:, None]
        return torch.where(token < hidden, torch.iinfo(torch.int32).max, slots - hidden)

    found: Tensor = passing.once("slots", made)
    return found


# --- The counts of one cache.


class ModelKinds(NamedTuple):
    """The kinds of head of all layers, for which kernels are built so that layers share them.

    Attributes
    ----------
    planes : tuple of (key width, value width), optional
        Of layers whose tokens are all stored alike; None where they have too many between them.
    segments : tuple of HeadKind, optional
        Of layers whose tokens lie in segments; None likewise.
    """

    planes: tuple[tuple[int, int], ...] | None = None
    segments: tuple[HeadKind, ...] | None = None


_NONE = ModelKinds()


def _where_all(kinds: tuple[Any, ...] | None, own: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return a model's kinds where all of a layer's are among them; None elsewhere."""
    return kinds if kinds is not None and set(own) <= set(kinds) else None


class KernelState:
    """The counts and the cut work of one cache.

    Parameters
    ----------
    kinds : ModelKinds, optional

    Attributes
    ----------
    first : list of int
        Where each row's first real token stands in the padded sequence; for a row that is padding
        so far, where the next pass begins or later.
    past, tokens : int
        Of the pass under way: tokens before it, padding included, and its own (0 outside a pass).
    rotation : Rotation or None
        Of the layer that runs: its call of the model's rotary function, where it rebuilds keys.
    tables : SlotTables
        The angles that rebuilt keys are rotated by.
    held : list
        What captured steps read and nothing else may hold.
    """

    def __init__(self, kinds: ModelKinds = _NONE) -> None:
        self.kinds = kinds
        self.first: list[int] = []
        self.past = 0
        self.tokens = 0
        self.rotation: Rotation | None = None
        self.tables = SlotTables()
        self._hidden: list[int] = []
        self._seen: dict[torch.device, Tensor] = {}
        self._passes: dict[torch.device, KernelPass] = {}
        self.held: list[Any] = []
        self._steps: dict[Any, tuple[Any, Any]] = {}
        # By what steps have in common whose work is cut together: their tables, one after another.
        self._together: dict[Any, tuple[list[Any], Tensor]] = {}
        # Steps whose work was cut by themselves, since no other of theirs was known.
        self._alone: dict[Any, list[Any]] = {}

    def continues(self, starts: Sequence[int], past: int) -> bool:
        """Whether a mask whose rows begin at `starts` shows every stored token.

        Parameters
        ----------
        starts : sequence of int
            Where each row's first visible token stands.
        past : int
            Tokens before the pass, padding included.
        """
        known = self.first or starts
        return all(
            first >= past or start <= first for start, first in zip(starts, known, strict=True)
        )

    def begin(self, starts: Sequence[int], past: int, tokens: int) -> None:
        """Begin a pass.

        Parameters
        ----------
        starts : sequence of int
            Where each row's first real token stands; of rows that have begun it is known.
        past, tokens : int
            Tokens before the pass and its own.
        """
        known = self.first or [past] * len(starts)
        self.first = [
            first if first < past else max(start, past)
            for first, start in zip(known, starts, strict=True)
        ]
        self.past, self.tokens = past, tokens
        self._hidden = [min(max(first - past, 0), tokens) for first in self.first]
        self._passes.clear()

    def on(self, device: torch.device) -> KernelPass:
        """Return the pass under way, for the layers on a device."""
        if device not in self._passes:
            with part("schedule"):
                self._passes[device] = self._begun(device)
        return self._passes[device]

    def _begun(self, device: torch.device) -> KernelPass:
        known = self._seen.get(device)
        if known is None or len(known) != len(self.first):
            seen = self.seen(self.past)
            with torch.inference_mode(False):
                self._seen[device] = torch.tensor(seen, dtype=torch.int32, device=device)
        start = self._seen[device]
        hidden, after = None, start + self.tokens
        if any(self._hidden):
            hidden = torch.tensor(self._hidden, dtype=torch.int32, device=device)
            after = after - hidden
        return KernelPass(self.tokens, hidden, start, after)

    def end(self) -> None:
        """End the pass: its tokens are stored now."""
        for device, passing in self._passes.items():
            # In place, so that a captured step finds what its last replay left.
            self._seen[device].copy_(passing.after)
        self._passes.clear()
        self.tokens = 0
        self._join_steps()

    def cut(
        self, passing: KernelPass, step: Any, lengths: Callable[[], Tensor], of: Hashable
    ) -> "Schedule":
        """Return how a decoding step's work is cut: in one launch for all layers that are alike.

        Which layers are, the cache knows after their first decoding step, in which each is cut by
        itself.

        Parameters
        ----------
        passing : KernelPass
        step : DecodeStep or SegmentsStep
        lengths : callable
            Gives the lengths that it is cut by.
        of : hashable
            Names these lengths: steps that are cut alike have the same.
        """
        if step not in passing.schedules:
            with part("schedule"):
                steps, tables = self._alike(step, of)
                if is_capturing(tables.device):
                    self.held.append(tables)
                cuts = step.cut_alike(tables, lengths())
                passing.schedules.update(zip(steps, cuts, strict=True))
        return passing.schedules[step]

    def _alike(self, step: Any, of: Hashable) -> tuple[list[Any], Tensor]:
        """Return the steps that are cut with one, itself among them, and their tables."""
        key = step.cut_by, of
        known = self._together.get(key)
        if known is not None and any(each is step for each in known[0]):
            return known
        self._alone.setdefault(key, []).append(step)
        return [step], step.cut_table[None]

    def _join_steps(self) -> None:
        """Lay the tables of steps side by side that were cut by themselves and are alike."""
        if not self._alone or any(is_capturing(device) for device in self._seen):
            return
        used = [step for _, step in self._steps.values()]
        self._together = {
            key: known for key, known in self._together.items() if known[0][0] in used
        }
        for key, steps in self._alone.items():
            before = self._together.pop(key, ([],))[0]
            alike = [step for step in used if step in [*before, *steps]]
            if alike:
                with torch.inference_mode(False):
                    self._together[key] = alike, torch.stack([step.cut_table for step in alike])
        self._alone.clear()

    def buffers(self) -> list[Tensor]:
        """Return what a captured step reads and writes here, where it lies now."""
        return [*self._seen.values(), *(table.both for table in self.tables.all())]

    def prepared_steps(self) -> list[Any]:
        """Return what `prepared` has made: a captured step reads its tables."""
        return list(self._steps.values())

    def seen(self, total: int) -> list[int]:
        """Return how many real tokens each row has had after `total` tokens, padding included."""
        return [max(0, total - first) for first in self.first]

    def step(self, layout: RaggedLayout, device: torch.device, window: int | None) -> Any:
        """Return the decoding step of a layout, one for all layers of the same widths.

        Layers with a window see other lengths: they have a step of their own.
        """
        from kvprof.kernels.decode.step import decode_step  # Triton is for Linux only

        widths = layout.key_widths, layout.value_widths, layout.group
        key = (widths, device, window)
        own = zip(layout.key_widths, layout.value_widths, strict=True)
        pairs = _where_all(self.kinds.planes, own)
        return self.prepared(key, layout, lambda: decode_step(layout, device, pairs=pairs))

    def segments_step(self, layout: SegmentsLayout, device: torch.device) -> Any:
        """Return the decoding step of segments, one for all layers of the same widths."""
        from kvprof.kernels.segments.step import segments_step  # Triton is for Linux only

        widths = tuple(
            segment.layout.key_widths + segment.layout.value_widths for segment in layout.segments
        )
        key = ("segments", widths, layout.group, device)
        kinds = _where_all(self.kinds.segments, layout.kinds)
        return self.prepared(key, layout, lambda: segments_step(layout, device, kinds=kinds))

    def prepared(self, key: Any, layout: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` prepared for a layout, anew once the layout is another.

        Parameters
        ----------
        key : hashable
            Of the layers that share it, whatever room they have.
        layout : RaggedLayout or SegmentsLayout
        make : callable
        """
        known = self._steps.get(key)
        if known is None or known[0] != layout:
            known = layout, make()
            self._steps[key] = known
        return known[1]

    def select(self, index: Sequence[int]) -> None:
        """Make row i what row ``index[i]`` was."""
        if not self.first:
            return
        self.first = [self.first[row] for row in index]
        self.tables.select(index)
        for device, seen in self._seen.items():
            rows = torch.tensor(index, dtype=torch.int64, device=device)
            if len(rows) == len(seen):  # in place, where a captured step counts
                seen.copy_(seen.index_select(0, rows))
                continue
            with torch.inference_mode(False):
                self._seen[device] = seen.index_select(0, rows)

    def crop(self, total: int) -> None:
        """Go back to `total` tokens, padding included."""
        self.first = [min(first, total) for first in self.first]
        for device, seen in self._seen.items():
            seen.copy_(torch.tensor(self.seen(total), dtype=torch.int32, device=device))

    def reset(self) -> None:
        """Forget everything but the workspaces."""
        self.first, self.past, self.tokens = [], 0, 0
        # Kept in place for the graphs that count there.
        for seen in self._seen.values():
            seen.zero_()
