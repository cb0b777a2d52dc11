"""An attention layer whose tokens are stored alike, on kvprof's kernels."""

from typing import Any

from torch import Tensor

from kvprof.kernels.planes import RaggedLayout
from kvprof.runtime.backends.layer import KernelLayer, cut
from kvprof.runtime.backends.planes import PlaneStore, plane_cohorts
from kvprof.runtime.backends.state import KernelPass, KernelState
from kvprof.runtime.backends.store import KernelStore
from kvprof.runtime.clock import part
from kvprof.runtime.cohort import Cohort
from kvprof.runtime.heads import Bundle

__all__ = ["RaggedKernelLayer"]


class RaggedKernelLayer(KernelLayer):
    """A layer whose tokens are all stored alike, at full precision."""

    def new_store(self, capacity: int | None) -> PlaneStore:
        """Return an empty store; `capacity` is a static cache's, in tokens."""
        return PlaneStore(
            tuple(group.rank for group in self.layer.keys.groups),
            tuple(group.rank for group in self.layer.values.groups),
            self.facts.group,
            self.layer.sliding_window,
            capacity,
        )

    def run(
        self,
        store: KernelStore,
        state: KernelState,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
        reach: int | None,
    ) -> Tensor:
        """Store and attend."""
        assert isinstance(store, PlaneStore)
        batch, _, tokens, _ = query.shape
        window = self.layer.sliding_window
        total = state.past + tokens - min(state.first)
        layout = store.make_room(batch, max(1, total), reach, query.device, query.dtype)
        passing = state.on(query.device)
        scoring = self._scoring(options)
        if tokens == 1:
            projected = self._projected(
                layout, store.buffer, passing.slots(window), passing, query, key, value
            )
            step = state.step(layout, query.device, window)
            schedule = passing.once((layout, window), lambda: cut(step, passing.lengths(window)))
            output: Tensor = step.run(projected[:, 0], store.buffer, schedule, **scoring)
            output = output.unsqueeze(1)
        else:
            output = self._prefilled(store, layout, passing, state, (query, key, value), scoring)
        if self._turns:
            with part("decompress"):
                output = self._in_heads(output)
        if passing.hidden is not None:
            output = output.masked_fill(passing.padding(), 0)
        return output

    def _prefilled(
        self,
        store: PlaneStore,
        layout: RaggedLayout,
        passing: KernelPass,
        state: KernelState,
        states: tuple[Tensor, Tensor, Tensor],
        scoring: dict[str, Any],
    ) -> Tensor:
        """Store and attend to several tokens."""
        from kvprof.kernels.prefill.step import prefill  # Triton is for Linux only

        window, tokens = self.layer.sliding_window, passing.tokens
        buffer, start, lengths = store.buffer, passing.start, passing.after
        seen = state.seen(state.past)
        fresh = [b - a for a, b in zip(seen, state.seen(state.past + tokens), strict=True)]
        if window is not None:
            # What lies in a ring is in no order of time, and the pass may be longer than the ring.
            past = max(0, min(state.past - min(state.first), window - 1))
            layout, buffer = store.unrolled(passing.start, past, tokens)
            start = passing.once(("kept", window), lambda: passing.start.clamp(max=window - 1))
            lengths = passing.once(
                ("reached", window), lambda: start + (passing.after - passing.start)
            )
            seen = [min(old, window - 1) for old in seen]
        host_lengths = [old + new for old, new in zip(seen, fresh, strict=True)]
        projected = self._projected(layout, buffer, start, passing, *states)
        output: Tensor = prefill(
            projected,
            buffer,
            layout,
            lengths,
            window=window or 0,
            **scoring,
            # Every layer of unlike widths would measure for itself, which takes many prefills.
            path="quick",
            host_lengths=host_lengths if min(host_lengths) else None,
        )
        if window is not None:
            store.roll(layout, buffer, passing.start, passing.after)
        return output

    def cohorts(
        self,
        store: KernelStore,
        state: KernelState,
        total: int,
        bundles: tuple[list[Bundle], list[Bundle]],
    ) -> list[Cohort]:
        """Return what a store holds as `kvprof.runtime.layer` keeps it."""
        assert isinstance(store, PlaneStore)
        return plane_cohorts(store, state.seen(total), bundles, heads=1)
