"""Rows that codes of the kernels over segments stand for, beside the package's own arithmetic."""

import torch

from kvprof.kernels.quantized.codes import Quantised


def dequantised(found: Quantised, bits: int, columns: int | None) -> torch.Tensor:
    """Return ``middle + scale * code`` as float32, codes counted from the middle of a container."""
    width = found.codes.shape[-1]
    group = torch.arange(width) // (columns or width)
    scale, middle = (x.float()[..., group] for x in (found.scale, found.middle))
    half = {2: 2, 3: 8, 4: 8, 8: 128}[bits]
    return middle + scale * (found.codes.float() - half)
