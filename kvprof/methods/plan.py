"""What a plan is: a compressed KV cache as data, which one runtime executes.

A plan says, per layer and group of KV heads, where K and V are projected and with which matrices,
and for all layers which tokens are stored how. It holds no code, and every field changes what is
stored or computed. Notation: ``G`` query heads per KV head, ``d`` head dimension, ``n`` heads in a
group, ``r`` rank, ``T`` tokens; row vectors; ``up_j = up[j*d:(j+1)*d]`` are the rows of the group's
j-th KV head, and query head ``h`` reads KV head ``h // G``.

**Projections.** ``x`` is the concatenation ``[T, n*d]`` of the group's heads, biases and QK-norm
included. Stored is the latent ``z = x @ down``, ``[T, r]``, which stands for ``z @ up.T``. A group
whose matrices are None and whose rank is ``n*d`` is stored as it is (the identity).

- keys, ``none``: K after RoPE as the model gives it. Every group is the identity.
- keys, ``post_rope`` (FDC, ZACK, ``kq``): ``x`` is K after RoPE. Nothing is rebuilt: query head h
  becomes ``q_h @ up_j`` (``[T, r]``), its score is ``scaling * (q_h @ up_j) @ z.T``. The scale is
  the model's own. With ``per_query_head`` (FDC §5.1 to the letter) the groups are the layer's query
  heads instead, ``heads`` 1 each: query head h has a basis and a stored key of its own,
  ``z_h = k_{h // G} @ down_h``, so that K is stored G times; nothing folds, and eviction still
  takes a KV head's tokens together. Otherwise, where the layer has no RoPE, ``fold_down`` puts
  ``down`` into W_K (and b_K) and ``fold_up`` puts ``up_j`` into each W_Q^h (and b_Q), which has
  room for d columns, so only where every rank of the layer's keys is at most d; otherwise both run
  online.
- keys, ``pre_rope`` (Palu): ``x`` is K as it enters RoPE, after QK-norm where the layer has one.
  At every use ``K_j = RoPE((z @ up.T)[:, j*d:(j+1)*d])`` is rebuilt at the token's own position,
  also in prefill. ``fold_down`` puts ``down`` into W_K and b_K; it is never set across a QK-norm.
- a group that is stored as it is may have a ``scale`` s, a power of two, for a quantiser's sake:
  stored is ``z = x / s``, queries meet it as ``s * q_h`` and outputs are ``s * (p_h @ z)``. It is
  the plan's, the same for every token, and rounds nothing.
- values (``projected``): ``x`` is V. Query head h gives ``o_h = p_h @ z`` (``[T, r]``) and
  ``out_h = o_h @ up_j.T``. ``fold_down`` puts ``down`` into W_V and b_V; ``fold_up`` replaces
  W_O^h by ``up_j.T @ W_O^h`` (``[r, D]``), which makes W_O up to n times larger. b_O stays. Bias
  travels inside ``z``, so attention sinks, whose probabilities do not sum to 1, stay exact.

**Prefill and decode.** A forward pass attends to what was stored before it and to its own tokens;
its own tokens are projected and cut to the rank that their level has after the pass, but not
quantised (as KIVI and transformers' quantised cache do). With ``lazy`` (TALE) a pass over more than
one token attends to its own tokens with exact Q, K, V and the model's own W_O; only the cached copy
is compressed. ``lazy`` excludes every ``fold_down``; with ``fold_up`` both W_O are kept.

**How queries read** (``by_age``). By age a query reads each older token as it is stored by then,
in a prompt too, and its own as in decoding: no border of a pass changes an answer. So does every
plan that stores each token for itself and once; not those of KIVI (channels of many tokens), TALE,
kvtc, the strawman and HQQ, nor one with ``prefill_uncompressed``: a pass reads its own tokens as
the paragraph above says. An engine whose pages a plan has shows a query its own token as stored
too, in chunks of a prompt as in decoding.

**Centre** (`kvprof.analysis.centring`). A layer with a ``centre`` takes ``R_j m`` from the key of
every token and u from its value before anything else; scores get ``q_h @ (R_j m)`` back before
scaling and softcap, outputs get ``u`` times the sum of the probabilities (below 1 with learned
sinks) before W_O. ``R_j`` is made of the model's own cosines and sines, by the token's slot.
Nothing is folded in such a layer.

**Mean of keys** (``key_mean``). What a layer's rotated keys have in common on average adds the same
to all scores of a query and leaves the softmax: it is taken from every key before it is projected.
Latents of 16 bits round what is left instead of channels of some hundreds. Only where all that a
layer stores of keys are such latents, and neither softcap nor learned sinks see it.

**Tokens.** In this order, per sequence, counted from the first real token (not the padding):
evict (`Eviction`; heads that share a latent go together, `kvprof.methods.tokens.eviction_units`);
the first ``levels.sink`` kept tokens stay at full precision and at the top rank; the m others get a
level, 0 (lowest) first in time; the oldest of them are quantised.
`kvprof.methods.tokens.segments` is that rule as code: a pure function of the number of tokens,
which the byte account and the runtime share. Going down a level keeps the first ``ranks[level]``
columns of a latent (and of ``q_h @ up_j`` and ``up_j``), and quantises anew with that level's bits.

**Quantiser.** Quantised is the latent. ``affine``: ``x ≈ zero + scale * code``, code in
0 … 2^bits - 1, zero the minimum and scale the range over ``2^bits - 1``, of the vector being
quantised: with ``axis = token`` ``group`` adjacent columns of one token (None: the whole row of the
group of heads), with ``axis = channel`` ``group`` consecutive tokens of one column. With ``clip`` c
the row is first cut to ± its ``floor(c * r)``-th smallest magnitude, counted from 0. ``lloyd-max``:
``x ≈ norm * c[code]`` with the row's norm and ``c = kvprof.methods.quantisers.lloyd_max(bits, r)``,
nearest to ``x / norm``; ``lloyd-max-unit`` divides the norm by that of ``c[code]``. ``codebook``
(KVQuant-like): ``x ≈ zero + scale * c[code]`` with ``c = kvprof.methods.quantisers.codebook(bits)``
in [0, 1]; before that the ``ceil(outliers * r)`` largest magnitudes of each token's row are kept
apart (value in the model's dtype, 16-bit column index) and count as 0 in minimum and maximum.
``fp8``: a saturating cast to e4m3; what is cast may be stored over a scale of its group's own.
``lloyd-max-rms``: ``x ≈ scale * c[code]`` with ``c =
kvprof.methods.quantisers.normal_levels(bits)``, the levels of least squared error for a standard
normal variable, and scale the root mean square of the token's row, rounded to ``scale_dtype``
before it divides; for latents whose columns are alike. ``uniform-rms``: the same with levels at
equal distances, ``c[code] = step * (code - (2^bits - 1) / 2)`` with ``step =
kvprof.analysis.uniform.uniform_step(bits)``.
Those of engines make codes by a scale that is rounded only when it is stored, of a group of a
token's columns. ``absmax``: ``x ≈ scale * (code - 128)``, scale the largest magnitude over 127,
halves away from 0. ``signed-max``: ``x ≈ scale * (code - 2^(bits - 1))``, scale the value of the
largest magnitude over ``-2^(bits - 1)``. ``minimum``: as ``affine``. ``hidden-zero``: ``x ≈ scale *
(code - zero)`` with a whole zero that lies in the four lowest bits of the scale. ``iq4_nl``: ``x ≈
scale * c[code]`` with llama.cpp's 16 levels. ``fp8-e5m2``: a saturating cast. A side whose ``kind``
is said has that one in place of the quantiser's.
``hqq`` and ``quanto``: what the library of that name makes of a group of columns of one token;
`kvprof.methods.storage` says how a row is cut, filled up and packed.
Scale and zero are ``scale_dtype``. A token's codes are packed into ``ceil(r * bits / 8)`` bytes.
Where the last column group is narrower than ``group`` it has its own scale all the same.

**Bits by column, and by group.** A group's ``column_bits``, pairs ``(columns, bits)``, cut its
latent into runs of adjacent columns with bits of their own, each packed into whole bytes; they
stand in place of the side's ``bits``, which are then empty. Several runs, and runs of 0 bits, are
for ``lloyd-max-rms`` and ``uniform-rms`` alone, and share the row's scale. A run of 0 bits is
stored of sinks and of what the quantiser has not reached, and of nothing else: of a quantised token
it is left out, reads as 0, and does not count for the root mean square. With any other quantiser
but ``fp8`` a group has one run over all its columns: the bits of that group. A group that is not
``quantised`` stays at full precision whatever the quantiser does to others of its side.

**Sliding windows.** A layer with ``sliding_window`` W stores its last ``W - 1`` tokens. Only its
projections (top rank) and a quantiser with ``window`` 0 and ``block`` 1 apply there; sinks, levels,
eviction and any other quantiser do not, and what they would touch stays at full precision.

**Layers left out.** A layer that is ``left_out`` is stored as the model gives it: neither bases nor
levels, quantiser or eviction apply there.

**Prompts coded across layers** (``across``, `kvprof.methods.across`; KVTC). This is for storing
and moving a cache, not for decoding from it. A group's row is what its layers hold of a token, side
by side; keys are before RoPE (``pre_rope`` with the identity, rotated at every use). While a prompt
runs nothing is coded. Before the first pass over a single token all tokens seen so far but the
first ``levels.sink`` and the newest ``across.window`` become ``y = (x - mean) @ basis``, blocks of
``y`` integers over a shift and a scale of their own for each token
(`kvprof.analysis.transform_coding`), these DEFLATE's bytes; and at once all of it back,
``x ≈ mean + y @ basis.T``. Decoding goes on from that in all columns; tokens that come then stay as
they are. The byte account is of a context at rest, all of it a prompt; bytes after DEFLATE are
those that a sample took per token.

**Latents of several layers** (``across`` with a ``block``; xKV). Rows are the same, without a
mean, and ``z = x @ basis`` is stored once for all layers of a group, in the model's dtype, the same
groups for keys as for values; a layer l rebuilds ``z @ basis_l.T`` from its rows of the basis at
every use. A pass attends to its own tokens as they are, and after it as many of the tokens that are
neither among the first ``levels.sink`` nor the newest ``across.window`` as fill blocks of ``block``
are stored so, the oldest first. A group without a ``basis`` finds its first r right singular
vectors in the first tokens that it stores so, by sequence; they count as cache.

**Strawman** (ZACK §3.2). ``online_bases``: ``down`` and ``up`` are None though the rank is below
the width (keys: ``post_rope``). Prefill computes, per sequence and head, the eigenvectors of
``KᵀK`` (K after RoPE) and ``VᵀV`` over the prompt, stores the first r (they count as cache) and
projects; prefill itself attends exactly. Every decode step first rebuilds all of K and V
(``z @ basis.T``).

Tensors are float32 on the CPU; the runtime casts what it runs online and folds in float32 or wider.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from torch import Tensor

from kvprof.analysis.centring import Centre
from kvprof.errors import UsageError
from kvprof.methods.across import Across, check_across
from kvprof.methods.storage import (
    ROW_RMS,
    Eviction,
    Levels,
    Quantiser,
    SideQuantiser,
    bits_of,
    check_eviction,
    check_levels,
    check_quantiser,
)
from kvprof.models.layout import LayerLayout

__all__ = [
    "Across",
    "Eviction",
    "HeadGroup",
    "KeyPlan",
    "LayerPlan",
    "Levels",
    "Placement",
    "Plan",
    "Quantiser",
    "SideQuantiser",
    "ValuePlan",
    "bears_key_mean",
    "unfolded",
]

# The quantised rows hold 16-bit column indices of outliers.
_WIDEST = 2**16
# A scale is 2^-64 … 2^64: what no dtype's largest or smallest value asks for is damage.
_SCALES = 64


class Placement(StrEnum):
    """Where keys are projected."""

    NONE = "none"
    POST_ROPE = "post_rope"
    PRE_ROPE = "pre_rope"


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """Adjacent KV heads that share a latent.

    Attributes
    ----------
    first, heads : int
        The group is KV heads ``first … first + heads - 1``.
    head_dim : int
        Of one head.
    ranks : tuple of int
        One per token level, lowest level first, never decreasing; the last is the latent's width.
    down, up : Tensor or None
        ``[heads * head_dim, ranks[-1]]`` float32; see the module. Both or neither.
    scale : float
        What rows are divided by before they are stored, a power of two; see the module.
    column_bits : tuple of (int, int)
        Runs of adjacent columns and the bits of each, see the module; empty where the quantiser
        says the bits of all.
    quantised : bool
        Whether the plan's quantiser applies to it, where it applies to its side at all.
    """

    first: int
    heads: int
    head_dim: int
    ranks: tuple[int, ...]
    down: Tensor | None = None
    up: Tensor | None = None
    scale: float = 1.0
    column_bits: tuple[tuple[int, int], ...] = ()
    quantised: bool = True

    @property
    def width(self) -> int:
        """Columns before projection, ``heads * head_dim``."""
        return self.heads * self.head_dim

    @property
    def rank(self) -> int:
        """Columns of a latent at the top level."""
        return self.ranks[-1]

    @property
    def identity(self) -> bool:
        """Whether the group is stored as the model gives it (at the top level), or over a scale."""
        return self.down is None and self.rank == self.width

    def runs(self, side: SideQuantiser | None, level: int) -> tuple[tuple[int, int], ...]:
        """Return the runs of columns, and their bits, of the quantised tokens of a level.

        Parameters
        ----------
        side : SideQuantiser or None
            The quantiser's, of the side that the group is of.
        level : int

        Returns
        -------
        tuple of (int, int)
            Empty where no token of the group is quantised.
        """
        if side is None or not self.quantised:
            return ()
        if self.column_bits or not side.bits:
            return self.column_bits
        return ((self.ranks[level], side.bits[level]),)


@dataclass(frozen=True, eq=False)
class KeyPlan:
    """The keys of one layer; the groups cover its KV heads in order, each once.

    With `per_query_head` they cover its query heads, each a group of its own; see the module.
    """

    placement: Placement
    groups: tuple[HeadGroup, ...]
    fold_down: bool = False
    fold_up: bool = False
    per_query_head: bool = False


@dataclass(frozen=True, eq=False)
class ValuePlan:
    """The values of one layer; the groups need not be those of the keys."""

    groups: tuple[HeadGroup, ...]
    fold_down: bool = False
    fold_up: bool = False

    @property
    def projected(self) -> bool:
        """Whether any group of heads is not the identity."""
        return not all(group.identity for group in self.groups)


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One attention layer.

    Attributes
    ----------
    keys, values
        What is done to each.
    sliding_window : int or None
        The layer's own, in tokens.
    shared : bool
        Whether it attends to another layer's keys and values and stores none.
    left_out : bool
        Whether the plan leaves it as it is; see the module.
    centre : Centre or None
        What its keys and values are stored without; see the module.
    key_mean : Tensor or None
        ``[num_kv_heads, d]`` float32, taken from every rotated key; see the module.
    """

    keys: KeyPlan
    values: ValuePlan
    sliding_window: int | None = None
    shared: bool = False
    left_out: bool = False
    centre: Centre | None = None
    key_mean: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        """KV heads of the layer."""
        return sum(group.heads for group in self.values.groups)

    @property
    def key_copies(self) -> int:
        """How many keys are stored where the model stores one: 1, or G per query head."""
        return sum(group.heads for group in self.keys.groups) // self.kv_heads

    def rebuilds(self, facts: LayerLayout) -> bool:
        """Whether keys are stored before RoPE, if the layer has it, and rebuilt at every use."""
        return self.keys.placement is Placement.PRE_ROPE and facts.rotary_dim > 0


