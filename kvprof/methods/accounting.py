"""The bytes that a plan stores, counted as definitions demand: everything that lies in the cache.

Latents, scales, zero points, outliers, full-precision windows, sinks, the rounding of ranks and
what eviction keeps beside the tokens. Weights that grow are counted apart (`weight_bytes`).
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvprof.methods.across import Across, coded_layers, coded_tokens
from kvprof.methods.plan import HeadGroup, LayerPlan, Placement, Plan
from kvprof.methods.storage import (
    ARITHMETICS,
    LIBRARIES,
    SCALE_BYTES,
    Quantiser,
    SideQuantiser,
    row_layout,
)
from kvprof.methods.tokens import (
    Segment,
    eviction_units,
    kept,
    quantises,
    segments,
    stored_tokens,
)
from kvprof.models.layout import LayerLayout, ModelLayout

__all__ = [
    "SERVED_BYTES",
    "CacheBytes",
    "RunningWeights",
    "WeightBytes",
    "bytes_at",
    "compression_ratio",
    "dim_rate",
    "full_bytes",
    "full_layer_bytes",
    "layer_bytes",
    "paper_rate",
    "rate",
    "weight_bytes",
]

#: Of a value that is not quantised, where a plan serves: what every rate counts.
SERVED_BYTES = 2

_FULL_BITS = 16  # of a value, as the papers count
_INDEX_BYTES = 2  # of an outlier's column
_SCORE_BYTES = 4  # accumulated scores and Gumbel samples are float32
_POSITION_BYTES = 4


@dataclass(frozen=True)
class CacheBytes:
    """What a cache holds, in bytes.

    Attributes
    ----------
    keys, values : int
        Latents or heads: packed codes, and unquantised rows that are neither sink nor window.
    scales, zeros : int
        Of the quantiser; a row's norm counts as its scale.
    outliers : int
        Values kept apart with their indices.
    window : int
        Rows that the quantiser has not reached yet, at full precision.
    sinks : int
        The first tokens, at full precision.
    eviction : int
        Accumulated scores, Gumbel samples, and positions where keys are rebuilt.
    bases : int
        Bases of a sequence's own: the strawman's per head, xKV's per group of layers.
    """

    keys: int = 0
    values: int = 0
    scales: int = 0
    zeros: int = 0
    outliers: int = 0
    window: int = 0
    sinks: int = 0
    eviction: int = 0
    bases: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(vars(self).values())


# The same while it is counted, as fast as plans for a rate ask for it.
_Counts = Counter[str]


@dataclass(frozen=True)
class WeightBytes:
    """What a plan changes about the weights, in bytes; negative where they shrink.

    Attributes
    ----------
    online : int
        Matrices that run beside the model's weights (``down``, ``up``).
    folded : int
        Growth of the projections that a basis is folded into.
    kept_twice : int
        The model's own W_O beside the folded one (lazy prefill).
    """

    online: int
    folded: int
    kept_twice: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.online + self.folded + self.kept_twice


def bytes_at(plan: Plan, tokens: int, *, itemsize: int, batch: int = 1) -> CacheBytes:
    """Return what the cache stores after `tokens` tokens, in bytes.

    Allocator overhead and a static cache's unused capacity are not in it. Of a plan that codes a
    prompt's cache across layers these are the bytes at rest, not those that decoding takes.

    Parameters
    ----------
    plan : Plan
    tokens : int
        Seen per sequence.
    itemsize : int
        Bytes of a value in the model's dtype.
    batch : int
        Sequences of that length.
    """
    counts: _Counts = Counter()
    if plan.across is not None:
        _count_coded(counts, plan, plan.across, tokens, itemsize)
    else:
        for layer in plan.layers:
            _count_layer(counts, plan, layer, tokens, itemsize)
    return CacheBytes(**{name: count * batch for name, count in counts.items()})


def full_bytes(plan: Plan, tokens: int, *, itemsize: int, batch: int = 1) -> int:
    """Return what the model's own cache would store, uncompressed in the model's dtype.

    Keys and values; a recurrent state beside them is not counted.
    """
    return batch * sum(full_layer_bytes(layer, tokens, itemsize=itemsize) for layer in plan.layers)


def full_layer_bytes(layer: LayerPlan, tokens: int, *, itemsize: int) -> int:
    """Return what the model's own cache would store of one sequence in a layer; see `full_bytes`.

    Parameters
    ----------
    layer : LayerPlan
    tokens : int
    itemsize : int
        Bytes of a value in the model's dtype.
    """
    window = layer.sliding_window
    return (tokens if window is None else min(tokens, window - 1)) * _width(layer) * itemsize


def rate(plan: Plan, tokens: int) -> float:
    """Return ``1 - bytes(plan) / bytes(uncompressed)`` at a context of `tokens` tokens.

    Both as they serve, at 16 bits: a run in float32 stores more bytes at the same rate.
    """
    full = full_bytes(plan, tokens, itemsize=SERVED_BYTES)
    return 1.0 - bytes_at(plan, tokens, itemsize=SERVED_BYTES).total / full


def compression_ratio(rate: float) -> float:
    """Return ``1 / (1 - rate)``."""
    return 1.0 / (1.0 - rate)


def dim_rate(plan: Plan) -> float:
    """Return FDC's rate, dimensions only: ``1 - Σ(r_k + r_v) / Σ(d_k + d_v)``.

    Ranks of token levels count by the levels' shares; bits, sinks and eviction do not count.
    """
    return 1.0 - _weighted(plan, lambda bits: 1.0) / sum(map(_width, plan.layers))


def paper_rate(plan: Plan) -> float:
    """Return the rate as the papers count: dimensions, bits, tokens; no scales, windows or sinks.

    TALE's 9.14×, KIVI's 8× at 2 bits and Palu's 8.89× (40 %, 3 bits) are this figure. Never show
    it as bytes. Layers with a sliding window count as any other.
    """
    full = _FULL_BITS * sum(map(_width, plan.layers))
    return 1.0 - _weighted(plan, lambda bits: bits or _FULL_BITS, evict=True) / full


def weight_bytes(plan: Plan, layout: ModelLayout, *, itemsize: int) -> WeightBytes:
    """Return what the plan adds to, or takes from, the model's weights.

    Parameters
    ----------
    plan : Plan
        For this model.
    layout : ModelLayout
        Its hidden size and query heads say how large W_Q, W_K, W_V and W_O are.
    itemsize : int
        Bytes of a weight.
    """
    online = folded = twice = 0
    hidden = layout.hidden_size
    for layer, facts in zip(plan.layers, layout.layers, strict=True):
        for side in (layer.keys, layer.values):
            for group in side.groups:
                if group.down is None:
                    continue
                matrix = group.width * group.rank
                if side.fold_down:
                    folded += hidden * (group.rank - group.width)
                else:
                    online += matrix
                if side.fold_up:
                    # One [D, d] slice of W_Q or W_O per query head becomes [D, r].
                    queries = group.heads * facts.group
                    folded += hidden * queries * (group.rank - group.head_dim)
                else:
                    online += matrix
        if plan.lazy and layer.values.fold_up:
            twice += hidden * facts.num_heads * facts.v_head_dim
    if plan.across is not None:  # one basis for both ways, and a mean
        matrices = [one for x in plan.across.groups for one in (x.basis, x.mean)]
        online += sum(matrix.numel() for matrix in matrices if matrix is not None)
    return WeightBytes(online * itemsize, folded * itemsize, twice * itemsize)


def layer_bytes(plan: Plan, layer: LayerPlan, tokens: int, *, itemsize: int) -> CacheBytes:
    """Return what one of the plan's layers stores of one sequence; see `bytes_at`.

    Of a plan that codes across layers there is no such thing.
    """
    counts: _Counts = Counter()
    _count_layer(counts, plan, layer, tokens, itemsize)
    return CacheBytes(**counts)


def _count_layer(counts: _Counts, plan: Plan, layer: LayerPlan, tokens: int, itemsize: int) -> None:
    quantiser = None if layer.left_out else plan.quantiser
    aged = layer.sliding_window is None and not layer.left_out
    sink = min(plan.levels.sink, tokens) if aged else 0
    for segment in segments(plan, layer, tokens):
        in_sink = segment.stop <= sink
        for groups, side, name in (
            (layer.keys.groups, quantiser.keys if quantiser else None, "keys"),
            (layer.values.groups, quantiser.values if quantiser else None, "values"),
        ):
            for group in groups:
                rank = group.ranks[segment.level]
                reached = side is not None and group.quantised
                if segment.quantised and quantiser is not None and side is not None and reached:
                    _count_quantised(counts, segment, group, quantiser, side, name, itemsize)
                    continue
                # What a quantiser has still to reach is its window; without one it is just stored.
                part = "sinks" if in_sink else "window" if reached else name
                counts[part] += segment.tokens * rank * itemsize
    counts["eviction"] += _eviction_bytes(plan, layer, tokens)
    if plan.online_bases and not layer.shared:
        matrices = [
            group.width * group.rank
            for groups in (layer.keys.groups, layer.values.groups)
            for group in groups
            if group.down is None and not group.identity
        ]
        counts["bases"] += sum(matrices) * itemsize


def _count_coded(counts: _Counts, plan: Plan, across: Across, tokens: int, itemsize: int) -> None:
    """Count what a context takes that is coded across layers, at rest or as latents."""
    coded = coded_tokens(across, plan.levels.sink, tokens)
    for group in across.groups:
        size = math.ceil(coded * group.token_bytes)
        if not across.at_rest:
            size = coded * group.rank * itemsize
        counts[group.side] += size
        if coded and group.basis is None:
            counts["bases"] += group.width * group.rank * itemsize
    for side in ("keys", "values"):
        together = coded_layers(across, side)
        for index, layer in enumerate(plan.layers):
            width = sum(group.width for group in getattr(layer, side).groups) * itemsize
            if index in together:
                sink = min(plan.levels.sink, tokens)
                counts["sinks"] += sink * width
                counts["window"] += (tokens - sink - coded) * width
            else:
                counts[side] += stored_tokens(plan, layer, tokens) * width


def _count_quantised(
    counts: _Counts,
    segment: Segment,
    group: HeadGroup,
    quantiser: Quantiser,
    side: SideQuantiser,
    name: str,
    itemsize: int,
) -> None:
    tokens, rank = segment.tokens, group.ranks[segment.level]
    runs, kind = group.runs(side, segment.level), quantiser.kind_of(side)
    if kind in LIBRARIES:
        ((_, bits),) = runs  # check_plan has seen to it
        row = row_layout(kind, bits, rank, side.group)
        scales = tokens * row.groups * itemsize  # in the model's own dtype
        counts["scales"] += scales
        counts["zeros"] += scales if row.zeros else 0
        counts[name] += tokens * row.code_bytes
        return
    counts[name] += tokens * sum(math.ceil(columns * bits / 8) for columns, bits in runs)
    kept = ARITHMETICS[kind].kept
    if not kept:
        return
    if side.axis == "channel":
        assert side.group is not None  # check_plan has seen to it
        scales = tokens // side.group * rank
    else:
        scales = tokens * math.ceil(rank / (side.group or rank))
    width = SCALE_BYTES[quantiser.scale_dtype]
    counts["scales"] += scales * width * ("scale" in kept or "norm" in kept)
    counts["zeros"] += scales * width * ("zero point" in kept)
    # Decimal shares again: 0.01 * 300 is 3 outliers.
    outliers = tokens * math.ceil(quantiser.outliers * rank - 1e-9)
    counts["outliers"] += outliers * (itemsize + _INDEX_BYTES)


def _eviction_bytes(plan: Plan, layer: LayerPlan, tokens: int) -> int:
    eviction = plan.eviction
    if eviction is None or layer.sliding_window is not None or layer.shared or layer.left_out:
        return 0
    stored = kept(eviction, tokens)
    units = len(eviction_units(layer)) if eviction.kind != "recent" else 1
    numbers = {"recent": 0, "h2o": 1, "snapkv": 1, "keyformer": 2}[eviction.kind]
    per_token = numbers * _SCORE_BYTES
    if layer.keys.placement is Placement.PRE_ROPE or layer.centre is not None:
        per_token += _POSITION_BYTES  # keys are rebuilt at the position they had
    return stored * units * per_token


def _width(layer: LayerPlan) -> int:
    """Return the columns that the model itself stores per token, K and V."""
    if layer.shared:
        return 0
    keys, values = (
        sum(group.width for group in side.groups) for side in (layer.keys, layer.values)
    )
    return keys // layer.key_copies + values


def _weighted(plan: Plan, weigh: Callable[[int | None], float], *, evict: bool = False) -> float:
    """Return Σ over layers, groups and levels of share × rank × weight of its bits."""
    if plan.across is not None:
        return _coded_weight(plan, plan.across, weigh)
    total = 0.0
    quantiser = plan.quantiser
    top = len(plan.levels.shares) - 1
    for layer in plan.layers:
        if layer.shared:
            continue
        levels = list(enumerate(plan.levels.shares))
        if layer.sliding_window is not None or layer.left_out:
            levels = [(top, 1.0)]
        elif evict and plan.eviction is not None:
            levels = [(level, share * plan.eviction.keep) for level, share in levels]
        quantised = quantises(plan, layer)
        for groups, side in (
            (layer.keys.groups, quantiser.keys if quantiser else None),
            (layer.values.groups, quantiser.values if quantiser else None),
        ):
            for level, share in levels:
                columns = 0.0
                for group in groups:
                    runs: tuple[tuple[int, int | None], ...] = ((group.ranks[level], None),)
                    if quantised:
                        runs = group.runs(side, level) or runs
                    # Columns of 0 bits are not stored.
                    columns += sum(n * weigh(bits) for n, bits in runs if bits != 0)
                total += share * columns
    return total


def _coded_weight(plan: Plan, across: Across, weigh: Callable[[int | None], float]) -> float:
    """Return the same of a plan that codes across layers: coefficients that have bits."""
    total = 0.0
    for group in across.groups:
        total += sum(columns * weigh(bits) for columns, bits in group.blocks if bits)
        total += 0 if across.at_rest else group.rank * weigh(None)
    for side in ("keys", "values"):
        together = coded_layers(across, side)
        for index, layer in enumerate(plan.layers):
            if index not in together and not layer.shared:
                groups = getattr(layer, side).groups
                total += weigh(None) * sum(group.width for group in groups)
    return total


# --- What a plan adds to the weights in memory while it runs.
#
# `weight_bytes` counts a folded projection at its rank, which is what a
# method costs in principle. Here it has the width that it is run with.


@dataclass(frozen=True)
class RunningWeights:
    """What a plan adds to the model's weights while it runs, in bytes."""

    # By a server that folds once: matrices that run online, W_O's growth (negative where it
    # shrinks), a second W_O. W_K, W_V and W_Q keep their width when a basis is folded into them.
    added: int
    beside: int  # more than that by ``kvprof.compressed``, which keeps what it replaces


def running_weights(plan: Plan, layout: ModelLayout, *, itemsize: int) -> RunningWeights:
    """Return what a plan adds to the weights as the runtime lays them out."""
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
