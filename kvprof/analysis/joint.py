"""Moments of several KV heads together, for bases that a group of heads shares (Palu, TALE)."""

import torch
from torch import Tensor

from kvprof.analysis.moments import LayerMoments
from kvprof.errors import UsageError

__all__ = ["JOINT_KEYS", "group_size", "join_heads", "joint_gram"]

#: What is kept jointly, and the vectors it is made of.
JOINT_KEYS = {"v_joint": "v", "k_pre_joint": "k_pre"}


def group_size(heads: int, num_kv_heads: int) -> int:
    """Return how many heads a group has: `heads`, or all there are where a layer has fewer.

    Raises
    ------
    UsageError
        When the layer's heads cannot be split into such groups.
    """
    size = min(heads, num_kv_heads)
    if size < 1 or num_kv_heads % size:
        raise UsageError(
            f"groups of {heads} heads do not divide the model's {num_kv_heads} KV heads"
        )
    return size


def join_heads(vectors: Tensor, heads: int) -> Tensor:
    """Lay the heads of each group side by side.

    Parameters
    ----------
    vectors : Tensor
        ``[batch, num_kv_heads, T, d]``.
    heads : int
        Heads per group.

    Returns
    -------
    Tensor
        ``[batch, num_kv_heads / heads, T, heads * d]``.
    """
    batch, count, length, width = vectors.shape
    grouped = vectors.view(batch, count // heads, heads, length, width)
    return grouped.transpose(2, 3).reshape(batch, count // heads, length, heads * width)


def joint_gram(moments: LayerMoments, vector: str, heads: int) -> Tensor:
    """Return the Gram matrices of groups of heads, ``[groups, heads*d, heads*d]`` float64.

    Moments of larger groups hold those of smaller ones as diagonal blocks.

    Parameters
    ----------
    moments : LayerMoments
    vector : str
        ``v`` or ``k_pre``.
    heads : int
        Heads per group, a divisor of the layer's KV heads.

    Raises
    ------
    UsageError
        When the moments were not kept for such groups.
    """
    count = moments.rest["k"].shape[0]
    if heads == 1 and vector in moments.rest:
        return moments.gram(vector)
    name = f"{vector}_joint"
    if name in moments.rest:
        gram = moments.gram(name)
        stored = count // gram.shape[0]
        if stored % heads == 0:
            parts = stored // heads
            size = gram.shape[-1] // parts
            corners = [part * size for part in range(parts)]
            blocks = [gram[:, at : at + size, at : at + size] for at in corners]
            return torch.stack(blocks, dim=1).flatten(0, 1)
    raise UsageError(
        f"the moments hold no {vector} of groups of {heads} heads; calibrate anew with that group "
        "size"
    )
