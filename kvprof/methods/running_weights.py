"""What a plan adds to the weights in memory while it runs.

`kvprof.methods.accounting.weight_bytes` counts a folded projection at its rank, which is what a
method costs in principle. Here it has the width that it is run with.
"""

from dataclasses import dataclass

from kvprof.methods.accounting import weight_bytes
from kvprof.methods.plan import Plan
from kvprof.models.layout import LayerLayout, ModelLayout

__all__ = ["RunningWeights", "running_weights"]


@dataclass(frozen=True)
class RunningWeights:
    """What a plan adds to the model's weights while it runs, in bytes.

    Attributes
    ----------
    added : int
        By a server that folds once and for all: matrices that run online, W_O's own growth
        (negative where it shrinks), a second W_O. W_K, W_V and W_Q keep their width when a basis is
        folded into them, because models cut their outputs by that width.
    beside : int
        More than that by ``kvprof.compressed``, which keeps the projections that it replaces, so
        that it can give the model back, and every basis that it folded.
    """

    added: int
    beside: int


def running_weights(plan: Plan, layout: ModelLayout, *, itemsize: int) -> RunningWeights:
    """Return what a plan adds to the weights as the runtime lays them out.

    Parameters
    ----------
    plan : Plan
    layout : ModelLayout
        Of the plan's model.
    itemsize : int
        Bytes of a weight.
    """
    counted = weight_bytes(plan, layout, itemsize=itemsize)
    hidden = layout.hidden_size
    output = beside = 0
    for layer, facts in zip(plan.layers, layout.layers, strict=True):
        for side in (layer.keys, layer.values):
            for group in side.groups:
                if group.down is not None:
                    beside += group.width * group.rank * (side.fold_down + side.fold_up)
        if layer.values.fold_up:
            output += hidden * sum(
                group.heads * facts.group * (group.rank - group.head_dim)
                for group in layer.values.groups
                if group.down is not None
            )
            if not plan.lazy:
                beside += hidden * facts.num_heads * facts.v_head_dim
        beside += hidden * _replaced_columns(
            facts,
            query=layer.keys.fold_up,
            key=layer.keys.fold_down,
            value=layer.values.fold_down,
        )
    added = counted.online + counted.kept_twice + output * itemsize
    return RunningWeights(added, beside * itemsize)


def _replaced_columns(facts: LayerLayout, *, query: bool, key: bool, value: bool) -> int:
    """Return how many columns the input projections have that a fold replaces."""
    columns = {
        "q": facts.num_heads * facts.qk_head_dim,
        "k": facts.num_kv_heads * facts.qk_head_dim,
        "v": facts.num_kv_heads * facts.v_head_dim,
    }
    if facts.fused_qkv:
        return sum(columns.values()) if query or key or value else 0
    return query * columns["q"] + key * columns["k"] + value * columns["v"]
