"""``palu``: shared latents before RoPE, keys rebuilt at every use (Palu §3, appendix K)."""

from collections.abc import Sequence

from kvprof.analysis.rank_allocation import Grid
from kvprof.analysis.width_clusters import KINDS
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import (
    KNOBS,
    LayerBases,
    allocator,
    hadamard_folded,
    has_rope,
    low_rank_layers,
    rank_targets,
    value_folds,
)
from kvprof.methods.option_types import Allocation, Count, Positive
from kvprof.methods.pair_bases import shared_bases
from kvprof.methods.plan import Placement, Plan
from kvprof.methods.soundness import refuse_latent_attention

__all__ = ["palu"]


def palu(
    inputs: MethodInputs,
    *,
    heads: Count = 4,
    allocation: Allocation = "uniform",
    hadamard: bool = False,
    grid: Positive = 32,
    minimum: Positive = 16,
    kinds: Count = KINDS,
) -> PlanFamily:
    """Return Palu's plans: whitened decomposition of W_K and W_V over groups of heads.

    Keys are projected before RoPE and rebuilt; ``down`` is folded into W_K. Where the layer has no
    RoPE nothing is rebuilt: queries meet the latent, by ``up`` folded into W_Q (eq. 7) or, where
    heads share a latent, online. With QK-norm between projection
    and RoPE, K after the norm is decomposed and projected online: the norm is no linear map.
    Values are folded into W_V and W_O, which makes W_O up to `heads` times larger. Where
    projections add a bias, latents are without it, as in Palu's code, and nothing is folded.

    Parameters
    ----------
    inputs : MethodInputs
        With moments of K before RoPE and V, kept jointly over a multiple of `heads` heads.
    heads : int
        1 is M-LRD, 4 the paper's G-LRD, 0 (all of a layer's) J-LRD; at most as many as there are.
    allocation : str
        ``uniform``, or ``fisher`` (§3.3), which needs gradients.
    hadamard : bool
        Fold a Walsh-Hadamard rotation in, for quantised latents (§3.4).
    grid, minimum : int
        The paper rounds to multiples of 32.
    kinds : int
        Distinct pairs of K's and V's rank that there may be, as for ``fdc``; 0 for no limit.

    Raises
    ------
    UsageError
        For MLA, heads that do not divide, moments without the joint ones, or a rotation of a kind
        that keys cannot be had before.
    """
    refuse_latent_attention(inputs.layout)
    moments = inputs.calibrated("palu")
    layers = []
    for index, facts in enumerate(inputs.layout.layers):
        if index in inputs.skip:
            layers.append(LayerBases(None, None))
            continue
        rope = has_rope(facts)
        keys = shared_bases(moments, facts, "k_pre", heads)
        layers.append(
            LayerBases(
                keys=keys,
                values=shared_bases(moments, facts, "v", heads),
                placement=Placement.PRE_ROPE if rope else Placement.POST_ROPE,
                # A latent that heads share is wider than a query head: W_Q would grow with it.
                fold_keys=(not facts.qk_norm, not rope and not facts.qk_norm and keys.heads == 1),
                fold_values=value_folds(facts),
            )
        )
    ranks = allocator(allocation, inputs, layers, Grid(grid, minimum), kinds)
    made = {
        **inputs.made,
        "calibration": {**moments.info, "tokens": moments.tokens},
        "options": {
            "heads": heads,
            "allocation": allocation,
            "hadamard": hadamard,
            "grid": grid,
            "minimum": minimum,
            "kinds": kinds,
        },
    }

    def at_ranks(given: Sequence[int]) -> Plan:
        return Plan("palu", inputs.fingerprint, low_rank_layers(inputs, layers, given), made=made)

    return PlanFamily(
        "palu",
        KNOBS[allocation],
        lambda knob: at_ranks(ranks(knob)),
        finish=hadamard_folded if hadamard else None,
        targets=tuple(rank_targets(layers)),
        at_ranks=at_ranks,
    )
