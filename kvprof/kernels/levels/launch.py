"""Launches the Triton kernels of a step over segments; nothing here waits for the device."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvprof.kernels.decode.join import dependent, launch_merge
from kvprof.kernels.dispatch import interpreted
from kvprof.kernels.levels.cuts import places_of, token_bytes, token_cost
from kvprof.kernels.levels.kernel import level_pieces
from kvprof.kernels.levels.layout import LevelsLayout
from kvprof.kernels.levels.schedule import cut_units
from kvprof.kernels.levels.side import Side
from kvprof.kernels.levels.tile import PLANE
from kvprof.kernels.levels.tuning import Tuning, query_block
from kvprof.kernels.levels.unpack import FP8, FULL, missing_factor

__all__ = [
    "UNIT_COLUMNS",
    "constants",
    "kind_numbers",
    "launch_cut",
    "launch_levels",
    "unit_table",
]

#: Columns of `unit_table`.
UNIT_COLUMNS = 10
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
#: Bytes of shared memory beyond which fewer tiles are on their way.
_SHARED = 64 << 10


def _kinds(layout: LevelsLayout) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Return each kind (segment, key width, value width) with one unit (segment, head) of it."""
    found: dict[tuple[int, int, int], tuple[int, int]] = {}
    for number, segment in enumerate(layout.segments):
        widths = zip(segment.layout.key_widths, segment.layout.value_widths, strict=True)
        for head, pair in enumerate(widths):
            found.setdefault((number, *pair), (number, head))
    return found


def unit_table(layout: LevelsLayout, tuning: Tuning, device: torch.device) -> Tensor:
    """Return what the kernels look up per segment and head, ``[segments * heads, 10]`` int64.

    The columns: where a head's queries begin and how wide one is; the byte at which the head
    begins; where its outputs begin and how wide one is; a token's cost; a tile's tokens; the kind;
    the bytes of a sequence; the capacity.
    """
    kinds = list(_kinds(layout))
    wide = layout.widest
    rows = []
    for number, segment in enumerate(layout.segments):
        for head in range(layout.heads):
            widths = (segment.layout.key_widths[head], segment.layout.value_widths[head])
            rows.append([
                wide.query_offsets[head], wide.key_widths[head], layout.offsets[number][head],
                wide.output_offsets[head], wide.value_widths[head],
                token_cost(layout, number, head, tuning.per_token),
                segment.slots * places_of(layout, number, head, tuning.tile),
                kinds.index((number, *widths)),
                segment.blocks * layout.block_bytes(number, head), segment.layout.capacity,
            ])  # fmt: skip
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _format(side: Side) -> int:
    return FULL if side.bits is None else FP8 if side.bits == "fp8" else side.container


def _planes(side: Side, most: int, before: int) -> list[int]:
    """Return seven numbers per plane, as `PLANE` says; `before` it are bytes of a block.

    Start, width, inner size, group, first and last of it, place in the block.
    """
    found: list[int] = []
    groups = [plane.group for plane in side.planes]
    for number, plane in enumerate(side.planes):
        first = number == 0 or groups[number - 1] != plane.group
        last = number + 1 == len(groups) or groups[number + 1] != plane.group
        # Bytes enter a product in fours per lane, which takes 32 columns of K.
        depth = plane.width if side.bits is None else max(32, plane.width)
        unit = side.dtype.itemsize if side.bits is None else 1
        place = (before + side.plane_at(plane)) // unit
        found += [plane.start, plane.width, depth, plane.group, int(first), int(last), place]
    return found + [0] * (PLANE * (most - len(side.planes)))


def kind_numbers(
    layout: LevelsLayout, tuning: Tuning, code: str, query: str
) -> tuple[tuple[float, ...], int, int]:
    """Return the kinds of heads as `level_pieces` takes them, how many, and the planes of a side.

    Parameters
    ----------
    layout : LevelsLayout
    tuning : Tuning
    code, query : str
        Types in which codes of V and of K are multiplied: ``bf16``, ``fp16`` or ``fp32``.
    """
    kinds = _kinds(layout)
    sides = [side for unit in kinds.values() for side in layout.sides(*unit)]
    most = max(len(side.planes) for side in sides)
    found: list[float] = []
    for number, head in kinds.values():
        keys, values = layout.sides(number, head)
        slots = keys.slots
        places = places_of(layout, number, head, tuning.tile)
        moved = places * slots * token_bytes(layout, number, head)
        stages = tuning.stages
        while stages > 2 and (stages - 1) * moved > _SHARED:
            stages -= 1
        key_format, value_format = _format(keys), _format(values)
        key_factor = missing_factor(key_format, query)
        value_factor = missing_factor(value_format, code)
        # Products of e4m3 in bfloat16 would be denormal: half of what they lack goes to the query.
        boost = 2.0**60 if key_factor == 2.0**120 else 1.0
        shift = {FULL: 0.0, FP8: 60.0 if code == "bf16" else 0.0}.get(
            value_format, 14.0 if code == "bf16" else 0.0
        )
        size, itemsize = layout.block_bytes(number, head), layout.dtype.itemsize
        found += [
            key_format, key_factor / boost, boost, slots // keys.per_byte,
            keys.groups, len(keys.planes), keys.code_bytes // 2,
            (keys.code_bytes + keys.scale_bytes) // 2, size // (1 if key_format else itemsize),
            value_format, value_factor, shift, slots // values.per_byte,
            values.groups, len(values.planes), (keys.nbytes + values.code_bytes) // 2,
            (keys.nbytes + values.code_bytes + values.scale_bytes) // 2,
            size // (1 if value_format else itemsize), values.width,
            size // 2, slots, places, stages,
            max(16, triton.next_power_of_2(values.groups + 1)),
        ]  # fmt: skip
        found += _planes(keys, most, 0) + _planes(values, most, keys.nbytes)
    return tuple(found), len(kinds), most


