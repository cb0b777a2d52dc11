"""Decides, layer by layer and pass by pass, what runs on kvprof's kernels and what on torch."""

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvprof.errors import FailedError, UsageError
from kvprof.kernels.planes import LARGEST_GROUP, STEP
from kvprof.methods.plan import HeadGroup, LayerPlan, Plan
from kvprof.models.interface import Rotation
from kvprof.models.layout import LayerLayout, ModelLayout
from kvprof.models.load import LoadedModel
from kvprof.runtime.backends.layer import KernelLayer
from kvprof.runtime.backends.ragged import RaggedKernelLayer
from kvprof.runtime.backends.rebuilt import FoldedKernelLayer, RebuiltKernelLayer
from kvprof.runtime.backends.rebuilt_tables import rebuilds, rotary_reasons, shared_reason, shares
from kvprof.runtime.backends.segments import SegmentKernelLayer, levelled, levels_reason
from kvprof.runtime.backends.state import KernelState, KernelStore
from kvprof.runtime.clock import part
from kvprof.runtime.masks import MaskFacts, masks

if TYPE_CHECKING:
    from kvprof.runtime.cache import CompressedCache
    from kvprof.runtime.layer import LayerRuntime

__all__ = [
    "CHOICES",
    "KernelRoute",
    "choice",
    "kernel_layer_of",
    "kernel_reasons",
    "runs_on_kernels",
]


def kernel_layer_of(plan: Plan, layer: LayerPlan, facts: LayerLayout) -> KernelLayer:
    """Return what runs a layer that `kvprof.runtime.backends.route` finds fit.

    Parameters
    ----------
    plan : Plan
    layer : LayerPlan
        One of its layers.
    facts : LayerLayout
        The model's layer.
    """
    if rebuilds(layer, facts):
        return RebuiltKernelLayer(layer, facts)
    if shares(layer):
        return FoldedKernelLayer(layer, facts)
    if levelled(plan, layer):
        return SegmentKernelLayer(plan, layer, facts)
    return RaggedKernelLayer(layer, facts)


# --- Which layers of a plan run on kvprof's kernels, and why the others do not.


CHOICES = ("auto", "on", "off")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 256
_OLDEST = (8, 0)


def choice(wanted: str | None) -> str:
    """Return whether kernels are used: what was asked for, or what ``KVPROF_KERNELS`` says.

    Parameters
    ----------
    wanted : str or None
        ``auto`` (where they are the faster way), ``on`` (everywhere, or an error), ``off``; None
        asks the environment, and without an answer there is ``auto``.

    Raises
    ------
    UsageError
        For another word.
    """
    source = "kernels" if wanted is not None else "KVPROF_KERNELS"
    found = wanted if wanted is not None else os.environ.get("KVPROF_KERNELS", "auto")
    if found not in CHOICES:
        raise UsageError(f"{source} is {found!r}; choose from {', '.join(CHOICES)}")
    return found


