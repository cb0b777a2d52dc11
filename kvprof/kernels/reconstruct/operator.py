"""The reconstruction step as operators, ``kvprof::reconstruct`` and ``kvprof::reconstruct_cut``.

So that ``torch.compile`` and CUDA graphs go through: a call is one opaque operator with tensors and
numbers, and its workspace is allocated inside it, where nobody sees it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from kvprof.kernels.dispatch import interpreted, uses_triton
from kvprof.kernels.reconstruct.cpu import reconstruct_cpu
from kvprof.kernels.reconstruct.cut import cut_pieces, merge_pieces
from kvprof.kernels.reconstruct.form import Form
from kvprof.kernels.reconstruct.kernel import reconstruct_pieces

__all__ = ["constants_of", "cut_operator", "reconstruct_operator"]

#: Parts that the merge reads at once, and the columns of one of its programs.
_PARTS, _COLUMNS = 64, 64


def constants_of(form: Form, *, capped: bool) -> dict[str, Any]:
    """Return the compile-time arguments of `reconstruct_pieces`."""
    return {
        "KINDS": form.numbers, "KIND_COUNT": len(form.kinds),
        "BLOCKS": (*form.paired, *form.plain) or (0,), "PAIRED": len(form.paired),
        "COUNT": len(form.paired) + len(form.plain), "HEADS": form.heads, "GROUP": form.group,
        "HEAD_DIM": form.head_dim, "HALF": form.rotary_dim // 2, "INTERLEAVED": form.interleaved,
        "REBUILD": form.rebuild, "CAPPED": capped, "STAGES": form.tuning.stages,
        "ROWS": form.rows, "PADDED": form.padded,
        "WIDEST": max(form.value_widths), "QUERY_ROW": form.query_row,
        # The request to L2 is inline assembly, which the interpreter has none of.
        "AHEAD": form.tuning.ahead and not interpreted(), "KEPT": form.tuning.kept,
    }  # fmt: skip


@torch.library.custom_op("kvprof::reconstruct_cut", mutates_args=())
def cut_operator(
    lengths: Tensor, groups: Tensor, capacity: int, pieces: int
) -> tuple[Tensor, Tensor]:
    """Return the items and parts of a step, as `cut_pieces` writes them."""
    tasks = len(lengths) * len(groups)
    items = _empty((pieces + tasks, 4), lengths, torch.int32)
    parts = _empty((tasks, 2), lengths, torch.int32)
    cut_pieces[(tasks,)](
        lengths, groups, items, parts, capacity, pieces, GROUPS=len(groups), NUMBERS=tasks,
        MOST=triton.next_power_of_2(tasks), ITEMS=len(items), BLOCK=128, num_warps=4,
    )  # fmt: skip
    return items, parts


@cut_operator.register_fake
def _(lengths: Tensor, groups: Tensor, capacity: int, pieces: int) -> tuple[Tensor, Tensor]:
    tasks = lengths.shape[0] * groups.shape[0]
    return lengths.new_empty(pieces + tasks, 4), lengths.new_empty(tasks, 2)


@torch.library.custom_op("kvprof::reconstruct", mutates_args=())
def reconstruct_operator(
    query: Tensor,
    buffer: Tensor,
    up: Tensor | None,
    lengths: Tensor,
    scheduled: Sequence[Tensor],
    groups: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
    form: Sequence[int],
) -> Tensor:
    """Run a step: Triton on a GPU (or interpreted), blocked torch on a CPU.

    Parameters
    ----------
    query, buffer, cos, sin, sinks, scaling, softcap
        As for `ReconstructStep.run`, which checks them.
    up
        From `weights.arranged` for Triton, from `weights.flat` for a CPU.
    lengths, scheduled
        Of a `Schedule`.
    groups
        See `kvprof.kernels.reconstruct.kernel.COLUMNS`.
    form
        From `Form.encoded`.

    Returns
    -------
    Tensor
        ``[batch, Σ_groups n·G·r_v]``.
    """
    made = Form.decoded(form)
    if not uses_triton(query.device):
        return reconstruct_cpu(
            query, buffer, up, made, lengths, cos, sin, scaling, softcap=softcap, sinks=sinks
        )
    items, parts = scheduled
    widest = max(made.value_widths)
    partial = _empty((len(items), made.queries, widest), query, torch.float32)
    logs = _empty((len(items), made.queries), query, torch.float32)
    output = _empty((made.batch, made.layout.output_offsets[-1]), query, query.dtype)
    _launch_pieces(query, buffer, up, cos, sin, partial, logs, items, groups, made,
                   scaling * math.log2(math.e), softcap * math.log2(math.e))  # fmt: skip
    merge_pieces[(len(parts), made.queries, triton.cdiv(widest, _COLUMNS))](
        partial, logs, parts, groups, logs if sinks is None else sinks, output,
        GROUPS=len(groups), QUERIES=made.queries, WIDEST=widest, WIDTH=_COLUMNS, BLOCK=_PARTS,
        OUTPUT_ROW=made.layout.output_offsets[-1], SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
    return output


@reconstruct_operator.register_fake
def _(
    query: Tensor,
    buffer: Tensor,
    up: Tensor | None,
    lengths: Tensor,
    scheduled: Sequence[Tensor],
    groups: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
    form: Sequence[int],
) -> Tensor:
    made = Form.decoded(form)
    return query.new_empty(made.batch, made.layout.output_offsets[-1])


def _launch_pieces(
    query: Tensor, buffer: Tensor, up: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    partial: Tensor, logs: Tensor, items: Tensor, groups: Tensor, form: Form, scale: float,
    cap: float,
) -> None:  # fmt: skip
    # Where nothing is rebuilt the kernel reads no table; any tensor takes its place.
    cos, sin = (query if table is None else table for table in (cos, sin))
    strides = (cos.stride(0) if cos.dim() == 3 else 0, *cos.stride()[-2:])
    reconstruct_pieces[(len(items),)](
        query, buffer, query if up is None else up, cos, sin, partial, logs, items, groups,
        form.capacity, form.batch, *strides, scale, cap,
        **constants_of(form, capped=cap > 0), num_warps=form.tuning.warps,
    )  # fmt: skip


def _empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory that the kernels write whole; tests poison it."""
    return torch.empty(shape, dtype=dtype, device=like.device)
