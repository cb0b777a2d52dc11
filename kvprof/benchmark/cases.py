"""From a method to the call that is timed."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvprof.benchmark.case import Case, Sample, Workload, sampled_heads, sampled_positions
from kvprof.benchmark.methods import Method
from kvprof.benchmark.plans import Widths, stored_parts
from kvprof.benchmark.shapes import Shape
from kvprof.kernels.decode.step import decode_step
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill.launch import prefill_step
from kvprof.kernels.prefill.paths import measured_path
from kvprof.kernels.prefill.step import prefill
from kvprof.kernels.quantized.layout import SegmentsLayout, segment_of
from kvprof.kernels.quantized.step import segments_step
from kvprof.kernels.reconstruct.reference import turned
from kvprof.kernels.reconstruct.step import reconstruct_step
from kvprof.methods.plan import Plan

__all__ = [
    "build_case",
    "palu_case",
    "ragged_case",
    "ragged_samples",
    "segments_case",
    "segments_layout",
    "sinks_of",
]

# --- kvprof's own kernels on ragged widths, uncompressed ones too: decode and prefill.


_Run = Callable[[Tensor], Tensor]


def sinks_of(workload: Workload, heads: int, group: int) -> Tensor | None:
    """Return logits of the learned sinks, ``[heads, group]`` float32, where the model has them."""
    if not workload.shape.sinks:
        return None
    drawn = torch.randn(heads, group, generator=torch.Generator().manual_seed(workload.seed))
    return drawn.to(workload.device)


def ragged_case(
    name: str,
    workload: Workload,
    widths: Widths,
    *,
    cut: bool = False,
    group: int | None = None,
    path: str = "auto",
) -> Case:
    """Return attention over K and V of different widths; partitioning is not timed."""
    shape = workload.shape
    layout = RaggedLayout(
        widths.keys, widths.values, group or shape.group, workload.batch, workload.seq
    )
    source = workload.generator(1)
    copies = workload.copies(layout.elements * workload.dtype.itemsize)
    buffers = [workload.random(source, layout.elements) for _ in range(copies)]
    sizes = (workload.batch,) if workload.phase == "decode" else (workload.batch, workload.queries)
    query = workload.random(source, *sizes, layout.query_offsets[-1])
    sinks = sinks_of(workload, layout.heads, layout.group)
    how = _decode if workload.phase == "decode" else _prefill
    call, evenness = how(workload, layout, query, sinks, path)
    cut, note = cut and workload.device.type == "cuda", None
    plain = sinks is None and not shape.softcap  # what torch's own kernels can do
    if workload.phase == "prefill" and workload.device.type == "cuda" and path == "auto" and plain:
        library, words = _prefill_path(workload, layout)
        cut = cut and library < layout.heads
        note = f"{name}: prefill at {workload.seq:,} tokens, batch {workload.batch}, runs {words}"

    def run(buffer: Tensor) -> Callable[[], Tensor]:
        return lambda: call(buffer)

    outputs = (
        workload.batch * workload.queries * layout.output_offsets[-1] * workload.dtype.itemsize
    )
    return Case(
        name,
        workload,
        [run(buffer) for buffer in buffers],
        bytes_moved=query.nbytes + buffers[0].nbytes + outputs,
        buffer_bytes=buffers[0].nbytes,
        flops=workload.attention_flops(layout.query_offsets[-1], layout.output_offsets[-1]),
        samples=lambda output: ragged_samples(
            workload, layout, query, output, lambda head: layout.head(buffers[0], head), sinks
        ),
        scaling=shape.scaling,
        softcap=shape.softcap,
        schedule="equal" if cut else None,
        makespan_over_mean=evenness() if cut else None,
        ranks={"keys": list(widths.keys), "values": list(widths.values)},
        note=note,
    )


def _decode(
    workload: Workload,
    layout: RaggedLayout,
    query: Tensor,
    sinks: Tensor | None,
    _: str,
) -> tuple[_Run, Callable[[], float]]:
    step, lengths = decode_step(layout, workload.device), [workload.seq] * workload.batch
    cut = step.cut(lengths)
    scaling, softcap = workload.shape.scaling, workload.shape.softcap
    return (
        lambda buffer: step.run(query, buffer, cut, scaling, softcap=softcap, sinks=sinks),
        lambda: step.predicted_makespan_over_mean(lengths),
    )


def _prefill(
    workload: Workload,
    layout: RaggedLayout,
    query: Tensor,
    sinks: Tensor | None,
    path: str,
) -> tuple[_Run, Callable[[], float]]:
    scaling, softcap = workload.shape.scaling, workload.shape.softcap
    lengths = torch.full((workload.batch,), workload.seq, dtype=torch.int32, device=workload.device)

    def run(buffer: Tensor) -> Tensor:
        return prefill(
            query,
            buffer,
            layout,
            lengths,
            scaling,
            softcap=softcap,
            sinks=sinks,
            path=path,
            host_lengths=[workload.seq] * workload.batch,
        )

    def evenness() -> float:
        step = prefill_step(
            layout, workload.seq, workload.device, element_size=workload.dtype.itemsize
        )
        return step.blocks.makespan_over_mean

    return run, evenness


def _prefill_path(workload: Workload, layout: RaggedLayout) -> tuple[int, str]:
    """Return how many heads run on torch's own kernels, and a sentence about it."""
    choice = measured_path(layout, workload.seq, workload.dtype, workload.device)
    library = sum(path == "library" for path in choice.paths)
    words = f"{library} of {layout.heads} heads on torch's own kernels, the others on Triton"
    return library, words