@dataclass(frozen=True, eq=False)
class Plan:
    """A compressed cache for one model.

    Attributes
    ----------
    method : str
        Registered name, for example ``fdc+keyformer``.
    fingerprint : str
        Of the model that it is for; the runtime refuses another.
    layers : tuple of LayerPlan
    levels : Levels
    quantiser : Quantiser or None
    eviction : Eviction or None
    lazy : bool
        See the module.
    online_bases : bool
        The strawman; see the module.
    across : Across or None
        How a prompt's cache is coded across layers; see the module.
    prefill_uncompressed : bool
        Whether a pass reads its own tokens uncompressed though it could by age; see the module.
    made : dict
        JSON values: how the plan was made (model, architecture, calibration source and tokens,
        rate asked, knob and its value, allocation, grid, options). The runtime ignores it.
    """

    method: str
    fingerprint: str
    layers: tuple[LayerPlan, ...]
    levels: Levels = field(default_factory=Levels)
    quantiser: Quantiser | None = None
    eviction: Eviction | None = None
    lazy: bool = False
    online_bases: bool = False
    made: dict[str, Any] = field(default_factory=dict)
    across: Across | None = None
    prefill_uncompressed: bool = False

    def __post_init__(self) -> None:
        check_plan(self)

    @property
    def by_age(self) -> bool:
        """Whether queries read each older token as it is stored by then, in a prompt too."""
        quantiser = self.quantiser
        apart = (self.lazy, self.online_bases, self.across, self.eviction)
        if self.prefill_uncompressed or any(apart) or len(self.levels.shares) > 1:
            return False
        if quantiser is None:
            return True
        sides = (quantiser.keys, quantiser.values)
        return quantiser.kind != "hqq" and all(x is None or x.axis == "token" for x in sides)

    def __repr__(self) -> str:
        """Return the method, the layers and heads, and the ranks' range, on a line."""
        method = self.method if len(self.method) <= 24 else f"{self.method[:23]}…"
        heads = sorted({sum(group.heads for group in one.keys.groups) for one in self.layers})
        keys, values = (
            [group.rank for layer in self.layers for group in getattr(layer, side).groups]
            for side in ("keys", "values")
        )
        return (
            f"<Plan {method}: {len(self.layers)} layers × {_range(heads)} KV heads, "
            f"ranks K {_range(keys)}, V {_range(values)}>"
        )


