"""Keys that are rebuilt: Palu's latents from before RoPE, FDC without post-RoPE, the strawman."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import rotate_half

from kvprof.analysis.bases import eigenbasis
from kvprof.benchmark.case import Place
from kvprof.benchmark.jct.full import FullAttention
from kvprof.benchmark.jct.ragged import store_latents
from kvprof.benchmark.jct.units import Attended, Unit
from kvprof.benchmark.own_cases import sinks_of
from kvprof.benchmark.palu_case import palu_case
from kvprof.benchmark.ranks import Widths
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.reconstruct.step import reconstruct_step, stored_step

__all__ = ["latents_attended", "strawman_attended"]


def latents_attended(
    name: str, place: Place, widths: Widths, full: FullAttention, window: int | None
) -> Attended:
    """Return attention over latents from before RoPE (Palu §3.1.2).

    Decode rebuilds keys inside its kernel: what that costs is the kernel's time without the same
    kernel's over latents as they lie. Prefill rebuilds K and V and attends at full width.
    """
    shape = place.shape
    heads = shape.num_kv_heads // len(widths.keys)
    layout = RaggedLayout(widths.keys, widths.values, heads * shape.group, place.batch, place.seq)
    stored = store_latents(place, layout)
    queries = shape.num_heads * shape.head_dim
    projections = (queries, sum(widths.keys), sum(widths.values))
    if place.phase == "prefill":
        attention, error, labels = full.unit(place, window)
        return Attended(
            [stored, _rebuilt(place, widths, heads), attention], projections, queries, "query",
            error,
            {**labels, "prefill": "rebuilds K and V, attends at full width, keeps its own W_O"},
        )  # fmt: skip
    case = palu_case(name, place, widths)
    stored_runs, schedule = _without_rebuild(place, layout, heads)
    key = ("reconstruct", layout)
    own = Unit("decompress", case.runs, key, aside=("attention", stored_runs))
    cut = Unit("schedule", [schedule], ("reconstruct schedule", layout), per_pass=True)
    return Attended(
        [stored, own, cut], projections, layout.output_offsets[-1], "query",
        lambda: case.error(case.runs[0]()),
        {"by_difference": "decompress", "merge": "counted in attention"},
    )  # fmt: skip


def _without_rebuild(
    place: Place, layout: RaggedLayout, heads: int
) -> tuple[list[Callable[[], Tensor]], Callable[[], Tensor]]:
    """Return the same kernel over latents as they lie, on as many copies; and what cuts a step."""
    shape, source = place.shape, place.generator(41)
    up = [
        place.random(source, heads * shape.head_dim, width) / width**0.5
        for width in layout.key_widths
    ]
    copies = place.copies(layout.elements * place.dtype.itemsize)
    buffers = [place.random(source, layout.elements) for _ in range(copies)]
    query = place.random(source, place.batch, layout.query_offsets[-1])
    sinks = sinks_of(place, layout.heads, layout.group)
    rebuilding = reconstruct_step(layout, up, shape.head_dim, heads, place.device)
    step = stored_step(rebuilding)
    lengths = torch.full((place.batch,), place.seq, dtype=torch.int32, device=place.device)
    cut = rebuilding.cut(lengths)

    def run(buffer: Tensor) -> Callable[[], Tensor]:
        return lambda: step.run(
            query, buffer, cut, None, None, shape.scaling, softcap=shape.softcap, sinks=sinks
        )

    return [run(buffer) for buffer in buffers], lambda: rebuilding.cut(lengths).lengths


def _rebuilt(place: Place, widths: Widths, heads: int) -> Unit:
    """Return a prompt's K and V from its latents, and RoPE on K."""
    shape, source = place.shape, place.generator(42)
    where = (place.batch, place.queries)

    def matrices(sides: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        return [
            (place.random(source, *where, width),
             place.random(source, width, heads * shape.head_dim) / width**0.5)
            for width in sides
        ]  # fmt: skip

    keys, values = matrices(widths.keys), matrices(widths.values)
    cos, sin = (place.random(source, 1, 1, place.queries, shape.head_dim) for _ in range(2))

    def run() -> Tensor:
        made = torch.cat([latent @ up for latent, up in keys], dim=-1)
        made = made.view(*where, shape.num_kv_heads, shape.head_dim).transpose(1, 2)
        turned: Tensor = made * cos + rotate_half(made) * sin
        torch.cat([latent @ up for latent, up in values], dim=-1)
        return turned

    return Unit("decompress", [run], ("rebuild", widths.keys, widths.values, *where))


def strawman_attended(
    place: Place, widths: Widths, full: FullAttention, window: int | None
) -> Attended:
    """Return ZACK §3.2's strawman: bases per request, K and V rebuilt whole at every step.

    The basis is found as the runtime finds it: eigenvectors of ``KᵀK`` and ``VᵀV`` in float64, the
    right singular vectors that the paper's SVD gives; the host decomposes the matrices.
    """
    shape, source = place.shape, place.generator(43)
    rank, width, heads = widths.keys[0], shape.head_dim, shape.num_kv_heads
    new = place.random(source, 2, place.batch, heads, place.queries, width)
    bases = torch.linalg.qr(
        torch.randn(2, place.batch, heads, width, width, generator=torch.Generator().manual_seed(0))
    ).Q.to(place.device, place.dtype)
    kept = bases[..., :rank].contiguous()
    where = (place.batch, place.queries, rank)

    def compress() -> Tensor:
        made: Tensor = new @ kept
        return made

    compressed = Unit("compress", [compress], ("strawman compress", *where))
    attention, error, labels = full.unit(place, window)
    full_columns = shape.num_kv_heads * width
    queries = shape.num_heads * width
    units: list[Unit]
    if place.phase == "prefill":

        def basis() -> Tensor:
            states = new.double()
            found: Tensor = eigenbasis(states.mT @ states)[1]
            return found

        online = Unit("basis", [basis], ("basis", *where), waits=True)
        units = [attention, online, compressed]
        labels = {
            **labels,
            "basis": "eigenvectors of KᵀK and VᵀV per sequence and head, decomposed by the host; "
            "timed beside the layer's other calls",
        }
    else:
        latents = [
            place.random(source, 2, place.batch, heads, place.seq, rank)
            for _ in range(place.copies(place.full_bytes * rank // width))
        ]

        def decompress(stored: Tensor) -> Callable[[], Tensor]:
            return lambda: stored @ kept.mT

        rebuilt = Unit(
            "decompress", [decompress(stored) for stored in latents],
            ("strawman decompress", place.seq, *where),
        )  # fmt: skip
        units = [compressed, rebuilt, attention]
    return Attended(units, (queries, full_columns, full_columns), queries, "both", error, labels)
