"""What the kernels can run of a plan and a model, asked before any of them is loaded.

A layer's tokens are stored in one of four ways (`storage`), for each of which there is a subclass
of `kvprof.runtime.backends.layer.KernelLayer`; `why_not` says why a layer cannot run so.
"""

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from kvprof.errors import UsageError
from kvprof.kernels.checks import DTYPES
from kvprof.kernels.planes import LARGEST_GROUP, STEP, chunks
from kvprof.kernels.quantized.codes import BITS_PER_COLUMN, COLUMN_BITS, COLUMN_FORMATS, FORMATS
from kvprof.methods.plan import HeadGroup, LayerPlan, Plan
from kvprof.methods.soundness import CENTRED
from kvprof.methods.storage import Quantiser
from kvprof.methods.tokens import quantises
from kvprof.models.layout import LayerLayout, ModelLayout
from kvprof.models.load import LoadedModel

__all__ = [
    "LayerSpec",
    "kernel_facts",
    "kernel_reasons",
    "refused_quantiser",
    "storage",
    "why_not",
]

_WIDEST = 256
_OLDEST = (8, 0)


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """A layer of a plan, and where and in what it is to run."""

    plan: Plan
    layer: LayerPlan
    facts: LayerLayout  # the model's layer
    device: torch.device
    dtype: torch.dtype
    #: Gives the rotary functions that the model may call in it; None where the model is not there
    #: to be asked.
    rotations: Callable[[], Sequence[Callable[..., Any]]] | None = None

    @property
    def groups(self) -> tuple[HeadGroup, ...]:
        """The layer's head groups, of the keys and then of the values."""
        return (*self.layer.keys.groups, *self.layer.values.groups)


def storage(spec: LayerSpec) -> Literal["rebuilt", "folded", "segments", "ragged"]:
    """Return how a layer's tokens are stored, from the most special way to what takes the rest."""
    if spec.layer.rebuilds(spec.facts):
        return "rebuilt"
    if any(group.heads > 1 for group in spec.groups):
        return "folded"
    return "segments" if _ages(spec.plan, spec.layer) else "ragged"


def why_not(spec: LayerSpec) -> str | None:
    """Return why a layer cannot run on the kernels; None where it can."""
    if spec.layer.centre is not None:
        return CENTRED
    reason = _machine(spec.device, spec.dtype) or _planned(spec)
    match storage(spec):
        case "rebuilt":
            return reason or _rebuilt(spec) or _modelled(spec.facts) or _unknown_form(spec)
        case "folded":
            return reason or _latents(spec, "heads share latents") or _modelled(spec.facts)
        case "segments":
            reason = reason or _segments(spec)
    return reason or _modelled(spec.facts) or _refused_width(spec)


def kernel_reasons(
    plan: Plan,
    layout: ModelLayout,
    device: torch.device,
    dtype: torch.dtype,
    loaded: LoadedModel | None = None,
) -> list[str | None]:
    """Return `why_not` of every layer."""

    @cache
    def rotations() -> Sequence[Callable[..., Any]]:
        from kvprof.runtime.backends.rotary import rotary_functions

        assert loaded is not None
        return rotary_functions(loaded)

    asked = None if loaded is None else rotations
    return [
        why_not(LayerSpec(plan, layer, facts, device, dtype, asked))
        for layer, facts in zip(plan.layers, layout.layers, strict=True)
    ]


def kernel_facts(plan: Plan, loaded: LoadedModel) -> dict[str, Any]:
    """Return how many of a model's layers the kernels run with a plan, and why not the others."""
    reasons = kernel_reasons(plan, loaded.layout, loaded.device, loaded.dtype, loaded)
    refused = [reason for reason in reasons if reason is not None]
    return {
        "layers": len(reasons) - len(refused),
        "of": len(reasons),
        "reason": refused[0] if refused else None,
    }


# --- What no way to store tokens on the kernels can do.


def _ages(plan: Plan, layer: LayerPlan) -> bool:
    """Whether a layer's tokens are not all stored alike at full precision."""
    if quantises(plan, layer):
        return True
    groups = (*layer.keys.groups, *layer.values.groups)
    uneven = any(len(set(group.ranks)) > 1 for group in groups)
    return layer.sliding_window is None and uneven