def unfolded(plan: Plan) -> Plan:
    """Return the same plan with nothing folded into weights: every projection runs online."""
    layers = [
        replace(
            layer,
            keys=replace(layer.keys, fold_down=False, fold_up=False),
            values=replace(layer.values, fold_down=False, fold_up=False),
        )
        for layer in plan.layers
    ]
    return replace(plan, layers=tuple(layers))


def _range(values: Sequence[int]) -> str:
    if not values:
        return "none"
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low}–{high}"


def check_plan(plan: Plan) -> None:
    """Make sure that a plan says one thing.

    Raises
    ------
    UsageError
        Naming what contradicts what.
    """
    check_levels(plan.levels)
    if plan.quantiser is not None:
        check_quantiser(plan.quantiser, plan.levels)
    if plan.eviction is not None:
        check_eviction(plan.eviction, plan.quantiser)
    for index, layer in enumerate(plan.layers):
        _check_layer(f"layer {index}", layer, plan)
    if plan.across is not None:
        _check_coded(plan, plan.across)


def _check_coded(plan: Plan, across: Across) -> None:
    groups = (group for x in plan.layers for group in (*x.keys.groups, *x.values.groups))
    if (
        any((plan.quantiser, plan.eviction, plan.lazy, plan.online_bases))
        or len(plan.levels.shares) > 1
        or not all(group.identity and group.heads == 1 for group in groups)
    ):
        raise UsageError(
            f"{plan.method} codes several layers together and cannot be combined with bases, a "
            "quantiser, an evictor or token levels"
        )

    def widths(side: str) -> list[int | None]:
        return [
            None
            if layer.left_out or layer.shared or layer.sliding_window is not None
            else sum(group.width for group in getattr(layer, side).groups)
            for layer in plan.layers
        ]

    check_across(across, {side: widths(side) for side in ("keys", "values")})


