"""Which ways of quantising, and which levels, the kernels over segments know."""

from collections.abc import Iterable

import torch

from kvprof.kernels.planes import STEP
from kvprof.methods.plan import HeadGroup, LayerPlan, Plan, Quantiser
from kvprof.methods.tokens import quantises
from kvprof.models.layout import LayerLayout

__all__ = ["levelled", "levels_reason"]

_BITS = {2, 3, 4, 8}


def levelled(plan: Plan, layer: LayerPlan) -> bool:
    """Return whether a layer's tokens are not all stored alike at full precision."""
    if layer.sliding_window is not None:
        return quantises(plan, layer)
    groups = (*layer.keys.groups, *layer.values.groups)
    return quantises(plan, layer) or any(len(set(group.ranks)) > 1 for group in groups)


def levels_reason(
    plan: Plan, layer: LayerPlan, facts: LayerLayout, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return why a layer's tokens cannot be stored in segments; None where they can.

    Parameters
    ----------
    plan : Plan
    layer : LayerPlan
        One of its layers, for which `levelled` holds.
    facts : LayerLayout
        The model's layer.
    device, dtype
        Where and in what the layer runs.
    """
    if layer.sliding_window is not None:
        return "latents within a sliding window are quantised"
    if plan.eviction is not None:
        return "tokens are evicted"
    if device.type == "cuda" and dtype == torch.float32:
        return "quantised tokens and levels run in bfloat16 or float16 on a GPU"
    reason = _levels(plan) or (_quantiser(plan.quantiser) if plan.quantiser else None)
    if reason is None and plan.lazy:
        widths = facts.qk_head_dim, facts.v_head_dim
        if any(width % STEP for width in widths):
            reason = f"a lazy prefill of heads {widths} wide: widths are multiples of {STEP}"
    return reason or _ranks((*layer.keys.groups, *layer.values.groups))


def _levels(plan: Plan) -> str | None:
    levels = plan.levels
    if len(levels.shares) > 2:
        return f"there are {len(levels.shares)} levels of rank, more than 2"
    if len(levels.shares) == 2:
        if levels.batch != 1:
            return f"tokens move down {levels.batch} at a time"
        if plan.quantiser is not None and plan.quantiser.window:
            return "levels are quantised but for a window of the newest tokens"
    return None


def _quantiser(quantiser: Quantiser) -> str | None:
    if quantiser.kind not in ("affine", "fp8"):
        return f"latents are quantised by {quantiser.kind}"
    if quantiser.block != 1:
        return f"tokens are quantised {quantiser.block} at a time"
    sides = [side for side in (quantiser.keys, quantiser.values) if side is not None]
    if quantiser.kind == "fp8":
        return None
    if any(side.axis != "token" for side in sides):
        return "scales are shared along a channel"
    if quantiser.scale_dtype != "float16":
        return f"scales are kept in {quantiser.scale_dtype}"
    groups = {side.group for side in sides}
    if len(groups) > 1:
        return "keys and values share scales in groups of unlike width"
    if any(group is not None and group % STEP for group in groups):
        return f"groups of {groups.pop()} columns share a scale, no multiple of {STEP}"
    bits = {own for side in sides for own in side.bits} - _BITS
    if bits:
        return f"latents are quantised to {bits.pop()} bits"
    return None


def _ranks(groups: Iterable[HeadGroup]) -> str | None:
    for group in groups:
        for rank in group.ranks:
            if rank % STEP:
                return (
                    f"KV head {group.first} keeps {rank} columns at a level, and widths are "
                    f"multiples of {STEP}"
                )
    return None
