"""An attention layer whose KV heads share latents, on kvprof's kernels: store, attend, turn back.

A group's latent is stored as the kernels store a head: its planes are read by the query heads of
all its KV heads.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout
from kvprof.methods.plan import LayerPlan
from kvprof.models.layout import LayerLayout
from kvprof.runtime.clock import part
from kvprof.runtime.cohort import Cohort
from kvprof.runtime.heads import Bundle
from kvprof.runtime.kernels.handover import plane_cohorts
from kvprof.runtime.kernels.layer import KernelLayer
from kvprof.runtime.kernels.planes import PlaneStore
from kvprof.runtime.kernels.rebuilt_matrices import LatentMatrices, latent_matrices
from kvprof.runtime.kernels.state import KernelPass, KernelState
from kvprof.runtime.kernels.store import KernelStore
from kvprof.runtime.shapes import unflatten

__all__ = ["LatentKernelLayer", "prefilled"]


class LatentKernelLayer(KernelLayer):
    """A layer whose tokens are stored alike, at full precision, as latents of groups of KV heads.

    All groups of the keys and of the values have as many heads.
    """

    def __init__(self, layer: LayerPlan, facts: LayerLayout) -> None:
        super().__init__(layer, facts)
        self._latent_matrices: dict[tuple[torch.device, torch.dtype], LatentMatrices] = {}

    @property
    def heads(self) -> int:
        """KV heads that share a latent, n."""
        return self.layer.keys.groups[0].heads

    def new_store(self, capacity: int | None) -> PlaneStore:
        """Return an empty store; `capacity` is a static cache's, in tokens."""
        return PlaneStore(
            tuple(group.rank for group in self.layer.keys.groups),
            tuple(group.rank for group in self.layer.values.groups),
            self.heads * self.facts.group, None, capacity,
        )  # fmt: skip

    def run(
        self, store: KernelStore, state: KernelState, query: Tensor, key: Tensor, value: Tensor,
        options: dict[str, Any], reach: int | None,
    ) -> Tensor:  # fmt: skip
        """Store and attend."""
        assert isinstance(store, PlaneStore)
        batch, _, tokens, _ = query.shape
        most = max(1, state.past + tokens - min(state.first))
        layout = store.make_room(batch, most, reach, query.device, query.dtype)
        passing = state.on(query.device)
        stored = self._stored_keys(state, query, key)
        self._store(layout, store.buffer, passing, stored, value)
        output = self._attended(layout, store.buffer, state, passing, query, self._scoring(options))
        if self._turns:
            with part("decompress"):
                output = self._in_heads(output)
        if passing.hidden is not None:
            output = output.masked_fill(passing.padding(), 0)
        return output

    def _stored_keys(self, state: KernelState, query: Tensor, key: Tensor) -> Tensor:
        """Return the keys that are to be compressed, ``[batch, KV heads, t, d]``."""
        return key

    @abstractmethod
    def _attended(
        self, layout: RaggedLayout, buffer: Tensor, state: KernelState, passing: KernelPass,
        query: Tensor, scoring: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        """Attend to what is stored, the pass's own tokens included: ``[batch, t, Σ_h r_h]``."""

    def _store(
        self, layout: RaggedLayout, buffer: Tensor, passing: KernelPass, key: Tensor, value: Tensor
    ) -> None:
        from kvprof.kernels.project import step  # Triton is for Linux only

        matrices = self._latents(key.device, key.dtype)
        groups, start, hidden = layout.heads, passing.start, passing.hidden
        with part(self._storing):
            keys = unflatten(key.transpose(1, 2).flatten(2), -1, (groups, -1))
            keys = keys[..., : matrices.depth]
            step.project_keys(keys, matrices.keys, layout, buffer, start, valid=hidden)
            values = value.transpose(1, 2).flatten(2)
            if matrices.values is not None:
                values = unflatten(values, -1, (groups, -1))
                step.project_values(values, matrices.values, layout, buffer, start, valid=hidden)
                return
            if matrices.columns is not None:
                values = values.index_select(-1, matrices.columns)
            step.store_values(values, layout, buffer, start, valid=hidden)

    def _in_heads(self, output: Tensor) -> Tensor:
        """Turn latents back into heads, which no projection does behind the attention."""
        matrices = self._latents(output.device, output.dtype)
        group, turned = self.facts.group, []
        widths = [len(up) * group * up.shape[1] for up in matrices.value_ups]
        for own, up in zip(torch.split(output, widths, dim=-1), matrices.value_ups, strict=True):
            heads, rank, width = up.shape
            latents = unflatten(own, -1, (heads, group, rank)).permute(2, 0, 1, 3, 4)
            flat = latents.reshape(heads, -1, rank) @ up
            shape = (heads, *output.shape[:2], group * width)
            turned.append(flat.view(shape).permute(1, 2, 0, 3).flatten(2))
        return torch.cat(turned, dim=-1)

    def _latents(self, device: torch.device, dtype: torch.dtype) -> LatentMatrices:
        key = device, dtype
        if key not in self._latent_matrices:
            # Not as inference tensors: they outlive the mode they were made in.
            with torch.inference_mode(False):
                self._latent_matrices[key] = latent_matrices(self.layer, self.facts, device, dtype)
        return self._latent_matrices[key]

    def cohorts(
        self, store: KernelStore, state: KernelState, total: int,
        bundles: tuple[list[Bundle], list[Bundle]],
    ) -> list[Cohort]:  # fmt: skip
        """Return what a store holds as `kvprof.runtime.layer` keeps it."""
        assert isinstance(store, PlaneStore)
        return plane_cohorts(store, state.seen(total), bundles, self.heads)


def prefilled(
    query: Tensor, buffer: Tensor, layout: RaggedLayout, state: KernelState, passing: KernelPass,
    scoring: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Attend with several tokens to planes that hold every token of every row, theirs included.

    Parameters
    ----------
    query : Tensor
        ``[batch, t, Σ_g G·dk_g]``.
    buffer, layout
        The planes.
    state : KernelState
    passing : KernelPass
    scoring : dict
        Scaling, soft-cap and sinks.
    """
    from kvprof.kernels.prefill.step import prefill  # Triton is for Linux only

    lengths = state.seen(state.past + passing.tokens)
    output: Tensor = prefill(
        query, buffer, layout, passing.after, **scoring,
        path="quick",  # as in kvprof.runtime.kernels.ragged
        host_lengths=lengths if min(lengths) else None,
    )  # fmt: skip
    return output