def constants(layout: LevelsLayout, tuning: Tuning, *, softcap: bool, fast: bool) -> dict[str, Any]:
    """Return the compile-time arguments of `level_pieces`."""
    name = _NAMES[layout.dtype]
    code = "bf16" if fast else name
    kinds, count, most = kind_numbers(layout, tuning, code, name)
    types = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
    return {
        "KINDS": kinds, "COUNT": count, "STRIDE": len(kinds) // count, "PLANES": most,
        "COLUMNS": UNIT_COLUMNS, "GROUP": layout.group,
        "HEADS": query_block(layout, tuning.warps), "KV_HEADS": layout.heads,
        "WIDEST": max(layout.widest.value_widths), "CAPPED": softcap, "CODE": types[code],
        # A weight of the middles is a float16 as they are; the interpreter's run keeps its own.
        "MIDDLE": tl.float16 if fast else types[name], "FAST": fast,
        "NEAR": bool(tuning.near),
    }  # fmt: skip


def launch_cut(
    lengths: Tensor, units: Tensor, heads: int, pieces: int, counted: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut a step's work into items.

    Parameters
    ----------
    lengths : Tensor
        ``[segments, batch]`` int32.
    units : Tensor
        From `unit_table`.
    heads, pieces : int
    counted : int
        Counters that the kernel needs: one per multiprocessor and one, or none.

    Returns
    -------
    tuple of Tensor
        Items, parts and counters, as `cut_units` has them.
    """
    segments, batch = lengths.shape
    count = segments * batch * heads
    room = pieces + count
    items = lengths.new_empty(room, 5)
    parts = lengths.new_empty(batch * heads, 2)
    counters = lengths.new_empty(counted)
    cut_units[(batch * heads,)](
        lengths, units, items, parts, counters, count, batch, pieces, room, counted,
        HEADS=heads, SEGMENTS=segments, COLUMNS=UNIT_COLUMNS,
        BLOCK=min(256, max(32, triton.next_power_of_2(count))), num_warps=1,
    )  # fmt: skip
    return items, parts, counters


def launch_levels(
    query: Tensor,
    buffer: Tensor,
    layout: LevelsLayout,
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
) -> Tensor:
    """Run the items and join their parts.

    Parameters
    ----------
    query : Tensor
        ``[batch, Σ_g G·dk_g]``, contiguous.
    buffer : Tensor
        uint8.
    layout : LevelsLayout
    tuning : Tuning
    units : Tensor
        From `unit_table`, with the same tuning.
    eye : Tensor
        256 bytes uint8, 1 at 128.
    items, parts, counters : Tensor
        From `launch_cut`; the counters are 0 again when this ends.
    processors : int
        Multiprocessors of the GPU.
    scaling, softcap : float
    sinks : Tensor, optional
        ``[heads, G]`` float32.

    Returns
    -------
    Tensor
        ``[batch, Σ_g G·dv_g]`` in the dtype of `query`.
    """
    wide = layout.widest
    widest = max(wide.value_widths)
    partial = query.new_empty(len(items), layout.group, widest, dtype=torch.float32)
    logs = query.new_empty(len(items), layout.group, dtype=torch.float32)
    output = query.new_empty(layout.batch, wide.output_offsets[-1])
    log2_e = math.log2(math.e)
    chosen = constants(layout, tuning, softcap=softcap > 0.0, fast=not interpreted())
    blocks = triton.cdiv(layout.group, chosen["HEADS"])
    options = {"maxnreg": tuning.registers} if tuning.registers and not interpreted() else {}
    level_pieces[(len(items) * blocks,)](
        query, buffer, buffer.view(layout.dtype), buffer.view(torch.float16), eye, partial, logs,
        counters, items, parts, units, len(parts), processors, blocks, query.shape[1],
        scaling * log2_e, softcap * log2_e,
        **chosen, **options, DEPENDENT=dependent(query.device), num_warps=tuning.warps,
    )  # fmt: skip
    launch_merge(
        partial, logs, parts, output, units, layout.heads, sinks=sinks,
        counters=counters if tuning.near else None,
    )  # fmt: skip
    return output
