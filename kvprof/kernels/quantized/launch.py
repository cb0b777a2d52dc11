"""Launches the Triton kernels of a step over segments; nothing here waits for the device."""

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvprof.kernels.dispatch import early_launch, interpreted, launching
from kvprof.kernels.planes import MOST_TOKENS, row_stride
from kvprof.kernels.quantized.codes import FP8, FULL
from kvprof.kernels.quantized.cuts import (
    cut_units,
    share_units,
    tile_places,
    token_bytes,
    token_cost,
)
from kvprof.kernels.quantized.kernel import segment_pieces
from kvprof.kernels.quantized.layout import SegmentsLayout
from kvprof.kernels.quantized.layout_registry import OPERAND_LAYOUTS
from kvprof.kernels.quantized.operand_layout import Tuning
from kvprof.kernels.quantized.tables import Counter, Item, Kind, PlaneColumns, Unit
from kvprof.kernels.quantized.unpack import missing_factor
from kvprof.kernels.split_kv import (
    Attended,
    assign_options,
    empty_parts,
    launch_combine,
    partition_options,
)
from kvprof.kernels.tables import Part, joined_rows

__all__ = [
    "constants",
    "kind_table",
    "launch_cut",
    "launch_segments",
    "tuning_for",
    "unit_table",
]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
#: Bytes of shared memory beyond which fewer tiles are on their way.
_SHARED_MEMORY = 64 << 10


def unit_table(
    layout: SegmentsLayout, family: SegmentsLayout, tuning: Tuning, device: torch.device
) -> Tensor:
    """Return what the kernels look up per segment and head: rows of `Unit` in int64."""
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
                    cost=token_cost(layout, number, head, tuning.per_token, tuning.int8),
                    height=segment.slots * tile_places(layout, number, head, tuning.tile),
                    kind=kinds.index(layout.unit_kind(number, head)),
                )
            )
    return torch.tensor(rows, dtype=torch.int64, device=device)


#: Numbers of a thread that a program's queries and sums may take.
_REGISTERS = 112


def _numbers(layout: SegmentsLayout, heads: int, warps: int) -> int:
    keys, values = max(layout.widest.key_widths), max(layout.widest.value_widths)
    return heads * keys // 64 + heads * values // (32 * warps)


def _query_block(layout: SegmentsLayout, warps: int) -> int:
    """Return the query heads that a program serves: 8, 16 or 32, as registers allow."""
    block = 8
    while block < layout.group and block < 32 and _numbers(layout, 2 * block, warps) <= _REGISTERS:
        block *= 2
    return block


def _near(kinds: int, int8: bool) -> int:
    """Return `Tuning.near` of rows for so many kinds of quantised unit.

    Time in shares over time in order, by earlier schedulers on an H200: never below 1 with two head
    configs; with four 0.75 at 48 tiles a piece, 0.98 at 4, 1.10 at 2; with six 0.52, 0.77, 0.92;
    with eight 0.52 to 0.68 at 1, as int8 in 16 pieces. Up to four kinds of 4 bits as int8 are told
    apart by `tuning_for`.
    """
    if kinds <= (4 if int8 else 2):
        return 0
    return 3 if kinds <= 4 else 1


def _int8(layout: SegmentsLayout) -> bool:
    """Return `Tuning.int8`: whether that was the faster form on an H100.

    With one quantised segment and at most four query heads per KV head, layers of 4 bits took 0.90
    of the time over 18 cases (0.69 to 1.03). More query heads need twice the products (8 took 1.05,
    16 took 1.12). Several quantised segments took 1.25, pages 1.11, for reasons unknown.
    """
    segments = [layout.sides(number, 0) for number in range(len(layout.segments))]
    quantised = [sides for sides in segments if any(side.bits is not None for side in sides)]
    if layout.paged or layout.group > 4 or len(quantised) != 1:
        return False
    return all(side.form.counted for side in quantised[0])


def tuning_for(layout: SegmentsLayout) -> Tuning:
    """Return what was fastest on an H200, and on an H100 of two forms, by widths and formats."""
    sides = [side for number in range(len(layout.segments)) for side in layout.sides(number, 0)]
    numbers = _numbers(layout, 8, 1)
    if numbers > _REGISTERS // 2 or all(side.bits is None for side in sides):
        warps = 2 if numbers > _REGISTERS else 1
        return Tuning(8, stages=3, warps=warps, per_token=32, registers=0, near=0)
    for operand_layout in OPERAND_LAYOUTS:
        alike = sum(
            any(isinstance(side, operand_layout) for side in layout.sides(*unit))
            for unit in layout.unit_kinds.values()
        )
        if alike and (own := operand_layout.tuned(alike)) is not None:
            return own
    int8 = _int8(layout)
    # Exact tokens at an end, of which there are few, empty no cache of instructions.
    kinds = sum(
        any(side.bits is not None for side in layout.sides(*unit))
        for unit in layout.unit_kinds.values()
    )
    near = _near(kinds, int8)
    if not any(side.groups for side in sides):
        return Tuning(stages=3, warps=2, near=near)
    # Larger tiles, of which fewer programs have room at once.
    slots = {segment.slots for segment in layout.segments}
    pieces = 16 if slots == {2} else 13 if slots == {1} else 12
    if int8 and 2 in slots and kinds <= 4:
        # Of 12 programs each has registers for all it needs: on an H200 that took 0.95 to 0.98 of
        # the time with 128, and with four kinds 0.96 to 0.98 of that of 16 programs, if each
        # multiprocessor takes its own kind, and 1.13 to 1.23 if not.
        several = kinds > 2
        return Tuning(12, registers=168, near=int(several), dealt=several, int8=True)
    return Tuning(pieces, near=near, int8=int8)


