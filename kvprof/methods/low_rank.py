"""From bases at full rank to plans: the part that all low-rank methods share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from kvprof.analysis.bases import walsh_hadamard
from kvprof.analysis.moments import LossMoments
from kvprof.analysis.rank_allocation import (
    ALLOCATIONS,
    Grid,
    RankTarget,
    allocation_losses,
    budget_ranks,
    few_kinds,
    fisher_ranks,
    head_units,
    removal_ranks_of,
    tail_ranks,
    uniform_ranks,
)
from kvprof.errors import UsageError
from kvprof.methods.family import HeadWeights, MethodInputs, PlanFamily
from kvprof.methods.pair_bases import (
    KEY_BASES,
    VALUE_BASES,
    SideBases,
    chosen,
    loss_keys,
    loss_values,
    shared_outputs,
)
from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan, Placement, Plan, ValuePlan
from kvprof.methods.soundness import refuse_latent_attention
from kvprof.models.layout import LayerLayout

__all__ = [
    "KNOBS",
    "LayerBases",
    "allocator",
    "full",
    "full_plan",
    "hadamard_folded",
    "has_rope",
    "identity_groups",
    "identity_layer",
    "low_rank_layers",
    "orthonormal",
    "projected",
    "rank_targets",
    "value_folds",
]

#: What the knob of each allocation is; it grows from full rank to the smallest ranks.
KNOBS = {
    "removal": "removal_rate",
    "uniform": "removed_share",
    "tail": "tail_energy",
    "fisher": "removed_share",
    "budget": "saved_share",
}

# Plans of a family that are given again: at the ends of its knob, and on both sides of a rate.
_KEPT = 8


@dataclass(frozen=True, eq=False)
class LayerBases:
    """One layer's bases and where they go; None for a side that stays as it is."""

    keys: SideBases | None
    values: SideBases | None
    placement: Placement = Placement.NONE
    fold_keys: tuple[bool, bool] = (False, False)
    fold_values: tuple[bool, bool] = (False, False)


def identity_groups(heads: int, head_dim: int, levels: int = 1) -> tuple[HeadGroup, ...]:
    """Return one untouched group per KV head."""
    return tuple(HeadGroup(head, 1, head_dim, (head_dim,) * levels) for head in range(heads))


def identity_layer(facts: LayerLayout, levels: int = 1) -> LayerPlan:
    """Return a layer that is stored as the model gives it."""
    return LayerPlan(
        KeyPlan(Placement.NONE, identity_groups(facts.num_kv_heads, facts.qk_head_dim, levels)),
        ValuePlan(identity_groups(facts.num_kv_heads, facts.v_head_dim, levels)),
        facts.sliding_window,
        facts.shared,
    )


def rank_targets(layers: Sequence[LayerBases]) -> list[RankTarget]:
    """Return what ranks are handed out to: keys of all layers, then values of all layers."""
    targets = []
    for side in ("keys", "values"):
        for index, layer in enumerate(layers):
            bases: SideBases | None = getattr(layer, side)
            if bases is not None:
                counted = bases.values if bases.counted is None else bases.counted
                targets += [
                    RankTarget(index, side, group, *own)
                    for group, own in enumerate(
                        zip(bases.values, bases.errors, counted, strict=True)
                    )
                ]
    return targets


