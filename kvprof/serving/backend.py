"""The attention back end that serves a plan in vLLM; only the plug-in loads it.

A step's tokens are projected and stored in one launch, sequences with one new token are decoded
over their pages, and the others attend by rows of unlike numbers of new tokens. What there is to do
is cut on the device, once for all layers, by the first layer that asks: so a graph of a decoding
step holds its own cut, and nothing waits for the host. Where there is no GPU the same calls go to
kvprof's plain kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from kvprof.errors import FailedError, UsageError
from kvprof.kernels.decode.step import DecodeStep, decode_step
from kvprof.kernels.dispatch import compiling_ahead
from kvprof.kernels.parts import Schedule
from kvprof.kernels.planes import STEP, RaggedLayout
from kvprof.kernels.prefill.rows import RowsCut, RowsStep, rows_step
from kvprof.kernels.project.bases import BasisSet
from kvprof.kernels.project.step import project_step
from kvprof.runtime.backends.route import few_kinds

__all__ = ["PlanBackend", "PlanBuilder", "PlanImpl", "PlanMetadata", "ServedLayer", "ServedModel"]

#: Tokens of a page where nobody says another number: from here on a tile lies in a single page.
PAGE_TOKENS = 64


@dataclass(frozen=True, eq=False)
class Steps:
    """What a layer runs, over its pages.

    Attributes
    ----------
    layout : RaggedLayout
        Of the pool.
    decode, rows : DecodeStep, RowsStep
        Of one sequence; `replace` makes them for others.
    """

    layout: RaggedLayout
    decode: DecodeStep
    rows: RowsStep


@dataclass(eq=False)
class ServedLayer:
    """One attention layer of this rank.

    Attributes
    ----------
    attention : Any
        vLLM's layer, which holds the pages.
    queries, keys : BasisSet
        What Q and K are multiplied with after RoPE.
    value_widths : tuple of int
        Columns of V's latents, which W_V makes.
    group : int
        Query heads per KV head.
    """

    attention: Any
    queries: BasisSet
    keys: BasisSet
    value_widths: tuple[int, ...]
    group: int
    steps: Steps | None = None

    @property
    def kinds(self) -> set[tuple[int, int]]:
        """Pairs of widths of its heads."""
        return set(zip(self.keys.widths, self.value_widths, strict=True))

    def layout(self, pages: int, page: int) -> RaggedLayout:
        """Return how its tokens lie in a pool of pages."""
        return RaggedLayout(self.keys.widths, self.value_widths, self.group, pages, page)


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
    alike: dict[Any, tuple[list[DecodeStep], Tensor]] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        """The kinds of head of all layers."""
        return tuple(sorted(set().union(*(layer.kinds for layer in self.layers))))

    def bind(self, page: int) -> None:
        """Prepare every layer's steps over the pages that the engine has given it.

        Parameters
        ----------
        page : int
            Tokens of a page.

        Raises
        ------
        FailedError
            When a layer has no pages.
        """
        if all(
            layer.steps is not None and layer.steps.layout.batch == len(layer.attention.kv_cache)
            for layer in self.layers
        ):
            return
        shared = few_kinds(set(self.kinds))
        for layer in self.layers:
            cache = layer.attention.kv_cache
            if cache.dim() != 2:
                raise FailedError(f"{layer.attention.layer_name} was given no pages")
            layout, device = layer.layout(len(cache), page), cache.device
            layer.steps = Steps(
                layout,
                decode_step(layout, device, page_tokens=page, rows=1, pairs=shared),
                rows_step(layout, device, cache.dtype, page_tokens=page, rows=1, pairs=self.kinds),
            )
        together: dict[Any, list[DecodeStep]] = {}
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

    def _rehearse(self) -> None:
        """Run every layer on steps of padding alone."""
        device = self.layers[0].attention.kv_cache.device
        numbers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        tokens, rows = 32, 2
        for new in (torch.arange(rows + 1, **numbers), torch.tensor([0, 1, tokens], **numbers)):
            count = int(new[-1])
            metadata = PlanMetadata(
                self,
                torch.full((count,), -1, dtype=torch.int64, device=device),
                torch.zeros(rows, 4, **numbers),
                new,
                torch.zeros(rows, **numbers),
                decodes=rows if count == rows else 0,
                rows=rows,
            )
            for layer in self.layers:
                heads, depth = len(layer.keys.widths), layer.keys.depth
                like = layer.attention.kv_cache
                query, key, value = (
                    like.new_zeros(count, number, depth)
                    for number in (heads * layer.group, heads, heads)
                )
                attend(layer, metadata, query, key, value, 1.0)


def _cut_key(step: DecodeStep) -> Any:
    return step.tuning, step.capacity, len(step.heads), step.multiprocessors


@dataclass
class PlanMetadata(AttentionMetadata):  # type: ignore[misc]
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
    """

    model: ServedModel
    slots: Tensor
    table: Tensor
    starts: Tensor
    lengths: Tensor
    decodes: int
    rows: int
    _schedules: dict[int, Schedule] = field(default_factory=dict)
    _cut: RowsCut | None = None

    def schedule(self, step: DecodeStep) -> Schedule:
        """Return how a layer's decoding step is cut: in one launch for all that are alike."""
        if id(step) not in self._schedules:
            steps, tables = self.model.alike[_cut_key(step)]
            first = replace(steps[0], rows=self.decodes)
            cuts = first.cut_alike(tables, self.lengths[: self.decodes])
            self._schedules.update((id(own), cut) for own, cut in zip(steps, cuts, strict=True))
        return self._schedules[id(step)]

    def cut(self, step: RowsStep, tokens: int) -> RowsCut:
        """Return how the rows of several new tokens are cut, for all layers."""
        if self._cut is None:
            starts = self.starts[self.decodes :] - self.decodes
            self._cut = step.cut(starts, self.lengths[self.decodes :], tokens)
        return self._cut


