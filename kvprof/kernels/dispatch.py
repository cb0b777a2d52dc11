"""Whether a call goes to Triton's kernels, compiled or interpreted, or to torch on a CPU."""

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

__all__ = ["interpreted", "uses_triton"]


@triton.jit  # type: ignore[untyped-decorator]
def _nothing() -> None:
    pass


def interpreted() -> bool:
    """Tell whether Triton interprets its kernels, which it decides when it is first imported."""
    return isinstance(_nothing, InterpretedFunction)


def uses_triton(device: torch.device) -> bool:
    """Tell whether tensors of a device go to the Triton kernels: on a GPU, or interpreted."""
    return device.type == "cuda" or interpreted()
