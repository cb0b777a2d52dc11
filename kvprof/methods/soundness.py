"""Refuses plans that do not fit a model, each in one clear line."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from kvprof.errors import UsageError
from kvprof.methods.plan import HeadGroup, LayerPlan, Placement, Plan
from kvprof.models.layout import LayerLayout, ModelLayout
from kvprof.tensor_files import other_model

__all__ = ["CENTRED", "check_fits", "check_kinds", "head_kinds", "refuse_latent_attention"]


#: Why the kernels do not run a centred plan.
CENTRED = "no kernel runs centred plans yet (option centre=false)"


def check_fits(plan: Plan, layout: ModelLayout, fingerprint: str) -> None:
    """Make sure that a plan is for this model, and folds nothing that cannot be folded.

    Raises
    ------
    UsageError
        For another model's plan, MLA, a shape that differs, or an unsound fold.
    """
    if other_model(plan.fingerprint, fingerprint):
        raise UsageError(
            f"the plan is for {plan.made.get('model', 'another model')} "
            f"({plan.fingerprint[:12]}), not for the model given ({fingerprint[:12]})"
        )
    refuse_latent_attention(layout)
    if len(plan.layers) != len(layout.layers):
        raise UsageError(f"the plan has {len(plan.layers)} layers, the model {len(layout.layers)}")
    for index, (layer, facts) in enumerate(zip(plan.layers, layout.layers, strict=True)):
        _check_layer_fits(f"layer {index}", layer, facts)


def head_kinds(plan: Plan) -> set[tuple[tuple[Any, ...], ...]]:
    """Return the head configs that a plan has: distinct ranks of K and of V, by token level.

    Where heads or columns have bits of their own, these count too.

    A head is a KV head, or as many as share a latent; a kernel is compiled for each kind. Layers
    that no basis touches, and those that store nothing of their own, count for none.
    """
    kinds = set()
    for layer in plan.layers:
        keys, values, copies = layer.keys.groups, layer.values.groups, layer.key_copies
        if layer.shared or all(group.identity for group in (*keys, *values)):
            continue
        # The groups cover the heads in order (`check_plan`), so a kind begins only with a group.
        starts = {group.first // copies for group in keys} | {group.first for group in values}
        for head in starts:
            own = (_ranks_of(keys, head * copies, copies), _ranks_of(values, head, 1))
            kinds.add(own[0] + own[1])
    return kinds


def _ranks_of(groups: Sequence[HeadGroup], first: int, heads: int) -> tuple[tuple[Any, ...], ...]:
    """Return the ranks, and own bits, of the groups of `heads` heads from `first` on."""
    low = bisect_right(groups, first, key=lambda group: group.first) - 1
    high = bisect_left(groups, first + heads, key=lambda group: group.first)
    return tuple(
        (*group.ranks, *group.column_bits, *(() if group.quantised else ("exact",)))
        for group in groups[low:high]
    )


def check_kinds(plan: Plan) -> None:
    """Refuse a plan that has more head configs than it says (option ``kinds``).

    Raises
    ------
    UsageError
    """
    options = plan.made.get("options")
    allowed = options.get("kinds") if isinstance(options, dict) else None
    if not isinstance(allowed, int) or isinstance(allowed, bool) or allowed < 1:
        return  # no limit, or a plan from before there was one
    if (found := len(head_kinds(plan))) > allowed:
        raise UsageError(
            f"the plan has {found} head shapes, above its option kinds={allowed}; create it "
            "again with kvprof plan"
        )


def refuse_latent_attention(layout: ModelLayout) -> None:
    """Refuse a model whose cache is a latent already.

    Raises
    ------
    UsageError
        For multi-head latent attention.
    """
    if any(layer.mla for layer in layout.layers):
        raise UsageError(
            f"{layout.architecture} has multi-head latent attention, whose cache is already a "
            "low-rank latent; use spectrum or stability instead of a plan"
        )


def _check_layer_fits(name: str, layer: LayerPlan, facts: LayerLayout) -> None:
    stored_keys = facts.num_heads if layer.keys.per_query_head else facts.num_kv_heads
    sides = (
        ("keys", layer.keys.groups, facts.qk_head_dim, stored_keys),
        ("values", layer.values.groups, facts.v_head_dim, facts.num_kv_heads),
    )
    for what, groups, width, heads in sides:
        if sum(group.heads for group in groups) != heads or any(
            group.head_dim != width for group in groups
        ):
            raise UsageError(f"{name}: {what} of the plan do not have the model's shape")
    if (layer.sliding_window, layer.shared) != (facts.sliding_window, facts.shared):
        raise UsageError(
            f"{name}: the plan's sliding window or shared keys and values do not match the model's"
        )
    if layer.centre is not None and facts.rotary_pairs is None:
        raise UsageError(f"{name}: its rotation of keys is unknown, so it cannot be centred")
    keys = layer.keys
    rope = facts.position in ("rope", "partial_rope")
    if keys.placement is Placement.POST_ROPE and rope and (keys.fold_down or keys.fold_up):
        raise UsageError(f"{name}: a basis after RoPE cannot be folded into W_K or W_Q")
    if facts.qk_norm and (keys.fold_down or keys.fold_up):
        raise UsageError(f"{name}: a basis cannot be folded across QK-norm; project online")
    if keys.placement is Placement.PRE_ROPE and rope and facts.rotary_offset is None:
        raise UsageError(f"{name}: this model does not expose K before RoPE")
    if layer.values.fold_up and facts.output_projection is None:
        raise UsageError(
            f"{name}: values cannot be folded because the output projection is not linear"
        )
    if layer.values.fold_down and facts.value_projection is None:
        raise UsageError(
            f"{name}: values cannot be folded because the value projection is not linear"
        )