def _refused_width(spec: LayerSpec) -> str | None:
    """Return which head's width no plane has; None where there is none."""
    for name, side in (("keys", spec.layer.keys), ("values", spec.layer.values)):
        for group in side.groups:
            if group.rank % STEP or group.rank > _WIDEST:
                return (
                    f"KV head {group.first} keeps {group.rank} columns of its {name}; the kernels "
                    f"run multiples of {STEP} up to {_WIDEST}"
                )
    return None


def _machine(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type not in ("cuda", "cpu"):
        return f"the kernels run on CUDA and CPUs, not on {device.type}"
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        return f"the kernels compute in bfloat16, float16 or float32, not in {name}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":
        return None
    if torch.version.hip is not None:
        return "the kernels require an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST:
        return (
            f"the kernels require compute capability {_OLDEST[0]}.{_OLDEST[1]} (A100) or newer; "
            f"this GPU has {capability[0]}.{capability[1]}"
        )
    return None


def _planned(spec: LayerSpec) -> str | None:
    """Return which part of the plan no kernel supports for this layer; None if all are."""
    if spec.plan.across is not None:
        if spec.plan.across.at_rest:
            return "a coded prompt cache is stored or moved, not decoded from"
        return "several layers share a latent, but a kernel reads one layer"
    if spec.layer.left_out:
        return None
    if spec.layer.keys.per_query_head:
        return "each query head stores its own key, but the kernels share one per KV head"
    if spec.plan.online_bases:
        return "bases are computed online, per sequence"
    if spec.plan.lazy and not _ages(spec.plan, spec.layer):
        return "a lazy prefill attends to uncompressed tokens and compresses afterwards"
    if spec.plan.eviction is not None and spec.layer.sliding_window is None:
        return "tokens are evicted"
    return None


def _modelled(facts: LayerLayout) -> str | None:
    if facts.position == "alibi":
        return "ALiBi adds biases to the scores"
    if facts.masked:
        return "its mask is not just causal with a sliding window"
    if facts.group > LARGEST_GROUP:
        return f"{facts.group} query heads share a KV head (limit {LARGEST_GROUP})"
    return None


# --- Latents that KV heads share: never rebuilt, or rebuilt from before RoPE.


def _latents(spec: LayerSpec, what: str) -> str | None:
    """Say what no kernel does with latents that KV heads share; `what` the plan asks for."""
    group = spec.facts.group
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


def _runs(width: int) -> bool:
    try:
        chunks(width)
    except UsageError:
        return False
    return True


def _rebuilt(spec: LayerSpec) -> str | None:
    facts = spec.facts
    if (reason := _latents(spec, "keys are rebuilt before RoPE")) is not None:
        return reason
    if not _runs(facts.qk_head_dim):
        return f"keys have {facts.qk_head_dim} columns; the kernels rebuild multiples of {STEP}"
    if facts.rotary_offset != 0 or facts.rotary_dim % 2:
        return (
            f"RoPE rotates {facts.rotary_dim} columns from column {facts.rotary_offset}; the "
            "kernels require an even number of leading columns"
        )
    return None


def _unknown_form(spec: LayerSpec) -> str | None:
    """Say whether keys may be rotated in a form that the kernels do not know."""
    if spec.rotations is None:
        return None
    from kvprof.runtime.backends.rotary import rotary_form

    # Which of several functions a layer calls is known only when it does.
    facts = spec.facts
    forms = {
        rotary_form(function, facts.rotary_dim, facts.rotary_transposed)
        for function in spec.rotations()
    }
    known = len(forms) == 1 and None not in forms
    return None if known else "the kernels do not support this model's rotary embedding"


# --- Which ways of quantising, and which levels, the kernels over segments know.


def _segments(spec: LayerSpec) -> str | None:
    plan = spec.plan
    if spec.layer.sliding_window is not None:
        return "latents in a sliding window are quantised"
    if spec.device.type == "cuda" and spec.dtype == torch.float32:
        return "quantised tokens and rank levels require bfloat16 or float16 on a GPU"
    reason = _levels(plan) or (refused_quantiser(plan.quantiser) if plan.quantiser else None)
    if reason is None and plan.lazy:
        widths = spec.facts.qk_head_dim, spec.facts.v_head_dim
        if any(width % STEP for width in widths):
            reason = f"a lazy prefill has heads of {widths} columns (not multiples of {STEP})"
    reason = reason or _refused_bits(plan.quantiser, spec.layer)
    return reason or _refused_heads(plan.quantiser, spec.groups)


def _levels(plan: Plan) -> str | None:
    levels = plan.levels
    if len(levels.shares) > 2:
        return f"there are {len(levels.shares)} rank levels (limit 2)"
    if len(levels.shares) == 2:
        if levels.batch != 1:
            return f"tokens move down in batches of {levels.batch}"
        if plan.quantiser is not None and plan.quantiser.window:
            return "levels are quantised except for a window of the newest tokens"
    return None


def refused_quantiser(quantiser: Quantiser) -> str | None:
    """Return why the kernels over segments do not store what a quantiser makes; None if they do."""
    if quantiser.kind not in FORMATS and quantiser.kind != "affine":
        return f"latents are quantised by {quantiser.kind}"
    if quantiser.block != 1:
        return f"tokens are quantised in blocks of {quantiser.block}"
    if quantiser.kind in FORMATS:
        kept = FORMATS[quantiser.kind].kept_dtype
        if kept is not None and quantiser.scale_dtype != kept:
            return f"scales are stored in {quantiser.scale_dtype}"
        if quantiser.kind in COLUMN_FORMATS and None in (quantiser.keys, quantiser.values):
            return f"only keys or only values have {BITS_PER_COLUMN}"
        return None
    sides = [side for side in (quantiser.keys, quantiser.values) if side is not None]
    if any(side.axis != "token" for side in sides):
        return "scales are shared along a channel"
    if any(side.clip is not None for side in sides):
        return "rows are clipped before quantisation"
    if quantiser.scale_dtype != "float16":
        return f"scales are stored in {quantiser.scale_dtype}"
    groups = {side.group for side in sides}
    if len(groups) > 1:
        return "keys and values have scale groups of different widths"
    if any(group is not None and group % STEP for group in groups):
        return f"groups of {groups.pop()} columns share a scale (not a multiple of {STEP})"
    bits = {own for side in sides for own in side.bits} - FORMATS.keys()
    if bits:
        return f"latents are quantised to {bits.pop()} bits"
    return None


def _refused_heads(quantiser: Quantiser | None, groups: Iterable[HeadGroup]) -> str | None:
    """Return why the kernels over segments do not store some heads; None if they do."""
    by_column = quantiser is not None and quantiser.kind in COLUMN_FORMATS
    for group in groups:
        head = f"KV head {group.first}"
        for rank in group.ranks:
            if rank % STEP:
                return f"{head} has {rank} columns at a level (not a multiple of {STEP})"
        if by_column and (reason := _refused_columns(head, group.column_bits)) is not None:
            return reason
    return None


def _refused_bits(quantiser: Quantiser | None, layer: LayerPlan) -> str | None:
    """Return why the kernels do not store heads with different bits; None if they do."""
    if quantiser is None:
        return None
    by_width = quantiser.kind not in COLUMN_FORMATS
    for name in ("keys", "values"):
        side, groups = getattr(quantiser, name), getattr(layer, name).groups
        quantised = {group.quantised for group in groups}
        if side is not None and not by_width and quantised != {True}:
            return f"some {name} stay uncompressed, others have {BITS_PER_COLUMN}"
        bits = {group.column_bits[0][1] for group in groups if by_width and group.column_bits}
        if len(quantised) > 1 or len(bits) > 1:
            return f"the {name} of one layer have different bits"
        if unknown := bits - FORMATS.keys():
            return f"latents are quantised to {unknown.pop()} bits"
    return None


def _refused_columns(head: str, runs: Sequence[tuple[int, int]]) -> str | None:
    """Return why a head with these bits by column cannot be stored; None if it can."""
    for width, own in runs:
        if own and width % STEP:
            return (
                f"{head} has {width} columns with the same bits; this must be a multiple of {STEP}"
            )
    bits = [own for _, own in runs]
    if bits != sorted(set(bits), reverse=True) or not set(bits) <= {*COLUMN_BITS, 0}:
        return f"the bits of {head} do not decrease from column to column"
    return None
