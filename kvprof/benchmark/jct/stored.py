"""Attention over what is stored otherwise: in segments, before RoPE, as the strawman does."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from kvprof.analysis.bases import eigenbasis
from kvprof.benchmark.case import Workload
from kvprof.benchmark.cases import palu_case, segments_case, segments_layout, sinks_of
from kvprof.benchmark.jct.attention import (
    FullAttention,
    compress_call,
    ragged_prefill,
    store_latents,
)
from kvprof.benchmark.jct.layer import AttentionCalls, PartCall
from kvprof.benchmark.methods import Method
from kvprof.benchmark.plans import Widths
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.quantized.append import append
from kvprof.kernels.quantized.layout import SegmentsLayout
from kvprof.kernels.quantized.step import segments_step
from kvprof.kernels.reconstruct.step import reconstruct_step, stored_step
from kvprof.methods.plan import Plan

__all__ = ["latent_attention", "segments_attention", "strawman_attention"]


# --- Caches in segments: FP8, quantised latents, TALE's levels.


def segments_attention(
    method: Method,
    workload: Workload,
    full: FullAttention,
    window: int | None,
) -> AttentionCalls:
    """Return quantised storage and attention over it in decode; prefill is uncompressed."""
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
            units += ragged_prefill(workload, layout, window, method.balanced)
        else:
            unit, labels = full.call(workload, window)
            units.append(unit)
            labels = {**labels, "prefill": "attends uncompressed, then stores K and V quantised"}
        units.append(_quantised(method, plan, workload))
        return AttentionCalls(units, projections, output, turned, labels)
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
            "each step stores one token in the newest level and moves one to the next level"
        )
    return AttentionCalls(
        units,
        projections,
        stored.widest.output_offsets[-1],
        turned,
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


# --- Keys that are rebuilt: Palu's latents from before RoPE, the strawman's at every step.


def latent_attention(
    name: str, workload: Workload, widths: Widths, full: FullAttention, window: int | None
) -> AttentionCalls:
    """Return attention over pre-RoPE latents (Palu §3.1.2), which rebuilds keys."""
    shape = workload.shape
    heads = shape.num_kv_heads // len(widths.keys)
    layout = RaggedLayout(
        widths.keys, widths.values, heads * shape.group, workload.batch, workload.seq
    )
    stored = store_latents(workload, layout)
    queries = shape.num_heads * shape.head_dim
    projections = (queries, sum(widths.keys), sum(widths.values))
    if workload.phase == "prefill":
        attention, labels = full.call(workload, window)
        return AttentionCalls(
            [stored, _rebuilt(workload, widths, heads), attention],
            projections,
            queries,
            "query",
            {**labels, "prefill": "rebuilds K and V, attends uncompressed, uses the original W_O"},
        )
    case = palu_case(name, workload, widths)
    stored_runs, schedule = _without_rebuild(workload, layout, heads)
    key = ("reconstruct", layout)
    own = PartCall("decompress", case.runs, key, contained=("attention", stored_runs))
    cut = PartCall("schedule", [schedule], ("reconstruct schedule", layout), per_pass=True)
    return AttentionCalls(
        [stored, own, cut],
        projections,
        layout.output_offsets[-1],
        "query",
        {"by_difference": "decompress", "merge": "counted in attention"},
    )


def _without_rebuild(
    workload: Workload, layout: RaggedLayout, heads: int
) -> tuple[list[Callable[[], Tensor]], Callable[[], Tensor]]:
    """Return the same kernel over latents as they lie, on as many copies; and what cuts a step."""
    shape, source = workload.shape, workload.generator(41)
    up = [
        workload.random(source, heads * shape.head_dim, width) / width**0.5
        for width in layout.key_widths
    ]
    copies = workload.copies(layout.elements * workload.dtype.itemsize)
    buffers = [workload.random(source, layout.elements) for _ in range(copies)]
    query = workload.random(source, workload.batch, layout.query_offsets[-1])
    sinks = sinks_of(workload, layout.heads, layout.group)
    rebuilding = reconstruct_step(layout, up, shape.head_dim, heads, workload.device)
    step = stored_step(rebuilding)
    lengths = torch.full((workload.batch,), workload.seq, dtype=torch.int32, device=workload.device)
    cut = rebuilding.cut(lengths)

    def run(buffer: Tensor) -> Callable[[], Tensor]:
        return lambda: step.run(
            query, buffer, cut, None, None, shape.scaling, softcap=shape.softcap, sinks=sinks
        )

    return [run(buffer) for buffer in buffers], lambda: rebuilding.cut(lengths).lengths


def _rebuilt(workload: Workload, widths: Widths, heads: int) -> PartCall:
    """Return a prompt's K and V from its latents, and RoPE on K."""
    shape, source = workload.shape, workload.generator(42)
    where = (workload.batch, workload.queries)

    def matrices(sides: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        return [
            (
                workload.random(source, *where, width),
                workload.random(source, width, heads * shape.head_dim) / width**0.5,
            )
            for width in sides
        ]

    keys, values = matrices(widths.keys), matrices(widths.values)
    cos, sin = (workload.random(source, 1, 1, workload.queries, shape.head_dim) for _ in range(2))

    def run() -> Tensor:
        made = torch.cat([latent @ up for latent, up in keys], dim=-1)
        made = made.view(*where, shape.num_kv_heads, shape.head_dim).transpose(1, 2)
        turned: Tensor = made * cos + rotate_half(made) * sin
        torch.cat([latent @ up for latent, up in values], dim=-1)
        return turned

    return PartCall("decompress", [run], ("rebuild", widths.keys, widths.values, *where))


def strawman_attention(
    workload: Workload, widths: Widths, full: FullAttention, window: int | None
) -> AttentionCalls:
    """Return ZACK §3.2's strawman: bases per request, K and V rebuilt at every step."""
    shape, source = workload.shape, workload.generator(43)
    rank, width, heads = widths.keys[0], shape.head_dim, shape.num_kv_heads
    new = workload.random(source, 2, workload.batch, heads, workload.queries, width)
    bases = torch.linalg.qr(
        torch.randn(
            2, workload.batch, heads, width, width, generator=torch.Generator().manual_seed(0)
        )
    ).Q.to(workload.device, workload.dtype)
    kept = bases[..., :rank].contiguous()
    where = (workload.batch, workload.queries, rank)

    def compress() -> Tensor:
        made: Tensor = new @ kept
        return made

    compressed = PartCall("compress", [compress], ("strawman compress", *where))
    attention, labels = full.call(workload, window)
    full_columns = shape.num_kv_heads * width
    queries = shape.num_heads * width
    calls: list[PartCall]
    if workload.phase == "prefill":

        def basis() -> Tensor:
            states = new.double()
            found: Tensor = eigenbasis(states.mT @ states)[1]
            return found

        online = PartCall("basis", [basis], ("basis", *where), waits=True)
        calls = [attention, online, compressed]
        labels = {
            **labels,
            "basis": "eigenvectors of KᵀK and VᵀV per sequence and head, computed on the host; "
            "timed along with the layer's other calls",
        }
    else:
        latents = [
            workload.random(source, 2, workload.batch, heads, workload.seq, rank)
            for _ in range(workload.copies(workload.full_bytes * rank // width))
        ]

        def decompress(stored: Tensor) -> Callable[[], Tensor]:
            return lambda: stored @ kept.mT

        rebuilt = PartCall(
            "decompress",
            [decompress(stored) for stored in latents],
            ("strawman decompress", workload.seq, *where),
        )
        calls = [compressed, rebuilt, attention]
    return AttentionCalls(calls, (queries, full_columns, full_columns), queries, "both", labels)
