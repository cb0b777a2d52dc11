"""Caches in segments in one layer: FP8, quantised latents, TALE's levels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprof.benchmark.case import Workload
from kvprof.benchmark.cases import segments_case, segments_layout
from kvprof.benchmark.jct.attention import (
    FullAttention,
    compress_call,
    ragged_prefill,
    store_latents,
)
from kvprof.benchmark.jct.layer import AttentionCalls, PartCall
from kvprof.benchmark.methods import Method
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.segments.append import append
from kvprof.kernels.segments.layout import SegmentsLayout
from kvprof.kernels.segments.step import segments_step
from kvprof.methods.plan import Plan

__all__ = ["segments_attention"]


def segments_attention(
    method: Method,
    workload: Workload,
    full: FullAttention,
    window: int | None,
) -> AttentionCalls:
    """Return quantised storage, and attention over it in decode.

    A prefill attends to its own tokens before they are quantised, as the runtime does: at full
    width, or over the latents of a quantised low rank.
    """
    plan, layer, shape = method.plan, method.layer, workload.shape
    sides = (*layer.keys.groups, *layer.values.groups)
    low = not plan.lazy and not all(group.identity for group in sides)
    keys_kept, values_kept = (
        tuple(group.rank for group in side.groups) for side in (layer.keys, layer.values)
    )
    group = shape.num_heads // len(keys_kept)
    layout = RaggedLayout(keys_kept, values_kept, group, workload.batch, workload.seq)
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    units: list[PartCall] = []
    projections, turned = (queries, keys, keys), "both"
    if low and method.folded:
        turned = "none"
        projections = (layout.query_offsets[-1], sum(keys_kept), sum(values_kept))
        units.append(store_latents(workload, layout))
    elif low:
        projections = (queries, keys, sum(values_kept))
        units.append(compress_call(workload, layout))
    elif plan.lazy:
        units.append(_levelled(workload))
    labels: dict[str, str] = {}
    if workload.phase == "prefill":
        output = layout.output_offsets[-1] if low else queries
        if low:
            made, error = ragged_prefill(workload, layout, window, method.balanced)
            units += made
        else:
            unit, error, labels = full.call(workload, window)
            units.append(unit)
            labels = {**labels, "prefill": "attends to exact K and V, then stores them quantised"}
        units.append(_quantised(method, plan, workload))
        return AttentionCalls(units, projections, output, turned, error, labels)
    case = segments_case(method, workload)
    stored = segments_layout(plan, shape, workload.batch, workload.seq, workload.dtype)
    units += [
        _quantised(method, plan, workload),
        PartCall("attention", case.runs, ("segments", method, layout)),
        _schedule(stored, workload),
    ]
    labels["merge"] = "counted in attention"
    labels["dequantisation"] = "counted in attention: the kernel does it in registers"
    if len(plan.levels.shares) > 1:
        labels["levels"] = (
            "a step stores one token in the newest level and moves one down into the one below"
        )
    return AttentionCalls(
        units,
        projections,
        stored.widest.output_offsets[-1],
        turned,
        lambda: case.error(case.runs[0]()),
        labels,
    )


def _schedule(layout: SegmentsLayout, workload: Workload) -> PartCall:
    """Return how a step's work is cut; layers stored alike share it."""
    step = segments_step(layout, workload.device)
    tokens = [[segment.layout.capacity] * workload.batch for segment in layout.segments]
    lengths = torch.tensor(tokens, dtype=torch.int32, device=workload.device)
    key = ("segments schedule", layout)
    return PartCall("schedule", [lambda: step.cut(lengths).lengths], key, per_pass=True)


def _levelled(workload: Workload) -> PartCall:
    """Return TALE's rotation of V into its basis, which nothing can be folded into (lazy)."""
    shape, source = workload.shape, workload.generator(51)
    values = workload.random(
        source, workload.batch, workload.queries, shape.num_kv_heads, shape.head_dim
    )
    down = workload.random(source, shape.num_kv_heads, shape.head_dim, shape.head_dim)

    def run() -> Tensor:
        return torch.einsum("btgd,gdr->btgr", values, down)

    return PartCall("compress", [run], ("tale compress", workload.batch, workload.queries))


def _quantised(method: Method, plan: Plan, workload: Workload) -> PartCall:
    """Return the store of new tokens: a prompt packed whole, or one token appended."""
    shape, source = workload.shape, workload.generator(52)
    kept = plan.levels.sink + (plan.quantiser.window if plan.quantiser is not None else 0)
    # Levels and windows need some tokens.
    least = 64 + 2 * kept if kept or len(plan.levels.shares) > 1 else 1
    tokens = max(least, workload.queries)
    layout = segments_layout(plan, shape, workload.batch, tokens, workload.dtype)
    key = ("quantise", method, layout, workload.phase)

    def states(widths: Sequence[int], tokens: int) -> list[Tensor]:
        return [workload.random(source, workload.batch, tokens, width) for width in widths]

    given = []
    for segment in layout.segments:
        tokens = segment.layout.capacity if workload.phase == "prefill" else 1
        own = segment.layout
        given.append((states(own.key_widths, tokens), states(own.value_widths, tokens)))
    if workload.phase == "prefill":
        return PartCall("quantise", [lambda: layout.packed(given)], key)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8, device=workload.device)
    start = torch.zeros(workload.batch, dtype=torch.int32, device=workload.device)
    # Sinks never change; a token enters the newest segment, and the others pass one on.
    changed = range(1 if plan.levels.sink else 0, len(layout.segments))

    def run() -> Tensor:
        for segment in changed:
            append(buffer, layout, segment, *given[segment], start)
        return buffer

    return PartCall("quantise", [run], key)
