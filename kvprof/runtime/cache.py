"""The compressed cache: transformers' cache interface around what each layer stores."""

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvprof.errors import UsageError
from kvprof.methods.plan import LayerPlan, Plan
from kvprof.methods.tokens import Segment, quantises, segments
from kvprof.models.interface import RotaryTable, Rotation, rotary_angles
from kvprof.runtime.rows import Part, RowGroup
from kvprof.runtime.tensors import is_capturing

if TYPE_CHECKING:
    from kvprof.runtime.backends.state import KernelState, KernelStore

__all__ = [
    "CacheOwner",
    "CompressedCache",
    "CompressedLayer",
    "StaticBuffers",
    "check_room",
    "not_croppable",
]

# --- Who makes a cache.


class CacheOwner(Protocol):
    """The context that a cache belongs to, `kvprof.runtime.session.Compression`."""

    plan: Plan
    active: bool  # whether the context is open

    def new_kernel_state(self) -> "KernelState | None":
        """Return what a new cache's layers share; None where no layer runs on the kernels."""

    def new_kernel_store(self, index: int, capacity: int | None) -> "KernelStore | None":
        """Return a layer's empty store; None where it does not run on the kernels."""

    def leave_kernels(self, cache: "CompressedCache", reason: str) -> None:
        """Take a cache off the kernels, with what is in it."""


# --- Room reserved in advance for what a layer stores: the static cache.


_Kind = tuple[bool, int, bool]


def check_room(capacity: int | None, tokens: int) -> None:
    """Refuse more tokens than a static cache of `capacity` tokens has room for."""
    if capacity is not None and tokens > capacity:
        raise UsageError(f"the static cache has room for {capacity} tokens, not for {tokens}")


