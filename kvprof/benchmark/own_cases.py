"""kvprof's own kernels on ragged widths, at full width too: decode and prefill."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvprof.benchmark.baselines import FullWidth
from kvprof.benchmark.case import Case, Place, Sample, sampled_heads, sampled_positions
from kvprof.benchmark.ranks import Widths, full_widths
from kvprof.kernels.decode.step import decode_step
from kvprof.kernels.planes import RaggedLayout

__all__ = ["own_full_width", "ragged_case", "ragged_samples", "sinks_of"]

_Run = Callable[[Tensor], Tensor]
_Trace = Callable[[Tensor], Any]
_DEFAULT = "equal"


def own_full_width(inputs: FullWidth) -> Case:
    """Return kvprof's own kernel at full width, as one of the baselines."""
    return ragged_case("kvprof", inputs.place, full_widths(inputs.place.shape))


def sinks_of(place: Place, heads: int, group: int) -> Tensor | None:
    """Return logits of the learned sinks, ``[heads, group]`` float32, where the model has them."""
    if not place.shape.sinks:
        return None
    drawn = torch.randn(heads, group, generator=torch.Generator().manual_seed(place.seed))
    return drawn.to(place.device)


def ragged_case(
    name: str,
    place: Place,
    widths: Widths,
    *,
    schedule: str | None = None,
    group: int | None = None,
    path: str = "auto",
) -> Case:
    """Return attention over K and V whose widths differ from head to head.

    Cutting the work is not timed: a step does it once, and its layers share it.

    Parameters
    ----------
    name : str
        Of the method.
    place : Place
    widths : Widths
    schedule : str, optional
        How the work is cut; None takes the kernel's own default and is no row's choice.
    group : int, optional
        Query heads per stored head where KV heads share latents; G by default.
    path : str
        Of a prefill: ``triton`` where schedules are compared, which a library would ignore.
    """
    shape = place.shape
    layout = RaggedLayout(widths.keys, widths.values, group or shape.group, place.batch, place.seq)
    source = place.generator(1)
    copies = place.copies(layout.elements * place.dtype.itemsize)
    buffers = [place.random(source, layout.elements) for _ in range(copies)]
    sizes = (place.batch,) if place.phase == "decode" else (place.batch, place.queries)
    query = place.random(source, *sizes, layout.query_offsets[-1])
    sinks = sinks_of(place, layout.heads, layout.group)
    how = _decode if place.phase == "decode" else _prefill
    call, trace = how(place, layout, query, sinks, schedule or _DEFAULT, path)
    note = None
    plain = sinks is None and not shape.softcap  # what torch's own kernels can do
    if place.phase == "prefill" and place.device.type == "cuda" and path == "auto" and plain:
        schedule, words = _prefill_path(place, layout, schedule or _DEFAULT)
        note = f"{name}: prefill at {place.seq:,} tokens, batch {place.batch}, runs {words}"

    def run(buffer: Tensor) -> Callable[[], Tensor]:
        return lambda: call(buffer)

    outputs = place.batch * place.queries * layout.output_offsets[-1] * place.dtype.itemsize
    return Case(
        name, place, [run(buffer) for buffer in buffers],
        bytes_moved=query.nbytes + buffers[0].nbytes + outputs, cache_bytes=buffers[0].nbytes,
        flops=place.attention_flops(layout.query_offsets[-1], layout.output_offsets[-1]),
        samples=lambda output: ragged_samples(
            place, layout, query, output, lambda head: layout.head(buffers[0], head), sinks
        ),
        scaling=shape.scaling, softcap=shape.softcap, schedule=schedule,
        ranks={"keys": list(widths.keys), "values": list(widths.values)},
        trace=None if trace is None else lambda: trace(buffers[0]), note=note,
    )  # fmt: skip


def _decode(
    place: Place, layout: RaggedLayout, query: Tensor, sinks: Tensor | None, schedule: str, _: str
) -> tuple[_Run, _Trace | None]:
    step = decode_step(layout, place.device, schedule=schedule)
    cut = step.cut([place.seq] * place.batch)
    scaling, softcap = place.shape.scaling, place.shape.softcap
    return (
        lambda buffer: step.run(query, buffer, cut, scaling, softcap=softcap, sinks=sinks),
        lambda buffer: step.trace(query, buffer, cut, scaling, softcap=softcap, sinks=sinks),
    )


def _prefill(
    place: Place, layout: RaggedLayout, query: Tensor, sinks: Tensor | None, schedule: str,
    path: str,
) -> tuple[_Run, _Trace | None]:  # fmt: skip
    from kvprof.kernels.prefill.launch import prefill_step
    from kvprof.kernels.prefill.step import prefill

    scaling, softcap = place.shape.scaling, place.shape.softcap
    lengths = torch.full((place.batch,), place.seq, dtype=torch.int32, device=place.device)

    def run(buffer: Tensor) -> Tensor:
        return prefill(
            query, buffer, layout, lengths, scaling, softcap=softcap, sinks=sinks,
            schedule=schedule, path=path, host_lengths=[place.seq] * place.batch,
        )  # fmt: skip

    def trace(buffer: Tensor) -> Any:
        step = prefill_step(
            layout, place.seq, place.device, schedule=schedule, element_size=buffer.element_size()
        )
        return step.trace(query, buffer, lengths, scaling, softcap=softcap, sinks=sinks)

    return run, trace if path == "triton" else None


def _prefill_path(place: Place, layout: RaggedLayout, schedule: str) -> tuple[str | None, str]:
    """Return the schedule, or None where no head's work is cut by it, and who computes the heads.

    On a GPU the kernel takes the faster of Triton and torch's own kernels, as it measures.
    """
    from kvprof.kernels.prefill.measured import measured_path

    choice = measured_path(layout, place.seq, place.dtype, place.device, schedule=schedule)
    library = sum(path == "library" for path in choice.paths)
    words = f"{library} of {layout.heads} heads through torch's own kernels, the others by Triton's"
    return schedule if library < layout.heads else None, words


def ragged_samples(
    place: Place,
    layout: RaggedLayout,
    query: Tensor,
    output: Tensor,
    stored: Callable[[int], tuple[Tensor, Tensor]],
    sinks: Tensor | None,
) -> Iterator[Sample]:
    """Return what is checked of an output that lies head after head.

    Parameters
    ----------
    place : Place
    layout : RaggedLayout
    query, output : Tensor
        ``[batch, (queries,) Σ G·d]``.
    stored : callable
        From a head to its K and V, ``[batch, tokens, width]``.
    sinks : Tensor or None
        ``[heads, G]``.
    """
    positions = sampled_positions(place).to(place.device)
    queries = query.view(place.batch, place.queries, -1)
    found = output.view(place.batch, place.queries, -1)
    for row, head in sampled_heads(place.batch, layout.heads):
        keys, values = stored(head)
        asked = queries[row, positions, slice(*layout.query_offsets[head : head + 2])]
        given = found[row, positions, slice(*layout.output_offsets[head : head + 2])]
        yield Sample(
            asked.view(len(positions), layout.group, -1), keys[row], values[row],
            given.view(len(positions), layout.group, -1),
            positions + 1 if place.phase == "prefill" else None,
            sinks[head] if sinks is not None else None,
        )  # fmt: skip
