"""Refuses plans that contradict themselves or do not fit a model, each in one clear line."""

from collections.abc import Sequence

from kvprof.errors import UsageError
from kvprof.methods.plan import HeadGroup, LayerPlan, Placement, Plan
from kvprof.methods.storage import LIBRARIES, Eviction, Levels, Quantiser, SideQuantiser
from kvprof.models.layout import LayerLayout, ModelLayout

__all__ = ["check_fits", "check_plan", "refuse_latent_attention"]

_KINDS = ("affine", "codebook", "fp8", *LIBRARIES)
_BITS = (2, 3, 4, 8)
_SCALES = ("float16", "bfloat16", "float32")
# The quantised rows hold 16-bit column indices of outliers.
_WIDEST = 2**16


def check_plan(plan: Plan) -> None:
    """Make sure that a plan says one thing.

    Raises
    ------
    UsageError
        Naming what contradicts what.
    """
    _check_levels(plan.levels)
    if plan.quantiser is not None:
        _check_quantiser(plan.quantiser, plan.levels)
    if plan.eviction is not None:
        _check_eviction(plan.eviction, plan.quantiser)
    for index, layer in enumerate(plan.layers):
        _check_layer(f"layer {index}", layer, plan)


def check_fits(plan: Plan, layout: ModelLayout, fingerprint: str) -> None:
    """Make sure that a plan is for this model, and folds nothing that cannot be folded.

    Raises
    ------
    UsageError
        For another model's plan, MLA, a shape that differs, or an unsound fold.
    """
    if plan.fingerprint != fingerprint:
        raise UsageError(
            f"the plan is for {plan.made.get('model', 'another model')} "
            f"({plan.fingerprint[:12]}), not for the model given ({fingerprint[:12]})"
        )
    refuse_latent_attention(layout)
    if len(plan.layers) != len(layout.layers):
        raise UsageError(f"the plan has {len(plan.layers)} layers, the model {len(layout.layers)}")
    for index, (layer, facts) in enumerate(zip(plan.layers, layout.layers, strict=True)):
        _check_layer_fits(f"layer {index}", layer, facts)


def refuse_latent_attention(layout: ModelLayout) -> None:
    """Refuse a model whose cache is a latent already.

    Raises
    ------
    UsageError
        For multi-head latent attention.
    """
    if any(layer.mla for layer in layout.layers):
        raise UsageError(
            f"{layout.architecture} has multi-head latent attention: its cache is a low-rank "
            "latent already, and no plan applies to it (spectrum and stability do)"
        )


def _check_levels(levels: Levels) -> None:
    if levels.sink < 0 or levels.batch < 1:
        raise UsageError(f"levels: sink {levels.sink} and batch {levels.batch} make no sense")
    if not levels.shares or min(levels.shares) < 0 or abs(sum(levels.shares) - 1) > 1e-9:
        raise UsageError(f"levels: the shares {levels.shares} are no parts of 1")


def _check_quantiser(quantiser: Quantiser, levels: Levels) -> None:
    if quantiser.kind not in _KINDS:
        raise UsageError(f"quantiser: {quantiser.kind!r} is none of {', '.join(_KINDS)}")
    if quantiser.window < 0 or quantiser.block < 1 or not 0 <= quantiser.outliers < 1:
        raise UsageError("quantiser: window, block or share of outliers makes no sense")
    if quantiser.outliers and quantiser.kind != "codebook":
        raise UsageError(f"quantiser: {quantiser.kind} keeps no outliers; codebook does")
    known = ("model",) if quantiser.kind in LIBRARIES else _SCALES
    if quantiser.scale_dtype not in known:
        raise UsageError(
            f"quantiser: scales of {quantiser.kind} are {' or '.join(known)}, not "
            f"{quantiser.scale_dtype!r}"
        )
    sides = [side for side in (quantiser.keys, quantiser.values) if side is not None]
    if not sides:
        raise UsageError("quantiser: neither keys nor values are quantised; leave it out")
    for side in sides:
        _check_side(side, quantiser, levels)


def _check_side(side: SideQuantiser, quantiser: Quantiser, levels: Levels) -> None:
    library = LIBRARIES.get(quantiser.kind)
    allowed = library.bits if library else (8,) if quantiser.kind == "fp8" else _BITS
    unknown = [bits for bits in side.bits if bits not in allowed]
    if unknown:
        raise UsageError(
            f"quantiser: {quantiser.kind} has no {unknown[0]} bits; choose from "
            f"{', '.join(map(str, allowed))}"
        )
    if len(side.bits) != len(levels.shares):
        raise UsageError(
            f"quantiser: {len(side.bits)} bit widths for {len(levels.shares)} token levels"
        )
    if side.axis not in ("token", "channel"):
        raise UsageError(f"quantiser: the axis is token or channel, not {side.axis!r}")
    if library is not None and side.axis != "token":
        raise UsageError(f"quantiser: {quantiser.kind} quantises per token here, not per channel")
    if side.group is not None and side.group < 1:
        raise UsageError(f"quantiser: a group of {side.group} values makes no sense")
    if side.axis == "channel":
        if side.group is None or quantiser.block % side.group:
            raise UsageError(
                f"quantiser: keys per channel in groups of {side.group} tokens need blocks of a "
                f"multiple of it, not of {quantiser.block}"
            )
        if len(levels.shares) > 1 and levels.batch % side.group:
            raise UsageError(
                f"levels: tokens that share scales in groups of {side.group} move down in batches "
                f"of a multiple of it, not of {levels.batch}"
            )


