"""The vLLM attention back end that serves a plan; `kvprof.serving.steps` runs the steps."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from kvprof.errors import UsageError
from kvprof.kernels.planes import STEP
from kvprof.serving.model import ServedModel
from kvprof.serving.quantised import own_pages
from kvprof.serving.runners import CAPTURE
from kvprof.serving.steps import PAGE_TOKENS, EngineStep, ServedLayer, attend

__all__ = ["PlanBackend", "PlanBuilder", "PlanImpl"]


class PlanBuilder(AttentionMetadataBuilder):  # type: ignore[misc]  # vLLM has no types here
    """Says what a step of the engine is, once for all layers, without waiting for the device."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return which steps a graph holds: all."""
        return AttentionCGSupport.ALWAYS

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
    ) -> EngineStep:
        """Return the step; layers whose pages differ are asked for separately and share it."""
        common = common_attn_metadata
        found: EngineStep | None = getattr(common, "_kvprof_step", None)
        if found is None:
            self._bind(common)
            decodes, prefills, _, _ = split_decodes_and_prefills(common, decode_threshold=1)
            # Of sequences with several new tokens the host's numbers are those of the device.
            several = prefills > 0
            starts = common.query_start_loc_cpu.tolist() if several else []
            lengths = common.seq_lens_cpu_upper_bound.tolist() if several else []
            if self._beyond(common):
                lengths = self._cut(common, starts, lengths)
            found = EngineStep(
                self._model.alike,
                common.slot_mapping,
                common.block_table_tensor,
                common.query_start_loc,
                common.seq_lens,
                decodes,
                decodes + prefills,
                starts,
                lengths,
            )
            common._kvprof_step = found
        return found

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> EngineStep:
        """Return the step that a CUDA graph captures; replays read the engine's tensors."""
        common = common_attn_metadata
        decodes = common.max_query_len <= 1 if CAPTURE.decodes is None else CAPTURE.decodes
        if decodes:
            return self.build(0, common)
        found: EngineStep | None = getattr(common, "_kvprof_step", None)
        if found is None:
            self._bind(common)
            if self._beyond(common):
                self._cut(common, [], [])
            found = self._model.captured_step(
                common.slot_mapping,
                common.block_table_tensor,
                common.query_start_loc,
                common.seq_lens,
            )
            common._kvprof_step = found
        return found

    def _row_tokens(self, common: CommonAttentionMetadata) -> int:
        """Return the tokens that a sequence's row of the table has pages for."""
        return int(common.block_table_tensor.shape[1] * self.kv_cache_spec.block_size)

    def _beyond(self, common: CommonAttentionMetadata) -> bool:
        """Whether sequences exceed their pages, as in vLLM's trial of a long step."""
        return int(common.max_query_len) > self._row_tokens(common)

    def _cut(
        self, common: CommonAttentionMetadata, starts: list[int], lengths: list[int]
    ) -> list[int]:
        """Limit sequences to their pages, in place on the device; return the host's lengths."""
        room = self._row_tokens(common)
        common.seq_lens.clamp_(max=room)
        new = (stop - start for start, stop in pairwise(starts))
        return [max(own, min(length, room)) for own, length in zip(new, lengths, strict=True)]

    def _bind(self, common: CommonAttentionMetadata) -> None:
        """Prepare the layers' steps, if this is the first one."""
        longest = self.vllm_config.model_config.max_model_len
        columns = common.block_table_tensor.shape[1]
        most, captured = _room(self.vllm_config)
        self._model.bind(self.kv_cache_spec.block_size, most, longest, columns, captured)


def _room(config: Any) -> tuple[int, tuple[int, int]]:
    """Return the tokens of a step, and tokens and sequences of the largest captured mixed step."""
    scheduler, graphs = config.scheduler_config, config.compilation_config
    captured = 0, 0
    if graphs.cudagraph_mode.mixed_mode().name == "FULL":
        captured = graphs.max_cudagraph_capture_size or 0, scheduler.max_num_seqs
    return scheduler.max_num_batched_tokens, captured


class PlanImpl(AttentionImpl):  # type: ignore[misc]  # vLLM has no types here
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
            "non-causal attention": attn_type != AttentionType.DECODER,
            "KV sharing between layers": kv_sharing_target_layer_name is not None,
            "attention sinks": others.get("sinks") is not None,
            f"--kv-cache-dtype {kv_cache_dtype}": kv_cache_dtype
            not in ("auto", "bfloat16", "float16"),
        }
        for what, there in reasons.items():
            if there:
                raise UsageError(f"a plan cannot be served with {what}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self._config = get_current_vllm_config()
        self.model = ServedModel()
        self.served: ServedLayer | None = None
        #: Tokens that a sequence may have.
        self.longest = 0

    def attended(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: EngineStep | None
    ) -> Tensor:
        """Return a step's attention; zeros while the engine measures its memory."""
        assert self.served is not None
        if metadata is None:
            # What chunks take beside the pages has its room too, and a step's own pages.
            taken = self.served.working(self.longest)
            if self.served.codes is not None:
                taken += own_pages(self.served, *_room(self._config)).elements
            self.model.reserve(query, taken)
            return query.new_zeros(len(query), self.served.outputs)
        return attend(self.served, metadata, query, key, value, self.scale)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: EngineStep | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write a step's attention where vLLM's operator wants it, ``[tokens, columns]``."""
        return output.copy_(self.attended(query, key, value, attn_metadata))


class PlanBackend(AttentionBackend):  # type: ignore[misc]  # vLLM has no types here
    """What vLLM asks of a back end: pages are rows of bytes that only the kernels understand."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM has for back ends from outside."""
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