def _check_layer(name: str, layer: LayerPlan, plan: Plan) -> None:
    keys, values = layer.keys, layer.values
    key_heads = _check_groups(f"{name} keys", keys.groups, plan)
    value_heads = _check_groups(f"{name} values", values.groups, plan)
    if keys.per_query_head:
        single = all(group.heads == 1 for group in keys.groups)
        if keys.placement is not Placement.POST_ROPE or not single or key_heads % value_heads:
            raise UsageError(
                f"{name}: keys per query head require a basis after RoPE for each query head"
            )
        if keys.fold_down or keys.fold_up:
            raise UsageError(f"{name}: keys per query head cannot be folded into W_K or W_Q")
    elif key_heads != value_heads:
        raise UsageError(f"{name}: keys and values cover different numbers of KV heads")
    for side, groups in (("keys", keys.groups), ("values", values.groups)):
        if any(group.scale != 1 for group in groups):
            _check_scales(f"{name} {side}", groups, layer, plan)
        _check_column_bits(f"{name} {side}", groups, side, layer, plan)
    plain = all(group.identity for group in keys.groups)
    if keys.placement is Placement.NONE and not plain:
        raise UsageError(f"{name}: keys have a basis but no placement")
    if keys.placement is Placement.NONE and (keys.fold_down or keys.fold_up):
        raise UsageError(f"{name}: keys without a basis cannot be folded")
    if keys.placement is Placement.PRE_ROPE and keys.fold_up:
        raise UsageError(f"{name}: keys rebuilt before RoPE cannot be folded into W_Q")
    if layer.left_out and (
        keys.placement is not Placement.NONE
        or any(
            group.scale != 1
            or group.column_bits
            or not group.quantised
            or set(group.ranks) != {group.width}
            for group in (*keys.groups, *values.groups)
        )
        or not plain
        or values.projected
    ):
        raise UsageError(f"{name} is marked as skipped but also compressed")
    if layer.centre is not None:
        _check_centre(name, layer)
    shape = layer.kv_heads, keys.groups[0].head_dim
    if layer.key_mean is not None and (
        not bears_key_mean(plan, layer) or tuple(layer.key_mean.shape) != shape
    ):
        raise UsageError(
            f"{name}: a mean of keys must match their shape and requires latents of 16 bits, "
            "made after RoPE"
        )
    if layer.sliding_window is not None and layer.sliding_window < 2:
        raise UsageError(f"{name}: sliding window {layer.sliding_window} must be 2 or more")
    if (plan.lazy or plan.online_bases) and (keys.fold_down or values.fold_down):
        what = "lazy" if plan.lazy else "online_bases"
        raise UsageError(
            f"{name}: {what} requires exact K and V in prefill, so bases cannot be folded into "
            "W_K or W_V"
        )


