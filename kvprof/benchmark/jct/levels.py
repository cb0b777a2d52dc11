"""Quantised caches in one layer: FP8, quantised latents, TALE's levels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprof.benchmark.case import Place
from kvprof.benchmark.cases import level_case
from kvprof.benchmark.jct.ablations import Variant
from kvprof.benchmark.jct.attention import (
    FullAttention,
    compress_call,
    ragged_prefill,
    store_latents,
)
from kvprof.benchmark.jct.layer import AttentionCalls, PartCall
from kvprof.benchmark.methods import COLUMNS, Method
from kvprof.benchmark.ranks import Widths, full_widths
from kvprof.benchmark.shapes import Shape
from kvprof.benchmark.tale import tale_levels
from kvprof.kernels.levels.append import append
from kvprof.kernels.levels.codes import Bits
from kvprof.kernels.levels.layout import LevelsLayout, Segment
from kvprof.kernels.levels.step import levels_step
from kvprof.kernels.planes import RaggedLayout

__all__ = ["levels_attention", "levels_layout"]


def levels_layout(
    method: Method, shape: Shape, widths: Widths | None, batch: int, seq: int, dtype: torch.dtype
) -> LevelsLayout:
    """Return how a quantised cache lies in memory, as `kvprof.benchmark.cases` has it.

    Parameters
    ----------
    method : Method
    shape : Shape
    widths : Widths or None
        Of a low rank.
    batch, seq : int
    dtype : torch.dtype
        Of what is not quantised.

    Raises
    ------
    UsageError
        When a sequence is too short for TALE's levels.
    """
    own = widths if widths is not None and method.kind != "tale" else full_widths(shape)
    group = shape.num_heads // len(own.keys)
    parts: list[tuple[int, tuple[int, ...], Bits]]
    if method.kind == "tale":
        parts = [*tale_levels(seq, own.values, quantised=method.quantised_levels)]
    else:
        parts = [(seq, own.values, "fp8" if method.kind == "fp8" else method.bits)]
    return LevelsLayout(
        tuple(
            Segment(
                RaggedLayout(own.keys, values, group, batch, tokens), bits, bits, columns=COLUMNS
            )
            for tokens, values, bits in parts
        ),
        dtype,
    )


def levels_attention(
    variant: Variant,
    place: Place,
    widths: Widths | None,
    full: FullAttention,
    window: int | None,
) -> AttentionCalls:
    """Return quantised storage, and attention over it in decode.

    A prefill attends to its own tokens before they are quantised, as the runtime does: at full
    width, or over the latents of a quantised low rank.
    """
    method, shape = variant.method, place.shape
    low = widths is not None and method.kind != "tale"
    own = widths if low and widths is not None else full_widths(shape)
    group = shape.num_heads // len(own.keys)
    layout = RaggedLayout(own.keys, own.values, group, place.batch, place.seq)
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    units: list[PartCall] = []
    projections, turned = (queries, keys, keys), "both"
    if low and variant.folded_for(shape):
        turned = "none"
        projections = (layout.query_offsets[-1], sum(own.keys), sum(own.values))
        units.append(store_latents(place, layout))
    elif low:
        projections = (queries, keys, sum(own.values))
        units.append(compress_call(place, layout))
    elif method.kind == "tale":
        units.append(_levelled(place))
    labels: dict[str, str] = {}
    if place.phase == "prefill":
        output = layout.output_offsets[-1] if low else queries
        if low:
            made, error = ragged_prefill(variant, place, layout, window)
            units += made
        else:
            unit, error, labels = full.call(place, window)
            units.append(unit)
            labels = {**labels, "prefill": "attends to exact K and V, then stores them quantised"}
        units.append(_quantised(method, place, widths))
        return AttentionCalls(units, projections, output, turned, error, labels)
    case = level_case(method, place, widths)
    stored = levels_layout(method, shape, widths, place.batch, place.seq, place.dtype)
    units += [
        _quantised(method, place, widths),
        PartCall("attention", case.runs, ("levels", method, layout)),
        _schedule(stored, place),
    ]
    labels["merge"] = "counted in attention"
    labels["dequantisation"] = "counted in attention: the kernel does it in registers"
    if method.kind == "tale":
        labels["levels"] = (
            "a step stores one token in the recent level and moves one down into the middle level"
        )
    return AttentionCalls(
        units,
        projections,
        stored.widest.output_offsets[-1],
        turned,
        lambda: case.error(case.runs[0]()),
        labels,
    )


def _schedule(layout: LevelsLayout, place: Place) -> PartCall:
    """Return how a step's work is cut; layers stored alike share it."""
    step = levels_step(layout, place.device)
    tokens = [[segment.layout.capacity] * place.batch for segment in layout.segments]
    lengths = torch.tensor(tokens, dtype=torch.int32, device=place.device)
    key = ("levels schedule", layout)
    return PartCall("schedule", [lambda: step.cut(lengths).lengths], key, per_pass=True)


def _levelled(place: Place) -> PartCall:
    """Return TALE's rotation of V into its basis, which nothing can be folded into (lazy)."""
    shape, source = place.shape, place.generator(51)
    values = place.random(source, place.batch, place.queries, shape.num_kv_heads, shape.head_dim)
    down = place.random(source, shape.num_kv_heads, shape.head_dim, shape.head_dim)

    def run() -> Tensor:
        return torch.einsum("btgd,gdr->btgr", values, down)

    return PartCall("compress", [run], ("tale compress", place.batch, place.queries))


def _quantised(method: Method, place: Place, widths: Widths | None) -> PartCall:
    """Return the store of new tokens: a prompt packed whole, or one token appended."""
    shape, source = place.shape, place.generator(52)
    least = 64 if method.kind == "tale" else 1  # TALE's levels need some tokens
    layout = levels_layout(
        method, shape, widths, place.batch, max(least, place.queries), place.dtype
    )
    key = ("quantise", method, layout, place.phase)

    def states(widths: Sequence[int], tokens: int) -> list[Tensor]:
        return [place.random(source, place.batch, tokens, width) for width in widths]

    given = []
    for segment in layout.segments:
        tokens = segment.layout.capacity if place.phase == "prefill" else 1
        own = segment.layout
        given.append((states(own.key_widths, tokens), states(own.value_widths, tokens)))
    if place.phase == "prefill":
        return PartCall("quantise", [lambda: layout.packed(given)], key)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=place.device)
    start = torch.zeros(place.batch, dtype=torch.int32, device=place.device)
    # Sinks never change; with levels one token enters the newest and one falls out of it.
    changed = range(len(layout.segments))[-2:] if method.kind == "tale" else range(1)

    def run() -> Tensor:
        for segment in changed:
            append(buffer, layout, segment, *given[segment], start)
        return buffer

    return PartCall("quantise", [run], key)
