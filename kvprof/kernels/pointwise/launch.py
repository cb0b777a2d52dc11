"""Calls of the kernels for single tokens; nothing here waits for the device."""

import torch
import triton
from torch import Tensor

from kvprof.kernels.dispatch import launching
from kvprof.kernels.pointwise.kernel import gate_rows, normalise_rows, rotate_heads

__all__ = ["gated", "normalised", "rotated"]

_GATED = 1024


def normalised(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight · round(x / sqrt(mean(x²) + eps))`` of rows ``[..., width]``, contiguous."""
    width = states.shape[-1]
    rows = states.reshape(-1, width)
    output = torch.empty(
        states.shape, dtype=torch.promote_types(states.dtype, weight.dtype), device=states.device
    )
    block = triton.next_power_of_2(width)
    launching(normalise_rows, (len(rows),))(
        rows, weight, output, rows.stride(0), eps, WIDTH=width, BLOCK=block, num_warps=8
    )
    return output


def rotated(query: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys of one token, turned; dense, in the order of axes that they have."""
    found = torch.empty_like(query), torch.empty_like(keys)
    batch, heads, _, width = query.shape
    launching(rotate_heads, (batch * (heads + keys.shape[1]),))(
        query,
        keys,
        *found,
        cos,
        sin,
        *(stride for states in (query, keys, *found) for stride in states.stride()[:2]),
        *(0 if len(table) == 1 else table.stride(0) for table in (cos, sin)),
        QUERY_HEADS=heads,
        KEY_HEADS=keys.shape[1],
        HALF=width // 2,
        BLOCK=triton.next_power_of_2(width // 2),
        num_warps=1,
        enable_fp_fusion=False,  # a product that is added is rounded before, as in the chain
    )
    return found


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) · up`` of contiguous tensors of one shape."""
    output = torch.empty_like(gate)
    launching(gate_rows, (triton.cdiv(gate.numel(), _GATED),))(
        gate, up, output, gate.numel(), BLOCK=_GATED, num_warps=4
    )
    return output
