"""``hadamard-int4``: a Hadamard rotation of K and Q, then integers per token (SAW-INT4)."""

from typing import Annotated

from kvprof.analysis.bases import block_hadamard
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.option_types import Among, Count
from kvprof.methods.plan import Plan
from kvprof.methods.quantisers import per_token
from kvprof.methods.rotated import rotated_layer
from kvprof.methods.soundness import refuse_latent_attention

__all__ = ["hadamard"]


def hadamard(
    bits: int,
    inputs: MethodInputs,
    *,
    block: Count = 0,
    values: Annotated[str, Among("none", "hadamard")] = "none",
    group: Count = 0,
) -> PlanFamily:
    """Return the one plan of full width, keys turned by Hadamard blocks, with so many bits.

    Nothing is calibrated. Keys and queries are turned after RoPE, so scores stay what they are
    (SAW-INT4, arXiv 2604.19157, §3: block-diagonal rotation, then asymmetric integers per token).

    Parameters
    ----------
    bits : int
        4 in the paper.
    inputs : MethodInputs
    block : int
        Columns of a Hadamard block; 0 for a head's whole width, as the paper's 128 is. What is no
        power of two is cut into blocks that are (80 columns: 64 and 16).
    values : str
        ``hadamard`` turns V too, in W_V and W_O; the paper leaves it.
    group : int
        Columns that share a scale and a zero point; 0 for a head's whole row, which is the paper's
        4.25 bits at 128 columns.

    Raises
    ------
    UsageError
        For MLA.
    """
    refuse_latent_attention(inputs.layout)
    layers = tuple(
        rotated_layer(
            facts,
            block_hadamard(facts.qk_head_dim, block),
            block_hadamard(facts.v_head_dim, block) if values == "hadamard" else None,
        )
        for facts in inputs.layout.layers
    )
    plan = Plan(
        f"hadamard-int{bits}",
        inputs.fingerprint,
        layers,
        quantiser=per_token((bits,), group=group or None),
        made={**inputs.made, "options": {"block": block, "values": values, "group": group}},
    )
    return PlanFamily(plan.method, "bits", lambda _: plan, settings=(float(bits),))
