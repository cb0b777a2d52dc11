"""A step of an engine over pages: which tokens are stored where, and what the queries see.

A step's tokens are projected and stored in one launch, sequences with one new token are decoded
over their pages, and the others attend by rows of unlike numbers of new tokens. What there is to do
is cut on the device, once for all layers, by the first layer that asks: so a graph of a decoding
step holds its own cut, and nothing waits for the host. Where there is no GPU the same calls go to
kvprof's plain kernels. Nothing here knows vLLM. `kvprof.serving.quantised` is the same for pages of
quantised latents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from kvprof.errors import FailedError
from kvprof.kernels.decode.step import DecodeStep, decode_step
from kvprof.kernels.dispatch import compiling_ahead
from kvprof.kernels.parts import Schedule
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill.rows import RowsCut, RowsStep, rows_step
from kvprof.kernels.project.bases import BasisSet
from kvprof.kernels.project.step import project_step
from kvprof.kernels.segments.step import SegmentsStep
from kvprof.runtime.backends.route import few_kinds
from kvprof.serving.pages import Codes

__all__ = ["PAGE_TOKENS", "EngineStep", "ServedLayer", "ServedModel", "attend", "filled_up"]

#: Tokens of a page where nobody says another number: from here on a tile lies in a single page.
PAGE_TOKENS = 64


class Steps(Protocol):
    """What a layer runs over its pages."""

    @property
    def pages(self) -> int:
        """Pages of the pool."""

    @property
    def decode(self) -> Any:
        """The decoding step of one sequence; `replace` makes those of more."""

    def attend(
        self, step: "EngineStep", query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Do what `kvprof.serving.steps.attend` says."""


@dataclass(eq=False)
class ServedLayer:
    """One attention layer of this rank.

    Attributes
    ----------
    attention : Any
        The engine's layer: `kv_cache` is its pool of pages, ``[pages, values]``, and `layer_name`
        its name.
    queries, keys : BasisSet
        What Q and K are multiplied with after RoPE.
    value_widths : tuple of int
        Columns of V's latents, which W_V makes.
    group : int
        Query heads per KV head.
    codes : Codes or None
        How its latents are quantised.
    """

    attention: Any
    queries: BasisSet
    keys: BasisSet
    value_widths: tuple[int, ...]
    group: int
    codes: Codes | None = None
    steps: Steps | None = None

    @property
    def kinds(self) -> set[tuple[int, int]]:
        """Pairs of widths of its heads."""
        return set(zip(self.keys.widths, self.value_widths, strict=True))

    def layout(self, rows: int, capacity: int) -> RaggedLayout:
        """Return how its tokens lie in a pool of pages, or in sequences, at full precision."""
        return RaggedLayout(self.keys.widths, self.value_widths, self.group, rows, capacity)