def bears_key_mean(plan: Plan, layer: LayerPlan) -> bool:
    """Whether all that a layer stores of keys are alike latents of 16 bits, made after RoPE."""
    keys = layer.keys
    projected = keys.placement is Placement.POST_ROPE and not (keys.fold_down or keys.fold_up)
    unlike = plan.lazy or plan.online_bases or plan.across is not None
    unlike = unlike or len(plan.levels.shares) > 1 or layer.centre is not None or layer.shared
    return projected and not unlike and plan.quantiser is None


def _check_centre(name: str, layer: LayerPlan) -> None:
    centre, groups = layer.centre, (layer.keys.groups, layer.values.groups)
    assert centre is not None
    widths = [(layer.kv_heads, group[0].head_dim) for group in groups]
    if [tuple(x.shape) for x in (centre.keys, centre.values)] != widths:
        raise UsageError(f"{name}: means must have the shape of keys and values")
    sides = (layer.keys, layer.values)
    if layer.left_out or layer.shared or any(x.fold_down or x.fold_up for x in sides):
        raise UsageError(f"{name}: a centred layer cannot be skipped, shared or folded")


def _check_scales(name: str, groups: Sequence[HeadGroup], layer: LayerPlan, plan: Plan) -> None:
    for group in groups:
        if not 2.0**-_SCALES <= group.scale <= 2.0**_SCALES or math.frexp(group.scale)[0] != 0.5:
            raise UsageError(
                f"{name}: scale {group.scale:g} must be a power of two from 2^-{_SCALES} to "
                f"2^{_SCALES}"
            )
        if not group.identity:
            raise UsageError(
                f"{name}: a head with a basis cannot have a scale; put it into the basis"
            )
        if group.scale != 1 and not group.quantised:
            raise UsageError(f"{name}: a scale requires a quantised head")
    if layer.keys.placement is Placement.PRE_ROPE or plan.lazy or plan.online_bases:
        raise UsageError(
            f"{name}: scales cannot be combined with keys before RoPE, lazy or online_bases"
        )
    if plan.quantiser is None:
        raise UsageError(f"{name}: scales require a quantiser in the plan")


