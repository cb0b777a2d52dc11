"""Planes of several heads read and written as rows: all heads of a token side by side."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvprof.kernels.planes import RaggedLayout, chunks

__all__ = ["cut_rows", "fill_rows", "kept_columns", "rows_of"]


def rows_of(layout: RaggedLayout, buffer: Tensor, first: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return slots `first` … `stop` of all heads, keys and values, ``[batch, n, Σ width]``."""
    pairs = [layout.planes(buffer, head) for head in range(layout.heads)]
    keys, values = (
        torch.cat([plane[:, first:stop] for pair in pairs for plane in pair[side]], dim=-1)
        for side in (0, 1)
    )
    return keys, values


def fill_rows(layout: RaggedLayout, buffer: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write rows ``[batch, n, Σ width]`` into the first n slots of all heads."""
    for plane, side, columns in _columns(layout, buffer):
        rows = (keys, values)[side][..., columns]
        plane[:, : rows.shape[1]] = rows


def cut_rows(
    layout: RaggedLayout, buffer: Tensor, where: Tensor, keys: list[int], values: list[int]
) -> None:
    """Zero what lies behind the first columns of some tokens.

    Parameters
    ----------
    layout, buffer
    where : Tensor
        ``[batch, n]`` bool, of the first n slots.
    keys, values : list of int
        Columns to keep per head.
    """
    for head in range(layout.heads):
        for planes, keep in zip(
            layout.planes(buffer, head), (keys[head], values[head]), strict=True
        ):
            for plane in planes:
                behind = plane[:, : where.shape[1], max(0, keep) :]
                behind.masked_fill_(where[..., None], 0)
                keep -= plane.shape[-1]


def kept_columns(widths: tuple[int, ...], kept: tuple[int, ...], device: torch.device) -> Tensor:
    """Return where the first `kept` columns of each head lie among rows of heads `widths` wide."""
    found: list[int] = []
    begin = 0
    for width, keep in zip(widths, kept, strict=True):
        found += range(begin, begin + keep)
        begin += width
    return torch.tensor(found, dtype=torch.int64, device=device)


def _columns(layout: RaggedLayout, buffer: Tensor) -> Iterator[tuple[Tensor, int, slice]]:
    """Yield every plane with its side and its columns among all heads'."""
    begin = [0, 0]
    for head in range(layout.heads):
        widths = layout.key_widths[head], layout.value_widths[head]
        for side, planes in enumerate(layout.planes(buffer, head)):
            for plane, width in zip(planes, chunks(widths[side]), strict=True):
                yield plane, side, slice(begin[side], begin[side] + width)
                begin[side] += width
