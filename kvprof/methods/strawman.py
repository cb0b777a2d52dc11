"""``strawman``: SVD at run time, decompression at every step (ZACK §3.2): shows the overheads."""

from kvprof.analysis.rank_allocation import Grid, share_of
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import KNOBS
from kvprof.methods.option_types import Positive
from kvprof.methods.plan import HeadGroup, KeyPlan, LayerPlan, Placement, Plan, ValuePlan
from kvprof.methods.soundness import refuse_latent_attention

__all__ = ["strawman"]


def strawman(inputs: MethodInputs, *, grid: Positive = 16, minimum: Positive = 16) -> PlanFamily:
    """Return plans whose bases prefill finds per sequence and head; the same rank for all.

    Parameters
    ----------
    inputs : MethodInputs
        Moments are not needed.
    grid, minimum : int
        For the rank, the paper's being half of the width.
    """
    refuse_latent_attention(inputs.layout)
    allowed = Grid(grid, minimum)
    made = {**inputs.made, "options": {"grid": grid, "minimum": minimum}}

    def build(knob: float) -> Plan:
        def groups(heads: int, width: int) -> tuple[HeadGroup, ...]:
            rank = allowed.up(share_of(width, 1.0 - knob), width)
            return tuple(HeadGroup(head, 1, width, (rank,)) for head in range(heads))

        layers = tuple(
            LayerPlan(
                KeyPlan(Placement.POST_ROPE, groups(facts.num_kv_heads, facts.qk_head_dim)),
                ValuePlan(groups(facts.num_kv_heads, facts.v_head_dim)),
                facts.sliding_window,
                facts.shared,
            )
            for facts in inputs.layout.layers
        )
        return Plan("strawman", inputs.fingerprint, layers, online_bases=True, made=made)

    return PlanFamily("strawman", KNOBS["uniform"], build)
