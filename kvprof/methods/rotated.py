"""Plans at full width in other coordinates: every KV head turned by a rotation, then quantised.

Scores and outputs do not change with a rotation, but what codes lose does. Keys are turned after
RoPE and queries with them, online, or in W_K and W_Q where a layer has neither RoPE nor QK-norm;
values in W_V and W_O where the model has them as plain projections.
"""

from dataclasses import replace

from torch import Tensor

from kvprof.methods.low_rank import has_rope, identity_layer, value_folds
from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan, Placement, ValuePlan
from kvprof.models.layout import LayerLayout

__all__ = ["rotated_layer"]


def rotated_layer(facts: LayerLayout, keys: Tensor | None, values: Tensor | None) -> LayerPlan:
    """Return a layer that stores ``x @ R`` of every KV head, at full width.

    Parameters
    ----------
    facts : LayerLayout
    keys, values : Tensor or None
        R, orthogonal: ``[d, d]`` for all heads or ``[num_kv_heads, d, d]``; None leaves that side
        as the model gives it.
    """
    layer, heads = identity_layer(facts), facts.num_kv_heads
    if keys is not None:
        folds = not has_rope(facts) and not facts.qk_norm
        own = KeyPlan(Placement.POST_ROPE, _groups(keys, heads), folds, folds)
        layer = replace(layer, keys=own)
    if values is not None:
        layer = replace(layer, values=ValuePlan(_groups(values, heads), *value_folds(facts)))
    return layer


def _groups(rotations: Tensor, heads: int) -> tuple[HeadGroup, ...]:
    width = rotations.shape[-1]
    every = rotations.float().expand(heads, width, width)
    return tuple(
        HeadGroup(head, 1, width, (width,), own.contiguous(), own.contiguous())
        for head, own in enumerate(every)
    )