def ragged_samples(
    workload: Workload,
    layout: RaggedLayout,
    query: Tensor,
    output: Tensor,
    stored: Callable[[int], tuple[Tensor, Tensor]],
    sinks: Tensor | None,
) -> Iterator[Sample]:
    """Return what is checked of an output that lies head after head."""
    positions = sampled_positions(workload).to(workload.device)
    queries = query.view(workload.batch, workload.queries, -1)
    found = output.view(workload.batch, workload.queries, -1)
    for row, head in sampled_heads(workload.batch, layout.heads):
        keys, values = stored(head)
        asked = queries[row, positions, slice(*layout.query_offsets[head : head + 2])]
        given = found[row, positions, slice(*layout.output_offsets[head : head + 2])]
        yield Sample(
            asked.view(len(positions), layout.group, -1),
            keys[row],
            values[row],
            given.view(len(positions), layout.group, -1),
            positions + 1 if workload.phase == "prefill" else None,
            sinks[head] if sinks is not None else None,
        )


# --- Palu's decode: keys are rebuilt from latents inside the kernel (Palu §3.1.2, appendix B).


def palu_case(name: str, workload: Workload, widths: Widths) -> Case:
    """Return attention over pre-RoPE latents, with the shape's plain RoPE frequencies."""
    shape, source = workload.shape, workload.generator(3)
    heads = shape.num_kv_heads // len(widths.keys)
    layout = RaggedLayout(
        widths.keys, widths.values, heads * shape.group, workload.batch, workload.seq
    )
    copies = workload.copies(layout.elements * workload.dtype.itemsize)
    buffers = [workload.random(source, layout.elements) for _ in range(copies)]
    query = workload.random(source, workload.batch, shape.num_heads * shape.head_dim)
    # Columns of norm 1: rebuilt keys are as large as stored ones.
    up = [
        workload.random(source, heads * shape.head_dim, width) / width**0.5 for width in widths.keys
    ]
    cos, sin = _tables(workload)
    sinks = sinks_of(workload, layout.heads, layout.group)
    step = reconstruct_step(layout, up, shape.head_dim, heads, workload.device)
    cut = step.cut([workload.seq] * workload.batch)

    def run(buffer: Tensor) -> Callable[[], Tensor]:
        return lambda: step.run(
            query, buffer, cut, cos, sin, shape.scaling, softcap=shape.softcap, sinks=sinks
        )

    outputs = workload.batch * layout.output_offsets[-1] * workload.dtype.itemsize
    weights = sum(matrix.nbytes for matrix in up)
    rebuilt = 2 * workload.batch * workload.seq * sum(matrix.numel() for matrix in up)
    return Case(
        name,
        workload,
        [run(buffer) for buffer in buffers],
        bytes_moved=query.nbytes + buffers[0].nbytes + outputs + weights + cos.nbytes + sin.nbytes,
        buffer_bytes=buffers[0].nbytes,
        flops=rebuilt
        + workload.attention_flops(shape.num_heads * shape.head_dim, layout.output_offsets[-1]),
        samples=lambda output: _samples(
            workload, layout, query, output, buffers[0], up, (cos, sin), sinks
        ),
        scaling=shape.scaling,
        softcap=shape.softcap,
        ranks={"keys": list(widths.keys), "values": list(widths.values)},
    )