def allocator(
    name: str,
    inputs: MethodInputs,
    layers: Sequence[LayerBases],
    grid: Grid,
    kinds: int = 0,
) -> Callable[[float], list[int]]:
    """Return the function from a knob to the ranks of `rank_targets`.

    Parameters
    ----------
    name : str
        One of `kvprof.analysis.rank_allocation.ALLOCATIONS`.
    inputs : MethodInputs
        With ``fisher``, or ``sensitivities`` and perhaps ``width_costs``, where the allocation
        needs them.
    layers : sequence of LayerBases
    grid : Grid
    kinds : int
        Distinct pairs of K's and V's rank that the heads of all layers may have; 0 for no limit.

    Raises
    ------
    UsageError
        For an unknown allocation, or one whose measurements are not there.
    """
    targets = rank_targets(layers)
    weights: list[float] | None = None
    cost: Callable[[RankTarget, int], float] | None = None
    unlimited: Callable[[float], list[int]]
    if name == "removal":
        unlimited = partial(_of_knob, removal_ranks_of, targets, grid)
    elif name == "uniform":
        unlimited = partial(_of_knob, uniform_ranks, targets, grid)
    elif name == "tail":
        unlimited = partial(_of_knob, tail_ranks, targets, grid)
    elif name == "fisher":
        weights = _per_target(inputs.fisher, targets, layers, "fisher", "Fisher information")
        unlimited = partial(_of_knob, fisher_ranks, targets, grid, importance=weights)
    elif name == "budget":
        weights = _per_target(
            inputs.sensitivities, targets, layers, "budget", "measured sensitivities"
        )
        cost = _cost(inputs, targets, grid)
        unlimited = partial(_of_knob, budget_ranks, targets, grid, sensitivities=weights, cost=cost)
    else:
        raise UsageError(f"--allocation: {name!r} is unknown; use {', '.join(ALLOCATIONS)}")
    if not kinds or not targets:
        return unlimited
    units = head_units(targets, whole_layers=name == "tail")
    losses = allocation_losses(name, targets, grid, weights)
    limited = few_kinds(targets, units, losses, kinds, cost)
    return lambda knob: limited(unlimited(knob))


def _of_knob(
    rule: Callable[..., list[int]],
    targets: Sequence[RankTarget],
    grid: Grid,
    knob: float,
    **given: Any,
) -> list[int]:
    return rule(targets, knob, grid, **given)


def low_rank_layers(
    inputs: MethodInputs,
    layers: Sequence[LayerBases],
    ranks: Sequence[int],
    *,
    levels: Callable[[SideBases, int], tuple[int, ...]] = lambda _, rank: (rank,),
) -> tuple[LayerPlan, ...]:
    """Return the layers of a plan with these ranks.

    Parameters
    ----------
    inputs : MethodInputs
    layers : sequence of LayerBases
    ranks : sequence of int
        In the order of `rank_targets`.
    levels : callable
        From a side's bases and a rank to the ranks per token level.
    """
    given = dict(
        zip([(t.layer, t.side, t.group) for t in rank_targets(layers)], ranks, strict=True)
    )
    count = len(levels(next(x for y in layers for x in (y.keys, y.values) if x is not None), 1))
    plans = []
    for index, (layer, facts) in enumerate(zip(layers, inputs.layout.layers, strict=True)):

        def groups(
            side: str, bases: SideBases | None, head_dim: int, index: int = index
        ) -> tuple[HeadGroup, ...]:
            if bases is None:
                heads = inputs.layout.layers[index].num_kv_heads
                return identity_groups(heads, head_dim, count)
            return tuple(
                _group(bases, number, head_dim, levels(bases, given[index, side, number]))
                for number in range(len(bases.values))
            )

        plans.append(
            LayerPlan(
                KeyPlan(
                    layer.placement if layer.keys is not None else Placement.NONE,
                    groups("keys", layer.keys, facts.qk_head_dim),
                    *(layer.fold_keys if layer.keys is not None else (False, False)),
                    per_query_head=layer.keys is not None and layer.keys.per_query_head,
                ),
                ValuePlan(
                    groups("values", layer.values, facts.v_head_dim),
                    *(layer.fold_values if layer.values is not None else (False, False)),
                ),
                facts.sliding_window,
                facts.shared,
            )
        )
    return tuple(plans)


def orthonormal(plan: Plan) -> Plan:
    """Give latents orthonormal bases where nothing quantises them; products stay what they are.

    ``down = Q R``: ``z = x @ Q`` and ``up @ R.T`` say the same, and rounding to 16 bits costs a
    latent no more than it costs a key. A quantiser wants the gauge that the pair has.
    """
    if plan.quantiser is not None or len(plan.levels.shares) > 1:
        return plan

    def turned(group: HeadGroup) -> HeadGroup:
        if group.down is None or group.up is None or torch.equal(group.down, group.up):
            return group
        basis, triangle = torch.linalg.qr(group.down.double())
        return replace(group, down=basis.float(), up=(group.up.double() @ triangle.mT).float())

    return _with_groups(plan, turned)


