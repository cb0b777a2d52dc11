"""Decides, layer by layer and pass by pass, what runs on kvprof's kernels and what on torch."""

import os
from concurrent.futures import as_completed, wait
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvprof.errors import FailedError, UsageError
from kvprof.kernels.quantized.codes import FORMATS
from kvprof.methods.plan import Plan
from kvprof.models.interface import Rotation
from kvprof.models.load import LoadedModel
from kvprof.progress import Progress, nested, silent
from kvprof.runtime.backends.support import LayerSpec, kernel_reasons, storage, why_not
from kvprof.runtime.cache import CompressedCache
from kvprof.runtime.clock import part
from kvprof.runtime.layer import LayerRuntime
from kvprof.runtime.masks import MaskFacts, masks

if TYPE_CHECKING:
    from kvprof.runtime.backends.layer import KernelLayer
    from kvprof.runtime.backends.state import HeadConfigs, KernelState, KernelStore

__all__ = [
    "CHOICES",
    "KernelRoute",
    "choice",
    "few_configs",
    "storage_of",
]

CHOICES = ("auto", "on", "off")


def choice(wanted: str | None) -> str:
    """Return whether kernels are used: what was asked for, or what ``KVPROF_KERNELS`` says."""
    source = "kernels" if wanted is not None else "KVPROF_KERNELS"
    found = wanted if wanted is not None else os.environ.get("KVPROF_KERNELS", "auto")
    if found not in CHOICES:
        raise UsageError(f"{source} is {found!r}; use {', '.join(CHOICES)}")
    return found


# Measured on two shared cores of an EPYC, one layer of Llama-3.1-8B's shape, batch 1, one and two
# threads. float32: prompts of 512 tokens and more run 2 to 9 times faster on the kernels; decoding
# is 1.1 to 2.6 times slower with 1,024 tokens stored, and 1.1 to 4 times faster with 8,192. 16
# bits: ragged ranks decode 1.6 to 3.5 times faster at any length, but equal ranks mostly up to 3
# times slower at all lengths to 16,384. Quantised latents and levels: a prompt of 8,192 tokens runs
# 3 to 9 times faster, each step after it 1.4 to 3 times slower, which it takes 700 steps to lose.
_LEAST_ON_A_CPU = 8192
_SHORT_ON_A_CPU = f"on a CPU the kernels are faster only from {_LEAST_ON_A_CPU:,} tokens"
_HALF_ON_A_CPU = "on a CPU torch's own 16-bit matrix products are faster"
# On a GPU kernels are compiled before they first run, which takes seconds: more than they save a
# short sequence.
_LEAST_ON_A_GPU = 1024
_SHORT_ON_A_GPU = f"on a GPU the kernels are faster only from {_LEAST_ON_A_GPU:,} tokens"

# Head configs in one decode kernel: as many as a single layer of eight heads may ask for anyway.
_MOST_CONFIGS = 8

# How transformers names masks that are nothing but causal, with a window or without.
_CAUSAL = ("full_attention", "sliding_attention")


def storage_of(spec: LayerSpec) -> "type[KernelLayer]":
    """Return the way to store tokens that a plan asks for in a layer."""
    from kvprof.runtime.backends.ragged import RaggedKernelLayer
    from kvprof.runtime.backends.rebuilt import FoldedKernelLayer, RebuiltKernelLayer
    from kvprof.runtime.backends.segments import SegmentKernelLayer

    match storage(spec):
        case "rebuilt":
            return RebuiltKernelLayer
        case "folded":
            return FoldedKernelLayer
        case "segments":
            return SegmentKernelLayer
    return RaggedKernelLayer


