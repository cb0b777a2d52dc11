"""``fp8``: full rank in FP8 (e4m3), what most people would use instead of a low rank.

A saturating cast, K after RoPE and V as it is. Each KV head's keys, and its values, are divided by
a power of two before it, found on calibration data once and for all: queries and outputs take it
back, so that it costs no byte per token, and being a power of two it rounds nothing. Without it
(``scale=none``) this is the cast that serving systems store by default; what e4m3 cannot hold is
said then.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from torch import Tensor

from kvprof.analysis.moments import Moments
from kvprof.analysis.outliers import E4M3_LARGEST, clipped_shares, flushed_shares, scales_for
from kvprof.errors import UsageError
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import full_plan
from kvprof.methods.option_types import Among
from kvprof.methods.plan import HeadGroup, Plan
from kvprof.methods.storage import Quantiser, SideQuantiser

__all__ = ["fp8"]

# Of a head's values, zeros apart, how many may become zero before it is said. Those of a normal
# distribution whose deviation is 0.08 do to the plain cast; scaled, hardly any of any.
_FLUSHED = 0.01
_SIDES = {"keys": "k", "values": "v"}
# How many standard deviations of its widest column e4m3 holds, where only the spread is known.
_DEVIATIONS = 32


def fp8(
    inputs: MethodInputs, *, scale: Annotated[str, Among("head", "none")] = "head"
) -> PlanFamily:
    """Return the one plan of full rank in 8 bits: half the bytes of bfloat16.

    Parameters
    ----------
    inputs : MethodInputs
        With moments that count magnitudes. Without any, ``none`` is planned and nothing measured.
    scale : str
        ``head`` divides each KV head's keys and values by the least power of two over which twice
        the largest calibration value fits e4m3; ``none`` casts them as they are.

    Raises
    ------
    UsageError
        For MLA, and for scales without calibration.
    """
    side = SideQuantiser((8,))
    plan = replace(full_plan(inputs, "fp8"), quantiser=Quantiser("fp8", side, side))
    if inputs.moments is None and scale == "none":
        return PlanFamily("fp8", "bits", lambda _: plan, settings=(8.0,))
    moments = inputs.calibrated("fp8")
    if moments.centred:
        made = {
            **plan.made,
            "calibration": {**moments.info, "tokens": moments.tokens},
            "options": {"scale": scale},
        }
        plan = _scaled(plan, _spread(moments)) if scale == "head" else plan
        plan = replace(plan, made=made)
        return PlanFamily("fp8", "bits", lambda _: plan, settings=(8.0,))
    found = {
        name: [scales_for(counts) for counts in _counts(moments, key)]
        for name, key in _SIDES.items()
    }
    ones = {name: [[1.0] * len(row) for row in rows] for name, rows in found.items()}
    if scale == "head":
        plan = _scaled(plan, found)
    notes, worst = _cast_losses(inputs, scale, ones if scale == "none" else found, found)
    made = {
        **plan.made,
        "calibration": {**moments.info, "tokens": moments.tokens},
        "options": {"scale": scale},
        "cast": worst,
        "notes": [*plan.made.get("notes", []), *notes],
    }
    if not made["notes"]:
        del made["notes"]
    plan = replace(plan, made=made)
    return PlanFamily("fp8", "bits", lambda _: plan, settings=(8.0,))


def _counts(moments: Moments, key: str) -> list[Tensor]:
    if any(key not in layer.magnitudes for layer in moments.layers):
        raise UsageError(
            "fp8: the moments lack magnitudes of keys and values; collect them with magnitudes"
        )
    return [layer.magnitudes[key] for layer in moments.layers]


def _spread(moments: Moments) -> dict[str, list[list[float]]]:
    """Return scales from the spread of centred vectors, whose magnitudes nobody has counted."""

    def scale_of(gram: Tensor) -> float:
        widest = float((gram.diagonal().max() / moments.tokens).sqrt())
        return 2.0 ** math.ceil(math.log2(_DEVIATIONS * widest / E4M3_LARGEST)) if widest else 1.0

    return {
        side: [[scale_of(gram) for gram in layer.gram(key)] for layer in moments.layers]
        for side, key in _SIDES.items()
    }


def _scaled(plan: Plan, scales: dict[str, list[list[float]]]) -> Plan:
    def groups(old: Sequence[HeadGroup], own: list[float]) -> tuple[HeadGroup, ...]:
        return tuple(replace(one, scale=by) for one, by in zip(old, own, strict=True))

    layers = [
        replace(
            layer,
            keys=replace(layer.keys, groups=groups(layer.keys.groups, keys)),
            values=replace(layer.values, groups=groups(layer.values.groups, values)),
        )
        for layer, keys, values in zip(plan.layers, scales["keys"], scales["values"], strict=True)
    ]
    return replace(plan, layers=tuple(layers))


_Shares = Callable[[Tensor, list[float]], list[float]]


@dataclass(frozen=True)
class _Head:
    share: float
    layer: int
    head: int


def _cast_losses(
    inputs: MethodInputs,
    scale: str,
    used: dict[str, list[list[float]]],
    calibrated: dict[str, list[list[float]]],
) -> tuple[list[str], dict[str, Any]]:
    """Return in words what the cast loses more than it should, and the worst heads' shares.

    Clipping should not happen at all: scales see to it. What becomes zero is told from a share on
    that values of a usual size stay under.
    """
    moments = inputs.calibrated("fp8")
    name = "fp8:scale=none" if scale == "none" else "fp8"
    where = f"{moments.tokens:,} tokens of {moments.info.get('source', 'the calibration')}"
    notes: list[str] = []
    worst: dict[str, Any] = {"clipped": {}, "flushed": {}}
    for what, shares, least in (
        ("clipped", clipped_shares, 0.0),
        ("flushed", flushed_shares, _FLUSHED),
    ):
        for side, key in _SIDES.items():
            heads = _by_head(shares, inputs, key, used[side])
            most = heads[0]
            worst[what][side] = most.share
            if most.share <= least:
                continue
            many = sum(one.share > least for one in heads)
            does, beyond = ("clips", "any")
            if what == "flushed":
                does, beyond = ("flushes to zero", f"over {_words(least)}")
            text = (
                f"{name} {does} {_words(most.share)} of the {side} of layer {most.layer}, KV head "
                f"{most.head}, on {where} ({beyond} in {many} of {len(heads)} KV heads)"
            )
            if scale == "none":
                left = _by_head(shares, inputs, key, calibrated[side])[0].share
                text += f"; with scales per head {_words(left)}: take fp8"
            notes.append(text)
    return notes, worst


def _by_head(
    shares: _Shares, inputs: MethodInputs, key: str, scales: list[list[float]]
) -> list[_Head]:
    """Return every head's share, the largest first, but for layers that are left out."""
    counted = _counts(inputs.calibrated("fp8"), key)
    heads = [
        _Head(share, layer, head)
        for layer, (counts, own) in enumerate(zip(counted, scales, strict=True))
        if layer not in inputs.skip
        for head, share in enumerate(shares(counts, own))
    ]
    return sorted(heads, key=lambda one: -one.share)


def _words(share: float) -> str:
    return f"{100 * share:.2g} %" if share else "none"
