"""The base of all attention layers on kvprof's kernels.

Each way to store tokens is a subclass of `KernelLayer`: its store and its run.
`kvprof.runtime.backends.support` says which one a plan uses, and why it cannot run.
"""

import math
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.project.step import project_keys, project_step, project_values, store_values
from kvprof.methods.plan import LayerPlan, Plan
from kvprof.models.layout import LayerLayout
from kvprof.runtime.attention import GroupStack
from kvprof.runtime.backends.matrices import Matrices, matrices_of
from kvprof.runtime.backends.slots import KernelMetadata
from kvprof.runtime.backends.state import HeadConfigs, KernelState, KernelStore
from kvprof.runtime.clock import part
from kvprof.runtime.rows import RowGroup
from kvprof.runtime.tensors import on, unflatten

if TYPE_CHECKING:  # Triton is for Linux only
    from kvprof.kernels.prefill.rows import RowsStep
    from kvprof.kernels.split_kv import Attended

__all__ = [
    "KernelLayer",
    "attended",
    "by_latent",
    "combined",
    "cut",
    "prefilled",
]

# Tokens of a prompt for which kernels are built as for any longer one.
_REHEARSED = 192


class KernelLayer(ABC):
    """Executes one layer of a plan on the kernels: one way to store its tokens."""

    #: What its tokens lie in: ``ragged`` planes that attention reads as they are, ``latents`` that
    #: keys are rebuilt from, or ``segments`` of tokens that are stored alike.
    form: ClassVar[str]
    #: Whether keys are compressed apart from queries, which then need not be as wide.
    narrow = False

    def __init__(self, plan: Plan, layer: LayerPlan, facts: LayerLayout) -> None:
        self.plan = plan
        #: One of its layers, that is stored this way and can run.
        self.layer = layer
        self.facts = facts  # the model's layer
        # A layer that is stored as it is has nothing compressed, however its tokens are written.
        sides = (*layer.keys.groups, *layer.values.groups)
        self._storing = "attention" if all(group.identity for group in sides) else "compress"
        self._decompresses = layer.values.projected and not layer.values.fold_up
        self._scales: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._scaled = any(group.scale != 1 for group in layer.values.groups)
        self._matrices: dict[tuple[torch.device, torch.dtype], Matrices] = {}

    @abstractmethod
    def new_store(self, capacity: int | None) -> KernelStore:
        """Return an empty store; `capacity` is a static cache's, in tokens."""

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
        """Store and attend; return the heads' outputs side by side, ``[batch, t, Σ_h w_h]``."""
        with on(query.device):
            return self._run(store, state, (query, key, value), options, reach)

    def _run(
        self,
        store: KernelStore,
        state: KernelState,
        states: tuple[Tensor, Tensor, Tensor],
        options: dict[str, Any],
        reach: int | None,
    ) -> Tensor:
        query = states[0]
        batch, _, tokens, _ = query.shape
        most = max(1, state.past + tokens - min(state.first))
        store.make_room(batch, most, reach, query.device, query.dtype)
        metadata = state.on(query.device)
        output = self._attended(store, state, metadata, states, self._scoring(options))
        if self._decompresses and not (self.plan.lazy and tokens > 1):
            with part("decompress"):
                output = self._in_heads(output)
        if self._scaled:
            output = output * self._scale(output.device, output.dtype)
        if metadata.hidden is not None:
            output = output.masked_fill(metadata.padding(), 0)
        return output

    def rehearse(
        self,
        configs: HeadConfigs,
        batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Run a prompt and a step over nothing, for the kernels that they launch to be compiled."""
        store, state = self.new_store(None), KernelState(configs)
        heads, facts, past = self.facts.num_kv_heads, self.facts, 0
        shapes = (
            (heads * facts.group, facts.qk_head_dim),
            (heads, facts.qk_head_dim),
            (heads, facts.v_head_dim),
        )
        for tokens in (_REHEARSED, 1):
            state.begin([0] * batch, past, tokens)
            query, key, value = (
                torch.zeros(batch, tokens, *shape, device=device, dtype=dtype).transpose(1, 2)
                for shape in shapes
            )
            options: dict[str, Any] = {"softcap": facts.softcap}
            if facts.sinks:
                options["s_aux"] = torch.zeros(heads * facts.group, device=device)
            self.run(store, state, query, key, value, options, None)
            state.end()
            past += tokens

    @abstractmethod
    def _attended(
        self,
        store: Any,
        state: KernelState,
        metadata: KernelMetadata,
        states: tuple[Tensor, Tensor, Tensor],
        scoring: dict[str, Any],
    ) -> Tensor:
        """Store and attend, as `run` does; latents stay latents."""

    @abstractmethod
    def row_groups(
        self,
        store: KernelStore,
        state: KernelState,
        total: int,
        stacks: tuple[list[GroupStack], list[GroupStack]],
    ) -> list[RowGroup]:
        """Return what a store holds as `kvprof.runtime.layer` keeps it."""

    def _projected(
        self,
        layout: RaggedLayout,
        buffer: Tensor,
        start: Tensor,
        metadata: KernelMetadata,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        matrices: Matrices | None = None,
    ) -> Tensor:
        """Store a pass's keys and values; return its queries, ``[batch, t, Σ_g G·dk_g]``."""
        if matrices is None:
            matrices = self._prepared(query.device, query.dtype)
        with part(self._storing):
            values = by_latent(value, layout.heads)
            projected: Tensor = project_step(
                query.transpose(1, 2),
                key.transpose(1, 2),
                values,
                matrices.keys,
                layout,
                buffer,
                start,
                query_bases=matrices.queries,
                value_bases=matrices.values,
                valid=metadata.hidden,
            )
            return projected

    def _kept(
        self,
        layout: RaggedLayout,
        buffer: Tensor,
        start: Tensor,
        metadata: KernelMetadata,
        key: Tensor,
        value: Tensor,
    ) -> None:
        """Store a pass's keys and values."""
        matrices = self._prepared(key.device, key.dtype)
        with part(self._storing):
            where = (layout, buffer, start)
            keys = by_latent(key, layout.heads)[..., : matrices.keys.depth]
            project_keys(keys, matrices.keys, *where, valid=metadata.hidden)
            values = by_latent(value, layout.heads)
            if matrices.values is None:
                store_values(values, *where, valid=metadata.hidden)
            else:
                project_values(values, matrices.values, *where, valid=metadata.hidden)

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
        """Turn latents into heads again, which no projection does behind the attention."""
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

    def _scale(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return what every column of the heads' outputs is multiplied with, ``[Σ_h w_h]``."""
        key = device, dtype
        if key not in self._scales:
            columns = [
                group.scale
                for group in self.layer.values.groups
                for _ in range(group.heads * self.facts.group * group.head_dim)
            ]
            with torch.inference_mode(False):
                self._scales[key] = torch.tensor(columns, device=device, dtype=dtype)
        return self._scales[key]

    def _prepared(self, device: torch.device, dtype: torch.dtype) -> Matrices:
        key = device, dtype
        if key not in self._matrices:
            # Not as inference tensors: they outlive the mode they were made in.
            with torch.inference_mode(False):
                self._matrices[key] = matrices_of(
                    self.layer, self.facts, device, dtype, narrow=self.narrow
                )
        return self._matrices[key]


def by_latent(states: Tensor, latents: int) -> Tensor:
    """Lay the heads that share a latent side by side: ``[batch, t, latents, n * d]``."""
    states = states.transpose(1, 2)
    return states if states.shape[2] == latents else unflatten(states.flatten(2), -1, (latents, -1))


def cut(step: Any, lengths: Tensor) -> Any:
    """Return how a decoding step's work is cut, timed as scheduling."""
    with part("schedule"):
        schedule: Any = step.cut(lengths)
    return schedule


def prefilled(
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    lengths: Tensor,
    host_lengths: list[int],
    scoring: dict[str, Any],
    window: int | None = None,
) -> Tensor:
    """Attend with several tokens to planes that hold them too."""
    from kvprof.kernels.prefill.step import prefill  # Triton is for Linux only

    output: Tensor = prefill(
        query,
        buffer,
        layout,
        lengths,
        window=window or 0,
        **scoring,
        # Every layer of unlike widths would measure for itself, which takes many prefills.
        path="quick",
        host_lengths=host_lengths if min(host_lengths) else None,
    )
    return output


def attended(
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    lengths: Tensor,
    scoring: dict[str, Any],
    window: int = 0,
) -> "Attended":
    """Attend as `prefilled` does, to be combined with what is attended to beside."""
    from kvprof.kernels.split_kv import Attended  # Triton is for Linux only

    batch, tokens, _ = query.shape
    step = _rows_step(layout, query.device, query.dtype)
    starts = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device)
    logs = torch.empty(batch * tokens, layout.heads * layout.group, device=query.device)
    cut = step.cut(starts, lengths, batch * tokens)
    output = step.run(query.flatten(0, 1), buffer, cut, window=window, logs=logs, **scoring)
    return Attended(output.unflatten(0, (batch, tokens)), logs.unflatten(0, (batch, tokens)))


def combined(layout: RaggedLayout, found: "Attended", beside: "Attended") -> Tensor:
    """Return what queries see of both; the first is overwritten."""
    # Nothing of what is -inf, where there is anything.
    shares = torch.sigmoid((beside.logs - found.logs) * math.log(2))
    for head in range(layout.heads):
        columns = slice(*layout.output_offsets[head : head + 2])
        own, other = (
            unflatten(x.output[..., columns], -1, (layout.group, -1)) for x in (found, beside)
        )
        share = shares[..., head * layout.group : (head + 1) * layout.group, None]
        own.copy_(own.float().lerp(other.float(), share))
    return found.output


@lru_cache(maxsize=256)
def _rows_step(layout: RaggedLayout, device: torch.device, dtype: torch.dtype) -> "RowsStep":
    from kvprof.kernels.prefill.rows import rows_step  # Triton is for Linux only

    return rows_step(layout, device, dtype)
