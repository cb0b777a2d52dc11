"""KV-cache types of vLLM and llama.cpp as these store them: which of them does a model bear?

After the sources of vLLM 0.27.1 and of llama.cpp in 2026. Bytes are those of the engines' tensors.
What their kernels do to queries, and vLLM's first pass of a prompt in a ``turboquant_*`` type,
which reads its own tokens uncompressed, is not imitated.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvprof.analysis.bases import block_hadamard
from kvprof.errors import UsageError
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.hadamard import rotated_layer
from kvprof.methods.low_rank import identity_layer
from kvprof.methods.named import EDGE, ENGINE_FORMATS, TURBOQUANT
from kvprof.methods.plan import LayerPlan, Plan
from kvprof.methods.soundness import refuse_latent_attention
from kvprof.methods.storage import Quantiser, SideQuantiser
from kvprof.models.layout import LayerLayout

__all__ = ["engine_format"]

_BLOCK = 32  # columns of llama.cpp's blocks
_TURNED = 64  # least width, and what widths are multiples of, where llama.cpp turns heads
_SEED = 0x9E3779B9  # of the signs that vLLM draws
# Of vLLM's, those that turn a head by one Hadamard matrix.
_WHOLE = ("int4_per_token_head", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")


# Kind, bits, columns of a group, and the dtype of scales.
_ALIKE: dict[str, tuple[str, int, int | None, str]] = {
    "fp8_e4m3": ("fp8", 8, None, "float16"),
    "fp8_e5m2": ("fp8-e5m2", 8, None, "float16"),
    "int8_per_token_head": ("absmax", 8, None, "float32"),
    "int4_per_token_head": ("hidden-zero", 4, None, "float32"),
    "q8_0": ("absmax", 8, _BLOCK, "float16"),
    "q5_1": ("minimum", 5, _BLOCK, "float16"),
    "q5_0": ("signed-max", 5, _BLOCK, "float16"),
    "q4_1": ("minimum", 4, _BLOCK, "float16"),
    "q4_0": ("signed-max", 4, _BLOCK, "float16"),
    "iq4_nl": ("iq4_nl", 4, _BLOCK, "float16"),
}


def engine_format(name: str, inputs: MethodInputs) -> PlanFamily:
    """Return the one plan of an engine's KV-cache type.

    llama.cpp cuts heads into blocks of 32 columns, after a Hadamard rotation of K and Q (the
    largest power of two that divides the width) and of V (64 columns) where widths are the same in
    all layers of a cache and multiples of 64. vLLM's ``fp8_*`` are casts without a scale, which is
    1 unless the checkpoint brings one; ``int4_per_token_head`` turns K and V by random signs and a
    Hadamard matrix; ``turboquant_*`` turns K by the matrix, and leaves the first and last two
    layers out. Its levels are a normal variable's, here those of `lloyd_max` for the width.

    Parameters
    ----------
    name : str
        One of `kvprof.methods.named.ENGINE_FORMATS`.
    inputs : MethodInputs
        Moments are not needed.

    Raises
    ------
    UsageError
        For MLA, and for heads of a width that the engine does not take.
    """
    refuse_latent_attention(inputs.layout)
    engine, flag = ENGINE_FORMATS[name]
    quantiser, layers = _quantiser(name), inputs.layout.layers
    made = {**inputs.made, "engine": engine, "flag": flag}
    edge = min(EDGE, len(layers) // 2) if name.startswith("turboquant") else 0
    plan = Plan(
        name,
        inputs.fingerprint,
        tuple(
            _layer(name, facts, layers)
            if edge <= index < len(layers) - edge
            else replace(identity_layer(facts), left_out=True)
            for index, facts in enumerate(layers)
        ),
        quantiser=quantiser,
        made=made,
    )
    sides = (quantiser.keys, quantiser.values)
    mean = sum(side.bits[0] for side in sides if side is not None) / 2
    return PlanFamily(name, "bits", lambda _: plan, settings=(mean,))


def _quantiser(name: str) -> Quantiser:
    if name in TURBOQUANT:
        keys, values = TURBOQUANT[name]
        kind = "fp8" if keys == 8 else "lloyd-max-unit"
        return Quantiser("minimum", SideQuantiser((keys,), kind=kind), SideQuantiser((values,)))
    kind, bits, group, scales = _ALIKE[name]
    side = SideQuantiser((bits,), group=group)
    return Quantiser(kind, side, side, scale_dtype=scales)


def _layer(name: str, facts: LayerLayout, layers: tuple[LayerLayout, ...]) -> LayerPlan:
    """Return a layer with its heads turned as the engine turns them."""
    engine, widths = ENGINE_FORMATS[name][0], (facts.qk_head_dim, facts.v_head_dim)
    powers = tuple(width & -width for width in widths)  # that divide them
    blocks, whole = engine == "llama.cpp", name in _WHOLE
    if (blocks and min(powers) < _BLOCK) or (whole and powers != widths):
        raise UsageError(
            f"{name}: {engine} requires a head_dim that is "
            f"{f'a multiple of {_BLOCK}' if blocks else 'a power of two'}, but this model has "
            f"{' and '.join(map(str, dict.fromkeys(widths)))}"
        )
    if blocks:
        window = facts.sliding_window is None  # each kind of layer has a cache of its own
        alike = [x for x in layers if (x.sliding_window is None) == window]
        keys, values = (
            all(getattr(x, side) == width for x in alike) and not width % _TURNED
            for side, width in zip(("qk_head_dim", "v_head_dim"), widths, strict=True)
        )
        return rotated_layer(
            facts,
            block_hadamard(widths[0], powers[0]) if keys else None,
            block_hadamard(widths[1], _TURNED) if values else None,
        )
    if not whole:
        return identity_layer(facts)
    if name.startswith("turboquant"):
        return rotated_layer(facts, block_hadamard(widths[0]), None)
    return rotated_layer(facts, *map(_signed, widths))


def _signed(width: int) -> Tensor:
    """Return what turns a row as ``H @ (signs * x)`` does, with the signs that vLLM draws."""
    draws = torch.Generator().manual_seed(_SEED)
    signs = 2.0 * torch.bernoulli(torch.full((width,), 0.5), generator=draws) - 1.0
    return signs.double()[:, None] * block_hadamard(width)
