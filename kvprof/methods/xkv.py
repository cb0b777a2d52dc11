"""``xkv``: one latent for keys, one for values, of several layers (arXiv 2503.18893)."""

from typing import Annotated

from torch import Tensor

from kvprof.analysis.bases import eigenbasis
from kvprof.errors import UsageError
from kvprof.methods.across import Across, LayerGroup
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.layer_rows import gathered, layer_columns, together, unrotated_layers
from kvprof.methods.option_types import Among, Count, Positive
from kvprof.methods.plan import Plan
from kvprof.methods.soundness import refuse_latent_attention
from kvprof.methods.storage import Levels

__all__ = ["xkv"]


def xkv(
    inputs: MethodInputs,
    *,
    layers: Count = 4,
    ratio: float = 1.5,
    bases: Annotated[str, Among("prompt", "calibration")] = "prompt",
    sink: Count = 0,
    window: Count = 0,
    block: Positive = 64,
) -> PlanFamily:
    """Return xKV's plans: ``[X_1 … X_G] ≈ A [B_1 … B_G]``, the tokens' A shared by G layers.

    X are keys before RoPE, or values, of all KV heads of adjacent layers, side by side. B are the
    first right singular vectors, A the latents that are stored; a layer rebuilds its own X_l from A
    at every use.

    Parameters
    ----------
    inputs : MethodInputs
        With moments across layers for ``bases=calibration``.
    layers : int
        Adjacent layers that share latents, 4 in the paper (xKV-4), 0 for all; layers with a sliding
        window stay as they are.
    ratio : float
        Rank of the values per rank of the keys, where neither is whole: 144 to 96 in the paper.
    bases : str
        ``prompt``: each sequence has its own, from a singular value decomposition of its prompt, as
        in the paper; they are stored with it. ``calibration``: the plan has them, from calibration
        data.
    sink, window : int
        First and newest tokens that stay as they are.
    block : int
        Tokens that become latents at a time.

    Raises
    ------
    UsageError
        For MLA, a ratio that is none, or moments that are not across these layers.
    """
    refuse_latent_attention(inputs.layout)
    if not 0.1 <= ratio <= 10:
        raise UsageError(f"xkv: ratio {ratio:g} is not between 0.1 and 10")
    facts = inputs.layout.layers
    made = dict(inputs.made)
    own_bases = bases == "prompt"
    found = {
        (side, own): None if own_bases else _calibrated(inputs, side, own)
        for own in together(inputs, "xkv", layers)
        for side in ("keys", "values")
    }
    if not own_bases:
        moments = inputs.calibrated("xkv")
        made["calibration"] = {**moments.info, "tokens": moments.tokens}
    made["options"] = {
        "layers": layers,
        "ratio": ratio,
        "bases": bases,
        "sink": sink,
        "window": window,
        "block": block,
    }
    plain = unrotated_layers(facts, {layer for _, own in found for layer in own})

    def build(knob: float) -> Plan:
        shares = _shares(1.0 - knob, ratio)
        groups = []
        for (side, own), basis in found.items():
            width = sum(layer_columns(facts[layer], side) for layer in own)
            rank = max(1, round(shares[side] * width))
            cut = None if basis is None else basis[:, :rank].contiguous()
            groups.append(LayerGroup(side, own, width, rank, cut))
        across = Across(tuple(groups), window, block)
        return Plan("xkv", inputs.fingerprint, plain, levels=Levels(sink), made=made, across=across)

    return PlanFamily("xkv", "removed_share", build)


def _calibrated(inputs: MethodInputs, side: str, layers: tuple[int, ...]) -> Tensor:
    """Return the right singular vectors of all calibration rows of a group, as they are."""
    gram, rows = gathered(inputs, "xkv", side, layers)
    wide = rows.double()
    return eigenbasis(gram[:-1, :-1] + wide.mT @ wide)[1].float()


def _shares(kept: float, ratio: float) -> dict[str, float]:
    """Return K's and V's shares of columns, of mean `kept`, in `ratio` while none is whole."""
    keys = min(1.0, 2 * kept / (1 + ratio))
    values = min(1.0, 2 * kept - keys)
    return {"keys": min(1.0, 2 * kept - values), "values": values}
