"""A plan's bases in the weights of an engine: V's latents come out of W_V and go into W_O.

``W_V`` keeps its shape, because engines cut its output by width: a head's first columns are its
latent (``x @ W_V @ down``) and the rest are zero and stored nowhere. ``W_O`` gets as many columns
as there are stored ones (``up.T @ W_O``), so that what the kernels put out goes in as it is. Both
as torch keeps linear layers, ``[output, input]``. Keys are projected after RoPE, by the back end.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvprof.methods.plan import HeadGroup

__all__ = ["folded_output", "folded_value", "narrowed", "wide", "with_width"]


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in the precision that bases are folded in: float32, or its own above."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def with_width(matrix: Tensor, width: int) -> Tensor:
    """Give a basis ``[d, rank]`` columns of zeros to `width`."""
    return torch.nn.functional.pad(matrix, (0, width - matrix.shape[1]))


def narrowed(group: HeadGroup, width: int) -> tuple[Tensor, Tensor]:
    """Return ``down`` and ``up`` of a head, ``[d, width]``: the identity, scaled, without any."""
    if group.down is None or group.up is None:
        eye = torch.eye(group.width)
        return eye / group.scale, eye * group.scale
    return with_width(group.down, width), with_width(group.up, width)


def folded_value(weight: Tensor, downs: Sequence[Tensor]) -> Tensor:
    """Return ``W_V``, or its bias, whose heads' first columns are latents."""
    blocks = wide(weight).unflatten(0, (len(downs), -1))
    made = torch.zeros_like(blocks)
    for head, down in enumerate(downs):
        made[head, : down.shape[1]] = down.T.to(blocks) @ blocks[head]
    return made.flatten(0, 1).to(weight.dtype)


def folded_output(weight: Tensor, ups: Sequence[Tensor], group: int) -> Tensor:
    """Return ``W_O`` for latents, ``[hidden, Σ group · width]``."""
    blocks = wide(weight).unflatten(1, (len(ups) * group, -1))
    made = [blocks[:, head] @ ups[head // group].to(blocks) for head in range(len(ups) * group)]
    return torch.cat(made, dim=1).to(weight.dtype)