def _with_groups(plan: Plan, change: Callable[[HeadGroup], HeadGroup]) -> Plan:
    layers = [
        replace(
            layer,
            keys=replace(layer.keys, groups=tuple(map(change, layer.keys.groups))),
            values=replace(layer.values, groups=tuple(map(change, layer.values.groups))),
        )
        for layer in plan.layers
    ]
    return replace(plan, layers=tuple(layers))


def hadamard_folded(plan: Plan) -> Plan:
    """Rotate every latent by a Walsh-Hadamard matrix, folded into ``down`` and ``up`` (Palu §3.4).

    Raises
    ------
    UsageError
        When tokens have levels: truncation needs the order that the rotation destroys.
    """
    if len(plan.levels.shares) > 1:
        raise UsageError(
            "Hadamard rotation and token levels cannot be combined: it mixes the columns that "
            "levels truncate"
        )

    def rotated(group: HeadGroup) -> HeadGroup:
        if group.down is None or group.up is None:
            return group
        rotation = walsh_hadamard(group.rank).float()
        return replace(group, down=group.down @ rotation, up=group.up @ rotation)

    return _with_groups(plan, rotated)


def _cost(
    inputs: MethodInputs, targets: Sequence[RankTarget], grid: Grid
) -> Callable[[RankTarget, int], float] | None:
    costs = inputs.width_costs
    if costs is None:
        return None
    for target in targets:
        known = costs.get(target.side, {})
        lacking = [rank for rank in grid.ranks(target.width) if rank not in known]
        if lacking:
            raise UsageError(f"budget: the cost of {target.side} of width {lacking[0]} is unknown")
    return lambda target, rank: costs[target.side][rank]


def _group(bases: SideBases, number: int, head_dim: int, ranks: tuple[int, ...]) -> HeadGroup:
    return HeadGroup(
        first=number * bases.heads,
        heads=bases.heads,
        head_dim=head_dim,
        ranks=ranks,
        down=bases.down[number, :, : ranks[-1]],
        up=bases.up[number, :, : ranks[-1]],
    )


def _per_target(
    weights: HeadWeights | None,
    targets: Sequence[RankTarget],
    layers: Sequence[LayerBases],
    name: str,
    what: str,
) -> list[float]:
    """Return one figure per target; where there is one per KV head, its group's mean."""
    if weights is None:
        raise UsageError(f"--allocation {name} requires {what}")
    found = []
    for target in targets:
        try:
            row = weights[target.side][target.layer]
        except (KeyError, IndexError):
            raise UsageError(
                f"{name}: {what} do not include {target.side} of layer {target.layer}"
            ) from None
        bases: SideBases = getattr(layers[target.layer], target.side)
        groups = len(bases.values)
        size = len(row) // groups
        if size * groups != len(row) or size not in (1, bases.heads):
            raise UsageError(
                f"{name}: {what} have {len(row)} values for {target.side} of layer "
                f"{target.layer}, not {groups} or {groups * bases.heads}"
            )
        part = row[target.group * size : (target.group + 1) * size]
        found.append(sum(part) / size)
    return found


# --- The family that FDC, ZACK, ``kq`` and the plain SVDs are members of: one basis per KV
# head.
#
# K is projected after RoPE and queries meet it in the latent; V's basis is folded into W_V and W_O.
# Nothing is rebuilt (FDC §5.2, ZACK §4.3).


def has_rope(facts: LayerLayout) -> bool:
    """Return whether any of a layer's dimensions are rotated by position."""
    return facts.position in ("rope", "partial_rope")


def value_folds(facts: LayerLayout) -> tuple[bool, bool]:
    """Return whether V's basis can be folded into W_V and W_O; what cannot runs online."""
    return facts.value_projection is not None, facts.output_projection is not None


