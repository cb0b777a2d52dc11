"""What cannot be served, each in one line that says why; nothing of it needs an engine."""

from dataclasses import replace
from typing import Any

import torch

from kvprof.errors import UsageError
from kvprof.kernels.planes import LARGEST_GROUP, STEP
from kvprof.kernels.quantized.codes import FORMATS
from kvprof.kernels.quantized.layout_registry import operand_layout_of
from kvprof.methods.plan import LayerPlan, Placement, Plan
from kvprof.methods.registry import calibration_needs, centred_by_default
from kvprof.methods.soundness import CENTRED
from kvprof.methods.storage import Quantiser
from kvprof.moments.uncalibrated import Laid, uncalibrated_family
from kvprof.runtime.backends.support import refused_quantiser

__all__ = [
    "check_dtype",
    "check_load_format",
    "check_method",
    "check_positions",
    "check_servable",
    "check_shape",
    "check_shared",
    "refusal",
]

#: Ways of loading that give each weight to its parameter's own loader, where heads are dealt out.
#: Others (sharded_state, tensorizer) copy what another process kept of its weights.
_LOAD_FORMATS = (
    "auto", "dummy", "fastsafetensors", "hf", "instanttensor", "mistral", "npcache", "pt",
    "runai_streamer", "safetensors",
)  # fmt: skip


def check_servable(plan: Plan) -> None:
    """Refuse a plan that the plug-in cannot serve."""
    reason = refusal(plan)
    if reason is not None:
        raise UsageError(f"{plan.method} cannot be served: {reason}")


def check_method(laid: Laid, method: str, **options: Any) -> None:
    """Refuse a method whose plans the plug-in cannot serve, before anything is calibrated."""
    needs = calibration_needs(method, **options)  # of unknown methods there are none
    if options.get("centre", centred_by_default(method, laid.layout)) is not False:
        raise UsageError(f"{method} cannot be served: {CENTRED}")
    family = uncalibrated_family(laid, method, **options)
    if family is not None:
        plan = family.build((family.settings or family.bounds)[-1])
        check_servable(replace(plan, method=family.method))
        return
    if needs is not None and needs.across is not None:
        raise UsageError(
            f"{method} cannot be served: it stores several layers together, but an engine's pages "
            "belong to one layer"
        )


def refusal(plan: Plan) -> str | None:
    """Return why a plan cannot be served by pages of an engine; None where it can."""
    if any(layer.centre is not None for layer in plan.layers):
        return CENTRED
    if plan.across is not None:
        if plan.across.at_rest:
            return "it is only for storing and moving a cache, and an engine decodes from its pages"
        return "several layers share a latent, but an engine's pages belong to one layer"
    if plan.eviction is not None:
        return "it evicts tokens, but an engine keeps every token of a prompt for reuse"
    if plan.online_bases:
        return "its bases differ per request, but requests share pages"
    if len(plan.levels.shares) > 1:
        return "tokens change rank as they age, but a page's tokens cannot change"
    if plan.lazy:
        return "its prefill attends to uncompressed K and V, which chunked prefill does not keep"
    if plan.quantiser is not None and (plan.quantiser.window or plan.levels.sink):
        return "some tokens stay uncompressed, but a page stores all its tokens in one format"
    if plan.quantiser is not None and (reason := _quantiser_refusal(plan.quantiser)) is not None:
        return reason
    if not plan.by_age:
        return "its prefill attends to uncompressed tokens, which chunked prefill does not keep"
    if plan.quantiser is not None and any(layer.left_out for layer in plan.layers):
        return "uncompressed layers and quantised layers would need pages of different sizes"
    groups = [group for x in plan.layers for group in (*x.keys.groups, *x.values.groups)]
    if plan.quantiser is not None and any(x.column_bits or not x.quantised for x in groups):
        return "bits differ between heads, but an engine's pages have one size"
    for index, layer in enumerate(plan.layers):
        reason = _layer_refusal(layer, quantised=plan.quantiser is not None)
        if reason is not None:
            return f"layer {index}: {reason}"
    return None


def _quantiser_refusal(quantiser: Quantiser) -> str | None:
    reason = refused_quantiser(quantiser)
    if reason is not None or quantiser.kind not in FORMATS:
        return reason
    layout = operand_layout_of(quantiser.kind)
    if layout.by_width:
        return None
    return f"pages of latents with {layout.words} are not supported yet"


def _layer_refusal(layer: LayerPlan, *, quantised: bool) -> str | None:
    if layer.sliding_window is not None:
        return "a sliding window's pages and ragged pages have different sizes"
    if layer.shared:
        return "it attends to another layer's keys and values"
    if layer.keys.per_query_head:
        return "keys are stored per query head, which no kernel supports"
    if layer.keys.placement is Placement.PRE_ROPE:
        return _rebuilding_refusal(layer, quantised=quantised)
    if any(group.heads > 1 for group in (*layer.keys.groups, *layer.values.groups)):
        return "KV heads that share a latent require keys rebuilt before RoPE"
    return None


def _rebuilding_refusal(layer: LayerPlan, *, quantised: bool) -> str | None:
    if quantised:
        return "no kernel rebuilds keys before RoPE from pages of quantised latents"
    groups = (*layer.keys.groups, *layer.values.groups)
    if len(sizes := sorted({group.heads for group in groups})) > 1:
        return (
            f"latents are shared by {sizes[0]} and by {sizes[-1]} KV heads; the kernels require "
            "one number per layer"
        )
    if (width := groups[0].head_dim) % STEP:
        return f"keys have {width} columns; the kernels rebuild multiples of {STEP}"
    return None


def check_positions(plan: Plan) -> None:
    """Refuse to rebuild keys whose positions are several numbers a token (M-RoPE)."""
    if any(layer.keys.placement is Placement.PRE_ROPE for layer in plan.layers):
        raise UsageError(
            f"{plan.method} cannot be served: tokens have several positions (M-RoPE), but keys "
            "are rebuilt at one"
        )


def check_shared(plan: Plan, group: int) -> None:
    """Refuse latents that more query heads share than a kernel takes."""
    shared = group * max(own.heads for layer in plan.layers for own in layer.keys.groups)
    if shared > LARGEST_GROUP:
        raise UsageError(
            f"{plan.method} cannot be served: {shared} query heads share a latent (limit "
            f"{LARGEST_GROUP})"
        )


def check_dtype(plan: Plan, dtype: torch.dtype) -> None:
    """Refuse a dtype in which quantised pages do not run on a GPU."""
    if plan.quantiser is not None and dtype == torch.float32:
        raise UsageError(
            f"{plan.method} requires bfloat16 or float16 on a GPU, not float32; use --dtype"
        )


def check_load_format(name: str) -> None:
    """Refuse ways of loading in which weights would not lie where the plan expects them."""
    if name not in _LOAD_FORMATS:
        raise UsageError(
            f"a plan cannot be served with --load-format {name[:40]}, which bypasses the split of "
            f"heads among ranks; use {', '.join(_LOAD_FORMATS)}"
        )


def check_shape(plan: Plan, layers: int, kv_heads: int, head_dim: int) -> None:
    """Refuse a plan of another shape than the model's."""
    groups = plan.layers[0].values.groups if plan.layers else ()
    own = (
        len(plan.layers),
        sum(group.heads for group in groups),
        groups[0].head_dim if groups else 0,
    )
    if own != (layers, kv_heads, head_dim):
        raise UsageError(
            f"the plan is for {plan.made.get('model', 'another model')} ({own[0]} layers, "
            f"{own[1]} KV heads of {own[2]}), the model has {layers}, {kv_heads} of {head_dim}"
        )
