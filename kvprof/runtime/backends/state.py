"""State that all layers of a cache share on the kernels: token counts and work partitions.

It is computed once per pass, on the device, so the host never waits and CUDA graphs replay it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.quantized.layout import HeadConfig, SegmentsLayout
from kvprof.models.interface import Rotation
from kvprof.runtime.backends.slots import KernelMetadata, SlotTables
from kvprof.runtime.clock import part
from kvprof.runtime.tensors import is_capturing

if TYPE_CHECKING:
    from kvprof.kernels.split_kv import Schedule  # Triton is for Linux only

__all__ = [
    "HeadConfigs",
    "KernelState",
    "KernelStore",
    "next_capacity",
]

# --- What a layer's store is, whichever kernels it is for.


# Room is made for whole tiles of tokens.
_TILE = 64


def next_capacity(held: int, wanted: int, reach: int | None) -> int:
    """Return for how many tokens to make room where `wanted` are to come."""
    if reach is not None and reach >= wanted:
        # What generation will never reach is not worth holding, but for whole tiles: kernels are
        # compiled anew for a room of another divisibility.
        return -(-min(2 * wanted, reach) // _TILE) * _TILE
    return -(-max(wanted, 2 * held) // _TILE) * _TILE


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
        """Refuse to make room in the middle of a CUDA graph, or away from where one writes."""
        if is_capturing(device):
            raise UsageError(
                "a CUDA graph cannot grow a cache; capture a static cache "
                "(new_cache(capacity=...)) after one ordinary step"
            )
        self._may_move()

    def _may_move(self) -> None:
        """Refuse to lay the tokens elsewhere where a CUDA graph would go on writing here."""
        if self.captured:
            raise UsageError(
                "a CUDA graph writes into this cache, so its number of sequences cannot change; "
                "make a new cache and capture it"
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
        """See to it that every row has slots for its first `tokens` tokens; return the layout."""

    @abstractmethod
    def select(self, index: list[int]) -> None:
        """Make row i what row ``index[i]`` was."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all tokens; a static cache keeps its room."""

    @abstractmethod
    def bytes_at(self, seen: list[int]) -> int:
        """Return the bytes of what is stored of rows that have had `seen` tokens each."""


# --- The counts of one cache.


class HeadConfigs(NamedTuple):
    """The head configs of all layers, for which kernels are built so that layers share them."""

    #: Of layers whose tokens are all stored alike; None where they have too many between them.
    planes: tuple[tuple[int, int], ...] | None = None
    #: Of layers whose tokens lie in segments; None likewise.
    segments: tuple[HeadConfig, ...] | None = None


_NONE = HeadConfigs()


def _where_all(configs: tuple[Any, ...] | None, own: Iterable[Any]) -> tuple[Any, ...] | None:
    """Return a model's head configs where all of a layer's are among them; None elsewhere."""
    return configs if configs is not None and set(own) <= set(configs) else None


class KernelState:
    """The counts and the cut work of one cache."""

    def __init__(self, configs: HeadConfigs = _NONE) -> None:
        self.configs = configs
        #: Where each row's first real token stands in the padded sequence; for a row that is
        #: padding so far, where the next pass begins or later.
        self.first: list[int] = []
        #: Of the pass under way: tokens before it, padding included, and its own (0 outside a
        #: pass).
        self.past = 0
        self.tokens = 0
        #: Of the layer that runs: its call of the model's rotary function, where it rebuilds keys.
        self.rotation: Rotation | None = None
        self.tables = SlotTables()  # the angles that rebuilt keys are rotated by
        self._hidden: list[int] = []
        self._seen: dict[torch.device, Tensor] = {}
        self._passes: dict[torch.device, KernelMetadata] = {}
        self.held: list[Any] = []  # what captured steps read and nothing else may hold
        self._steps: dict[Any, tuple[Any, Any]] = {}
        # By what steps have in common whose work is cut together: their tables, one after another.
        self._together: dict[Any, tuple[list[Any], Tensor]] = {}
        # Steps whose work was cut by themselves, since no other of theirs was known.
        self._alone: dict[Any, list[Any]] = {}

    def continues(self, starts: Sequence[int], past: int) -> bool:
        """Whether a mask whose rows begin at `starts` shows every stored token."""
        known = self.first or starts
        return all(
            first >= past or start <= first for start, first in zip(starts, known, strict=True)
        )

    def begin(self, starts: Sequence[int], past: int, tokens: int) -> None:
        """Begin a pass."""
        known = self.first or [past] * len(starts)
        self.first = [
            first if first < past else max(start, past)
            for first, start in zip(known, starts, strict=True)
        ]
        self.past, self.tokens = past, tokens
        self._hidden = [min(max(first - past, 0), tokens) for first in self.first]
        self._passes.clear()

    def on(self, device: torch.device) -> KernelMetadata:
        """Return the pass under way, for the layers on a device."""
        if device not in self._passes:
            with part("schedule"):
                self._passes[device] = self._begun(device)
        return self._passes[device]

    def _begun(self, device: torch.device) -> KernelMetadata:
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
        return KernelMetadata(self.tokens, hidden, start, after)

    def end(self) -> None:
        """End the pass: its tokens are stored now."""
        for device, metadata in self._passes.items():
            # In place, so that a captured step finds what its last replay left.
            self._seen[device].copy_(metadata.after)
        self._passes.clear()
        self.tokens = 0
        self._join_steps()

    def cut(
        self, metadata: KernelMetadata, step: Any, lengths: Callable[[], Tensor], of: Hashable
    ) -> "Schedule":
        """Return the partition of a decoding step's work, shared by layers of the same layout."""
        if step not in metadata.schedules:
            with part("schedule"):
                steps, tables = self._alike(step, of)
                if is_capturing(tables.device):
                    self.held.append(tables)
                cuts = step.cut_alike(tables, lengths())
                metadata.schedules.update(zip(steps, cuts, strict=True))
        return metadata.schedules[step]

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
        """Return the decoding step of a layout; layers with a sliding window have their own."""
        from kvprof.kernels.decode.step import decode_step  # Triton is for Linux only

        widths = layout.key_widths, layout.value_widths, layout.group
        key = (widths, device, window)
        own = zip(layout.key_widths, layout.value_widths, strict=True)
        pairs = _where_all(self.configs.planes, own)
        return self.prepared(key, layout, lambda: decode_step(layout, device, pairs=pairs))

    def segments_step(self, layout: SegmentsLayout, device: torch.device) -> Any:
        """Return the decoding step of segments, one for all layers of the same widths."""
        from kvprof.kernels.quantized.step import segments_step  # Triton is for Linux only

        widths = tuple(
            segment.layout.key_widths + segment.layout.value_widths for segment in layout.segments
        )
        key = ("segments", widths, layout.group, device)
        configs = _where_all(self.configs.segments, layout.configs)
        return self.prepared(key, layout, lambda: segments_step(layout, device, configs=configs))

    def prepared(self, key: Any, layout: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` prepared for a layout, anew once the layout is another."""
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
