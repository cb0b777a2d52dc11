"""Launches the Triton kernels of a step over segments; nothing here waits for the device."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvprof.analysis.uniform import uniform_step
from kvprof.kernels.dispatch import dependent, interpreted, launching
from kvprof.kernels.parts import empty_parts, launch_merge
from kvprof.kernels.planes import MOST_TOKENS, row_stride
from kvprof.kernels.segments.codes import COLUMNS, FP8, FULL
from kvprof.kernels.segments.columns import ColumnSide
from kvprof.kernels.segments.cuts import cut_units, tile_places, token_bytes, token_cost
from kvprof.kernels.segments.kernel import segment_pieces
from kvprof.kernels.segments.layout import SegmentsLayout
from kvprof.kernels.segments.side import Side
from kvprof.kernels.segments.tables import Item, Kind, PlaneColumns, Unit
from kvprof.kernels.segments.tuning import Tuning, query_block
from kvprof.kernels.segments.unpack import missing_factor
from kvprof.kernels.tables import Part, joined_rows

__all__ = [
    "constants",
    "kind_table",
    "launch_cut",
    "launch_segments",
    "unit_table",
]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
#: Bytes of shared memory beyond which fewer tiles are on their way.
_SHARED_MEMORY = 64 << 10


def unit_table(
    layout: SegmentsLayout, family: SegmentsLayout, tuning: Tuning, device: torch.device
) -> Tensor:
    """Return what the kernels look up per segment and head: rows of `Unit` in int64.

    Parameters
    ----------
    layout : SegmentsLayout
    family : SegmentsLayout
        One head of every kind that the kernel is to know
        (`kvprof.kernels.segments.layout.of_kinds`).
    tuning : Tuning
    device : torch.device
    """
    kinds = list(family.unit_kinds)
    wide = layout.widest
    rows = []
    for number, segment in enumerate(layout.segments):
        for head in range(layout.heads):
            rows.append(
                Unit(
                    outputs=wide.output_offsets[head],
                    output_width=wide.value_widths[head],
                    queries=wide.query_offsets[head],
                    query_width=wide.key_widths[head],
                    begin=layout.offsets[number][head],
                    capacity=MOST_TOKENS if segment.paged else segment.layout.capacity,
                    cost=token_cost(layout, number, head, tuning.per_token),
                    height=segment.slots * tile_places(layout, number, head, tuning.tile),
                    kind=kinds.index(layout.unit_kind(number, head)),
                )
            )
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _planes(side: Side, most: int, before: int) -> list[PlaneColumns]:
    """Return the planes of a side, filled up to `most`; `before` it are bytes of a block."""
    if isinstance(side, ColumnSide):
        return _column_planes(side, most, before)
    found: list[PlaneColumns] = []
    groups = [plane.group for plane in side.planes]
    for number, plane in enumerate(side.planes):
        first = number == 0 or groups[number - 1] != plane.group
        last = number + 1 == len(groups) or groups[number + 1] != plane.group
        # Bytes enter a product in fours per lane, which takes 32 columns of K.
        depth = plane.width if side.bits is None else max(32, plane.width)
        unit = side.dtype.itemsize if side.bits is None else 1
        at = (before + side.plane_at(plane)) // unit
        found.append(
            PlaneColumns(plane.start, plane.width, depth, plane.group, int(first), int(last), at)
        )
    return found + [_NONE] * (most - len(found))


_NONE = PlaneColumns(*(0,) * len(PlaneColumns._fields))


def _column_planes(side: ColumnSide, most: int, before: int) -> list[PlaneColumns]:
    """Return what `_planes` does where columns have bits of their own: planes of bits.

    Those of 3 bits are a plane of 2 bits, then the halves of a plane of the highest.
    """
    found: list[PlaneColumns] = []
    for number, plane in enumerate(side.planes):
        bits = side.bits_of(plane)
        # Sums of codes of 8 bits, which are large, are kept by themselves.
        alone = [side.bits_of(own) == 8 for own in side.planes]
        first = number == 0 or alone[number - 1] != alone[number]
        last = plane == side.planes[-1] or alone[number + 1] != alone[number]
        # Columns of K are summed over, 32 at least; those of V are rows of a product, 16 at least.
        least = 16 if side.values else 32
        half = plane.width // 2
        stored = 2 if bits == 3 else bits
        pieces = [(plane.start, plane.width, side.plane_at(plane), stored, 0)]
        if bits == 3:
            top = side.top_at(plane)
            pieces += [(plane.start + x * half, half, top, 1, x) for x in (0, 1)]
        for piece, (start, width, at, own, shift) in enumerate(pieces):
            found.append(
                PlaneColumns(
                    start=start,
                    width=width,
                    depth=max(least, width),
                    group=int(bits < 8 and alone[0]),
                    first=int(first and piece == 0),
                    last=int(last and piece == len(pieces) - 1),
                    at=before + at,
                    bits=own,
                    shift=shift,
                    step=uniform_step(bits),
                )
            )
    return found + [_NONE] * (most - len(found))


def _plane_count(side: Side) -> int:
    """Return how many planes a kernel reads of a side."""
    if isinstance(side, ColumnSide):
        return sum(3 if side.bits_of(plane) == 3 else 1 for plane in side.planes)
    return len(side.planes)


def _kept_at(side: Side, name: str, before: int) -> int:
    """Return where something kept begins in a block, `before` it being bytes; 0 if nowhere.

    In float16, but in bytes where columns have bits of their own.
    """
    at = side.kept_at(name)
    if isinstance(side, ColumnSide):
        return before + at
    return (before + at) // 2 if at else 0


def kind_table(
    family: SegmentsLayout, tuning: Tuning, code: str, query: str
) -> tuple[tuple[float, ...], int, int]:
    """Return the kinds of heads as `segment_pieces` takes them, how many, and the planes of a side.

    Parameters
    ----------
    family : SegmentsLayout
        One head of every kind (`kvprof.kernels.segments.layout.of_kinds`).
    tuning : Tuning
    code, query : str
        Types in which codes of V and of K are multiplied: ``bf16``, ``fp16`` or ``fp32``.
    """
    kinds = family.unit_kinds
    sides = [side for unit in kinds.values() for side in family.sides(*unit)]
    most = max(map(_plane_count, sides))
    found: list[tuple[float, ...]] = []
    for number, head in kinds.values():
        keys, values = family.sides(number, head)
        slots = keys.slots
        places = tile_places(family, number, head, tuning.tile)
        moved = places * slots * token_bytes(family, number, head)
        # Loads that wait for the number of their page take the pipeline two stages.
        stages = tuning.stages
        while stages > 2 and (stages - 1) * moved > _SHARED_MEMORY:
            stages -= 1
        key_format, value_format = keys.form.read_as, values.form.read_as
        key_factor, value_factor = (
            1.0 if form == COLUMNS else missing_factor(form, dtype)
            for form, dtype in ((key_format, query), (value_format, code))
        )
        # Products of tiny numbers in bfloat16 would be denormal: half of what they lack goes to the
        # query.
        boost = 2.0**60 if key_factor >= 2.0**120 else 1.0
        far = 60.0 if code == "bf16" else 0.0
        shift = {FULL: 0.0, FP8: far}.get(value_format, 14.0 if code == "bf16" else 0.0)
        size, itemsize = family.block_bytes(number, head), family.dtype.itemsize
        kind = Kind(
            key_format=key_format,
            key_factor=key_factor / boost,
            key_boost=boost,
            key_parts=slots // keys.per_byte,
            key_groups=keys.groups,
            key_planes=_plane_count(keys),
            key_scales=_kept_at(keys, "scale", 0),
            key_middles=_kept_at(keys, "middle", 0),
            key_block=size // (1 if key_format else itemsize),
            value_format=value_format,
            value_factor=value_factor,
            shift=shift,
            value_parts=slots // values.per_byte,
            value_groups=values.groups,
            value_planes=_plane_count(values),
            value_scales=_kept_at(values, "scale", keys.nbytes),
            value_middles=_kept_at(values, "middle", keys.nbytes),
            value_block=size // (1 if value_format else itemsize),
            value_width=values.width,
            block_halfs=size // 2,
            slots=slots,
            places=places,
            stages=2 * stages - 1 if family.paged else stages,
            rows=max(16, triton.next_power_of_2(values.groups + 1)),
        )
        found += [kind, *_planes(keys, most, 0), *_planes(values, most, keys.nbytes)]
    return joined_rows(found), len(kinds), most


def constants(
    heads: int, family: SegmentsLayout, tuning: Tuning, *, softcap: bool, fast: bool
) -> dict[str, Any]:
    """Return the compile-time arguments of `segment_pieces`.

    Parameters
    ----------
    heads : int
        KV heads of a layer.
    family : SegmentsLayout
        One head of every kind that a layer may have (`kvprof.kernels.segments.layout.of_kinds`).
    tuning : Tuning
    softcap : bool
        Whether there is one.
    fast : bool
        Whether inline assembly can be used.
    """
    name = _NAMES[family.dtype]
    code = "bf16" if fast else name
    kinds, count, most = kind_table(family, tuning, code, name)
    types = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
    return {
        "KINDS": kinds,
        "COUNT": count,
        "STRIDE": len(kinds) // count,
        "PLANES": most,
        "GROUP": family.group,
        "HEADS": query_block(family, tuning.warps),
        "KV_HEADS": heads,
        "PAGE": family.segments[0].capacity if family.paged else 0,
        "WIDEST": max(family.widest.value_widths),
        "CAPPED": softcap,
        "CODE": types[code],
        # A weight of the middles is a float16 as they are; the interpreter's run keeps its own.
        "MIDDLE": tl.float16 if fast else types[name],
        "FAST": fast,
        "NEAR": bool(tuning.near),
    }


def launch_cut(
    lengths: Tensor, units: Tensor, heads: int, pieces: int, counted: int, near: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the work of one or more layers into items.

    Parameters
    ----------
    lengths : Tensor
        ``[segments, batch]`` int32.
    units : Tensor
        ``[layers, segments * heads, columns]``: a `unit_table` of every layer.
    heads, pieces : int
    counted : int
        Counters that the kernel needs, as `cut_units` has them, or 0.
    near : int
        `Tuning.near`.

    Returns
    -------
    tuple of Tensor
        Items, parts and counters, as `cut_units` has them, those of a layer first.
    """
    layers = len(units)
    segments, batch = lengths.shape
    count = segments * batch * heads
    room = pieces + count
    items = lengths.new_empty(layers, room, len(Item._fields))
    parts = lengths.new_empty(layers, batch * heads, len(Part._fields))
    counters = lengths.new_empty(layers, counted)
    launching(cut_units, (batch * heads, layers))(
        lengths,
        units,
        items,
        parts,
        counters,
        count,
        batch,
        pieces,
        room,
        counted,
        near,
        HEADS=heads,
        SEGMENTS=segments,
        BLOCK=min(256, max(32, triton.next_power_of_2(count))),
        num_warps=1,
    )
    return items, parts, counters