@dataclass(frozen=True, eq=False)
class PlainSteps:
    """What a layer runs over pages of latents as they are.

    Attributes
    ----------
    layer : ServedLayer
    layout : RaggedLayout
        Of the pool.
    decode, rows : DecodeStep, RowsStep
        Of one sequence; `replace` makes them for others.
    """

    layer: ServedLayer
    layout: RaggedLayout
    decode: DecodeStep
    rows: RowsStep

    @property
    def pages(self) -> int:
        """Pages of the pool."""
        return self.layout.batch

    def attend(
        self, step: "EngineStep", query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Do what `kvprof.serving.steps.attend` says."""
        layer, cache = self.layer, self.layer.attention.kv_cache
        projected = project_step(
            query[None],
            key[None],
            value[None],
            layer.keys,
            self.layout,
            cache,
            None,
            query_bases=layer.queries,
            slots=step.slots[: len(query)],
        )[0]
        found = []
        if step.decodes:
            decode = replace(self.decode, rows=step.decodes)
            schedule, table = step.schedule(self.decode), step.table[: step.decodes]
            found.append(decode.run(projected[: step.decodes], cache, schedule, scale, table=table))
        if step.rows > step.decodes:
            own = projected[step.decodes :]
            rows = replace(self.rows, rows=step.rows - step.decodes)
            cut, table = step.cut(rows, len(own)), step.table[step.decodes :]
            found.append(rows.run(own, cache, cut, scale, table=table))
        return filled_up(found, len(query))


def filled_up(found: Sequence[Tensor], tokens: int) -> Tensor:
    """Join outputs, and give zeros to the padding behind the last sequence."""
    seen = sum(map(len, found))
    if seen < tokens:
        found = [*found, found[0].new_zeros(tokens - seen, found[0].shape[1])]
    return found[0] if len(found) == 1 else torch.cat(list(found))


@dataclass(eq=False)
class ServedModel:
    """The layers of this rank, and what they share.

    Attributes
    ----------
    layers : list of ServedLayer
    alike : dict
        Decoding steps whose work one launch cuts, with their tables, by what they have in common.
    """

    layers: list[ServedLayer] = field(default_factory=list)
    alike: dict[Any, tuple[list[Any], Tensor]] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """The kinds of head of all layers."""
        return tuple(sorted(set().union(*(layer.kinds for layer in self.layers))))

    def bind(self, page: int, most_tokens: int) -> None:
        """Prepare every layer's steps over the pages that the engine has given it.

        Parameters
        ----------
        page : int
            Tokens of a page.
        most_tokens : int
            Of a step of the engine.

        Raises
        ------
        FailedError
            When a layer has no pages.
        """
        if all(
            layer.steps is not None and layer.steps.pages == len(layer.attention.kv_cache)
            for layer in self.layers
        ):
            return
        self._prepare(page, most_tokens)
        together: dict[Any, list[Any]] = {}
        for layer in self.layers:
            assert layer.steps is not None
            together.setdefault(_cut_key(layer.steps.decode), []).append(layer.steps.decode)
        self.alike = {
            key: (steps, torch.stack([step.cut_table for step in steps]))
            for key, steps in together.items()
        }
        if self.layers[0].attention.kv_cache.device.type == "cuda":
            # All kernels at once, and each of them loaded before a graph is captured.
            with compiling_ahead():
                self._rehearse()
            self._rehearse()

    def _prepare(self, page: int, most_tokens: int) -> None:
        from kvprof.serving.quantised import quantised_steps

        shared = few_kinds(set(self.kinds))
        scratch: Tensor | None = None
        for layer in self.layers:
            cache = layer.attention.kv_cache
            if cache.dim() != 2:
                raise FailedError(f"{layer.attention.layer_name} was given no pages")
            if layer.codes is not None:
                if scratch is None:
                    values = max(one.layout(most_tokens, 1).elements for one in self.layers)
                    scratch = layer.keys.packed.new_zeros(values)
                layer.steps = quantised_steps(layer, page, most_tokens, scratch, shared)
                continue
            layout, device = layer.layout(len(cache), page), cache.device
            layer.steps = PlainSteps(
                layer,
                layout,
                decode_step(layout, device, page_tokens=page, rows=1, pairs=shared),
                rows_step(layout, device, cache.dtype, page_tokens=page, rows=1, pairs=self.kinds),
            )

    def _rehearse(self) -> None:
        """Run every layer on steps of padding alone."""
        device = self.layers[0].attention.kv_cache.device
        numbers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        tokens, rows = 32, 2
        for starts in ([0, 1, 2], [0, 1, tokens]):
            count = starts[-1]
            step = EngineStep(
                self,
                torch.full((count,), -1, dtype=torch.int64, device=device),
                torch.zeros(rows, 4, **numbers),
                torch.tensor(starts, **numbers),
                torch.zeros(rows, **numbers),
                decodes=rows if count == rows else 0,
                rows=rows,
                host_starts=starts,
                host_lengths=[1, tokens - 1],
            )
            for layer in self.layers:
                heads, depth = len(layer.keys.widths), layer.keys.depth
                query, key, value = (
                    layer.keys.packed.new_zeros(count, number, depth)
                    for number in (heads * layer.group, heads, heads)
                )
                attend(layer, step, query, key, value, 1.0)


def _cut_key(step: Any) -> Any:
    room = step.capacity if isinstance(step, DecodeStep) else step.layout.heads
    return type(step), step.tuning, room, len(step.cut_table), step.multiprocessors


@dataclass
class EngineStep:
    """One step of the engine, the same for all layers.

    Attributes
    ----------
    model : ServedModel
    slots : Tensor
        ``[tokens]`` int64, where each token is stored; -1 for padding.
    table : Tensor
        ``[rows, most pages]`` int32.
    starts : Tensor
        ``[rows + 1]`` int32, where each sequence's new tokens begin.
    lengths : Tensor
        ``[rows]`` int32, tokens of each sequence, the new ones included.
    decodes, rows : int
        Sequences with one new token, which come first, and all.
    host_starts, host_lengths : sequence of int
        The same numbers where the host knows them; read of sequences with several new tokens alone,
        and where pages are quantised.
    """

    model: ServedModel
    slots: Tensor
    table: Tensor
    starts: Tensor
    lengths: Tensor
    decodes: int
    rows: int
    host_starts: Sequence[int] = ()
    host_lengths: Sequence[int] = ()
    _schedules: dict[int, Schedule] = field(default_factory=dict)
    _cut: RowsCut | None = None

    def schedule(self, step: Any) -> Schedule:
        """Return how a layer's decoding step is cut: in one launch for all that are alike."""
        if id(step) not in self._schedules:
            steps, tables = self.model.alike[_cut_key(step)]
            lengths = self.lengths[: self.decodes]
            if isinstance(step, SegmentsStep):
                lengths = lengths[None]
            cuts = replace(steps[0], rows=self.decodes).cut_alike(tables, lengths)
            self._schedules.update((id(own), cut) for own, cut in zip(steps, cuts, strict=True))
        return self._schedules[id(step)]

    def cut(self, step: RowsStep, tokens: int) -> RowsCut:
        """Return how the rows of several new tokens are cut, for all layers."""
        if self._cut is None:
            starts = self.starts[self.decodes :] - self.decodes
            self._cut = step.cut(starts, self.lengths[self.decodes :], tokens)
        return self._cut


def attend(
    layer: ServedLayer, step: EngineStep, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Store a step's tokens and return what its queries see, ``[tokens, Σ_g G·dv_g]``.

    Parameters
    ----------
    layer : ServedLayer
    step : EngineStep
    query, key, value : Tensor
        ``[tokens, heads, d]``, after RoPE; the first columns of V are its latents.
    scale : float
    """
    assert layer.steps is not None
    return layer.steps.attend(step, query, key, value, scale)
