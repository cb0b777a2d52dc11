"""``hadamard-int4``: a Hadamard rotation of K and Q, then integers per token (SAW-INT4)."""

from dataclasses import replace
from functools import partial
from typing import Annotated

from torch import Tensor

from kvprof.analysis.bases import block_hadamard
from kvprof.errors import UsageError
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import has_rope, identity_layer, value_folds
from kvprof.methods.named import side_bits
from kvprof.methods.option_types import Among, BitsAmong, Count
from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan, Placement, Plan, ValuePlan
from kvprof.methods.quantisers import per_token, quantised
from kvprof.methods.soundness import refuse_latent_attention
from kvprof.models.layout import LayerLayout

__all__ = [
    "hadamard",
    "rotated_layer",
]


def hadamard(
    own: int,
    inputs: MethodInputs,
    *,
    bits: Annotated[int | str, BitsAmong(2, 3, 4, 8)] | None = None,
    block: Count = 0,
    values: Annotated[str, Among("none", "hadamard")] = "none",
    group: Count = 0,
    sink: Count = 0,
    window: Count = 0,
) -> PlanFamily:
    """Return the one plan of full rank, keys turned by Hadamard blocks, with its own bits.

    Keys and queries are turned after RoPE, so scores stay what they are
    (SAW-INT4, arXiv 2604.19157, §3: block-diagonal rotation, then asymmetric integers per token).

    Parameters
    ----------
    own : int
        Bits that the name says, 4 in the paper.
    inputs : MethodInputs
    bits : int, str or None
        ``k8v4`` gives keys and values unlike ones, whose mean is the knob; another number has a
        name of its own.
    block : int
        Columns of a Hadamard block; 0 for a head's whole width, as the paper's 128 is. What is no
        power of two is cut into blocks that are (80 columns: 64 and 16).
    values : str
        ``hadamard`` turns V too, in W_V and W_O; the paper leaves it.
    group : int
        Columns that share a scale and a zero point; 0 for a head's whole row, which is the paper's
        4.25 bits at 128 columns.
    sink, window : int
        First and newest tokens that stay at full precision; with a window, layers with a sliding
        window stay too.

    Raises
    ------
    UsageError
        For MLA, and for a number of bits that is not the name's.
    """
    refuse_latent_attention(inputs.layout)
    pair = side_bits(own if bits is None else bits)
    assert pair is not None  # the option takes nothing else
    name = f"hadamard-int{own}"
    if pair[0] == pair[1] != own:
        raise UsageError(
            f"{name} has {own} bits, not {pair[0]}; use hadamard-int4, -int3 or -int2, or "
            "bits=k4v3 where keys and values differ"
        )
    layers = tuple(
        rotated_layer(
            facts,
            block_hadamard(facts.qk_head_dim, block),
            block_hadamard(facts.v_head_dim, block) if values == "hadamard" else None,
        )
        for facts in inputs.layout.layers
    )
    options = {"block": block, "values": values, "group": group, "sink": sink, "window": window}
    made = {**inputs.made, "options": options if bits is None else {"bits": bits, **options}}
    plan = quantised(
        Plan(name, inputs.fingerprint, layers, made=made),
        partial(per_token, group=group or None),
        own if bits is None else bits,
    )
    assert plan.quantiser is not None
    quantiser = replace(plan.quantiser, window=window)
    plan = replace(plan, levels=replace(plan.levels, sink=sink), quantiser=quantiser)
    return PlanFamily(name, "bits", lambda _: plan, settings=(sum(pair) / 2,))


# --- Plans at full rank in other coordinates: every KV head turned by a rotation, then quantised.
#
# Scores and outputs do not change with a rotation, but what codes lose does. Keys are turned after
# RoPE and queries with them, online, or in W_K and W_Q where a layer has neither RoPE nor QK-norm;
# values in W_V and W_O where the model has them as plain projections.


def rotated_layer(facts: LayerLayout, keys: Tensor | None, values: Tensor | None) -> LayerPlan:
    """Return a layer that stores ``x @ R`` of every KV head, at full rank.

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