def _check_column_bits(
    name: str, groups: Sequence[HeadGroup], what: str, layer: LayerPlan, plan: Plan
) -> None:
    quantiser = plan.quantiser
    side: SideQuantiser | None = getattr(quantiser, what) if quantiser is not None else None
    for group in groups:
        if not group.quantised and (side is None or group.column_bits):
            raise UsageError(
                f"{name}: unquantised heads require a quantiser of this side and cannot have "
                "bits by column"
            )
        if not group.column_bits:
            # As `kvprof.methods.tokens.quantises` has it, which knows plans that are checked.
            aged = layer.sliding_window is None or (quantiser is not None and not quantiser.window)
            stored = aged and group.quantised and not (layer.left_out or layer.shared)
            if side is not None and not side.bits and stored:
                raise UsageError(
                    f"{name}: the bits are missing; give them in the quantiser or by column"
                )
            continue
        if quantiser is None or side is None or side.bits:
            raise UsageError(
                f"{name}: bits by column or by head require a quantiser without bits of its own"
            )
        known = bits_of(quantiser.kind)
        if quantiser.kind in ROW_RMS:
            known = (0, *known)
        elif len(group.column_bits) > 1:
            raise UsageError(
                f"{name}: {quantiser.kind} requires the same bits for all columns of a head; "
                f"for bits by column use {' or '.join(ROW_RMS)}"
            )
        widths, bits = zip(*group.column_bits, strict=True)
        if min(widths) < 1 or sum(widths) != group.rank or len(group.ranks) > 1:
            raise UsageError(
                f"{name}: runs of {', '.join(map(str, widths))} columns must sum to rank "
                f"{group.rank}, with a single token level"
            )
        if not set(bits) <= set(known) or not any(bits):
            raise UsageError(
                f"{name}: unsupported bits by column: {', '.join(map(str, bits))}; use "
                f"{', '.join(map(str, known))}{' (not 0 for all)' if 0 in known else ''}"
            )


