"""Attention layers in which KV heads share latents (Palu), on kvprof's kernels.

A decoding step rebuilds, rotates and multiplies keys in one kernel (`kvprof.kernels.reconstruct`).
A prompt's keys are rebuilt once, into temporary planes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from kvprof.errors import FailedError, UsageError
from kvprof.kernels.planes import LARGEST_GROUP, STEP, RaggedLayout, chunks
from kvprof.kernels.project.step import project_queries
from kvprof.kernels.reconstruct.form import halves
from kvprof.methods.plan import LayerPlan, Plan
from kvprof.methods.tokens import quantises
from kvprof.models.interface import (
    Rotation,
    before_rotation,
    text_decoder,
    wrapped_rotations,
)
from kvprof.models.layout import LayerLayout
from kvprof.models.load import LoadedModel
from kvprof.runtime.backends.layer import LayerSpec, cut, prefilled
from kvprof.runtime.backends.matrices import by_head
from kvprof.runtime.backends.ragged import PlaneKernelLayer, PlaneStore
from kvprof.runtime.backends.slots import KernelPass, SlotTable
from kvprof.runtime.backends.state import KernelState
from kvprof.runtime.clock import part
from kvprof.runtime.rotary import angles, rebuilds
from kvprof.runtime.tensors import is_capturing, unflatten

__all__ = [
    "FoldedKernelLayer",
    "LatentKernelLayer",
    "RebuiltKernelLayer",
    "RotaryForm",
    "rotary_form",
    "rotary_functions",
]

# --- How a model's rotary function pairs columns and reads its tables, as the kernels have to
# know it.
#
# The torch path calls the function itself; a kernel computes ``k1 cos - k2 sin`` and ``k2 cos +
# k1 sin`` of every pair. Which columns are a pair, and where its angle lies in a table, is
# found by calling the function with angles that are all different.


_UNKNOWN = "the kernels do not support this model's rotary embedding"


@dataclass(frozen=True)
class RotaryForm:
    """How a rotary function works."""

    width: int  # columns that turn, the first of a head
    #: Whether neighbours are pairs (GLM, Cohere), and not column i and `width / 2 + i`.
    interleaved: bool
    stride: int  # pair i's angle is in column `i * stride` of a table

    def pairs(self, table: Tensor) -> Tensor:
        """Return a table's columns with one angle per pair, ``[..., width / 2]``: a view."""
        return table[..., : self.width // 2 * self.stride : self.stride]

    def rotated(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate ``[..., d]`` by angles ``[..., width / 2]``."""
        first, second = halves(self.width, self.interleaved)
        one, other = keys[..., first], keys[..., second]
        result = keys.clone()
        result[..., first] = one * cos - other * sin
        result[..., second] = other * cos + one * sin
        return result


@lru_cache(maxsize=64)
def rotary_form(function: Callable[..., Any], width: int, transposed: bool) -> RotaryForm | None:
    """Find out how a function ``f(q, k, cos, sin)`` works; None where no kernel knows it."""
    generator = torch.Generator().manual_seed(0)
    angles = 6 * torch.rand(1, 3, width // 2, generator=generator, dtype=torch.float64)
    keys = torch.randn(1, 1, 3, width, generator=generator, dtype=torch.float64)
    for whole, stride in ((_twice, 1), (_doubled, 2), (_once, 1)):
        cos, sin = whole(angles.cos()), whole(angles.sin())
        given = keys.transpose(1, 2) if transposed else keys
        try:
            found = function(given, given, cos, sin)[1]
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            continue  # a function of other arguments, or a table of another width
        if not isinstance(found, Tensor) or found.shape != given.shape:
            continue
        found = found.transpose(1, 2) if transposed else found
        for interleaved in (False, True):
            form = RotaryForm(width, interleaved, stride)
            wanted = form.rotated(keys, form.pairs(cos), form.pairs(sin))
            # Some functions compute in float32 whatever they get.
            if torch.allclose(found.double(), wanted, atol=1e-4):
                return form
    return None


def _twice(angles: Tensor) -> Tensor:
    return torch.cat([angles, angles], dim=-1)


def _doubled(angles: Tensor) -> Tensor:
    return angles.repeat_interleave(2, dim=-1)


def _once(angles: Tensor) -> Tensor:
    return angles


def rotary_functions(loaded: LoadedModel) -> tuple[Callable[..., Any], ...]:
    """Return the rotary functions that a model's attention may call."""
    functions: list[Callable[..., Any]] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        # Another context may be watching the same function.
        functions.append(unwrap(function))
        return function

    with wrapped_rotations(text_decoder(loaded.model), noted):
        pass
    return tuple(functions)


# --- Latents that KV heads share: never rebuilt, or rebuilt from before RoPE.


class LatentKernelLayer(PlaneKernelLayer):
    """A layer that stores unquantised latents of groups of KV heads, all of one size."""

    narrow = True
    #: What a plan asks for, as a refusal says it.
    what: str

    @classmethod
    def _own_reason(cls, spec: LayerSpec) -> str | None:
        what, group = cls.what, spec.facts.group
        if spec.layer.sliding_window is not None:
            return f"{what} in a sliding window"
        if quantises(spec.plan, spec.layer):
            return f"{what} and latents are quantised"
        if any(len(set(own.ranks)) > 1 for own in spec.groups):
            return f"{what} and token levels have different ranks"
        sizes = sorted({own.heads for own in spec.groups})
        if len(sizes) > 1:
            return (
                f"latents are shared by {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} KV "
                "heads; the kernels require one number per layer"
            )
        if sizes[0] * group > LARGEST_GROUP:
            return f"{sizes[0] * group} query heads share a latent (limit {LARGEST_GROUP})"
        for name, side in (("keys", spec.layer.keys), ("values", spec.layer.values)):
            for own in side.groups:
                if not _runs(own.rank):
                    return (
                        f"KV head {own.first} keeps {own.rank} columns of its {name}; the kernels "
                        f"run multiples of {STEP} up to 256 and of {2 * STEP} up to 512"
                    )
        return None

    def _shared(self, scoring: dict[str, Any], layout: RaggedLayout) -> dict[str, Any]:
        """Return sinks by latent, as the kernels over these planes take them."""
        sinks = scoring["sinks"]
        if sinks is None:
            return scoring
        return {**scoring, "sinks": sinks.reshape(layout.heads, layout.group)}


def _runs(width: int) -> bool:
    try:
        chunks(width)
    except UsageError:
        return False
    return True


class FoldedKernelLayer(LatentKernelLayer):
    """A layer whose shared latents are met by queries as they are, and never rebuilt."""

    what = "heads share latents"

    @classmethod
    def stores(cls, spec: LayerSpec) -> bool:
        """Whether KV heads share latents."""
        return any(group.heads > 1 for group in spec.groups)

    def _attended(
        self,
        store: PlaneStore,
        state: KernelState,
        passing: KernelPass,
        states: tuple[Tensor, Tensor, Tensor],
        scoring: dict[str, Any],
    ) -> Tensor:
        query, layout, buffer = states[0], store.layout, store.buffer
        assert layout is not None
        self._kept(layout, buffer, passing.start, passing, *states[1:])
        scoring = self._shared(scoring, layout)
        queries = self._prepared(query.device, query.dtype).queries
        # Every KV head has rows of its own in its group's matrix.
        widths = queries.widths
        each = RaggedLayout(widths, widths, self.facts.group, layout.batch, layout.capacity)
        with part(self._storing):
            projected = project_queries(query.transpose(1, 2), queries, each)
        if passing.tokens > 1:
            lengths = state.seen(state.past + passing.tokens)
            return prefilled(projected, buffer, layout, passing.after, lengths, scoring)
        step = state.step(layout, query.device, None)
        schedule = state.cut(passing, step, lambda: passing.lengths(None), None)
        output: Tensor = step.run(projected[:, 0], buffer, schedule, **scoring)
        return output.unsqueeze(1)


# Tokens whose keys are rebuilt at once: what that leaves behind is small beside the planes.
_BLOCK = 4096
# Tokens that show whether keys turn as the kernels think; a wrong form is wrong by a factor.
_LOOKED_AT, _FAR = 64, 0.05


class RebuiltKernelLayer(LatentKernelLayer):
    """A layer whose latents are from before RoPE."""

    form = "latents"

    what = "keys are rebuilt before RoPE"

    def __init__(self, plan: Plan, layer: LayerPlan, facts: LayerLayout) -> None:
        super().__init__(plan, layer, facts)
        self._steps: dict[tuple[torch.device, torch.dtype], Any] = {}
        self._key_ups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}

    @classmethod
    def stores(cls, spec: LayerSpec) -> bool:
        """Whether keys are stored before RoPE, in a layer that has it."""
        return rebuilds(spec.layer, spec.facts)

    @classmethod
    def why_not(cls, spec: LayerSpec) -> str | None:
        """Return why a layer that is stored this way cannot run; None where it can."""
        return super().why_not(spec) or _unknown_form(spec)

    @classmethod
    def _own_reason(cls, spec: LayerSpec) -> str | None:
        facts = spec.facts
        if (reason := super()._own_reason(spec)) is not None:
            return reason
        if not _runs(facts.qk_head_dim):
            return f"keys have {facts.qk_head_dim} columns; the kernels rebuild multiples of {STEP}"
        if facts.rotary_offset != 0 or facts.rotary_dim % 2:
            return (
                f"RoPE rotates {facts.rotary_dim} columns from column {facts.rotary_offset}; the "
                "kernels require an even number of leading columns"
            )
        return None

    def _ups(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """Return what turns each group's latent into its keys, ``[n * d, r]``."""
        key = device, dtype
        if key not in self._key_ups:
            with torch.inference_mode(False):
                self._key_ups[key] = [
                    torch.cat(by_head(group)).to(device, dtype) for group in self.layer.keys.groups
                ]
        return self._key_ups[key]

    def _attended(
        self,
        store: PlaneStore,
        state: KernelState,
        passing: KernelPass,
        states: tuple[Tensor, Tensor, Tensor],
        scoring: dict[str, Any],
    ) -> Tensor:
        layout, buffer = store.layout, store.buffer
        assert layout is not None
        query, key, value = states
        self._kept(
            layout, buffer, passing.start, passing, self._before_rotation(state, query, key), value
        )
        rotation = self._rotation(state)
        form = self._form(rotation)
        aligned = len(set(state.first)) == 1
        with part("decompress"):
            table = state.tables.extended(
                self.facts.index, rotation, passing, aligned, layout.capacity, query.dtype
            )
        if not table.checked and not is_capturing(query.device):
            self._check(rotation, form)
            table.checked = True
        if passing.tokens > 1:
            with part("decompress"):
                whole, planes = self._rebuilt(layout, buffer, state, passing, form, table)
            lengths = state.seen(state.past + passing.tokens)
            whole_query = query.transpose(1, 2).flatten(2)
            return prefilled(whole_query, planes, whole, passing.after, lengths, scoring)
        device, dtype = query.device, query.dtype
        # Kept by the cache: a graph of its steps reads their tables.
        step = state.prepared(
            ("rebuilt", self.facts.index, device, dtype),
            layout,
            lambda: self._step(layout, form, device, dtype),
        )
        # Layers of the same widths and heads share it, though not their matrices.
        schedule = passing.once(
            (layout, self.heads, self.facts.qk_head_dim, "rebuilt"),
            lambda: cut(step, passing.lengths(None)),
        )
        cos, sin = (form.pairs(own) for own in table.served())
        output: Tensor = step.run(
            query.transpose(1, 2).flatten(1),
            buffer,
            schedule,
            cos,
            sin,
            **self._shared(scoring, layout),
        )
        return output.unsqueeze(1)

    def _before_rotation(self, state: KernelState, query: Tensor, key: Tensor) -> Tensor:
        rotation, facts = self._rotation(state), self.facts
        assert facts.rotary_offset is not None  # why_not has seen to it
        return before_rotation(rotation, query, key, facts.rotary_offset, facts.rotary_transposed)[
            1
        ]

    def _rotation(self, state: KernelState) -> Rotation:
        assert state.rotation is not None  # the session gives it to every layer that rebuilds
        return state.rotation

    def _form(self, rotation: Rotation) -> RotaryForm:
        facts = self.facts
        form = rotary_form(rotation.function, facts.rotary_dim, facts.rotary_transposed)
        if form is None:
            raise FailedError(
                f"layer {facts.index}: the kernels do not support its rotary embedding; use "
                "kernels='off'"
            )
        return form

    def _check(self, rotation: Rotation, form: RotaryForm) -> None:
        """See to it that the model's tables mean what the form says; waits for the device."""
        transposed = self.facts.rotary_transposed
        given = rotation.args[1] if len(rotation.args) > 1 else rotation.kwargs["k"]
        before, after = (
            (states.transpose(1, 2) if transposed else states)[:, :, -_LOOKED_AT:]
            for states in (given, rotation.result[1])
        )
        tables = angles(rotation, -1)
        cos, sin = (form.pairs(table)[:, None, -_LOOKED_AT:] for table in (tables.cos, tables.sin))
        apart = (form.rotated(before, cos, sin) - after).float().norm()
        if not bool(apart <= _FAR * after.float().norm()):
            raise FailedError(
                f"layer {self.facts.index}: the kernels would compute other RoPE angles than the "
                "model; use kernels='off'"
            )

    def _rebuilt(
        self,
        layout: RaggedLayout,
        buffer: Tensor,
        state: KernelState,
        passing: KernelPass,
        form: RotaryForm,
        table: SlotTable,
    ) -> tuple[RaggedLayout, Tensor]:
        """Return planes of whole rotated keys and of latent values, a head for every KV head."""
        heads, width = self.heads, self.facts.qk_head_dim
        tokens = max(1, *state.seen(state.past + passing.tokens))
        widths = tuple(rank for rank in layout.value_widths for _ in range(heads))
        whole = RaggedLayout((width,) * len(widths), widths, self.facts.group, layout.batch, tokens)
        planes = buffer.new_empty(whole.elements)
        cos, sin = (form.pairs(own)[:, :tokens, None] for own in (table.cos, table.sin))
        for group, up in enumerate(self._ups(buffer.device, buffer.dtype)):
            keys, values = layout.planes(buffer, group)
            own = [whole.planes(planes, group * heads + head) for head in range(heads)]
            for _, copies in own:
                for new, old in zip(copies, values, strict=True):
                    new.copy_(old[:, :tokens])
            for start in range(0, tokens, _BLOCK):
                at = slice(start, min(start + _BLOCK, tokens))
                joined = torch.cat([plane[:, at] for plane in keys], dim=-1) @ up.mT
                rotated = form.rotated(
                    unflatten(joined, -1, (heads, width)), cos[:, at], sin[:, at]
                )
                for head, (rebuilt, _) in enumerate(own):
                    columns = torch.split(rotated[:, :, head], list(chunks(width)), dim=-1)
                    for plane, chunk in zip(rebuilt, columns, strict=True):
                        plane[:, at] = chunk
        return whole, planes

    def _step(
        self, layout: RaggedLayout, form: RotaryForm, device: torch.device, dtype: torch.dtype
    ) -> Any:
        """Return a decoding step for a layout; what rebuilds the keys is arranged once."""
        from kvprof.kernels.reconstruct.step import reconstruct_step  # Triton is for Linux only

        known = self._steps.get((device, dtype))
        # Not as inference tensors: steps outlive the mode they were made in.
        with torch.inference_mode(False):
            if known is None:
                known = reconstruct_step(
                    layout,
                    self._ups(device, dtype),
                    self.facts.qk_head_dim,
                    self.heads,
                    device,
                    interleaved=form.interleaved,
                    rotary_dim=form.width,
                    # Interpreted kernels have none.
                    multiprocessors=None if device.type == "cuda" else 1,
                )
                self._steps[device, dtype] = known
            if known.form.layout == layout:
                return known
            made = replace(known.form, batch=layout.batch, capacity=layout.capacity)
            return replace(known, form=made, groups=made.table().to(device))


def _unknown_form(spec: LayerSpec) -> str | None:
    """Say whether keys may be rotated in a form that the kernels do not know."""
    if spec.rotations is None:
        return None
    # Which of several functions a layer calls is known only when it does.
    facts = spec.facts
    forms = {
        rotary_form(function, facts.rotary_dim, facts.rotary_transposed)
        for function in spec.rotations()
    }
    return None if len(forms) == 1 and None not in forms else _UNKNOWN