def _check_eviction(eviction: Eviction, quantiser: Quantiser | None) -> None:
    if eviction.kind not in ("recent", "h2o", "keyformer"):
        raise UsageError(f"eviction: {eviction.kind!r} is none of recent, h2o, keyformer")
    if eviction.order not in ("evict_first", "compress_first"):
        raise UsageError(f"eviction: {eviction.order!r} is neither evict_first nor compress_first")
    if not 0 < eviction.keep <= 1 or not 0 <= eviction.recent_share <= 1 or eviction.sink < 0:
        raise UsageError(
            f"eviction: keep {eviction.keep:g}, recent share {eviction.recent_share:g} or sink "
            f"{eviction.sink} makes no sense"
        )
    if eviction.kind == "recent" and eviction.recent_share != 1:
        raise UsageError("eviction: recent keeps the newest tokens only; its recent share is 1")
    if min(eviction.tau) <= 0:
        raise UsageError(f"eviction: the temperatures {eviction.tau} must be above 0")
    sides = (quantiser.keys, quantiser.values) if quantiser is not None else ()
    if any(side is not None and side.axis == "channel" for side in sides):
        raise UsageError(
            "eviction would tear tokens out of blocks that share scales per channel (KIVI); "
            "quantise per token instead"
        )


def _check_layer(name: str, layer: LayerPlan, plan: Plan) -> None:
    keys, values = layer.keys, layer.values
    key_heads = _check_groups(f"{name} keys", keys.groups, plan)
    value_heads = _check_groups(f"{name} values", values.groups, plan)
    if keys.per_query_head:
        single = all(group.heads == 1 for group in keys.groups)
        if keys.placement is not Placement.POST_ROPE or not single or key_heads % value_heads:
            raise UsageError(
                f"{name}: keys per query head are projected after RoPE, each alone, and as many as "
                "there are query heads"
            )
        if keys.fold_down or keys.fold_up:
            raise UsageError(f"{name}: keys per query head cannot be folded into W_K or W_Q")
    elif key_heads != value_heads:
        raise UsageError(f"{name}: keys and values cover different numbers of KV heads")
    plain = all(group.identity for group in keys.groups)
    if keys.placement is Placement.NONE and not plain:
        raise UsageError(f"{name}: keys have a basis but no placement")
    if keys.placement is Placement.NONE and (keys.fold_down or keys.fold_up):
        raise UsageError(f"{name}: keys have nothing to fold")
    if keys.placement is Placement.PRE_ROPE and keys.fold_up:
        raise UsageError(f"{name}: keys rebuilt before RoPE cannot be folded into W_Q")
    if layer.sliding_window is not None and layer.sliding_window < 2:
        raise UsageError(f"{name}: a sliding window of {layer.sliding_window} stores no token")
    if (plan.lazy or plan.online_bases) and (keys.fold_down or values.fold_down):
        what = "lazy" if plan.lazy else "online_bases"
        raise UsageError(f"{name}: {what} needs exact K and V in prefill, so nothing folds down")


def _check_groups(name: str, groups: Sequence[HeadGroup], plan: Plan) -> int:
    """Return the number of KV heads that the groups cover."""
    head = 0
    for group in groups:
        if group.first != head or group.heads < 1:
            raise UsageError(f"{name}: head groups must cover the KV heads in order, each once")
        head += group.heads
        if len(group.ranks) != len(plan.levels.shares):
            raise UsageError(
                f"{name}: {len(group.ranks)} ranks for {len(plan.levels.shares)} token levels"
            )
        if group.ranks[0] < 1 or list(group.ranks) != sorted(group.ranks):
            raise UsageError(f"{name}: ranks {group.ranks} must be 1 or more and not decrease")
        if group.rank > min(group.width, _WIDEST):
            raise UsageError(f"{name}: rank {group.rank} is over the width {group.width}")
        if (group.down is None) is not (group.up is None):
            raise UsageError(f"{name}: a group has one of down and up; it takes both or neither")
        if group.down is not None and group.up is not None:
            for matrix in (group.down, group.up):
                if tuple(matrix.shape) != (group.width, group.rank):
                    raise UsageError(
                        f"{name}: a basis of {tuple(matrix.shape)}, not {(group.width, group.rank)}"
                    )
        elif group.ranks[0] < group.width and not plan.online_bases:
            raise UsageError(f"{name}: rank {group.ranks[0]} of {group.width} has no basis")
    return head


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
            raise UsageError(f"{name}: the plan's {what} have another shape than the model's")
    if (layer.sliding_window, layer.shared) != (facts.sliding_window, facts.shared):
        raise UsageError(
            f"{name}: the plan's sliding window, or whether the layer shares another's keys and "
            "values, is not the model's"
        )
    keys = layer.keys
    rope = facts.position in ("rope", "partial_rope")
    if keys.placement is Placement.POST_ROPE and rope and (keys.fold_down or keys.fold_up):
        raise UsageError(
            f"{name}: a basis after RoPE cannot be folded into W_K or W_Q (RoPE lies between)"
        )
    if facts.qk_norm and (keys.fold_down or keys.fold_up):
        raise UsageError(
            f"{name}: a basis cannot be folded across QK-norm, which lies between projection and "
            "scores; project online"
        )
    if keys.placement is Placement.PRE_ROPE and rope and facts.rotary_offset is None:
        raise UsageError(f"{name}: K before RoPE cannot be had on this model")
    if layer.values.fold_up and facts.output_projection is None:
        raise UsageError(f"{name}: values cannot be folded: there is no plain output projection")
    if layer.values.fold_down and facts.value_projection is None:
        raise UsageError(f"{name}: values cannot be folded: there is no plain value projection")
