"""Low ranks after RoPE in one layer: FDC, ``kq``, uniform widths, latents without RoPE."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvprof.benchmark.case import Place, relative_error
from kvprof.benchmark.cases import ragged_samples, sinks_of
from kvprof.benchmark.jct.ablations import Variant
from kvprof.benchmark.jct.units import Attended, Unit
from kvprof.benchmark.ranks import Widths
from kvprof.kernels.decode.cuts import kinds, tile_height
from kvprof.kernels.decode.step import DecodeStep, Schedule, decode_step
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.project.bases import BasisSet, basis_set
from kvprof.kernels.project.step import project_step, store_values

__all__ = ["compress_unit", "ragged_attended", "ragged_prefill", "random_bases", "store_latents"]


def ragged_attended(variant: Variant, place: Place, widths: Widths, window: int | None) -> Attended:
    """Return projection, attention and what cuts its work.

    Parameters
    ----------
    variant : Variant
    place : Place
    widths : Widths
        Per KV head, or per group of them where a model without RoPE shares latents.
    window : int or None
        Tokens that a prefill's token sees.
    """
    shape = place.shape
    group = shape.num_heads // len(widths.keys)
    layout = RaggedLayout(widths.keys, widths.values, group, place.batch, place.seq)
    labels, turned = {}, "both"
    if variant.folded_for(shape):
        # Folded into W_Q and W_K: the projections make latents (ZACK §4.3, Palu eq. 7).
        stored = store_latents(place, layout)
        turned = "none"
        projections = (layout.query_offsets[-1], sum(widths.keys), sum(widths.values))
    else:
        stored = compress_unit(place, layout)
        queries = shape.num_heads * shape.head_dim
        projections = (queries, shape.num_kv_heads * shape.head_dim, sum(widths.values))
    if place.phase == "decode":
        units, error = _decode(variant, place, layout)
        if place.device.type == "cuda":
            labels["by_difference"] = "attention"
            labels["merge"] = (
                "timed alone on partial results of the same sizes; attention is its launch's time "
                "without it"
            )
        else:
            labels["merge"] = "counted in attention"
    else:
        units, error = ragged_prefill(variant, place, layout, window)
    return Attended([stored, *units], projections, layout.output_offsets[-1], turned, error, labels)


def random_bases(place: Place, widths: Sequence[int], salt: int) -> BasisSet:
    """Return orthonormal bases ``[d, width]`` of every KV head."""
    source = torch.Generator().manual_seed(1000 * place.seed + salt)
    depth = place.shape.head_dim
    bases = [
        torch.linalg.qr(torch.randn(depth, depth, generator=source)).Q[:, :width]
        for width in widths
    ]
    return basis_set(bases, dtype=place.dtype, device=place.device)


def compress_unit(place: Place, layout: RaggedLayout) -> Unit:
    """Return the online projection of Q and K and the store of K and V (FDC §5.1).

    At full width the same kernel only stores, which counts as attention, as in the runtime.
    """
    shape, source = place.shape, place.generator(31)
    # Where in the cache new tokens lie changes nothing: their own buffer is enough.
    own = RaggedLayout(
        layout.key_widths, layout.value_widths, layout.group, place.batch, place.queries
    )
    where = (place.batch, place.queries)
    query = place.random(source, *where, shape.num_heads, shape.head_dim)
    keys = place.random(source, *where, shape.num_kv_heads, shape.head_dim)
    values = place.random(source, *where, sum(layout.value_widths))
    bases = random_bases(place, layout.key_widths, 32)
    buffer = torch.empty(own.elements, dtype=place.dtype, device=place.device)
    start = torch.zeros(place.batch, dtype=torch.int32, device=place.device)

    def run() -> Tensor:
        return project_step(query, keys, values, bases, own, buffer, start)

    whole = {*layout.key_widths, *layout.value_widths} == {shape.head_dim}
    return Unit(
        "attention" if whole else "compress",
        [run],
        ("compress", layout.key_widths, layout.value_widths, *where),
    )


def store_latents(place: Place, layout: RaggedLayout) -> Unit:
    """Return the store of latents that the projections have made."""
    source = place.generator(33)
    own = RaggedLayout(
        layout.key_widths, layout.value_widths, layout.group, place.batch, place.queries
    )
    where = (place.batch, place.queries)
    keys = place.random(source, *where, sum(layout.key_widths))
    values = place.random(source, *where, sum(layout.value_widths))
    buffer = torch.empty(own.elements, dtype=place.dtype, device=place.device)
    start = torch.zeros(place.batch, dtype=torch.int32, device=place.device)
    planes = [plane for head in range(own.heads) for plane in own.planes(buffer, head)[0]]
    columns = torch.split(keys, [plane.shape[-1] for plane in planes], dim=-1)

    def run() -> Tensor:
        for plane, latents in zip(planes, columns, strict=True):
            plane.copy_(latents)
        store_values(values, own, buffer, start)
        return buffer

    key = ("store", layout.key_widths, layout.value_widths, *where)
    return Unit("compress", [run], key)


def _decode(
    variant: Variant, place: Place, layout: RaggedLayout
) -> tuple[list[Unit], Callable[[], float]]:
    shape, source = place.shape, place.generator(1)
    copies = place.copies(layout.elements * place.dtype.itemsize)
    buffers = [place.random(source, layout.elements) for _ in range(copies)]
    query = place.random(source, place.batch, layout.query_offsets[-1])
    sinks = sinks_of(place, layout.heads, layout.group)
    step = decode_step(layout, place.device)
    lengths = torch.full((place.batch,), place.seq, dtype=torch.int32, device=place.device)
    cut = step.cut(lengths) if variant.balanced else _even(step, place)

    def run(buffer: Tensor) -> Tensor:
        return step.run(query, buffer, cut, shape.scaling, softcap=shape.softcap, sinks=sinks)

    def schedule() -> Tensor:
        return step.cut(lengths).lengths

    def error() -> float:
        return relative_error(
            ragged_samples(
                place,
                layout,
                query,
                run(buffers[0]),
                lambda head: layout.head(buffers[0], head),
                sinks,
            ),
            shape.scaling,
            shape.softcap,
        )

    key = (layout, variant.balanced)
    aside = None
    if place.device.type == "cuda":
        aside = ("merge", [_merge(step, place, cut, sinks)])
    units = [
        Unit(
            "attention", [_bound(run, buffer) for buffer in buffers], ("ragged", *key), aside=aside
        ),
    ]
    if variant.balanced:
        # Layers of the same widths share it, as in the runtime.
        units.insert(0, Unit("schedule", [schedule], ("schedule", *key), per_pass=True))
    return units, error


def _bound(run: Callable[[Tensor], Tensor], buffer: Tensor) -> Callable[[], Tensor]:
    return lambda: run(buffer)


def _even(step: DecodeStep, place: Place) -> Schedule:
    """Cut every head into as many pieces whatever its width: what a kernel for equal heads does."""
    layout, tile = step.layout, step.tuning.tile
    tasks = place.batch * layout.heads
    pieces = max(1, step.tuning.pieces * step.multiprocessors // tasks)
    items: list[list[int]] = []
    parts: list[list[int]] = []
    pairs = kinds(layout)
    for row in range(place.batch):
        for head, pair in enumerate(zip(layout.key_widths, layout.value_widths, strict=True)):
            height = tile_height(*pair, tile)
            tiles = max(1, -(-place.seq // height))
            count = min(tiles, pieces)
            parts.append([len(items), count])
            bounds = [min(place.seq, tiles * n // count * height) for n in range(count + 1)]
            items += [[row, head, low, high, pairs.index(pair)] for low, high in pairwise(bounds)]

    def whole(numbers: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=place.device)

    scheduled = [whole(items), whole(parts), whole([]), whole([])]
    return Schedule(whole([place.seq] * place.batch), None, scheduled)


def _merge(
    step: DecodeStep, place: Place, cut: Schedule, sinks: Tensor | None
) -> Callable[[], Tensor]:
    """Return the launch that joins partial results, alone, on partial results of the same sizes."""
    from kvprof.kernels.decode.launch import launch_merge

    layout = step.layout
    items, parts = cut.scheduled[:2]
    widest = max(layout.value_widths)
    partial = torch.randn(len(items), layout.group, widest, device=place.device)
    logs = torch.randn(len(items), layout.group, device=place.device)
    output = torch.empty(
        place.batch, layout.output_offsets[-1], dtype=place.dtype, device=place.device
    )

    def run() -> Tensor:
        launch_merge(partial, logs, parts, output, step.heads, layout.heads, sinks=sinks)
        return output

    return run


def ragged_prefill(
    variant: Variant, place: Place, layout: RaggedLayout, window: int | None
) -> tuple[list[Unit], Callable[[], float]]:
    """Return a prompt's attention over ragged widths, and what cuts its work; and its error."""
    from kvprof.kernels.prefill.step import prefill

    shape, source = place.shape, place.generator(2)
    buffer = place.random(source, layout.elements)
    query = place.random(source, place.batch, place.queries, layout.query_offsets[-1])
    sinks = sinks_of(place, layout.heads, layout.group)
    lengths = torch.full((place.batch,), place.seq, dtype=torch.int32, device=place.device)
    schedule = "equal" if variant.balanced else "plain"
    # A library's calls would ignore how the work is cut.
    path = "auto" if variant.balanced else "triton"

    def run() -> Tensor:
        return prefill(
            query,
            buffer,
            layout,
            lengths,
            shape.scaling,
            softcap=shape.softcap,
            sinks=sinks,
            window=window or 0,
            schedule=schedule,
            path=path,
            host_lengths=[place.seq] * place.batch,
        )

    def error() -> float:
        if window is not None and window < place.seq:
            return float("nan")  # the float64 reference knows no windows
        return relative_error(
            ragged_samples(
                place, layout, query, run(), lambda head: layout.head(buffer, head), sinks
            ),
            shape.scaling,
            shape.softcap,
        )

    key = (layout, variant.balanced, window)
    units = [Unit("attention", [run], ("ragged prefill", *key))]
    if place.device.type == "cuda" and not _all_by_library(place, layout, schedule, path, window):
        from kvprof.kernels.prefill.launch import prefill_step

        def cut() -> Tensor:
            # Not the remembered one: a prompt of a new length has to be cut.
            made = prefill_step.__wrapped__(
                layout,
                place.queries,
                place.device,
                schedule=schedule,
                window=window or 0,
                element_size=place.dtype.itemsize,
            )
            return torch.tensor(len(made.blocks.costs))

        units.insert(0, Unit("schedule", [cut], ("cut", *key), per_pass=True, on_host=True))
    return units, error


def _all_by_library(
    place: Place, layout: RaggedLayout, schedule: str, path: str, window: int | None
) -> bool:
    """Whether torch's own kernels were measured to be the faster for every head: nothing is cut."""
    shape = place.shape
    if path != "auto" or window is not None or shape.sinks or shape.softcap:
        return False
    from kvprof.kernels.prefill.paths import measured_path

    choice = measured_path(layout, place.seq, place.dtype, place.device, schedule=schedule)
    return all(path == "library" for path in choice.paths)