class StaticBuffers:
    """One layer's buffers, each as large as its segment gets at any length up to the capacity."""

    def __init__(self, plan: Plan, layer: LayerPlan, capacity: int) -> None:
        self.capacity = capacity  # tokens per sequence
        self._plan = plan
        self._layer = layer
        self._buffers: dict[tuple[object, ...], Tensor] = {}

    def take(self, row_groups: list[RowGroup]) -> None:
        """Move what the groups of rows store into the buffers."""
        for number, row_group in enumerate(row_groups):
            check_room(self.capacity, row_group.seen)
            kinds = [
                _kind(self._plan, s) for s in segments(self._plan, self._layer, row_group.seen)
            ]
            for name in ("keys", "values"):
                side: list[list[Part]] = getattr(row_group, name)
                for stack, parts in enumerate(side):
                    side[stack] = [
                        self._buffered(part, (number, name, stack, kind))
                        for part, kind in zip(parts, kinds, strict=True)
                    ]

    def _buffered(self, part: Part, slot: tuple[int, str, int, _Kind]) -> Part:
        longest = _longest(self._plan, self._layer, self.capacity)[slot[3]]
        stored = {}
        for name, tensor in part.stored.items():
            entries = -(-longest // part.codec.tokens_per_entry(name))
            key = (*slot, name, tensor.shape[0])
            if key not in self._buffers:
                shape = (*tensor.shape[:2], entries, tensor.shape[3])
                self._buffers[key] = tensor.new_zeros(shape)
            view = self._buffers[key][:, :, : tensor.shape[2]]
            view.copy_(tensor)
            stored[name] = view
        return replace(part, stored=stored)


def _kind(plan: Plan, segment: Segment) -> _Kind:
    # Sinks lie first and at the top level; nothing else that begins at 0 is unquantised there
    # unless there are no sinks at all, and then no two segments share a kind.
    return segment.start == 0 and plan.levels.sink > 0, segment.level, segment.quantised


@cache
def _longest(plan: Plan, layer: LayerPlan, capacity: int) -> dict[_Kind, int]:
    longest: dict[_Kind, int] = {}
    for tokens in range(1, capacity + 1):
        for segment in segments(plan, layer, tokens):
            kind = _kind(plan, segment)
            longest[kind] = max(longest.get(kind, 0), segment.tokens)
    return longest


# --- One layer of the compressed cache, as transformers sees it.


class CompressedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers carries no types
    """One layer's store; `update` returns K and V unchanged, the attention function stores."""

    is_compileable = False

    def __init__(
        self,
        layer: LayerPlan,  # what the plan makes of it
        compression: CacheOwner,  # whose cache this is part of
        static: StaticBuffers | None,  # room reserved in advance (a static cache)
        planes: "KernelStore | None",
    ) -> None:
        super().__init__()
        self.sliding_window = layer.sliding_window
        self.is_sliding = layer.sliding_window is not None
        self.seen = 0
        self.pending = 0
        #: Whether a layer with a sliding window keeps what a pass pushes out of it until the next
        #: pass or `crop`, as transformers asks for.
        self.record_past = False
        self.row_groups: list[RowGroup] = []
        #: Where the layer runs on the kernels: what it stores, in place of `row_groups`.
        self.planes = planes
        self._lossy = _lossy(compression.plan, layer)
        # Not the cache, whose tensors would then lie there until Python looks for cycles.
        self._compression = compression
        self._static = static

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: tensors are made when their widths are known."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take notice of new tokens and return them, uncompressed and without the past."""
        if not self._compression.active:
            raise UsageError(
                "a compressed cache works only inside its own kvprof.compressed context; "
                "generate there, or leave out past_key_values"
            )
        self.is_initialized = True
        self.pending = key_states.shape[-2]
        return key_states, value_states

    def changed(self) -> None:
        """Take what was put in the place of stored rows into the room reserved for them."""
        if self._static is not None:
            self._static.take(self.row_groups)

    def stored(self) -> None:
        """Close a pass: what was pending is in the store now."""
        captured = self.planes is not None and is_capturing(self.planes.buffer.device)
        if captured and self.planes is not None:
            self.planes.captured = True
        self.seen += 0 if captured else self.pending
        self.pending = 0
        if self._static is not None:
            self._static.take(self.row_groups)

    def get_seq_length(self) -> int:
        """Return how many tokens were seen, padding and evicted ones included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys that a mask is for: all that were ever seen."""
        if self.sliding_window is None:
            return self.seen + query_length, 0
        past = min(self.seen, self.sliding_window - 1)
        return past + query_length, self.seen - past

    def get_max_length(self) -> int:
        """Return the capacity in tokens, -1 where there is no limit."""
        if self.sliding_window is not None:
            return self.sliding_window
        return -1 if self._static is None else self._static.capacity

    def get_max_cache_shape(self) -> int:
        """Return the same, under its older name."""
        return self.get_max_length()

    def reset(self) -> None:
        """Forget everything."""
        self.seen = self.pending = 0
        self.row_groups = []
        if self.planes is not None:
            self.planes.clear()

    def select(self, index: list[int]) -> None:
        """Make row i what row ``index[i]`` was (beams, contrastive search, repeats)."""
        if self.planes is not None:
            self.planes.select(index)
        chosen = []
        for row_group in self.row_groups:
            where = {row: number for number, row in enumerate(row_group.rows)}
            new = [row for row, old in enumerate(index) if old in where]
            if new:
                chosen.append(row_group.selected([where[index[row]] for row in new], new))
        self.row_groups = chosen
        if self._static is not None:
            self._static.take(self.row_groups)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams."""
        self.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self.select(torch.arange(self._rows)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.select([row for row in range(self._rows) for _ in range(repeats)])

    @property
    def _rows(self) -> int:
        if self.planes is not None and self.planes.rows:
            return self.planes.rows
        return sum(len(row_group.rows) for row_group in self.row_groups)

    def trim(self) -> None:
        """Let go of what was kept in case that a pass is taken back."""
        if self.sliding_window is None:
            return
        for row_group in self.row_groups:
            if (over := row_group.stored - (self.sliding_window - 1)) > 0:
                row_group.kept(over, row_group.stored)

    @property
    def lossy(self) -> str | None:
        """Why what is stored of a token is not what its pass made of it; None where it is."""
        return self._lossy

    @property
    def is_croppable(self) -> bool:
        """Whether the newest token can be taken back, or will be after a pass that is recorded."""
        recording = self.record_past and self._static is None and self.planes is None
        return self._lossy is None and (recording or self.fixed(1) is None)

    def fixed(self, tokens: int) -> str | None:
        """Return why the newest `tokens` tokens cannot be taken back; None where they can."""
        if self._lossy is not None or self.sliding_window is None:
            return self._lossy
        if self.planes is not None:
            # A ring that has gone round has lost what stood in its window before.
            lost = tokens > 0 and self.seen > self.sliding_window
        else:
            past = self.sliding_window - 1
            lost = any(x.stored - tokens < min(x.seen - tokens, past) for x in self.row_groups)
        return "earlier tokens have left its sliding window" if lost else None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens; with 0 let go of what is kept for that alone."""
        if tokens_to_remove and (reason := self.fixed(-tokens_to_remove)) is not None:
            raise UsageError(not_croppable(reason))
        if not -self.seen <= tokens_to_remove <= 0:
            raise UsageError(
                f"cannot remove {-tokens_to_remove} tokens from a cache of {self.seen}"
            )
        self.seen += tokens_to_remove
        # Rows that have none left begin anew.
        self.row_groups = [
            row_group for row_group in self.row_groups if row_group.seen > -tokens_to_remove
        ]
        for row_group in self.row_groups:
            row_group.seen += tokens_to_remove
            row_group.kept(0, row_group.stored + tokens_to_remove)
        self.trim()
        if self._static is not None:
            self._static.take(self.row_groups)


def not_croppable(reason: str) -> str:
    """Say that tokens cannot be taken back, and what does not work then."""
    return (
        f"this compressed cache cannot be rolled back ({reason}), so assisted, prompt-lookup and "
        "speculative decoding do not work; use plain decoding"
    )


def _lossy(plan: Plan, layer: LayerPlan) -> str | None:
    if layer.left_out:
        return None
    if quantises(plan, layer):
        return f"{plan.method} quantises what it stores"
    if plan.across is not None:
        what = "codes a prompt's cache" if plan.across.at_rest else "shares latents across layers"
        return f"{plan.method} {what}"
    if plan.lazy or plan.online_bases:
        return f"{plan.method} attends to the prompt's uncompressed tokens"
    if layer.sliding_window is not None:
        return None
    if plan.eviction is not None:
        return f"{plan.method} evicts tokens"
    if len(plan.levels.shares) > 1:
        return f"{plan.method} truncates tokens to lower ranks as they age"
    return None


class CompressedCache(Cache):  # type: ignore[misc]  # transformers carries no types
    """A model's compressed cache; `Compression.new_cache` makes one."""

    def __init__(self, compression: CacheOwner, capacity: int | None = None) -> None:
        self.compression = compression  # what it belongs to
        #: Tokens to reserve room for at once (a static cache); None grows with the sequence.
        self.capacity = capacity
        self.reach = capacity
        #: What the layers that run on the kernels share; None where none does.
        self.kernels = compression.new_kernel_state()
        #: Why layers that could have are not, or no longer, run on them.
        self.left: str | None = None
        #: Bytes of the prompt's cache at rest, of all sequences, where the plan codes it; None
        #: before.
        self.rest_bytes: int | None = None
        layers: list[CompressedLayer] = []
        for layer in compression.plan.layers:
            static = None
            if capacity is not None:
                static = StaticBuffers(compression.plan, layer, capacity)
            planes = compression.new_kernel_store(len(layers), capacity)
            layers.append(CompressedLayer(layer, compression, static, planes))
        super().__init__(layers=layers)
        self._tables: list[RotaryTable] = []
        self._table_of: dict[int, int] = {}
        # Of this pass, by the identity of a table of cosines, which is held so that it stays one.
        self._extended: dict[int, tuple[int, Tensor]] = {}
        self._past = 0

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is stored, as `kvprof.methods.accounting` counts them."""
        return sum(self.layer_bytes)

    @property
    def layer_bytes(self) -> list[int]:
        """`nbytes` of each layer."""
        found = []
        for layer in self.layers:
            total = sum(t.nbytes for row_group in layer.row_groups for t in row_group.tensors())
            if layer.planes is not None and self.kernels is not None:
                total += layer.planes.bytes_at(self.kernels.seen(layer.seen))
            found.append(total)
        return found

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the memory behind it: with a static cache its whole capacity."""
        planes = [layer.planes.buffer for layer in self.layers if layer.planes is not None]
        tensors = [*self._tensors(), *planes]
        behind = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        return sum(storage.nbytes() for storage in behind.values())

    def _tensors(self) -> list[Tensor]:
        return [
            t
            for layer in self.layers
            for row_group in layer.row_groups
            for t in row_group.tensors()
        ]

    def begin_pass(self) -> None:
        """Start a forward pass."""
        self._extended.clear()
        self._past = self.get_seq_length()

    def angles(self, layer: int, rotation: Rotation, batch: int) -> RotaryTable:
        """Return cosines and sines of all tokens so far, the pass's own included."""
        fresh = rotary_angles(rotation, batch)
        source = rotation.args[2] if len(rotation.args) > 2 else rotation.kwargs["cos"]
        known = self._table_of.get(layer)
        if id(source) not in self._extended:
            if known is None:
                known = len(self._tables)
                self._tables.append(fresh)
            elif self._tables[known].cos.shape[1] == self._past:  # else another layer has done it
                self._tables[known] = self._tables[known].extended(fresh.cos, fresh.sin)
            self._extended[id(source)] = known, source
        self._table_of[layer] = self._extended[id(source)][0]
        return self._tables[self._table_of[layer]]

    def take_angles(self, kernels: "KernelState", past: int) -> None:
        """Take over the angles of the tokens that the kernels have stored."""
        for layers, table in kernels.tables.unslotted(kernels.first, past):
            self._table_of.update(dict.fromkeys(layers, len(self._tables)))
            self._tables.append(table)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.rest_bytes = None
        self._tables.clear()
        self._table_of.clear()
        if self.left is not None:
            # What made the layers leave the kernels was of the sequences that are forgotten.
            self.left = None
            self.kernels = self.compression.new_kernel_state()
            for index, layer in enumerate(self.layers):
                layer.planes = self.compression.new_kernel_store(index, self.capacity)
        elif self.kernels is not None:
            self.kernels.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens (assisted decoding), where every layer can."""
        if tokens_to_remove > 0:
            tokens_to_remove = min(0, tokens_to_remove - self.get_seq_length())
        reasons = [layer.fixed(-tokens_to_remove) for layer in self.layers]
        if tokens_to_remove and any(reasons):
            raise UsageError(not_croppable(next(filter(None, reasons))))
        super().crop(tokens_to_remove)
        total = self.get_seq_length()
        for number, table in enumerate(self._tables):
            self._tables[number] = RotaryTable(table.cos[:, :total], table.sin[:, :total])
        if self.kernels is not None:
            self.kernels.crop(total)

    def activate_past_recording(self) -> None:
        """Prepare for passes that are rolled back in part; this cache leaves the kernels."""
        if reason := next(filter(None, (layer.lossy for layer in self.layers)), None):
            raise UsageError(not_croppable(reason))
        windows = [layer for layer in self.layers if layer.sliding_window is not None]
        if self.kernels is not None and any(layer.planes is not None for layer in windows):
            self.compression.leave_kernels(self, "tokens are removed from a sliding window")
        for layer in windows:
            layer.record_past = True

    def replayed(self, tokens: int = 1) -> None:
        """Count the tokens of replayed CUDA graphs on the host, which a replay does not do."""
        if self.kernels is None or any(layer.planes is None for layer in self.layers):
            raise UsageError("only a cache that the kernels store can be captured and replayed")
        for layer in self.layers:
            layer.seen += tokens
        most = max(self.kernels.seen(self.get_seq_length()), default=0)
        check_room(self.capacity, most)

    def _select_tables(self, index: list[int]) -> None:
        for number, table in enumerate(self._tables):
            rows = torch.tensor(index, device=table.cos.device)
            self._tables[number] = RotaryTable(table.cos[rows], table.sin[rows])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams."""
        super().reorder_cache(beam_idx)
        self._select_tables(beam_idx.tolist())
        if self.kernels is not None:
            self.kernels.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        super().batch_select_indices(indices)
        for number, table in enumerate(self._tables):
            self._tables[number] = RotaryTable(table.cos[indices], table.sin[indices])
        if self.kernels is not None:
            rows = torch.arange(len(self.kernels.first))
            self.kernels.select(rows[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        for number, table in enumerate(self._tables):
            cos, sin = (x.repeat_interleave(repeats, dim=0) for x in (table.cos, table.sin))
            self._tables[number] = RotaryTable(cos, sin)
        if self.kernels is not None:
            rows = range(len(self.kernels.first))
            self.kernels.select([row for row in rows for _ in range(repeats)])
