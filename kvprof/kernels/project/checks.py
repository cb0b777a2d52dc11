"""What a projection refuses: shapes, dtypes and devices that do not fit together."""

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.project.bases import BasisSet

__all__ = ["check_cache", "check_latents", "check_states", "check_widths", "rotary_turn"]


def check_states(name: str, states: Tensor, bases: BasisSet, heads: int) -> None:
    """Refuse states that are not ``[batch, tokens, heads, d]`` of the bases' dtype and device."""
    shape = tuple(states.shape)
    if len(shape) != 4 or shape[2:] != (heads, bases.depth):
        raise UsageError(
            f"{name} of shape {shape} do not fit: wanted [batch, tokens, {heads}, {bases.depth}]"
        )
    if states.dtype != bases.packed.dtype or states.device != bases.packed.device:
        raise UsageError(
            f"{name} in {states.dtype} on {states.device} do not fit bases in "
            f"{bases.packed.dtype} on {bases.packed.device}: give basis_set that dtype and device"
        )
    if states.stride(3) != 1:
        raise UsageError(f"a head's values must lie side by side: call contiguous() on the {name}")


def check_latents(values: Tensor, layout: RaggedLayout) -> None:
    """Refuse latents that are not ``[batch, tokens, Σ dv]``."""
    width = sum(layout.value_widths)
    if values.dim() != 3 or values.shape[2] != width or values.stride(2) != 1:
        raise UsageError(
            f"values of shape {tuple(values.shape)} do not fit: wanted contiguous rows "
            f"[batch, tokens, {width}]"
        )


def check_widths(name: str, bases: BasisSet, widths: tuple[int, ...]) -> None:
    """Refuse bases that keep other widths than the layout stores."""
    if bases.widths != widths:
        raise UsageError(f"bases of widths {bases.widths} do not fit the {name} widths {widths}")


def check_cache(
    states: Tensor, layout: RaggedLayout, buffer: Tensor, start: Tensor,
    valid: Tensor | None, table: Tensor | None,
) -> None:  # fmt: skip
    """Refuse a cache, starts or a table that do not fit the states."""
    if buffer.numel() != layout.elements or buffer.dtype != states.dtype or buffer.dim() != 1:
        raise UsageError(
            f"a cache of shape {tuple(buffer.shape)} in {buffer.dtype} does not fit "
            f"{layout.elements:,} values in {states.dtype}"
        )
    batch = states.shape[0]
    if table is None and layout.batch != batch:
        raise UsageError(f"{batch} sequences do not fit a cache of {layout.batch} without a table")
    for name, given, dims in (("start", start, 1), ("valid", valid, 1), ("table", table, 2)):
        if given is None:
            continue
        if given.dtype != torch.int32 or given.dim() != dims or len(given) != batch:
            raise UsageError(
                f"{name} of shape {tuple(given.shape)} in {given.dtype} does not fit: wanted "
                f"{dims} dimensions, {batch} rows, int32"
            )
        if not given.is_contiguous():
            raise UsageError(f"{name} must be contiguous: call contiguous() on it")
    for given in (buffer, start, valid, table):
        if given is not None and given.device != states.device:
            raise UsageError(f"cache and states are on {given.device} and {states.device}")
    if not buffer.is_contiguous():
        raise UsageError("the cache must be contiguous")


def rotary_turn(
    states: Tensor, cos: Tensor | None, sin: Tensor | None,
    rotary_dim: int | None, offset: int, interleaved: bool,
) -> list[int]:  # fmt: skip
    """Check the tables and return what turns: dimensions, offset, and 1 for neighbours as pairs."""
    if cos is None and sin is None:
        if rotary_dim is not None or offset or interleaved:
            raise UsageError("RoPE's dimensions are given without cos and sin: give these too")
        return [0, 0, 0]
    if cos is None or sin is None:
        raise UsageError("RoPE needs both cos and sin")
    depth = states.shape[3]
    dim = depth - offset if rotary_dim is None else rotary_dim
    if offset < 0 or dim < 2 or dim % 2 or offset + dim > depth:
        raise UsageError(f"RoPE cannot turn {dim} dimensions from {offset} on of a head of {depth}")
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() == 3 and table.shape[0] in (1, states.shape[0])
        if not fits or table.shape[1] != states.shape[1] or table.shape[2] not in (dim, dim // 2):
            raise UsageError(
                f"{name} of shape {tuple(table.shape)} does not fit: wanted [{states.shape[0]} or "
                f"1, {states.shape[1]}, {dim} or {dim // 2}]"
            )
        if table.stride(2) != 1 or not table.is_floating_point() or table.device != states.device:
            raise UsageError(
                f"{name} must hold real numbers on {states.device}, a token's side by side"
            )
    if cos.shape[2] != sin.shape[2]:
        raise UsageError(f"cos has {cos.shape[2]} entries per token and sin {sin.shape[2]}")
    return [dim, offset, int(interleaved)]
