"""What every operation refuses before anything is launched; no tensor's values are read."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import STEP, RaggedLayout, row_stride

__all__ = [
    "DTYPES",
    "check_cache",
    "check_contexts",
    "check_device",
    "check_dtype",
    "check_numbers",
    "check_pages",
    "check_pool",
    "check_queries",
    "check_scaling",
    "check_softcap",
    "checked_sinks",
    "whole_numbers",
]

#: Of queries and caches.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_dtype(what: str, dtype: torch.dtype) -> None:
    """Refuse a dtype in which nothing runs."""
    if dtype not in DTYPES:
        raise UsageError(f"{what} must be bfloat16, float16 or float32, not {dtype}")


def check_queries(query: Tensor, wanted: Sequence[int | None], dtype: torch.dtype) -> None:
    """Refuse queries of another shape or dtype than `wanted`; None is any number of new tokens."""
    check_dtype("queries", query.dtype)
    fits = query.dim() == len(wanted) and all(
        size in (own, None) for own, size in zip(query.shape, wanted, strict=True)
    )
    if not fits or query.dtype != dtype:
        shape = ", ".join("tokens" if size is None else str(size) for size in wanted)
        raise UsageError(
            f"queries have shape {tuple(query.shape)} and dtype {query.dtype}; the layout "
            f"requires ({shape}) in {dtype}"
        )


def check_cache(buffer: Tensor, rows: int, size: int, dtype: torch.dtype) -> None:
    """Refuse a buffer that holds no `rows` rows of `size` values."""
    if buffer.dtype != dtype:
        fits = False
    elif buffer.dim() == 2:
        fits = buffer.shape[0] == rows and buffer.shape[1] >= size
    else:
        fits = buffer.dim() == 1 and buffer.numel() == rows * size
    if not fits:
        raise UsageError(
            f"the cache has shape {tuple(buffer.shape)} and dtype {buffer.dtype}; required are "
            f"{rows:,} rows of {size:,} values in {dtype}"
        )
    if buffer.stride(-1) != 1:
        raise UsageError("a row of the cache must be contiguous; use the layout's own cache")
    stride = row_stride(buffer, rows)
    if stride < size:
        raise UsageError(f"the stride of rows of {size:,} values cannot be {stride:,}")
    if stride * buffer.itemsize % 16:
        raise UsageError(
            f"rows are {stride * buffer.itemsize:,} bytes apart; they must start at multiples of "
            "16 bytes"
        )


def check_device(device: torch.device, **tensors: Tensor | None) -> None:
    """Refuse tensors, by name, that lie elsewhere."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise UsageError(f"{name} is on {tensor.device}, but must be on {device}")


def check_numbers(what: str, numbers: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse whole numbers of another shape, dtype or device than int32 on `device`."""
    if tuple(numbers.shape) != shape or numbers.dtype != torch.int32:
        raise UsageError(
            f"{what} has shape {tuple(numbers.shape)} and dtype {numbers.dtype}; required are "
            f"{shape} and torch.int32"
        )
    check_device(device, **{what: numbers})


def whole_numbers(
    what: str, numbers: Tensor | Sequence[object], shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return whole numbers as the kernels take them: `shape`, int32, on the device, contiguous."""
    if not isinstance(numbers, Tensor):
        numbers = torch.tensor(numbers, dtype=torch.int32, device=device)
    check_numbers(what, numbers, shape, device)
    return numbers.contiguous()


def check_contexts(lengths: Sequence[int], rows: int, capacity: int, *, least: int = 1) -> None:
    """Refuse lengths on the host: not one for each of `rows`, or beyond `least` … `capacity`."""
    if len(lengths) != rows:
        raise UsageError(f"{len(lengths)} lengths for {rows} sequences")
    for length in lengths:
        if not least <= length <= capacity:
            raise UsageError(
                f"a context of {length} tokens is outside the cache's {least} to {capacity}"
            )


def check_pages(table: Tensor | None, rows: int, *, paged: bool) -> None:
    """Refuse a page table too many or too few, or not ``[rows, most pages]`` int32, contiguous."""
    if paged != (table is not None):
        raise UsageError(f"this step {'requires a' if paged else 'takes no'} page table")
    if table is None:
        return
    fits = table.dim() == 2 and table.shape[0] == rows and table.dtype == torch.int32
    if not fits or not table.is_contiguous():
        raise UsageError(
            f"the page table has shape {tuple(table.shape)} and dtype {table.dtype}; required are "
            f"contiguous ({rows}, most pages) and torch.int32"
        )


def check_pool(layout: RaggedLayout, page_tokens: int | None, rows: int | None) -> int:
    """Refuse pages or rows that do not fit a layout; return the rows (sequences)."""
    paged = page_tokens is not None
    if paged and (page_tokens != layout.capacity or layout.capacity % STEP):
        raise UsageError(
            f"the pool's pages have {layout.capacity} tokens, not {page_tokens}: both must be the "
            f"same multiple of {STEP}"
        )
    if rows is None:
        if paged:
            raise UsageError("a paged step requires rows (its number of sequences)")
        rows = layout.batch
    if rows < 1 or (not paged and rows != layout.batch):
        raise UsageError(f"{rows} rows exceed the cache's {layout.batch} sequences or pages")
    return rows


def check_scaling(scaling: float) -> None:
    """Refuse a scaling that is not above 0."""
    if not (scaling > 0 and math.isfinite(scaling)):
        raise UsageError(f"scaling must be above 0, not {scaling}")


def check_softcap(softcap: float) -> None:
    """Refuse a soft-cap below 0."""
    if not (softcap >= 0.0 and math.isfinite(softcap)):
        raise UsageError(f"softcap must be 0 (none) or more, not {softcap}")


def checked_sinks(sinks: Tensor | None, heads: int, group: int) -> Tensor | None:
    """Return sinks as the kernels take them, ``[heads, group]`` float32, contiguous."""
    if sinks is None:
        return None
    if tuple(sinks.shape) != (heads, group) or sinks.dtype != torch.float32:
        raise UsageError(
            f"sinks have shape {tuple(sinks.shape)} and dtype {sinks.dtype}; required are "
            f"{(heads, group)} and torch.float32"
        )
    return sinks.contiguous()
