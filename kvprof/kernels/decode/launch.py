"""Launches the Triton kernels of a decoding step; nothing here waits for the device."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from kvprof.kernels.decode.cuts import COST_PER_TOKEN, kinds, tile_height
from kvprof.kernels.decode.join import dependent, launch_merge
from kvprof.kernels.decode.kernel import ITEM, decode_lists, decode_pieces
from kvprof.kernels.decode.schedule import assign_longest, cut_equal, rank_tasks
from kvprof.kernels.decode.tuning import Tuning, built_for, rows_of
from kvprof.kernels.planes import MOST_CHUNKS, RaggedLayout, chunks

__all__ = [
    "HEAD_COLUMNS",
    "head_table",
    "kind_numbers",
    "launch_cut",
    "launch_decode",
]

#: Columns of `head_table`.
HEAD_COLUMNS = 8
#: Tasks that a scheduling program looks at at once.
_BLOCK = 256


def head_table(layout: RaggedLayout, tile: int, device: torch.device) -> Tensor:
    """Return what the kernels look up per head, ``[heads, 8]`` int64.

    The columns: where a head's queries, K, V and outputs begin, dv, a token's cost, the tile's
    height, the kind.
    """
    pairs = kinds(layout)
    rows = []
    for head, widths in enumerate(zip(layout.key_widths, layout.value_widths, strict=True)):
        places = (layout.query_offsets[head], *layout.offsets[head], layout.output_offsets[head])
        cost = sum(widths) + COST_PER_TOKEN
        rows.append([*places, widths[1], cost, tile_height(*widths, tile), pairs.index(widths)])
    return torch.tensor(rows, dtype=torch.int64, device=device)


def kind_numbers(pairs: Sequence[tuple[int, int]], tile: int) -> tuple[int, ...]:
    """Return the kinds of heads as the kernels take them, nine numbers each.

    Parameters
    ----------
    pairs : sequence of (key width, value width)
    tile : int
        Values of K and V in a tile.
    """
    numbers: list[int] = []
    for pair in pairs:
        for width in pair:
            own = chunks(width)
            numbers += [*own, *(0,) * (MOST_CHUNKS - len(own))]
        numbers.append(tile_height(*pair, tile))
    return tuple(numbers)


def launch_cut(
    lengths: Tensor, starts: Tensor | None, heads: Tensor, capacity: int, pieces: int, workers: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut a step's work into items, or assign whole heads to workers.

    Parameters
    ----------
    lengths, starts : Tensor
        ``[rows]`` int32.
    heads : Tensor
        From `head_table`.
    capacity : int
        Tokens to which lengths are clamped.
    pieces : int
        Items to aim at; 0 for one per row and head, assigned longest first to `workers`.
    workers : int

    Returns
    -------
    tuple of Tensor
        Items, parts, and lists and counts (empty when cut into pieces), as the kernels have them.
    """
    tasks = len(lengths) * len(heads)
    room = pieces + tasks
    items = lengths.new_empty(room, ITEM)
    parts = lengths.new_empty(tasks, 2)
    shared: dict[str, Any] = {
        "HEADS": len(heads), "COLUMNS": HEAD_COLUMNS, "STARTS": starts is not None,
        "BLOCK": min(_BLOCK, max(32, triton.next_power_of_2(tasks))), "num_warps": 1,
    }  # fmt: skip
    first = lengths if starts is None else starts
    if pieces:
        cut_equal[(tasks,)](
            lengths, first, heads, items, parts, tasks, capacity, pieces, room, **shared
        )
        return items, parts, lengths.new_empty(0), lengths.new_empty(0)
    order = lengths.new_empty(tasks)
    costs = lengths.new_empty(tasks, dtype=torch.int64)
    lists, counts = lengths.new_empty(workers, tasks), lengths.new_empty(workers)
    rank_tasks[(tasks,)](
        lengths, first, heads, items, parts, order, costs, tasks, capacity, **shared
    )
    assign_longest[(1,)](
        order, costs, lists, counts, tasks,
        WORKERS=workers, ROUNDED=triton.next_power_of_2(workers), num_warps=1,
    )  # fmt: skip
    return items, parts, lists, counts


def launch_decode(
    query: Tensor,
    buffer: Tensor,
    layout: RaggedLayout,
    tuning: Tuning,
    heads: Tensor,
    scheduled: Sequence[Tensor],
    scaling: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    table: Tensor | None = None,
    trace: Tensor | None = None,
) -> Tensor:
    """Run the items and join their parts.

    Parameters
    ----------
    query : Tensor
        ``[rows, Σ_g G·dk_g]``, contiguous.
    buffer : Tensor
    layout : RaggedLayout
    tuning : Tuning
    heads : Tensor
        From `head_table`, with the same tile.
    scheduled : sequence of Tensor
        From `launch_cut`.
    scaling, softcap : float
    sinks : Tensor, optional
        ``[heads, G]`` float32.
    table : Tensor, optional
        ``[rows, most pages]`` int32.
    trace : Tensor, optional
        ``[items, 3]`` int64 that gets each item's multiprocessor, begin and end (ns).

    Returns
    -------
    Tensor
        ``[rows, Σ_g G·dv_g]`` in the dtype of `query`.
    """
    items, parts, lists, counts = scheduled
    widest, rows, pairs = max(layout.value_widths), len(query), kinds(layout)
    partial = query.new_empty(len(items), layout.group, widest, dtype=torch.float32)
    logs = query.new_empty(len(items), layout.group, dtype=torch.float32)
    output = query.new_empty(rows, layout.output_offsets[-1])
    log2_e = math.log2(math.e)
    scale = scaling * log2_e if softcap == 0.0 else 2.0 * scaling * log2_e / softcap
    tensors = (
        query, buffer, partial, logs, items, heads,
        items if table is None else table, items if trace is None else trace,
    )  # fmt: skip
    numbers = (
        0 if table is None else table.shape[1], layout.batch * layout.capacity, layout.capacity,
        query.shape[1], widest, scale, softcap * log2_e,
    )  # fmt: skip
    built = built_for(tuning, query.element_size(), paged=table is not None)
    constants: dict[str, Any] = {
        "KINDS": kind_numbers(pairs, built.tile), "COUNT": len(pairs), "STAGES": built.stages,
        "GROUP": layout.group, "ROWS": rows_of(layout), "COLUMNS": HEAD_COLUMNS,
        "PAGE": 0 if table is None else layout.capacity, "CAPPED": softcap > 0.0,
        "TRACE": trace is not None, "DEPENDENT": dependent(query.device), "num_warps": built.warps,
    }  # fmt: skip
    blocks = triton.cdiv(layout.group, rows_of(layout))
    if lists.numel():
        decode_lists[(len(counts) * blocks,)](
            *tensors, lists, counts, *numbers, lists.shape[1], **constants
        )
    else:
        decode_pieces[(len(items) * blocks,)](*tensors, *numbers, **constants)
    launch_merge(partial, logs, parts, output, heads, layout.heads, sinks=sinks)
    return output
