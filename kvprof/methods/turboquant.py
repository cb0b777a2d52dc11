"""``turboquant``: a random rotation, a norm per vector and Lloyd-Max levels (arXiv 2504.19874)."""

from typing import Annotated

from torch import Tensor

from kvprof.analysis.bases import random_rotation, walsh_hadamard
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.hadamard import rotated_layer
from kvprof.methods.named import side_bits
from kvprof.methods.option_types import Among, BitsAmong, Count
from kvprof.methods.plan import Plan
from kvprof.methods.soundness import refuse_latent_attention
from kvprof.methods.storage import Quantiser, SideQuantiser

__all__ = ["turboquant"]

# What the rate chooses among, and what may be asked for.
_BITS = (4, 3, 2)
_GIVEN = (8, *_BITS)


def turboquant(
    inputs: MethodInputs,
    *,
    bits: Annotated[int | str, BitsAmong(*_GIVEN)] | None = None,
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
    bits : int, str or None
        8, 4, 3 or 2, or ``k4v3`` for unlike ones of keys and values, whose mean is the knob; None
        lets the rate choose among the latter three.
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

    def rotation_of(width: int) -> Tensor:
        return random_rotation(width, seed) if rotation == "random" else walsh_hadamard(width)

    layers = tuple(
        rotated_layer(facts, rotation_of(facts.qk_head_dim), rotation_of(facts.v_head_dim))
        for facts in inputs.layout.layers
    )
    options = {"rotation": rotation, "unit": unit, "seed": seed}
    made = {**inputs.made, "options": options if bits is None else {"bits": bits, **options}}
    given = None if bits is None else side_bits(bits)

    def build(value: float) -> Plan:
        keys, values = (SideQuantiser((own,)) for own in given or (int(value),) * 2)
        quantiser = Quantiser("lloyd-max-unit" if unit else "lloyd-max", keys, values)
        return Plan("turboquant", inputs.fingerprint, layers, quantiser=quantiser, made=made)

    settings = tuple(map(float, _BITS)) if given is None else (sum(given) / 2,)
    return PlanFamily("turboquant", "bits", build, settings=settings)