class KernelRoute:
    """The way through the kernels, for one model and plan."""

    def __init__(self, loaded: LoadedModel, plan: Plan, wanted: str | None) -> None:
        self.wanted = choice(wanted)  # as `kvprof.runtime.backends.route.choice` takes it
        #: Caches whose first pass is shorter stay with torch, because it is the faster way.
        self.least_tokens, self._short = 0, ""
        self._plan = plan
        self._facts = loaded.layout.layers
        self._patterns = _patterns(loaded)
        device, dtype = loaded.device, loaded.dtype
        #: Per layer, why it does not run on the kernels.
        self.reasons: list[str | None] = ["the kernels are switched off"] * len(self._facts)
        if self.wanted != "off":
            asked = kernel_reasons(plan, loaded.layout, device, dtype, loaded)
            self.reasons = [
                pattern or reason for pattern, reason in zip(self._patterns, asked, strict=True)
            ]
        if self.wanted == "auto" and device.type == "cpu":
            self.least_tokens, self._short = _LEAST_ON_A_CPU, _SHORT_ON_A_CPU
            if dtype != torch.float32:
                self.reasons = [reason or _HALF_ON_A_CPU for reason in self.reasons]
        elif self.wanted == "auto":
            self.least_tokens, self._short = _LEAST_ON_A_GPU, _SHORT_ON_A_GPU
        elif self.wanted == "on":
            for index, reason in enumerate(self.reasons):
                self._refuse(index, reason)
        self._layers = [
            None
            if reason is not None
            else storage_of(self._spec(index, device, dtype))(plan, plan.layers[index], facts)
            for index, (facts, reason) in enumerate(zip(self._facts, self.reasons, strict=True))
        ]
        self._device, self._dtype = device, dtype
        self._compiled = device.type != "cuda"
        self._at: dict[tuple[int, torch.device, torch.dtype], str | None] = {}

    @property
    def notes(self) -> list[str]:
        """What is stored otherwise than the plan says, in words."""
        if not self.used:
            return []
        quantiser = self._plan.quantiser
        sides = [] if quantiser is None else [quantiser.keys, quantiser.values]
        groups = [x for y in self._plan.layers for x in (*y.keys.groups, *y.values.groups)]
        own = {bits for x in groups if len(x.column_bits) == 1 for _, bits in x.column_bits}
        by_head = quantiser is not None and quantiser.kind not in FORMATS and 3 in own
        three = by_head or any(side is not None and 3 in side.bits for side in sides)
        return ["the kernels store 3-bit values in 4 bits"] if three else []

    @property
    def configs(self) -> "HeadConfigs":
        """The head configurations that one kernel for decoding serves in all layers."""
        from kvprof.runtime.backends.ragged import PlaneKernelLayer
        from kvprof.runtime.backends.segments import SegmentKernelLayer
        from kvprof.runtime.backends.state import HeadConfigs

        planes, segments = set(), set()
        for layer in self._layers:
            if isinstance(layer, PlaneKernelLayer):
                planes |= layer.pairs
            elif isinstance(layer, SegmentKernelLayer):
                segments |= layer.configs
        return HeadConfigs(few_configs(planes), few_configs(segments))

    @property
    def used(self) -> bool:
        """Whether any layer runs on the kernels."""
        return any(layer is not None for layer in self._layers)

    def new_state(self) -> "KernelState | None":
        """Return what a new cache's layers share; None where no layer runs on the kernels."""
        if not self.used:
            return None
        from kvprof.runtime.backends.state import KernelState

        return KernelState(self.configs)

    def new_store(self, index: int, capacity: int | None) -> "KernelStore | None":
        """Return a layer's empty store; None where it does not run on the kernels."""
        layer = self._layers[index]
        return None if layer is None else layer.new_store(capacity)

    def begin(
        self,
        cache: CompressedCache,
        mask: MaskFacts,
        past: int,
        tokens: int,
        runtimes: list[LayerRuntime],
    ) -> None:
        """Begin a forward pass."""
        masks.needed = True
        state = cache.kernels
        if state is None:
            return
        if state.first and len(state.first) != len(mask.starts):
            raise UsageError(
                f"the cache has {len(state.first)} sequences, but the batch has {len(mask.starts)}"
            )
        plain = mask.plain and state.continues(mask.starts, past)
        if not plain:
            self.leave(cache, past, runtimes, _MASKED)
            return
        if not state.first and tokens < self.least_tokens:
            self.leave(cache, past, runtimes, self._short)
            return
        if not self._compiled:
            try:
                self.compile_ahead(len(mask.starts), nested.get())
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # what is missing is compiled where it is launched
        state.begin(mask.starts, past, tokens)
        masks.needed = not all(layer is not None for layer in self._layers)

    def compile_ahead(self, batch: int, progress: Progress = silent) -> int:
        """Compile the layers' kernels on all cores, except those that rebuild keys."""
        self._compiled = True
        layers = [layer for layer in self._layers if layer is not None and layer.form != "latents"]
        if self._device.type != "cuda" or not layers:
            return 0
        from kvprof.kernels.dispatch import compiling_ahead  # Triton is for Linux only

        with torch.inference_mode(), torch.cuda.device(self._device), compiling_ahead() as pending:
            for layer in layers:
                layer.rehearse(self.configs, batch, self._device, self._dtype)
            # What lies on disk takes no second, and needs no word.
            if wait(pending, timeout=1.0).not_done:
                with progress("compiling kernels", len(pending)) as counter:
                    for _ in as_completed(pending):
                        counter.advance()
        return len(pending)

    def end(self, cache: CompressedCache) -> None:
        """End a forward pass."""
        masks.needed = True
        if cache.kernels is not None:
            with part("schedule"):
                cache.kernels.end()

    def run(
        self,
        index: int,
        cache: CompressedCache,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
        rotation: Rotation | None,
    ) -> Tensor | None:
        """Run a layer on the kernels; None where it does not run there."""
        layer, state, store = self._layers[index], cache.kernels, cache.layers[index]
        if layer is None or state is None or store.planes is None:
            return None
        reason = self._reason_at(index, query.device, query.dtype)
        if reason is not None:
            self._refuse(index, reason if self.wanted == "on" else None)
            if not masks.needed:
                raise FailedError(f"layer {index}: {reason}; use kernels='off'")
            store.planes = None
            return None
        if (state.past, state.tokens) != (store.seen, query.shape[2]):
            raise UsageError(
                f"layer {index} was run alone with a compressed cache; run the whole model, or "
                "use kernels='off'"
            )
        state.rotation = rotation
        reach = cache.reach if cache.capacity is None else None
        output = layer.run(store.planes, state, query, key, value, options, reach)
        state.rotation = None  # it holds a prompt's queries and keys
        return output

    def _reason_at(self, index: int, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why a layer cannot run on what it turns out to run on."""
        key = index, device, dtype
        if key not in self._at:
            self._at[key] = why_not(self._spec(index, device, dtype))
        return self._at[key]

    def _spec(self, index: int, device: torch.device, dtype: torch.dtype) -> LayerSpec:
        return LayerSpec(self._plan, self._plan.layers[index], self._facts[index], device, dtype)

    def leave(
        self, cache: CompressedCache, past: int, runtimes: list[LayerRuntime], reason: str
    ) -> None:
        """Hand what the kernels have stored over to the layers that run on torch."""
        if self.wanted == "on":
            raise UsageError(f"{reason}; leave out kernels='on'")
        assert cache.kernels is not None
        cache.take_angles(cache.kernels, past)
        for layer, store, runtime in zip(self._layers, cache.layers, runtimes, strict=True):
            if layer is not None and store.planes is not None and store.planes.rows:
                buffer = store.planes.buffer
                stacks = runtime.stacks(buffer.device, buffer.dtype)
                store.row_groups = layer.row_groups(store.planes, cache.kernels, past, stacks)
            store.planes = None
        cache.kernels, cache.left = None, reason

    def _refuse(self, index: int, reason: str | None) -> None:
        if reason is not None:
            raise UsageError(
                f"layer {index} cannot run on the kernels: {reason}; use kernels='auto'"
            )


_MASKED = "the attention mask hides more than left padding, which the kernels do not support"


def few_configs(configs: set[Any]) -> tuple[Any, ...] | None:
    """Return head configurations in order where there are not too many for one kernel."""
    return tuple(sorted(configs)) if 0 < len(configs) <= _MOST_CONFIGS else None


def _patterns(loaded: LoadedModel) -> list[str | None]:
    """Say of each layer whether its mask is another than the kernels'."""
    config = loaded.model.config.get_text_config(decoder=True)
    modules = [loaded.model.get_submodule(facts.attention) for facts in loaded.layout.layers]
    if getattr(config, "use_bidirectional_attention", None) or not all(
        getattr(module, "is_causal", True) for module in modules
    ):
        return ["attention is not causal"] * len(modules)
    kinds = getattr(config, "layer_types", None)
    count = len(loaded.layout.layers)
    if not isinstance(kinds, list | tuple) or len(kinds) != count:
        chunk = getattr(config, "attention_chunk_size", None)
        return [f"attention is chunked ({chunk} tokens)" if chunk else None] * count
    return [
        None if kind in _CAUSAL else f"its mask is of the unsupported type {kind!r}"
        for kind in kinds
    ]
