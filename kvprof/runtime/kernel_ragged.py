"""One attention layer of a plan on kvprof's kernels: project and store, then attend.

The order differs from `kvprof.runtime.layer`'s, which attends first: a pass's own tokens are stored
as they are attended to, so one store serves both.
"""

from typing import Any

import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout
from kvprof.methods.plan import LayerPlan
from kvprof.models.layout import LayerLayout
from kvprof.runtime.clock import part
from kvprof.runtime.cohort import Cohort
from kvprof.runtime.heads import Bundle
from kvprof.runtime.kernel_matrices import Matrices, matrices_of
from kvprof.runtime.kernel_state import KernelPass, KernelState
from kvprof.runtime.kernel_store import KernelStore
from kvprof.runtime.parts import plain_part
from kvprof.runtime.shapes import unflatten

__all__ = ["KernelLayer"]


class KernelLayer:
    """Executes one layer of a plan that `kvprof.runtime.kernel_support` finds fit.

    Parameters
    ----------
    layer : LayerPlan
    facts : LayerLayout
        The model's layer.
    """

    def __init__(self, layer: LayerPlan, facts: LayerLayout) -> None:
        self.layer = layer
        self.facts = facts
        # A layer that is stored as it is has nothing compressed, however its tokens are written.
        sides = (*layer.keys.groups, *layer.values.groups)
        self._storing = "attention" if all(group.identity for group in sides) else "compress"
        self._turns = layer.values.projected and not layer.values.fold_up
        self._matrices: dict[tuple[torch.device, torch.dtype], Matrices] = {}

    def new_store(self, capacity: int | None) -> KernelStore:
        """Return an empty store; `capacity` is a static cache's, in tokens."""
        return KernelStore(
            tuple(group.rank for group in self.layer.keys.groups),
            tuple(group.rank for group in self.layer.values.groups),
            self.facts.group, self.layer.sliding_window, capacity,
        )  # fmt: skip

    def run(
        self, store: KernelStore, state: KernelState, query: Tensor, key: Tensor, value: Tensor,
        options: dict[str, Any], reach: int | None,
    ) -> Tensor:  # fmt: skip
        """Store and attend; return the heads' outputs side by side, ``[batch, t, Σ_h w_h]``.

        Parameters
        ----------
        store : KernelStore
        state : KernelState
            With the pass begun.
        query, key, value : Tensor
            ``[batch, heads, t, width]`` as the attention function got them.
        options : dict
            The attention function's other arguments.
        reach : int or None
            Longest sequence that is to come, where it is known.

        Raises
        ------
        UsageError
            When a static cache is too small.
        """
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
            schedule = passing.once((layout, window), lambda: _cut(step, passing.lengths(window)))
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
        self, store: KernelStore, layout: RaggedLayout, passing: KernelPass, state: KernelState,
        states: tuple[Tensor, Tensor, Tensor], scoring: dict[str, Any],
    ) -> Tensor:  # fmt: skip
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
            projected, buffer, layout, lengths, window=window or 0, **scoring,
            # Finding out by measuring whether torch's kernels are faster takes many prefills, and
            # every layout and every length of a prompt would ask anew.
            path="triton" if buffer.is_cuda else "auto",
            host_lengths=host_lengths if min(host_lengths) else None,
        )  # fmt: skip
        if window is not None:
            store.roll(layout, buffer, passing.start, passing.after)
        return output

    def _projected(
        self, layout: RaggedLayout, buffer: Tensor, start: Tensor, passing: KernelPass,
        query: Tensor, key: Tensor, value: Tensor,
    ) -> Tensor:  # fmt: skip
        """Store a pass's keys and values; return its queries, ``[batch, t, Σ_g G·dk_g]``."""
        from kvprof.kernels.project.step import project_step  # Triton is for Linux only

        matrices = self._prepared(query.device, query.dtype)
        with part(self._storing):
            values = value.transpose(1, 2)
            if matrices.values is None:
                values = values.flatten(2)
                if matrices.columns is not None:
                    values = values.index_select(-1, matrices.columns)
            projected: Tensor = project_step(
                query.transpose(1, 2), key.transpose(1, 2), values, matrices.keys, layout, buffer,
                start, query_bases=matrices.queries, value_bases=matrices.values,
                valid=passing.hidden,
            )  # fmt: skip
            return projected

    def _scoring(self, options: dict[str, Any]) -> dict[str, Any]:
        scaling, sinks = options.get("scaling"), options.get("s_aux")
        if sinks is not None:
            sinks = sinks.float().reshape(self.facts.num_kv_heads, self.facts.group)
        return {
            "scaling": self.facts.scaling if scaling is None else float(scaling),
            "softcap": float(options.get("softcap") or 0.0),
            "sinks": sinks,
        }

    def _in_heads(self, output: Tensor) -> Tensor:
        """Turn latents back into heads, which no projection does behind the attention."""
        matrices = self._prepared(output.device, output.dtype)
        group, turned = self.facts.group, []
        for ups in matrices.ups:
            heads, rank, width = ups.up.shape
            own = output if matrices.order is None else output.index_select(-1, ups.columns)
            own = unflatten(own, -1, (heads, group, rank)).permute(2, 0, 1, 3, 4)
            flat = own.reshape(heads, -1, rank) @ ups.up
            shape = (heads, *output.shape[:2], group, width)
            turned.append(flat.view(shape).permute(1, 2, 0, 3, 4))
        result = torch.cat(turned, dim=2)
        if matrices.order is not None:
            result = result.index_select(2, matrices.order)
        return result.flatten(2)

    def _prepared(self, device: torch.device, dtype: torch.dtype) -> Matrices:
        key = device, dtype
        if key not in self._matrices:
            # Not as inference tensors: they outlive the mode they were made in.
            with torch.inference_mode(False):
                self._matrices[key] = matrices_of(self.layer, self.facts, device, dtype)
        return self._matrices[key]

    def cohorts(
        self, store: KernelStore, state: KernelState, total: int,
        bundles: tuple[list[Bundle], list[Bundle]],
    ) -> list[Cohort]:  # fmt: skip
        """Return what a store holds as `kvprof.runtime.layer` keeps it.

        Parameters
        ----------
        store : KernelStore
        state : KernelState
        total : int
            Tokens so far, padding included.
        bundles : pair of list of Bundle
            Of the keys and of the values.
        """
        together: dict[int, list[int]] = {}
        for row, seen in enumerate(state.seen(total)):
            if seen:
                together.setdefault(seen, []).append(row)
        return [self._cohort(store, rows, seen, *bundles) for seen, rows in together.items()]

    def _cohort(
        self, store: KernelStore, rows: list[int], seen: int, keys: list[Bundle],
        values: list[Bundle],
    ) -> Cohort:  # fmt: skip
        heads = [
            [store.head_rows(head, row, seen) for row in rows]
            for head in range(self.facts.num_kv_heads)
        ]
        cohort = Cohort(rows, seen)
        for place, (found, bundles) in enumerate(((cohort.keys, keys), (cohort.values, values))):
            for bundle in bundles:
                own = [torch.stack([pair[place] for pair in heads[h]]) for h in bundle.kv_heads]
                found.append([plain_part(torch.stack(own, dim=1))])
        return cohort


def _cut(step: Any, lengths: Tensor) -> Any:
    with part("schedule"):
        schedule: Any = step.cut(lengths)
    return schedule
