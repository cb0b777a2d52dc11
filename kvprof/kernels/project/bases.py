"""The bases of a layer's heads in one tensor, so that one launch covers all heads."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.checks import check_dtype
from kvprof.kernels.planes import chunks

__all__ = ["BasisSet", "basis_set"]


@dataclass(frozen=True, eq=False)
class BasisSet:
    """Bases ``[d, width]`` of every KV head, one after another; made by `basis_set`."""

    packed: Tensor  # `[d · Σ width]`: head 0's matrix row by row, then head 1's
    widths: tuple[int, ...]  # kept columns per KV head
    depth: int  # d, the width of a head before projection

    def head(self, head: int) -> Tensor:
        """Return one head's basis ``[d, width]``, a view."""
        start = self.depth * sum(self.widths[:head])
        width = self.widths[head]
        return self.packed[start : start + self.depth * width].view(self.depth, width)


def basis_set(
    bases: Sequence[Tensor],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> BasisSet:
    """Pack bases once, before the first token.

    Parameters
    ----------
    bases : sequence of Tensor
        ``[d, width]`` per KV head: the kept columns of its basis. d is the same for all; a width is
        a multiple of 16 from 16 on.
    dtype : torch.dtype, optional
        Of the cache: bfloat16, float16 or float32; the first basis's by default.
    device : torch.device, optional
        The first basis's by default.

    Raises
    ------
    UsageError
        When the bases are no layer's, a width cannot run, or the dtype is another.
    """
    if not bases or any(basis.dim() != 2 or len(basis) != len(bases[0]) for basis in bases):
        shapes = ", ".join(str(tuple(basis.shape)) for basis in bases) or "none"
        raise UsageError(f"bases have shapes {shapes}; each head needs [d, width] with one d")
    dtype = dtype or bases[0].dtype
    check_dtype("bases", dtype)
    device = torch.device(device or bases[0].device)
    widths = tuple(basis.shape[1] for basis in bases)
    for width in set(widths):
        chunks(width)
    packed = torch.cat([basis.detach().to(device, dtype).reshape(-1) for basis in bases])
    return BasisSet(packed, widths, len(bases[0]))
