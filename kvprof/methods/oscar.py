"""``oscar``: rotations from what attention reads, then clipped integers (arXiv 2605.17757)."""

from typing import Annotated

from torch import Tensor

from kvprof.analysis.bases import bit_reversed, eigenbasis, walsh_hadamard
from kvprof.analysis.moments import LayerMoments
from kvprof.errors import UsageError
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.hadamard import rotated_layer
from kvprof.methods.low_rank import identity_layer
from kvprof.methods.named import side_bits
from kvprof.methods.option_types import Among, BitsAmong, Count
from kvprof.methods.plan import LayerPlan, Plan
from kvprof.methods.soundness import refuse_latent_attention
from kvprof.methods.storage import Levels, Quantiser, SideQuantiser
from kvprof.models.layout import LayerLayout

__all__ = ["oscar"]


def oscar(
    inputs: MethodInputs,
    *,
    bits: Annotated[int | str, BitsAmong(2, 3, 4, 8)] = 2,
    group: Count = 128,
    clip: tuple[float, float] = (0.96, 0.92),
    sink: Count = 64,
    window: Count = 256,
    bases: Annotated[str, Among("head", "layer")] = "head",
) -> PlanFamily:
    """Return OSCAR's one plan: full rank in the bases that attention weighs K and V by.

    ``R_K = U_Q H P`` with the eigenvectors ``U_Q`` of ``QᵀQ`` over a KV head's queries, and ``R_V =
    U_S H P`` with those of ``VᵀSᵀSV``, the moments of what its query heads put out (§3); H is a
    Hadamard matrix and P the order of reversed bits, which deals the directions out evenly where a
    row has several scales. Then each row is clipped and has asymmetric integers.

    Parameters
    ----------
    inputs : MethodInputs
        With moments of the heads' outputs.
    bits : int or str
        2 in the paper; ``k3v2`` gives keys and values unlike ones, whose mean is the knob.
    group : int
        Columns of a head that share a scale and a zero point; 0 for its whole row.
    clip : tuple of float
        Of K and of V: the share of a row's magnitudes that stays; 1 does not clip.
    sink, window : int
        First and newest tokens that stay at full precision.
    bases : str
        ``head``: a rotation for each KV head; ``layer``: one for all of a layer's, from the mean of
        their moments, as the paper has it.

    Raises
    ------
    UsageError
        For MLA, moments without those of the heads' outputs, or a share that is none.
    """
    refuse_latent_attention(inputs.layout)
    moments = inputs.calibrated("oscar")
    for share in clip:
        if not 0 < share <= 1:
            raise UsageError(f"oscar: clip {share:g} is not in (0, 1]")

    def layer_of(own: LayerMoments, facts: LayerLayout) -> LayerPlan:
        if facts.sliding_window is not None and window:
            return identity_layer(facts)  # a quantiser with a window does not reach it
        if "o" not in own.rest:
            raise UsageError(
                "oscar: the moments lack head outputs; calibrate again from tokens or text"
            )
        grams = [own.grouped(name).cpu() for name in ("q", "o")]
        if bases == "layer":
            grams = [gram.mean(0) for gram in grams]
        return rotated_layer(facts, *map(_rotation, grams))

    layers = tuple(map(layer_of, moments.layers, inputs.layout.layers))
    pair = side_bits(bits)
    assert pair is not None  # the option takes nothing else
    keys, values = (
        SideQuantiser((own,), "token", group or None, share if share < 1 else None)
        for own, share in zip(pair, clip, strict=True)
    )
    plan = Plan(
        "oscar",
        inputs.fingerprint,
        layers,
        levels=Levels(sink),
        quantiser=Quantiser("affine", keys, values, window=window),
        made={
            **inputs.made,
            "calibration": {**moments.info, "tokens": moments.tokens},
            "options": {
                "bits": bits,
                "group": group,
                "clip": list(clip),
                "sink": sink,
                "window": window,
                "bases": bases,
            },
        },
    )
    return PlanFamily("oscar", "bits", lambda _: plan, settings=(sum(pair) / 2,))


def _rotation(gram: Tensor) -> Tensor:
    width = gram.shape[-1]
    return eigenbasis(gram)[1] @ walsh_hadamard(width)[:, bit_reversed(width)]
