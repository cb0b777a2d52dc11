"""One layer of the compressed cache, as transformers sees it."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvprof.errors import UsageError
from kvprof.runtime.arena import Arena
from kvprof.runtime.cohort import Cohort
from kvprof.runtime.graphs import is_capturing
from kvprof.runtime.kernels.store import KernelStore

if TYPE_CHECKING:
    from kvprof.runtime.session import Compression

__all__ = ["CompressedLayer"]


class CompressedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's store.

    `update` only takes notice of the tokens and hands K and V back; the attention function, which
    has the queries too, attends and stores.

    Parameters
    ----------
    sliding_window : int or None
    compression : Compression
        Whose cache this is part of.
    arena : Arena or None
        Room reserved in advance (a static cache).
    planes : KernelStore or None
        Where the layer runs on the kernels: what it stores, in place of `cohorts`.
    """

    is_compileable = False

    def __init__(
        self, sliding_window: int | None, compression: "Compression", arena: Arena | None,
        planes: KernelStore | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.seen = 0
        self.pending = 0
        self.cohorts: list[Cohort] = []
        self.planes = planes
        # Not the cache, whose tensors would then lie there until Python looks for cycles.
        self._compression = compression
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
        if not self._compression.active:
            raise UsageError(
                "a compressed cache works inside its own kvprof.compressed context only; "
                "generate there, or leave past_key_values out"
            )
        self.is_initialized = True
        self.pending = key_states.shape[-2]
        return key_states, value_states

    def stored(self) -> None:
        """Close a pass: what was pending is in the store now."""
        captured = self.planes is not None and is_capturing(self.planes.buffer.device)
        if captured and self.planes is not None:
            self.planes.captured = True
        self.seen += 0 if captured else self.pending
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
        if self.planes is not None:
            self.planes.clear()

    def select(self, index: list[int]) -> None:
        """Make row i what row ``index[i]`` was (beams, contrastive search, repeats)."""
        if self.planes is not None:
            self.planes.select(index)
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
        self.select(torch.arange(self._rows)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.select([row for row in range(self._rows) for _ in range(repeats)])

    @property
    def _rows(self) -> int:
        if self.planes is not None and self.planes.rows:
            return self.planes.rows
        return sum(len(cohort.rows) for cohort in self.cohorts)

    @property
    def is_croppable(self) -> bool:
        """Whether the newest tokens can be taken back: only what is stored as it came can be."""
        # A ring that has gone round has lost what stood in its window before.
        whole = self.sliding_window is None or self.seen <= self.sliding_window
        return self.planes is not None and self.planes.exact and whole

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens.

        Parameters
        ----------
        tokens_to_remove : int
            Negative, as transformers counts them.

        Raises
        ------
        UsageError
            Where tokens were truncated, quantised or evicted on the way.
        """
        if not tokens_to_remove:
            return
        if not self.is_croppable:
            raise UsageError(
                "a compressed cache cannot be rolled back, so assisted and speculative decoding "
                "do not work with it; decode plainly"
            )
        if not -self.seen <= tokens_to_remove < 0:
            raise UsageError(
                f"{-tokens_to_remove} tokens cannot be taken back out of a cache of {self.seen}"
            )
        self.seen += tokens_to_remove