def runs_on_kernels(
    plan: Plan, layer: LayerPlan, facts: LayerLayout, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why a layer cannot run on the kernels; None where it can.

    What a plan says of all layers counts only where it touches this one: levels and eviction stop
    at a sliding window.

    Parameters
    ----------
    plan : Plan
    layer : LayerPlan
        One of its layers.
    facts : LayerLayout
        The model's layer.
    device : torch.device
        Where the layer runs.
    dtype : torch.dtype
        That it runs in.
    """
    reason = _machine(device, dtype)
    if reason is None:
        reason = _stored(plan, layer)
    if reason is None and (rebuilds(layer, facts) or shares(layer)):
        reason = shared_reason(plan, layer, facts)
    elif reason is None and levelled(plan, layer):
        reason = levels_reason(plan, layer, facts, device, dtype)
    if reason is None:
        reason = _shapes(layer, facts)
    return reason


def kernel_reasons(
    plan: Plan, layout: ModelLayout, device: torch.device, dtype: torch.dtype
) -> list[str | None]:
    """Return `runs_on_kernels` of every layer."""
    return [
        runs_on_kernels(plan, layer, facts, device, dtype)
        for layer, facts in zip(plan.layers, layout.layers, strict=True)
    ]


def _machine(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type not in ("cuda", "cpu"):
        return f"there are kernels for CUDA and the CPU, none for {device.type}"
    if dtype not in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"the kernels compute in bfloat16, float16 or float32, not in {name}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        return None
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        return (
            f"the kernels need compute capability {_OLDEST[0]}.{_OLDEST[1]} (A100) or newer, and "
            f"this GPU has {capability[0]}.{capability[1]}"
        )
    return None


def _stored(plan: Plan, layer: LayerPlan) -> str | None:
    """Say what of the way to store tokens the kernels do not know."""
    if layer.keys.per_query_head:
        return "each query head stores a key of its own, and the kernels share one per KV head"
    if plan.online_bases:
        return "bases are found online, per sequence"
    if plan.lazy and not levelled(plan, layer):
        return "a lazy prefill attends exactly and compresses afterwards"
    if plan.eviction is not None and layer.sliding_window is None:
        return "tokens are evicted"
    return None


def _shapes(layer: LayerPlan, facts: LayerLayout) -> str | None:
    if facts.position == "alibi":
        return "ALiBi adds to the scores"
    if facts.masked:
        return "its mask hides more than what is later or out of its sliding window"
    if facts.group > LARGEST_GROUP:
        return f"{facts.group} query heads share a KV head, more than {LARGEST_GROUP}"
    if rebuilds(layer, facts) or shares(layer):
        return None  # with widths of their own
    return _groups("keys", layer.keys.groups) or _groups("values", layer.values.groups)


def _groups(name: str, groups: Sequence[HeadGroup]) -> str | None:
    for group in groups:
        if group.rank % STEP or group.rank > _WIDEST:
            return (
                f"KV head {group.first} keeps {group.rank} columns of its {name}, and widths are "
                f"multiples of {STEP} to {_WIDEST}"
            )
    return None


# Measured on two shared cores of an EPYC, one layer of Llama-3.1-8B's shape, batch 1, one and two
# threads. float32: prompts of 512 tokens and more run 2 to 9 times faster on the kernels; decoding
# is 1.1 to 2.6 times slower with 1,024 tokens stored, and 1.1 to 4 times faster with 8,192. 16
# bits: ragged ranks decode 1.6 to 3.5 times faster at any length, but equal ranks mostly up to 3
# times slower at all lengths to 16,384. Quantised latents and levels: a prompt of 8,192 tokens runs
# 3 to 9 times faster, each step after it 1.4 to 3 times slower, which it takes 700 steps to lose.
_LEAST_ON_A_CPU = 8192
_SHORT_ON_A_CPU = f"on a CPU the kernels are the faster way from {_LEAST_ON_A_CPU:,} tokens on"
_HALF_ON_A_CPU = "on a CPU torch's own products of 16 bits are the faster way"
# On a GPU every set of widths is compiled when it first runs, which takes seconds: more than the
# kernels save a short sequence.
_LEAST_ON_A_GPU = 4096
_SHORT_ON_A_GPU = f"on a GPU the kernels pay from {_LEAST_ON_A_GPU:,} tokens on"

# How transformers names masks that are nothing but causal, with a window or without.
_CAUSAL = ("full_attention", "sliding_attention")


class KernelRoute:
    """The way through the kernels, for one model and plan.

    Parameters
    ----------
    loaded : LoadedModel
    plan : Plan
    wanted : str or None
        As `kvprof.runtime.backends.route.choice` takes it.

    Attributes
    ----------
    reasons : list of str or None
        Per layer, why it does not run on the kernels.
    least_tokens : int
        Caches whose first pass is shorter stay with torch, because it is the faster way.

    Raises
    ------
    UsageError
        When all layers are to run on the kernels and one cannot.
    """

    def __init__(self, loaded: LoadedModel, plan: Plan, wanted: str | None) -> None:
        self.wanted = choice(wanted)
        self.least_tokens, self._short = 0, ""
        self._plan = plan
        self._facts = loaded.layout.layers
        self._patterns = _patterns(loaded)
        device, dtype = loaded.device, loaded.dtype
        self.reasons: list[str | None] = [
            pattern or reason or turning
            for pattern, reason, turning in zip(
                self._patterns,
                kernel_reasons(plan, loaded.layout, device, dtype),
                rotary_reasons(loaded, plan),
                strict=True,
            )
        ]
        if self.wanted == "off":
            self.reasons = ["the kernels are switched off"] * len(self._facts)
        elif self.wanted == "auto" and device.type == "cpu":
            self.least_tokens, self._short = _LEAST_ON_A_CPU, _SHORT_ON_A_CPU
            if dtype != torch.float32:
                self.reasons = [reason or _HALF_ON_A_CPU for reason in self.reasons]
        elif self.wanted == "auto":
            self.least_tokens, self._short = _LEAST_ON_A_GPU, _SHORT_ON_A_GPU
        elif self.wanted == "on":
            for index, reason in enumerate(self.reasons):
                self._refuse(index, reason)
        self._layers = [
            None if reason is not None else kernel_layer_of(plan, layer, facts)
            for layer, facts, reason in zip(plan.layers, self._facts, self.reasons, strict=True)
        ]
        self._at: dict[tuple[int, torch.device, torch.dtype], str | None] = {}

    @property
    def notes(self) -> list[str]:
        """What is stored otherwise than the plan says, in words."""
        quantiser = self._plan.quantiser
        sides = [] if quantiser is None else [quantiser.keys, quantiser.values]
        three = any(side is not None and 3 in side.bits for side in sides)
        return ["3 bits are stored in the kernels' container of 4"] if three and self.used else []

    @property
    def used(self) -> bool:
        """Whether any layer runs on the kernels."""
        return any(layer is not None for layer in self._layers)

    def new_state(self) -> KernelState | None:
        """Return what a new cache's layers share; None where no layer runs on the kernels."""
        return KernelState() if self.used else None

    def new_store(self, index: int, capacity: int | None) -> KernelStore | None:
        """Return a layer's empty store; None where it does not run on the kernels."""
        layer = self._layers[index]
        return None if layer is None else layer.new_store(capacity)

    def begin(
        self,
        cache: "CompressedCache",
        mask: MaskFacts,
        past: int,
        tokens: int,
        runtimes: list["LayerRuntime"],
    ) -> None:
        """Begin a forward pass.

        Parameters
        ----------
        cache : CompressedCache
        mask : MaskFacts
        past, tokens : int
            Tokens before the pass and its own, padding included.
        runtimes : list of LayerRuntime
            Which go on where a mask asks for more than the kernels know.

        Raises
        ------
        UsageError
            For a batch that is not the cache's, and for such a mask where nothing but the kernels
            is to run.
        """
        masks.needed = True
        state = cache.kernels
        if state is None:
            return
        if state.first and len(state.first) != len(mask.starts):
            raise UsageError(
                f"the cache holds {len(state.first)} sequences, and the batch has "
                f"{len(mask.starts)}"
            )
        plain = mask.plain and state.continues(mask.starts, past)
        if not plain:
            self.leave(cache, past, runtimes, _MASKED)
            return
        if not state.first and tokens < self.least_tokens:
            self.leave(cache, past, runtimes, self._short)
            return
        state.begin(mask.starts, past, tokens)
        masks.needed = not all(layer is not None for layer in self._layers)

    def end(self, cache: "CompressedCache") -> None:
        """End a forward pass."""
        masks.needed = True
        if cache.kernels is not None:
            with part("schedule"):
                cache.kernels.end()

    def run(
        self,
        index: int,
        cache: "CompressedCache",
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
        rotation: Rotation | None,
    ) -> Tensor | None:
        """Run a layer on the kernels; None where it does not run there.

        Parameters
        ----------
        index : int
        cache : CompressedCache
        query, key, value, options
            As the attention function got them.
        rotation : Rotation or None
            The layer's call of the model's rotary function, where it rebuilds keys.

        Raises
        ------
        UsageError
            When the layer runs by itself, outside a forward pass of the model.
        FailedError
            When the states are of a kind that the kernels do not know, and no mask was made.
        """
        layer, state, store = self._layers[index], cache.kernels, cache.layers[index]
        if layer is None or state is None or store.planes is None:
            return None
        reason = self._reason_at(index, query.device, query.dtype)
        if reason is not None:
            self._refuse(index, reason if self.wanted == "on" else None)
            if not masks.needed:
                raise FailedError(f"layer {index}: {reason}; run it with kernels='off'")
            store.planes = None
            return None
        if (state.past, state.tokens) != (store.seen, query.shape[2]):
            raise UsageError(
                f"layer {index} runs by itself with a compressed cache; run the whole model, or "
                "choose kernels='off'"
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
            layer, facts = self._plan.layers[index], self._facts[index]
            self._at[key] = runs_on_kernels(self._plan, layer, facts, device, dtype)
        return self._at[key]

    def leave(
        self, cache: "CompressedCache", past: int, runtimes: list["LayerRuntime"], reason: str
    ) -> None:
        """Hand what the kernels have stored over to the layers that run on torch.

        Raises
        ------
        UsageError
            When nothing but the kernels is to run.
        """
        if self.wanted == "on":
            raise UsageError(f"{reason}; leave kernels='on' out")
        assert cache.kernels is not None
        cache.take_angles(cache.kernels, past)
        for layer, store, runtime in zip(self._layers, cache.layers, runtimes, strict=True):
            if layer is not None and store.planes is not None and store.planes.rows:
                buffer = store.planes.buffer
                bundles = runtime.bundles(buffer.device, buffer.dtype)
                store.cohorts = layer.cohorts(store.planes, cache.kernels, past, bundles)
            store.planes = None
        cache.kernels, cache.left = None, reason

    def _refuse(self, index: int, reason: str | None) -> None:
        if reason is not None:
            raise UsageError(
                f"layer {index} cannot run on the kernels: {reason}; choose kernels='auto'"
            )


_MASKED = (
    "the attention mask hides more than padding on the left, and the kernels see every token from "
    "a row's first real one on"
)


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
    return [None if kind in _CAUSAL else f"its mask is of the kind {kind!r}" for kind in kinds]