def projected(
    method: str,
    inputs: MethodInputs,
    *,
    keys: str | None,
    values: str | None,
    allocation: str,
    grid: int,
    minimum: int,
    kinds: int = 0,
    fold_keys: bool = False,
    value_heads: int = 1,
    by_loss: LossMoments | None = None,
) -> PlanFamily:
    """Return the plans of one choice of bases.

    Parameters
    ----------
    method : str
    inputs : MethodInputs
    keys, values : str or None
        Names of `KEY_BASES` and `VALUE_BASES`; None, or the name ``none``, leaves that side as it
        is.
    allocation : str
        See `kvprof.methods.low_rank.allocator`.
    grid, minimum : int
        Ranks are multiples of `grid`, at least `minimum`.
    kinds : int
        See `kvprof.methods.low_rank.allocator`.
    fold_keys : bool
        Fold the basis of Q and K into W_Q and W_K in layers that have neither RoPE nor QK-norm.
    value_heads : int
        KV heads whose values share a latent, 0 for all of a layer's; for ``vo-opt``.
    by_loss : LossMoments or None
        Pairs, and errors, are those of the next token instead of the queries' and of W_O's; for
        ``kq`` and ``vo-opt``.

    Raises
    ------
    UsageError
        For MLA, missing moments, an unknown basis or allocation, or neither side to compress.
    """
    refuse_latent_attention(inputs.layout)
    moments = inputs.calibrated(method)
    keys, values = (None if name == "none" else name for name in (keys, values))
    if keys is None and values is None:
        raise UsageError(f"{method}: keys=none and values=none compress nothing; use one of them")
    key_basis = chosen(keys, KEY_BASES, method) if keys is not None else None
    value_basis = chosen(values, VALUE_BASES, method) if values is not None else None
    if value_heads != 1:
        value_basis = partial(shared_outputs, heads=value_heads)
    if by_loss is not None:
        key_basis = partial(loss_keys, loss=by_loss)
        value_basis = partial(loss_values, loss=by_loss, heads=value_heads)
    layers = []
    # Of stand-ins one layer's moments are another's too (`kvprof.moments.uncalibrated`).
    worked_out: dict[tuple[int, float], tuple[SideBases | None, SideBases | None]] = {}
    for index, facts in enumerate(inputs.layout.layers):
        if index in inputs.skip:
            layers.append(LayerBases(None, None))
            continue
        alike = index if by_loss is not None else id(moments.layers[index]), facts.scaling
        if alike not in worked_out:
            worked_out[alike] = (
                key_basis(moments, facts) if key_basis is not None else None,
                value_basis(moments, facts) if value_basis is not None else None,
            )
        key_bases, value_bases = worked_out[alike]
        folds = fold_keys and not has_rope(facts) and not facts.qk_norm
        # W_K puts out one key per KV head, not one per query head.
        folds = folds and not (key_bases is not None and key_bases.per_query_head)
        layers.append(
            LayerBases(
                keys=key_bases,
                values=value_bases,
                placement=Placement.POST_ROPE,
                fold_keys=(folds, folds),
                fold_values=value_folds(facts),
            )
        )
    ranks = allocator(allocation, inputs, layers, Grid(grid, minimum), kinds)
    made = {
        **inputs.made,
        "calibration": {**moments.info, "tokens": moments.tokens},
        "options": {
            "keys": keys,
            "values": values,
            "allocation": allocation,
            "grid": grid,
            "minimum": minimum,
            "kinds": kinds,
        },
    }

    # Of nearby knobs, which a search comes to, most have the same ranks.
    @lru_cache(_KEPT)
    def planned(given: tuple[int, ...]) -> Plan:
        return Plan(method, inputs.fingerprint, low_rank_layers(inputs, layers, given), made=made)

    def at_ranks(given: Sequence[int]) -> Plan:
        return planned(tuple(given))

    return PlanFamily(
        method,
        KNOBS[allocation],
        lambda knob: at_ranks(ranks(knob)),
        finish=orthonormal,
        targets=tuple(rank_targets(layers)),
        at_ranks=at_ranks,
    )


def full_plan(inputs: MethodInputs, method: str = "full") -> Plan:
    """Return the plan that stores everything as it is."""
    refuse_latent_attention(inputs.layout)
    layers = tuple(identity_layer(facts) for facts in inputs.layout.layers)
    return Plan(method, inputs.fingerprint, layers, made=dict(inputs.made))


def full(inputs: MethodInputs) -> PlanFamily:
    """Return the uncompressed plan: rate 0."""
    plan = full_plan(inputs)
    return PlanFamily("full", "setting", lambda _: plan, settings=(0.0,))
