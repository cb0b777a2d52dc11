"""``turboquant``: a random rotation, a norm per vector and Lloyd-Max levels (arXiv 2504.19874)."""

from typing import Annotated

from torch import Tensor

from kvprof.analysis.bases import random_rotation, walsh_hadamard
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.option_types import Among, Count
from kvprof.methods.plan import Plan
from kvprof.methods.rotated import rotated_layer
from kvprof.methods.soundness import refuse_latent_attention
from kvprof.methods.storage import Quantiser, SideQuantiser

__all__ = ["turboquant"]

_BITS = (4, 3, 2)


def turboquant(
    inputs: MethodInputs,
    *,
    bits: Annotated[int, Among(*_BITS)] | None = None,
    rotation: Annotated[str, Among("random", "hadamard")] = "random",
    unit: bool = False,
    seed: Count = 0,
) -> PlanFamily:
    """Return TurboQuant's plans, optimal for the squared error; the knob is the bits.

    ``x ≈ ‖x‖ · Πᵀ c[code]`` with ``code`` the level nearest to each coordinate of ``Π x / ‖x‖``
    (algorithm 1), for K after RoPE and for V. Nothing is calibrated: after a random rotation any
    vector's coordinates are distributed as `kvprof.methods.quantisers.lloyd_max` takes them to be.

    Parameters
    ----------
    inputs : MethodInputs
    bits : int or None
        4, 3 or 2; None lets the rate choose.
    rotation : str
        ``random`` is the paper's Π, drawn once for all heads; ``hadamard`` what vLLM's TurboQuant
        takes, in blocks where a head's width is no power of two.
    unit : bool
        Divide the norm by that of the levels chosen, so that the vector keeps its own (vLLM's
        norm correction).
    seed : int
        Of the random rotation.

    Raises
    ------
    UsageError
        For MLA.
    """
    refuse_latent_attention(inputs.layout)

    def turned(width: int) -> Tensor:
        return random_rotation(width, seed) if rotation == "random" else walsh_hadamard(width)

    layers = tuple(
        rotated_layer(facts, turned(facts.qk_head_dim), turned(facts.v_head_dim))
        for facts in inputs.layout.layers
    )
    made = {**inputs.made, "options": {"rotation": rotation, "unit": unit, "seed": seed}}

    def build(value: float) -> Plan:
        side = SideQuantiser((int(value),))
        quantiser = Quantiser("lloyd-max-unit" if unit else "lloyd-max", side, side)
        return Plan("turboquant", inputs.fingerprint, layers, quantiser=quantiser, made=made)

    settings = tuple(map(float, _BITS if bits is None else (bits,)))
    return PlanFamily("turboquant", "bits", build, settings=settings)
