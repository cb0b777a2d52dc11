"""Splits dimensions."""

from collections.abc import Sequence

from torch import Tensor

__all__ = ["unflatten"]


def unflatten(tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Split dimension `dim` into `sizes`, one of which may be -1; a view where possible.

    ``Tensor.unflatten`` itself carries no types.
    """
    dim %= tensor.dim()
    return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])