def _tables(workload: Workload) -> tuple[Tensor, Tensor]:
    """Return cos and sin, ``[tokens, d / 2]`` in the run's dtype."""
    half = workload.shape.head_dim // 2
    theta = workload.shape.rope.theta or 10_000.0
    frequencies = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(workload.seq, dtype=torch.float64)[:, None] * frequencies
    cos, sin = (table.to(workload.device, workload.dtype) for table in (angles.cos(), angles.sin()))
    return cos, sin


def _samples(
    workload: Workload,
    layout: RaggedLayout,
    query: Tensor,
    output: Tensor,
    buffer: Tensor,
    up: list[Tensor],
    tables: tuple[Tensor, Tensor],
    sinks: Tensor | None,
) -> Iterator[Sample]:
    """Return KV heads with their keys rebuilt and turned in float64."""
    shape = workload.shape
    heads = shape.num_kv_heads // layout.heads
    queries = query.view(workload.batch, shape.num_kv_heads, shape.group, shape.head_dim)
    cos, sin = (table.double() for table in tables)
    for row, head in sampled_heads(workload.batch, shape.num_kv_heads):
        group, own = divmod(head, heads)
        latents, values = layout.head(buffer, group)
        rows = up[group][own * shape.head_dim : (own + 1) * shape.head_dim].double()
        keys = turned(latents[row].double() @ rows.mT, cos, sin, shape.head_dim, False)
        found = output[row, slice(*layout.output_offsets[group : group + 2])]
        yield Sample(
            queries[row, head].unsqueeze(0),
            keys,
            values[row],
            found.view(heads, shape.group, -1)[own].unsqueeze(0),
            sinks=sinks[group].view(heads, -1)[own] if sinks is not None else None,
        )


# --- Caches in segments: FP8 at full rank, quantised latents, TALE.


#: Tokens of a segment that are drawn: whole blocks of any format, and no power of two of them, so
#: that a kernel which reads the wrong ones is found out.
_DISTINCT = 31 * 256


def segments_layout(
    plan: Plan, shape: Shape, batch: int, seq: int, dtype: torch.dtype
) -> SegmentsLayout:
    """Return how a cache in segments lies in memory: those of a plan."""
    return SegmentsLayout(
        tuple(
            segment_of(
                part.kinds,
                shape.num_heads // len(part.keys),
                batch,
                part.tokens,
                part.key_bits,
                part.value_bits,
                part.columns,
            )
            for part in stored_parts(plan, seq)
        ),
        dtype,
    )


