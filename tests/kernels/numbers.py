"""Numbers that tests of the kernels make and compare."""

import torch

__all__ = ["error", "whole"]

_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def whole(numbers: object) -> torch.Tensor:
    """Return int32 on the GPU where there is one."""
    return torch.tensor(numbers, dtype=torch.int32, device=_DEVICE)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error; `wanted` is in float64."""
    return float((found.double() - wanted).norm() / wanted.norm())
