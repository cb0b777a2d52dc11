"""One layer of the compressed cache, as transformers sees it."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvprof.errors import UsageError
from kvprof.methods.plan import LayerPlan, Plan
from kvprof.methods.tokens import quantises
from kvprof.runtime.arena import Arena
from kvprof.runtime.cohort import Cohort
from kvprof.runtime.graphs import is_capturing
from kvprof.runtime.kernels.store import KernelStore

if TYPE_CHECKING:
    from kvprof.runtime.session import Compression

__all__ = ["CompressedLayer", "not_croppable"]


class CompressedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's store.

    `update` only takes notice of the tokens and hands K and V back; the attention function, which
    has the queries too, attends and stores.

    Parameters
    ----------
    layer : LayerPlan
        What the plan makes of it.
    compression : Compression
        Whose cache this is part of.
    arena : Arena or None
        Room reserved in advance (a static cache).
    planes : KernelStore or None
        Where the layer runs on the kernels: what it stores, in place of `cohorts`.

    Attributes
    ----------
    record_past : bool
        Whether a layer with a sliding window keeps what a pass pushes out of it until the next pass
        or `crop`, as transformers asks for.
    """

    is_compileable = False

    def __init__(
        self, layer: LayerPlan, compression: "Compression", arena: Arena | None,
        planes: KernelStore | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.sliding_window = layer.sliding_window
        self.is_sliding = layer.sliding_window is not None
        self.seen = 0
        self.pending = 0
        self.record_past = False
        self.cohorts: list[Cohort] = []
        self.planes = planes
        self._lossy = _lossy(compression.plan, layer)
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

    def trim(self) -> None:
        """Let go of what was kept in case that a pass is taken back."""
        if self.sliding_window is None:
            return
        for cohort in self.cohorts:
            if (over := cohort.stored - (self.sliding_window - 1)) > 0:
                cohort.kept(over, cohort.stored)

    @property
    def lossy(self) -> str | None:
        """Why what is stored of a token is not what its pass made of it; None where it is."""
        return self._lossy

    @property
    def is_croppable(self) -> bool:
        """Whether the newest token can be taken back, or will be after a pass that is recorded."""
        recording = self.record_past and self._arena is None and self.planes is None
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
            lost = any(x.stored - tokens < min(x.seen - tokens, past) for x in self.cohorts)
        return "what came before lies no longer in its sliding window" if lost else None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens; with 0 let go of what is kept for that alone.

        Parameters
        ----------
        tokens_to_remove : int
            Negative, as transformers counts them.

        Raises
        ------
        UsageError
            Where tokens were quantised, evicted or cut again on the way, or what came before is out
            of a sliding window.
        """
        if tokens_to_remove and (reason := self.fixed(-tokens_to_remove)) is not None:
            raise UsageError(not_croppable(reason))
        if not -self.seen <= tokens_to_remove <= 0:
            raise UsageError(
                f"{-tokens_to_remove} tokens cannot be taken back out of a cache of {self.seen}"
            )
        self.seen += tokens_to_remove
        # Rows that have none left begin anew.
        self.cohorts = [cohort for cohort in self.cohorts if cohort.seen > -tokens_to_remove]
        for cohort in self.cohorts:
            cohort.seen += tokens_to_remove
            cohort.kept(0, cohort.stored + tokens_to_remove)
        self.trim()
        if self._arena is not None:
            self._arena.take(self.cohorts)


def not_croppable(reason: str) -> str:
    """Say that tokens cannot be taken back, and what does not work then."""
    return (
        f"this compressed cache cannot be rolled back ({reason}), so assisted, prompt-lookup and "
        "speculative decoding do not work with it; decode plainly"
    )


def _lossy(plan: Plan, layer: LayerPlan) -> str | None:
    if quantises(plan, layer):
        return f"{plan.method} quantises what it stores"
    if plan.lazy or plan.online_bases:
        return f"{plan.method} attends to a prompt's own tokens exactly"
    if layer.sliding_window is not None:
        return None
    if plan.eviction is not None:
        return f"{plan.method} evicts tokens"
    if len(plan.levels.shares) > 1:
        return f"{plan.method} cuts tokens to lower ranks as they get older"
    return None