_NONE = PlaneColumns(*(0,) * len(PlaneColumns._fields))


# For every layer of every step, of the same few families.
@lru_cache(maxsize=256)
def kind_table(
    family: SegmentsLayout, tuning: Tuning, code: str, query: str
) -> tuple[tuple[float, ...], int, int]:
    """Return head configs as `segment_pieces` takes them, how many, and the planes of a side."""
    kinds = family.unit_kinds
    sides = [side for unit in kinds.values() for side in family.sides(*unit)]
    most = max(len(side.table(0)) for side in sides)
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
        key_factor = missing_factor(key_format, query)
        # Products of tiny numbers in bfloat16 would be denormal: half of what they lack goes to the
        # query.
        boost = 2.0**60 if key_factor >= 2.0**120 else 1.0
        far = 60.0 if code == "bf16" else 0.0
        shift = {FULL: 0.0, FP8: far}.get(value_format, 14.0 if code == "bf16" else 0.0)
        size, itemsize = family.block_bytes(number, head), family.dtype.itemsize
        tables = keys.table(0), values.table(keys.nbytes)
        kind = Kind(
            key_format=key_format,
            key_factor=key_factor / boost,
            key_boost=boost,
            key_parts=slots // keys.per_byte,
            key_groups=keys.groups,
            key_planes=len(tables[0]),
            key_scales=keys.kept_from("scale", 0),
            key_middles=keys.kept_from("middle", 0),
            key_block=size // (1 if key_format else itemsize),
            value_format=value_format,
            value_factor=missing_factor(value_format, code),
            shift=shift,
            value_parts=slots // values.per_byte,
            value_groups=values.groups,
            value_planes=len(tables[1]),
            value_scales=values.kept_from("scale", keys.nbytes),
            value_middles=values.kept_from("middle", keys.nbytes),
            value_block=size // (1 if value_format else itemsize),
            value_width=values.width,
            block_halfs=size // 2,
            slots=slots,
            places=places,
            stages=2 * stages - 1 if family.paged else stages,
            rows=max(16, triton.next_power_of_2(values.groups + 1)),
            int8=int(tuning.int8 and keys.form.counted and values.form.counted),
        )
        filled = (row for own in tables for row in own + [_NONE] * (most - len(own)))
        found += [kind, *filled]
    return joined_rows(found), len(kinds), most


def constants(
    heads: int, family: SegmentsLayout, tuning: Tuning, *, softcap: bool, fast: bool
) -> dict[str, Any]:
    """Return the compile-time arguments of `segment_pieces`."""
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
        "HEADS": _query_block(family, tuning.warps),
        "KV_HEADS": heads,
        "PAGE": family.segments[0].capacity if family.paged else 0,
        "WIDEST": max(family.widest.value_widths),
        "CAPPED": softcap,
        "CODE": types[code],
        # A weight of the middles is a float16 as they are; the interpreter's run keeps its own.
        "MIDDLE": tl.float16 if fast else types[name],
        "FAST": fast,
        "NEAR": bool(tuning.near),
        "DEALT": tuning.dealt,
    }


def launch_cut(
    lengths: Tensor, units: Tensor, heads: int, pieces: int, counted: int, near: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the work of one or more layers into items."""
    layers = len(units)
    segments, batch = lengths.shape
    count = segments * batch * heads
    room = pieces + count
    items = lengths.new_empty(layers, room, len(Item._fields))
    parts = lengths.new_empty(layers, batch * heads, len(Part._fields))
    counters = lengths.new_empty(layers, counted)
    firsts = lengths.new_empty(layers, count + 1)
    cut = partition_options(count)
    numbers = count, batch, pieces, counted, near
    constants = {
        "HEADS": heads,
        "SEGMENTS": segments,
        **early_launch(lengths.device, batch),
    }
    if not cut["BLOCK"]:
        launching(share_units, (layers,))(
            lengths, units, firsts, counters, *numbers, **constants, **assign_options(count)
        )
    launching(cut_units, (triton.cdiv(room, cut["ITEMS"]), layers))(
        lengths, units, firsts, counters, items, parts, *numbers, room, **constants, **cut
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
    shares: int,
    scaling: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    table: Tensor | None = None,
    beside: Attended | None = None,
) -> Tensor:
    """Run the items and combine their splits."""
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
        shares,
        blocks,
        0 if table is None else table.shape[1],
        row_stride(buffer, layout.batch),
        query.shape[1],
        scaling * log2_e,
        softcap * log2_e,
        **chosen,
        **options,
        num_warps=tuning.warps,
        **early_launch(query.device, len(query)),
    )
    launch_combine(
        partial,
        logs,
        parts,
        output,
        units,
        layout.heads,
        sinks=sinks,
        counters=counters[len(Counter._fields) :] if tuning.near else None,
        beside=beside,
    )
    return output