def _check_groups(name: str, groups: Sequence[HeadGroup], plan: Plan) -> int:
    """Return the number of KV heads that the groups cover."""
    head = 0
    for group in groups:
        if group.first != head or group.heads < 1:
            raise UsageError(f"{name}: head groups must cover each KV head once, in order")
        head += group.heads
        if len(group.ranks) != len(plan.levels.shares):
            raise UsageError(
                f"{name}: {len(group.ranks)} ranks for {len(plan.levels.shares)} token levels"
            )
        if group.ranks[0] < 1 or list(group.ranks) != sorted(group.ranks):
            raise UsageError(f"{name}: ranks {group.ranks} must be 1 or more and not decrease")
        if group.rank > min(group.width, _WIDEST):
            raise UsageError(f"{name}: rank {group.rank} exceeds the width {group.width}")
        if (group.down is None) is not (group.up is None):
            raise UsageError(f"{name}: a head group requires both down and up, or neither")
        if group.down is not None and group.up is not None:
            for matrix in (group.down, group.up):
                if tuple(matrix.shape) != (group.width, group.rank):
                    raise UsageError(
                        f"{name}: the basis has shape {tuple(matrix.shape)}; required is "
                        f"{(group.width, group.rank)}"
                    )
        elif group.ranks[0] < group.width and not plan.online_bases:
            raise UsageError(f"{name}: rank {group.ranks[0]} of {group.width} requires a basis")
    return head