def launch_segments(
    query: Tensor,
    buffer: Tensor,
    layout: SegmentsLayout,
    family: SegmentsLayout,
    tuning: Tuning,
    units: Tensor,
    eye: Tensor,
    items: Tensor,
    parts: Tensor,
    counters: Tensor,
    processors: int,
    scaling: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Run the items and join their parts.

    Parameters
    ----------
    query : Tensor
        ``[rows, Σ_g G·dk_g]``, contiguous.
    buffer : Tensor
        uint8.
    layout : SegmentsLayout
    family : SegmentsLayout
        One head of every kind that the kernel knows (`kvprof.kernels.segments.layout.of_kinds`).
    tuning : Tuning
    units : Tensor
        From `unit_table`, with the same family and tuning.
    eye : Tensor
        uint8, 1 at `kvprof.kernels.segments.tables.EYE_ONE`.
    items, parts, counters : Tensor
        From `launch_cut`; the counters are what they were when this ends.
    processors : int
        Multiprocessors of the GPU.
    scaling, softcap : float
    sinks : Tensor, optional
        ``[heads, G]`` float32.
    table : Tensor, optional
        ``[rows, most pages]`` int32, of a pool of pages.

    Returns
    -------
    Tensor
        ``[rows, Σ_g G·dv_g]`` in the dtype of `query`.
    """
    softly, fast = softcap > 0.0, not interpreted()
    chosen = constants(layout.heads, family, tuning, softcap=softly, fast=fast)
    partial, logs = empty_parts(query, len(items), layout.group, chosen["WIDEST"])
    output = query.new_empty(len(query), layout.widest.output_offsets[-1])
    log2_e = math.log2(math.e)
    blocks = triton.cdiv(layout.group, chosen["HEADS"])
    options = {"maxnreg": tuning.registers} if tuning.registers and not interpreted() else {}
    launching(segment_pieces, (len(items) * blocks,))(
        query,
        buffer,
        buffer.view(layout.dtype),
        buffer.view(torch.float16),
        eye,
        partial,
        logs,
        counters,
        items,
        parts,
        units,
        units if table is None else table,
        len(parts),
        processors,
        blocks,
        0 if table is None else table.shape[1],
        row_stride(buffer, layout.batch),
        query.shape[1],
        scaling * log2_e,
        softcap * log2_e,
        **chosen,
        **options,
        DEPENDENT=dependent(query.device),
        num_warps=tuning.warps,
    )
    launch_merge(
        partial,
        logs,
        parts,
        output,
        units,
        layout.heads,
        sinks=sinks,
        counters=counters[1:] if tuning.near else None,
    )
    return output