def attend(
    layer: ServedLayer, step: PlanMetadata, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> Tensor:
    """Store a step's tokens and return what its queries see, ``[tokens, Σ_g G·dv_g]``.

    Parameters
    ----------
    layer : ServedLayer
    step : PlanMetadata
    query, key, value : Tensor
        ``[tokens, heads, d]``, after RoPE; the first columns of V are its latents.
    scale : float
    """
    steps, cache = layer.steps, layer.attention.kv_cache
    assert steps is not None
    projected = project_step(
        query[None],
        key[None],
        value[None],
        layer.keys,
        steps.layout,
        cache,
        None,
        query_bases=layer.queries,
        slots=step.slots[: len(query)],
    )[0]
    found = []
    if step.decodes:
        decode = replace(steps.decode, rows=step.decodes)
        schedule = step.schedule(steps.decode)
        table = step.table[: step.decodes]
        found.append(decode.run(projected[: step.decodes], cache, schedule, scale, table=table))
    if step.rows > step.decodes:
        own = projected[step.decodes :]
        rows = replace(steps.rows, rows=step.rows - step.decodes)
        cut, table = step.cut(rows, len(own)), step.table[step.decodes :]
        found.append(rows.run(own, cache, cut, scale, table=table))
    seen = sum(map(len, found))
    if seen < len(query):  # padding behind the last sequence
        found.append(found[0].new_zeros(len(query) - seen, found[0].shape[1]))
    return found[0] if len(found) == 1 else torch.cat(found)


class PlanBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Says what a step of the engine is, once for all layers, without waiting for the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=False)
        context = vllm_config.compilation_config.static_forward_context
        self._model: ServedModel = context[layer_names[0]].impl.model

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PlanMetadata:
        """Return the step; layers whose pages differ are asked for separately and share it."""
        common = common_attn_metadata
        found: PlanMetadata | None = getattr(common, "_kvprof_step", None)
        if found is None:
            self._model.bind(self.kv_cache_spec.block_size)
            decodes, prefills, _, _ = split_decodes_and_prefills(common, decode_threshold=1)
            found = PlanMetadata(
                self._model,
                common.slot_mapping,
                common.block_table_tensor,
                common.query_start_loc,
                common.seq_lens,
                decodes,
                decodes + prefills,
            )
            common._kvprof_step = found
        return found


class PlanImpl(AttentionImpl):  # type: ignore[misc]
    """Runs a layer; what it runs is given once the weights are there.

    Parameters
    ----------
    num_heads, head_size, scale, num_kv_heads
        Of this rank's share of the layer.
    alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
    kv_sharing_target_layer_name, **others
        As vLLM gives them; what cannot be served is refused.

    Raises
    ------
    UsageError
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        reasons = {
            "ALiBi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            "a soft-cap": bool(logits_soft_cap),
            "attention that is not causal": attn_type != AttentionType.DECODER,
            "a layer that shares another's cache": kv_sharing_target_layer_name is not None,
            "attention sinks": others.get("sinks") is not None,
            f"a cache in {kv_cache_dtype}": kv_cache_dtype not in ("auto", "bfloat16", "float16"),
        }
        for what, there in reasons.items():
            if there:
                raise UsageError(f"a plan cannot be served with {what}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.model = ServedModel()
        self.served: ServedLayer | None = None

    @property
    def output_width(self) -> int:
        """Columns of what it puts out."""
        assert self.served is not None
        return sum(self.served.value_widths) * self.served.group

    def attended(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: PlanMetadata | None
    ) -> Tensor:
        """Return a step's attention; zeros while the engine measures its memory."""
        if metadata is None:
            return query.new_zeros(len(query), self.output_width)
        assert self.served is not None
        return attend(self.served, metadata, query, key, value, self.scale)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PlanMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write a step's attention where vLLM's operator wants it, ``[tokens, columns]``."""
        return output.copy_(self.attended(query, key, value, attn_metadata))


class PlanBackend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks of a back end: pages are rows of bytes that only the kernels understand."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name of vLLM's place for back ends from outside."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PlanImpl]:
        """Return what runs a layer."""
        return PlanImpl

    @staticmethod
    def get_builder_cls() -> type[PlanBuilder]:
        """Return what describes a step."""
        return PlanBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """Return which pages run."""
        return [MultipleOf(STEP)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the tokens of a page where nobody asked for others."""
        return PAGE_TOKENS

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Return a pool of pages: a row each."""
        return (num_blocks, block_size * num_kv_heads * head_size)
