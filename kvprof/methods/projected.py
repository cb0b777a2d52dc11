"""The family that FDC, ZACK, ``kq`` and the plain SVDs are members of: one basis per KV head.

K is projected after RoPE and queries meet it in the latent; V's basis is folded into W_V and W_O.
Nothing is rebuilt (FDC §5.2, ZACK §4.3).
"""

from collections.abc import Sequence

from kvprof.analysis.rank_allocation import Grid
from kvprof.errors import UsageError
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import KNOBS, LayerBases, allocator, low_rank_layers, rank_targets
from kvprof.methods.pair_bases import KEY_BASES, VALUE_BASES, chosen
from kvprof.methods.plan import Placement, Plan
from kvprof.methods.soundness import refuse_latent_attention
from kvprof.models.layout import LayerLayout

__all__ = ["has_rope", "projected", "value_folds"]


def has_rope(facts: LayerLayout) -> bool:
    """Return whether any of a layer's dimensions turn with the position."""
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
    fold_keys: bool = False,
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
    fold_keys : bool
        Fold the basis of Q and K into W_Q and W_K in layers that have neither RoPE nor QK-norm.

    Raises
    ------
    UsageError
        For MLA, missing moments, an unknown basis or allocation, or neither side to compress.
    """
    refuse_latent_attention(inputs.layout)
    moments = inputs.calibrated(method)
    keys, values = (None if name == "none" else name for name in (keys, values))
    if keys is None and values is None:
        raise UsageError(f"{method}: keys and values are both none, so nothing is compressed")
    key_basis = chosen(keys, KEY_BASES, method) if keys is not None else None
    value_basis = chosen(values, VALUE_BASES, method) if values is not None else None
    layers = []
    for facts in inputs.layout.layers:
        key_bases = key_basis(moments, facts) if key_basis is not None else None
        folds = fold_keys and not has_rope(facts) and not facts.qk_norm
        # W_K puts out one key per KV head, not one per query head.
        folds = folds and not (key_bases is not None and key_bases.per_query_head)
        layers.append(
            LayerBases(
                keys=key_bases,
                values=value_basis(moments, facts) if value_basis is not None else None,
                placement=Placement.POST_ROPE,
                fold_keys=(folds, folds),
                fold_values=value_folds(facts),
            )
        )
    ranks = allocator(allocation, inputs, layers, Grid(grid, minimum))
    made = {
        **inputs.made,
        "calibration": {**moments.info, "tokens": moments.tokens},
        "options": {
            "keys": keys,
            "values": values,
            "allocation": allocation,
            "grid": grid,
            "minimum": minimum,
        },
    }

    def at_ranks(given: Sequence[int]) -> Plan:
        return Plan(method, inputs.fingerprint, low_rank_layers(inputs, layers, given), made=made)

    return PlanFamily(
        method,
        KNOBS[allocation],
        lambda knob: at_ranks(ranks(knob)),
        targets=tuple(rank_targets(layers)),
        at_ranks=at_ranks,
    )
