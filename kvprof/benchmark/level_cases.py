"""Quantised caches and caches in levels: FP8 at full width, quantised latents, TALE."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvprof.benchmark.case import Case, Place, Sample, sampled_heads
from kvprof.benchmark.methods import COLUMNS, Method
from kvprof.benchmark.own_cases import sinks_of
from kvprof.benchmark.ranks import Widths, full_widths
from kvprof.benchmark.tale import tale_levels
from kvprof.kernels.levels.codes import Bits
from kvprof.kernels.levels.layout import LevelsLayout, Segment
from kvprof.kernels.levels.step import levels_step
from kvprof.kernels.planes import RaggedLayout

__all__ = ["level_case"]

#: Tokens of a segment that are drawn: whole blocks of any format, and no power of two of them, so
#: that a kernel which reads the wrong ones is found out.
_DISTINCT = 31 * 256


def level_case(method: Method, place: Place, widths: Widths | None) -> Case:
    """Return a decoding step over segments of tokens that are stored alike.

    Parameters
    ----------
    method : Method
        ``fp8``, TALE, or a low rank with bits.
    place : Place
    widths : Widths or None
        Of a low rank.

    Raises
    ------
    UsageError
        When a sequence is too short for TALE's levels.
    """
    shape = place.shape
    own = widths if widths is not None and method.kind != "tale" else full_widths(shape)
    group = shape.num_heads // len(own.keys)
    parts: list[tuple[int, tuple[int, ...], Bits]]
    if method.kind == "tale":
        parts = [*tale_levels(place.seq, own.values, quantised=method.quantised_levels)]
    else:
        parts = [(place.seq, own.values, "fp8" if method.kind == "fp8" else method.bits)]
    segments = [
        Segment(
            RaggedLayout(own.keys, values, group, place.batch, tokens), bits, bits, columns=COLUMNS
        )
        for tokens, values, bits in parts
    ]
    layout = LevelsLayout(tuple(segments), place.dtype)
    source = place.generator(4)
    # Packed once and copied: what a copy is for is its place in memory.
    first = _packed(place, source, layout)
    buffers = [first] + [first.clone() for _ in range(place.copies(first.nbytes) - 1)]
    widest = layout.widest
    query = place.random(source, place.batch, widest.query_offsets[-1])
    sinks = sinks_of(place, widest.heads, group)
    step = levels_step(layout, place.device)
    lengths = [[segment.layout.capacity] * place.batch for segment in segments]
    cut = step.cut(torch.tensor(lengths, dtype=torch.int32, device=place.device))

    def run(buffer: Tensor) -> Callable[[], Tensor]:
        return lambda: step.run(
            query, buffer, cut, shape.scaling, softcap=shape.softcap, sinks=sinks
        )

    outputs = place.batch * widest.output_offsets[-1] * place.dtype.itemsize
    flops = sum(
        2 * place.batch * tokens * group * (sum(own.keys) + sum(values))
        for tokens, values, _ in parts
    )
    kept = max(parts, key=lambda part: part[0])[1]
    return Case(
        method.name, place, [run(buffer) for buffer in buffers],
        bytes_moved=query.nbytes + first.nbytes + outputs, cache_bytes=first.nbytes, flops=flops,
        samples=lambda output: _samples(place, layout, query, output, first, sinks),
        scaling=shape.scaling, softcap=shape.softcap,
        ranks={"keys": list(own.keys), "values": list(kept)} if widths is not None else None,
    )  # fmt: skip


def _packed(place: Place, source: torch.Generator, layout: LevelsLayout) -> Tensor:
    """Return a buffer full of random tokens; long segments repeat their first ones.

    To quantise values takes a CPU far longer than to attend to them.
    """
    few = LevelsLayout(
        tuple(
            replace(own, layout=replace(own.layout, capacity=min(own.layout.capacity, _DISTINCT)))
            for own in layout.segments
        ),
        layout.dtype,
    )
    packed = few.packed([_states(place, source, own.layout) for own in few.segments])
    if few == layout:
        return packed
    buffer = layout.empty(place.device)
    for number, segment in enumerate(layout.segments):
        drawn = few.segments[number].blocks
        which = torch.arange(segment.blocks, device=place.device) % drawn
        for head in range(layout.heads):
            for target, given in zip(
                layout.blocks(buffer, number, head), few.blocks(packed, number, head), strict=True
            ):
                target.copy_(given.index_select(1, which))
    return buffer


def _states(
    place: Place, source: torch.Generator, layout: RaggedLayout
) -> tuple[list[Tensor], list[Tensor]]:
    """Return random K and V of every head of a segment."""

    def side(widths: tuple[int, ...]) -> list[Tensor]:
        return [place.random(source, place.batch, layout.capacity, width) for width in widths]

    return side(layout.key_widths), side(layout.value_widths)


def _samples(
    place: Place,
    layout: LevelsLayout,
    query: Tensor,
    output: Tensor,
    buffer: Tensor,
    sinks: Tensor | None,
) -> Iterator[Sample]:
    """Return heads with their segments dequantised and joined.

    A narrower level holds the first columns of the same latent: the others count as zero.
    """
    widest = layout.widest
    for row, head in sampled_heads(place.batch, widest.heads):
        stored = [layout.head(buffer, number, head) for number in range(len(layout.segments))]
        keys = torch.cat([states[row].double() for states, _ in stored])
        values = torch.zeros(
            keys.shape[0], widest.value_widths[head], dtype=torch.float64, device=keys.device
        )
        at = 0
        for _, states in stored:
            values[at : at + states.shape[1], : states.shape[2]] = states[row]
            at += states.shape[1]
        asked = query[row, slice(*widest.query_offsets[head : head + 2])]
        given = output[row, slice(*widest.output_offsets[head : head + 2])]
        yield Sample(
            asked.view(1, widest.group, -1), keys, values, given.view(1, widest.group, -1),
            sinks=sinks[head] if sinks is not None else None,
        )  # fmt: skip
