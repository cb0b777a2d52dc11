"""The compressed cache: transformers' cache interface around what each layer stores."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvprof.errors import UsageError
from kvprof.models.interface import Rotation
from kvprof.runtime.arena import Arena
from kvprof.runtime.cohort import Cohort
from kvprof.runtime.rotary import RotaryTable, angles

if TYPE_CHECKING:
    from kvprof.runtime.session import Compression

__all__ = ["CompressedCache", "CompressedLayer"]


class CompressedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's store.

    `update` only takes notice of the tokens and hands K and V back; the attention function, which
    has the queries too, attends and stores.

    Parameters
    ----------
    sliding_window : int or None
    owner : CompressedCache
    arena : Arena or None
        Room reserved in advance (a static cache).
    """

    is_compileable = False
    is_croppable = False

    def __init__(
        self, sliding_window: int | None, owner: "CompressedCache", arena: Arena | None
    ) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.seen = 0
        self.pending = 0
        self.cohorts: list[Cohort] = []
        self._owner = owner
        self._arena = arena

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: tensors are made when their widths are known."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take notice of new tokens and return them, uncompressed and without the past.

        Raises
        ------
        UsageError
            Outside the `compressed` context, where nobody would read the past.
        """
        if not self._owner.compression.active:
            raise UsageError(
                "a compressed cache works inside its own kvprof.compressed context only; "
                "generate there, or leave past_key_values out"
            )
        self.is_initialized = True
        self.pending = key_states.shape[-2]
        return key_states, value_states

    def stored(self) -> None:
        """Close a pass: what was pending is in the store now."""
        self.seen += self.pending
        self.pending = 0
        if self._arena is not None:
            self._arena.take(self.cohorts)

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
        return -1 if self._arena is None else self._arena.capacity

    def get_max_cache_shape(self) -> int:
        """Return the same, under its older name."""
        return self.get_max_length()

    def reset(self) -> None:
        """Forget everything."""
        self.seen = self.pending = 0
        self.cohorts = []

    def select(self, index: list[int]) -> None:
        """Make row i what row ``index[i]`` was (beams, contrastive search, repeats)."""
        chosen = []
        for cohort in self.cohorts:
            where = {row: place for place, row in enumerate(cohort.rows)}
            new = [row for row, old in enumerate(index) if old in where]
            if new:
                chosen.append(cohort.selected([where[index[row]] for row in new], new))
        self.cohorts = chosen
        if self._arena is not None:
            self._arena.take(self.cohorts)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams."""
        self.select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        rows = sum(len(cohort.rows) for cohort in self.cohorts)
        self.select(torch.arange(rows)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        rows = sum(len(cohort.rows) for cohort in self.cohorts)
        self.select([row for row in range(rows) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to go back: tokens were truncated, quantised or evicted on the way.

        Raises
        ------
        UsageError
            Always, but for 0.
        """
        if tokens_to_remove:
            raise UsageError(
                "a compressed cache cannot be rolled back, so assisted and speculative decoding "
                "do not work with it; decode plainly"
            )


class CompressedCache(Cache):  # type: ignore[misc]
    """A model's compressed cache; `Compression.new_cache` makes one.

    Parameters
    ----------
    compression : Compression
        What it belongs to.
    capacity : int or None
        Tokens to reserve room for at once (a static cache); None grows with the sequence.
    """

    def __init__(self, compression: "Compression", capacity: int | None = None) -> None:
        self.compression = compression
        self.capacity = capacity
        self.reach = capacity
        layers = []
        for layer in compression.plan.layers:
            arena = None
            if capacity is not None:
                arena = Arena(compression.plan, layer, capacity)
            layers.append(CompressedLayer(layer.sliding_window, self, arena))
        super().__init__(layers=layers)
        self._tables: list[RotaryTable] = []
        self._table_of: dict[int, int] = {}
        self._extended: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is stored, as `kvprof.methods.accounting` counts them."""
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the memory behind it: with a static cache its whole capacity."""
        behind = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self._tensors()}
        return sum(storage.nbytes() for storage in behind.values())

    def _tensors(self) -> list[Tensor]:
        return [t for layer in self.layers for cohort in layer.cohorts for t in cohort.tensors()]

    def begin_pass(self) -> None:
        """Start a forward pass."""
        self._extended.clear()

    def angles(self, layer: int, rotation: Rotation, batch: int) -> RotaryTable:
        """Return cosines and sines of all tokens so far, the pass's own included."""
        fresh = angles(rotation, batch)
        source = id(rotation.args[2] if len(rotation.args) > 2 else rotation.kwargs["cos"])
        known = self._table_of.get(layer)
        if source not in self._extended:
            if known is None:
                known = len(self._tables)
                self._tables.append(fresh)
            else:
                self._tables[known] = self._tables[known].extended(fresh.cos, fresh.sin)
            self._extended[source] = known
        self._table_of[layer] = self._extended[source]
        return self._tables[self._extended[source]]

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._tables.clear()
        self._table_of.clear()

    def _select_tables(self, index: list[int]) -> None:
        for place, table in enumerate(self._tables):
            rows = torch.tensor(index, device=table.cos.device)
            self._tables[place] = RotaryTable(table.cos[rows], table.sin[rows])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams."""
        super().reorder_cache(beam_idx)
        self._select_tables(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        super().batch_select_indices(indices)
        for place, table in enumerate(self._tables):
            self._tables[place] = RotaryTable(table.cos[indices], table.sin[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)
        for place, table in enumerate(self._tables):
            cos, sin = (x.repeat_interleave(repeats, dim=0) for x in (table.cos, table.sin))
            self._tables[place] = RotaryTable(cos, sin)
