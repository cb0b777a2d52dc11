"""Rows that go across layers: which columns they have, and what calibration tells of them."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor

from kvprof.analysis.moments import layer_groups
from kvprof.errors import UsageError
from kvprof.methods.family import MethodInputs
from kvprof.methods.low_rank import has_rope, identity_layer
from kvprof.methods.plan import LayerPlan, Placement
from kvprof.models.layout import LayerLayout

__all__ = ["gathered", "layer_columns", "together", "unrotated_layers"]

# Eigenvectors of more columns than this take longer than anybody waits for, and 2 GiB a matrix.
_WIDEST = 16384


def layer_columns(facts: LayerLayout, side: str) -> int:
    """Return the columns of a layer's keys, or values, of all KV heads."""
    return facts.num_kv_heads * (facts.qk_head_dim if side == "keys" else facts.v_head_dim)


def unrotated_layers(facts: Sequence[LayerLayout], coded: Collection[int]) -> tuple[LayerPlan, ...]:
    """Return layers at full rank; where tokens may be coded, keys before RoPE."""
    layers = []
    for own in facts:
        layer = identity_layer(own)
        if own.index in coded and has_rope(own):
            if own.rotary_offset is None:
                raise UsageError(f"layer {own.index}: this model does not expose K before RoPE")
            layer = replace(layer, keys=replace(layer.keys, placement=Placement.PRE_ROPE))
        layers.append(layer)
    return tuple(layers)


def together(inputs: MethodInputs, method: str, size: int) -> list[tuple[int, ...]]:
    """Return runs of `size` layers, 0 for all, without those with windows and those left out."""
    whole = tuple(x.index for x in inputs.layout.layers if x.sliding_window is None)
    if not whole:
        raise UsageError(
            f"{method}: every layer has a sliding window, so layers cannot share a cache"
        )
    groups = (
        tuple(layer for layer in own if layer not in inputs.skip)
        for own in layer_groups(whole, size)
    )
    return [own for own in groups if own]


def gathered(
    inputs: MethodInputs, method: str, side: str, layers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return what calibration tells of the rows of several layers."""
    known = inputs.calibrated(method).across
    of = () if known is None else known.groups
    number = next((at for at, own in enumerate(of) if set(layers) <= set(own)), None)
    if known is None or number is None:
        raise UsageError(
            f"{method}: the moments do not cover these layers jointly; calibrate again from "
            "tokens or text"
        )
    columns: list[int] = []
    start = 0
    for layer in known.groups[number]:
        stop = start + layer_columns(inputs.layout.layers[layer], side)
        if layer in layers:
            columns += range(start, stop)
        start = stop
    if len(columns) > _WIDEST:
        raise UsageError(
            f"{method}: {len(layers)} layers have {len(columns):,} columns of {side}, above the "
            f"limit of {_WIDEST:,}; use fewer layers, such as layers=4"
        )
    gram, rows = known.grams[side, number].cpu(), known.samples[side, number].cpu().float()
    if len(columns) < start:
        rows = rows[:, columns]
        gram = gram[[*columns, start]][:, [*columns, start]]
    return gram, rows
