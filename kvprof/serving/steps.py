"""A step of an engine over pages: which tokens are stored where, and what the queries see.

A step's tokens are projected and stored in one launch, sequences with one new token are decoded
over their pages, and the others attend by rows of unlike numbers of new tokens. What there is to do
is cut on the device, once for all layers, by the first layer that asks: so a graph of a decoding
step holds its own cut, and nothing waits for the host. Where there is no GPU the same calls go to
kvprof's plain kernels. Nothing here knows vLLM.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kvprof.kernels.decode.step import DecodeStep
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill.rows import RowsCut, RowsStep
from kvprof.kernels.project.bases import BasisSet
from kvprof.kernels.quantized.step import SegmentsStep
from kvprof.kernels.split_kv import Schedule
from kvprof.runtime.backends.rotary import RotaryForm
from kvprof.runtime.tensors import concatenated, unflatten
from kvprof.serving.pages import Codes

__all__ = [
    "PAGE_TOKENS",
    "EngineStep",
    "Rebuilding",
    "ServedLayer",
    "Steps",
    "attend",
    "cut_key",
    "filled_up",
    "value_lifts",
]

_Made = TypeVar("_Made")

#: Tokens of a page where nobody says another number: from here on a tile lies in a single page.
PAGE_TOKENS = 64


class Steps(Protocol):
    """What a layer runs over its pages."""

    @property
    def pages(self) -> int:
        """Pages of the pool."""

    @property
    def decode(self) -> Any:
        """Return one sequence's decoding step; None where layers cannot share a partition."""

    def attend(
        self, step: "EngineStep", query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Do what `kvprof.serving.steps.attend` says."""


@dataclass(frozen=True, eq=False)
class Rebuilding:
    """How a layer's keys come out of its latents, which are from before RoPE."""

    #: Of each latent `[n * d, width]`: what makes the keys of its n KV heads.
    ups: tuple[Tensor, ...]
    heads: int  # KV heads that share a latent, n
    form: RotaryForm
    cos: Tensor  # `[tokens, rotary width / 2]`, of every position that a token may have
    sin: Tensor
    #: Of each latent of V `[n * d, width]`: what makes the values of its KV heads, for which W_O
    #: stays as it is. None where W_O takes latents.
    value_ups: tuple[Tensor, ...] = ()
    lifts: tuple[Tensor, ...] = ()  # the same for what is decoded (`value_lifts`)

    @property
    def head_dim(self) -> int:
        """Columns of a key, d."""
        return len(self.ups[0]) // self.heads


@dataclass(eq=False)
class ServedLayer:
    """One attention layer of this rank."""

    #: The engine's layer: `kv_cache` is its pool of pages, `[pages, values]`, and `layer_name` its
    #: name.
    attention: Any
    #: What Q and K are multiplied with after RoPE. Where keys are rebuilt queries stay as they are
    #: (None), and K is multiplied before RoPE, the heads of a latent side by side.
    queries: BasisSet | None
    keys: BasisSet
    value_widths: tuple[int, ...]  # columns of V's latents, which W_V makes
    group: int  # query heads per latent: per KV head, or per all that share it
    codes: Codes | None = None  # how its latents are quantised
    rebuilding: Rebuilding | None = None  # how its keys are rebuilt
    #: `[heads, d]` float32, taken from every key before it is projected.
    key_mean: Tensor | None = None
    steps: Steps | None = None

    @property
    def heads(self) -> tuple[int, int]:
        """KV heads, and their columns before they are projected."""
        latents, rebuilding = len(self.keys.widths), self.rebuilding
        if rebuilding is None:
            return latents, self.keys.depth
        return latents * rebuilding.heads, rebuilding.head_dim

    @property
    def outputs(self) -> int:
        """Columns that it puts out of a token."""
        if self.rebuilding is not None and self.rebuilding.value_ups:
            return len(self.value_widths) * self.group * self.rebuilding.head_dim
        return sum(self.value_widths) * self.group

    @property
    def configs(self) -> set[tuple[int, int]]:
        """Pairs of widths of its heads."""
        return set(zip(self.keys.widths, self.value_widths, strict=True))

    def layout(self, rows: int, capacity: int) -> RaggedLayout:
        """Return how its tokens lie in a pool of pages, or in sequences, at full precision."""
        return RaggedLayout(self.keys.widths, self.value_widths, self.group, rows, capacity)

    def whole(self, pages: int, page: int) -> RaggedLayout:
        """Return how rebuilt keys lie in pages, with a KV head's values or its latent of V."""
        assert self.rebuilding is not None
        heads, width = self.rebuilding.heads, self.rebuilding.head_dim
        keys = (width,) * (len(self.value_widths) * heads)
        values = tuple(width for width in self.value_widths for _ in range(heads))
        if self.rebuilding.value_ups:
            values = keys
        return RaggedLayout(keys, values, self.group // heads, pages, page)

    def working(self, tokens: int) -> int:
        """Return the values of working memory that chunks of prompts take beside the pages."""
        if self.rebuilding is not None:  # whole pages of it
            return self.whole(-(-tokens // PAGE_TOKENS), PAGE_TOKENS).elements
        return 0 if self.codes is None else self.layout(1, tokens).elements


def value_lifts(value_ups: Sequence[Tensor], heads: int, queries: int) -> tuple[Tensor, ...]:
    """Return the matrices that rebuild values after decoding, ``[query heads, width, d]`` each."""
    return tuple(
        torch.cat([unflatten(up, 0, (heads, -1)).mT for up in ups])
        .repeat_interleave(queries, dim=0)
        .contiguous()
        for _, ups in groupby(value_ups, key=lambda up: up.shape[1])
    )


def filled_up(found: Sequence[Tensor], tokens: int) -> Tensor:
    """Join outputs, and give zeros to the padding behind the last sequence."""
    seen = sum(map(len, found))
    if seen < tokens:
        found = [*found, found[0].new_zeros(tokens - seen, found[0].shape[1])]
    return concatenated(found, 0)


def cut_key(step: Any) -> Any:
    """Return what decoding steps have in common whose work one launch may cut."""
    room = step.capacity if isinstance(step, DecodeStep) else step.layout.heads
    return type(step), step.tuning, room, len(step.cut_table), step.multiprocessors


@dataclass
class EngineStep:
    """One step of the engine, the same for all layers."""

    #: Decoding steps whose work one launch cuts, with their tables, by `cut_key`.
    alike: dict[Any, tuple[list[Any], Tensor]]
    slots: Tensor  # `[tokens]` int64, where each token is stored; -1 for padding
    table: Tensor  # `[rows, most pages]` int32
    starts: Tensor  # `[rows + 1]` int32, where each sequence's new tokens begin
    lengths: Tensor  # `[rows]` int32, tokens of each sequence, the new ones included
    decodes: int  # sequences with one new token, which come first, and all
    rows: int
    #: The same numbers where the host knows them; read of sequences with several new tokens alone,
    #: and where pages are quantised.
    host_starts: Sequence[int] = ()
    host_lengths: Sequence[int] = ()
    _schedules: dict[int, Schedule] = field(default_factory=dict)
    _made: dict[Any, Any] = field(default_factory=dict)

    def decoding(self, step: Any) -> Tensor:
        """Return the tokens of each row of a decoding step: of the sequences that decode."""
        return self.lengths[: self.decodes]

    def schedule(self, step: Any) -> Schedule:
        """Return how a layer's decoding step is cut: in one launch for all that are alike."""
        if id(step) not in self._schedules:
            steps, tables = self.alike[cut_key(step)]
            lengths = self.decoding(step)
            rows = len(lengths)
            if isinstance(step, SegmentsStep):
                lengths = lengths[None]
            cuts = replace(steps[0], rows=rows).cut_alike(tables, lengths)
            self._schedules.update((id(own), cut) for own, cut in zip(steps, cuts, strict=True))
        return self._schedules[id(step)]

    def once(self, key: Any, make: Callable[[], _Made]) -> _Made:
        """Return what layers share of a step, made by the first that asks for it."""
        if key not in self._made:
            self._made[key] = make()
        found: _Made = self._made[key]
        return found

    def pages_of(self, first: int, stop: int) -> Tensor:
        """Return some sequences' rows of the page table, aligned to 16 bytes as Triton requires."""
        if not first:
            return self.table[:stop]
        return self.once(("pages", first, stop), lambda: self.table[first:stop].clone())

    def cut(self, step: RowsStep, tokens: int, first: int, stop: int) -> RowsCut:
        """Return how the rows of several new tokens are cut, for all layers alike."""

        def made() -> RowsCut:
            # Copies, as `pages_of` says why.
            starts, lengths = self.starts[first : stop + 1], self.lengths[first:stop].clone()
            return step.cut(starts - starts[0], lengths, tokens)

        return self.once((step.heights, first, stop), made)


def attend(
    layer: ServedLayer, step: EngineStep, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Store a step's tokens and return what its queries see, ``[tokens, ServedLayer.outputs]``."""
    assert layer.steps is not None
    if layer.key_mean is not None:
        key = (key - layer.key_mean).to(key.dtype)
    return layer.steps.attend(step, query, key, value, scale)
