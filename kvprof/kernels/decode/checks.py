"""What a decoding step refuses before anything is launched; no tensor's values are read."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.dispatch import interpreted
from kvprof.kernels.planes import RaggedLayout

__all__ = ["DTYPES", "check_run", "whole_numbers"]

#: Of queries and caches.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def whole_numbers(
    numbers: Tensor | Sequence[int], what: str, rows: int, device: torch.device
) -> Tensor:
    """Return a row's number each, ``[rows]`` int32 on the device.

    Raises
    ------
    UsageError
        When a tensor has another shape, dtype or device.
    """
    if not isinstance(numbers, Tensor):
        return torch.tensor(numbers, dtype=torch.int32, device=device)
    if numbers.shape != (rows,) or numbers.dtype != torch.int32:
        raise UsageError(
            f"{what} of shape {tuple(numbers.shape)} in {numbers.dtype} do not fit: "
            f"{(rows,)} in torch.int32 is wanted"
        )
    if numbers.device != device:
        raise UsageError(f"{what} lie on {numbers.device}, and the step runs on {device}")
    return numbers.contiguous()


def check_run(
    layout: RaggedLayout,
    rows: int,
    paged: bool,
    query: Tensor,
    buffer: Tensor,
    softcap: float,
    sinks: Tensor | None,
    table: Tensor | None,
) -> None:
    """Refuse what does not fit together; the arguments are those of `DecodeStep.run`.

    Raises
    ------
    UsageError
        For shapes, dtypes, a soft-cap below 0, a page table too many or too few, and bf16 in the
        interpreter.
    """
    if tuple(query.shape) != (rows, layout.query_offsets[-1]):
        raise UsageError(
            f"queries of shape {tuple(query.shape)} do not fit the layout, which wants "
            f"{(rows, layout.query_offsets[-1])}"
        )
    if query.dtype not in DTYPES:
        raise UsageError(f"{query.dtype} cannot run: bfloat16, float16 or float32 can")
    if buffer.numel() != layout.elements or buffer.dtype != query.dtype or buffer.dim() != 1:
        raise UsageError(
            f"a cache of {buffer.numel():,} values in {buffer.dtype} does not fit "
            f"{layout.elements:,} in {query.dtype}"
        )
    if query.dtype == torch.bfloat16 and query.device.type != "cuda" and interpreted():
        raise UsageError("Triton's interpreter computes bf16 wrongly; use float16 or float32")
    if not (softcap >= 0.0 and math.isfinite(softcap)):
        raise UsageError(f"a soft-cap of {softcap} makes no sense: 0 (none) or more")
    if sinks is not None and (
        tuple(sinks.shape) != (layout.heads, layout.group)
        or sinks.dtype != torch.float32
        or not sinks.is_contiguous()
    ):
        raise UsageError(
            f"sinks of shape {tuple(sinks.shape)} in {sinks.dtype} do not fit: "
            f"{(layout.heads, layout.group)} in torch.float32, contiguous, are wanted"
        )
    if paged != (table is not None):
        raise UsageError("a paged step needs its page table" if paged else "this step has no pages")
    if table is not None and (
        table.dim() != 2
        or len(table) != rows
        or table.dtype != torch.int32
        or not table.is_contiguous()
    ):
        raise UsageError(
            f"a page table of shape {tuple(table.shape)} in {table.dtype} does not fit: "
            f"({rows}, most pages) in torch.int32, contiguous, is wanted"
        )
