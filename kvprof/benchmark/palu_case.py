"""Palu's decode: keys are rebuilt from latents inside the kernel (Palu §3.1.2, appendix B)."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvprof.benchmark.case import Case, Place, Sample, sampled_heads
from kvprof.benchmark.own_cases import sinks_of
from kvprof.benchmark.ranks import Widths
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.reconstruct.reference import turned
from kvprof.kernels.reconstruct.step import reconstruct_step

__all__ = ["palu_case"]


def palu_case(name: str, place: Place, widths: Widths) -> Case:
    """Return attention over latents from before RoPE.

    The rotary tables have the plain frequencies of the shape's θ: how they were stretched changes
    no time.

    Parameters
    ----------
    name : str
        Of the method.
    place : Place
        A decoding step of a model with RoPE.
    widths : Widths
        Per group of KV heads.
    """
    shape, source = place.shape, place.generator(3)
    heads = shape.num_kv_heads // len(widths.keys)
    layout = RaggedLayout(widths.keys, widths.values, heads * shape.group, place.batch, place.seq)
    copies = place.copies(layout.elements * place.dtype.itemsize)
    buffers = [place.random(source, layout.elements) for _ in range(copies)]
    query = place.random(source, place.batch, shape.num_heads * shape.head_dim)
    # Columns of norm 1: rebuilt keys are as large as stored ones.
    up = [place.random(source, heads * shape.head_dim, width) / width**0.5 for width in widths.keys]
    cos, sin = _tables(place)
    sinks = sinks_of(place, layout.heads, layout.group)
    step = reconstruct_step(layout, up, shape.head_dim, heads, place.device)
    cut = step.cut([place.seq] * place.batch)

    def run(buffer: Tensor) -> Callable[[], Tensor]:
        return lambda: step.run(
            query, buffer, cut, cos, sin, shape.scaling, softcap=shape.softcap, sinks=sinks
        )

    outputs = place.batch * layout.output_offsets[-1] * place.dtype.itemsize
    weights = sum(matrix.nbytes for matrix in up)
    rebuilt = 2 * place.batch * place.seq * sum(matrix.numel() for matrix in up)
    return Case(
        name, place, [run(buffer) for buffer in buffers],
        bytes_moved=query.nbytes + buffers[0].nbytes + outputs + weights + cos.nbytes + sin.nbytes,
        cache_bytes=buffers[0].nbytes,
        flops=rebuilt
        + place.attention_flops(shape.num_heads * shape.head_dim, layout.output_offsets[-1]),
        samples=lambda output: _samples(
            place, layout, query, output, buffers[0], up, (cos, sin), sinks
        ),
        scaling=shape.scaling, softcap=shape.softcap,
        ranks={"keys": list(widths.keys), "values": list(widths.values)},
    )  # fmt: skip


def _tables(place: Place) -> tuple[Tensor, Tensor]:
    """Return cos and sin, ``[tokens, d / 2]`` in the run's dtype."""
    half = place.shape.head_dim // 2
    theta = place.shape.rope.theta or 10_000.0
    frequencies = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(place.seq, dtype=torch.float64)[:, None] * frequencies
    cos, sin = (table.to(place.device, place.dtype) for table in (angles.cos(), angles.sin()))
    return cos, sin


def _samples(
    place: Place,
    layout: RaggedLayout,
    query: Tensor,
    output: Tensor,
    buffer: Tensor,
    up: list[Tensor],
    tables: tuple[Tensor, Tensor],
    sinks: Tensor | None,
) -> Iterator[Sample]:
    """Return KV heads with their keys rebuilt and turned in float64."""
    shape = place.shape
    heads = shape.num_kv_heads // layout.heads
    queries = query.view(place.batch, shape.num_kv_heads, shape.group, shape.head_dim)
    cos, sin = (table.double() for table in tables)
    for row, head in sampled_heads(place.batch, shape.num_kv_heads):
        group, own = divmod(head, heads)
        latents, values = layout.head(buffer, group)
        rows = up[group][own * shape.head_dim : (own + 1) * shape.head_dim].double()
        keys = turned(latents[row].double() @ rows.mT, cos, sin, shape.head_dim, False)
        found = output[row, slice(*layout.output_offsets[group : group + 2])]
        yield Sample(
            queries[row, head].unsqueeze(0), keys, values[row],
            found.view(heads, shape.group, -1)[own].unsqueeze(0),
            sinks=sinks[group].view(heads, -1)[own] if sinks is not None else None,
        )  # fmt: skip