def segments_case(method: Method, workload: Workload) -> Case:
    """Return a decoding step over segments of tokens that are stored alike."""
    shape = workload.shape
    layout = segments_layout(method.plan, shape, workload.batch, workload.seq, workload.dtype)
    segments = layout.segments
    source = workload.generator(4)
    # Packed once and copied: what a copy is for is its place in memory.
    first = _packed(workload, source, layout)
    buffers = [first] + [first.clone() for _ in range(workload.copies(first.nbytes) - 1)]
    widest = layout.widest
    query = workload.random(source, workload.batch, widest.query_offsets[-1])
    sinks = sinks_of(workload, widest.heads, widest.group)
    step = segments_step(layout, workload.device)
    lengths = [[segment.layout.capacity] * workload.batch for segment in segments]
    cut = step.cut(torch.tensor(lengths, dtype=torch.int32, device=workload.device))

    def run(buffer: Tensor) -> Callable[[], Tensor]:
        return lambda: step.run(
            query, buffer, cut, shape.scaling, softcap=shape.softcap, sinks=sinks
        )

    outputs = workload.batch * widest.output_offsets[-1] * workload.dtype.itemsize
    flops = sum(
        2 * workload.batch * own.capacity * own.group * sum(own.key_widths + own.value_widths)
        for own in (segment.layout for segment in segments)
    )
    most = max((segment.layout for segment in segments), key=lambda own: own.capacity)
    ranks = {"keys": list(most.key_widths), "values": list(most.value_widths)}
    return Case(
        method.name,
        workload,
        [run(buffer) for buffer in buffers],
        bytes_moved=query.nbytes + first.nbytes + outputs,
        buffer_bytes=first.nbytes,
        flops=flops,
        samples=lambda output: _segments_samples(workload, layout, query, output, first, sinks),
        scaling=shape.scaling,
        softcap=shape.softcap,
        ranks=ranks if method.widths is not None else None,
    )


def _packed(workload: Workload, source: torch.Generator, layout: SegmentsLayout) -> Tensor:
    """Return a buffer of random quantised tokens; long segments repeat their first ones."""
    few = SegmentsLayout(
        tuple(
            replace(own, layout=replace(own.layout, capacity=min(own.layout.capacity, _DISTINCT)))
            for own in layout.segments
        ),
        layout.dtype,
    )
    packed = few.packed([_states(workload, source, own.layout) for own in few.segments])
    if few == layout:
        return packed
    buffer = layout.empty(workload.device)
    for number, segment in enumerate(layout.segments):
        drawn = few.segments[number].blocks
        which = torch.arange(segment.blocks, device=workload.device) % drawn
        for head in range(layout.heads):
            for target, given in zip(
                layout.blocks(buffer, number, head), few.blocks(packed, number, head), strict=True
            ):
                target.copy_(given.index_select(1, which))
    return buffer


def _states(
    workload: Workload, source: torch.Generator, layout: RaggedLayout
) -> tuple[list[Tensor], list[Tensor]]:
    """Return random K and V of every head of a segment."""

    def side(widths: tuple[int, ...]) -> list[Tensor]:
        return [workload.random(source, workload.batch, layout.capacity, width) for width in widths]

    return side(layout.key_widths), side(layout.value_widths)


def _segments_samples(
    workload: Workload,
    layout: SegmentsLayout,
    query: Tensor,
    output: Tensor,
    buffer: Tensor,
    sinks: Tensor | None,
) -> Iterator[Sample]:
    """Return heads with dequantised segments joined; narrower levels are padded with zeros."""
    widest = layout.widest
    for row, head in sampled_heads(workload.batch, widest.heads):
        stored = [layout.head(buffer, number, head) for number in range(len(layout.segments))]
        keys, values = (
            torch.cat(
                [
                    pad(states[side][row].double(), (0, width - states[side].shape[-1]))
                    for states in stored
                ]
            )
            for side, width in enumerate((widest.key_widths[head], widest.value_widths[head]))
        )
        asked = query[row, slice(*widest.query_offsets[head : head + 2])]
        given = output[row, slice(*widest.output_offsets[head : head + 2])]
        yield Sample(
            asked.view(1, widest.group, -1),
            keys,
            values,
            given.view(1, widest.group, -1),
            sinks=sinks[head] if sinks is not None else None,
        )


def build_case(method: Method, workload: Workload, *, path: str = "auto") -> Case:
    """Make the inputs of a method and return its call."""
    if method.form == "segments":
        return segments_case(method, workload)
    if method.form == "latents":
        return palu_case(method.name, workload, method.kept)
    group = workload.shape.num_heads // len(method.kept.keys)
    return ragged_case(method.name, workload, method.kept, cut=method.cut, group=group, path=path)
