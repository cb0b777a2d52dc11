"""Q and K before RoPE: where the slice that a model's rotary function turns lies in Q and K."""

import torch
from torch import Tensor

from kvprof.models.interface import AttentionCall, Rotation

__all__ = ["before_rotation", "find_rotation"]


def find_rotation(call: AttentionCall) -> tuple[int, int | None, bool] | None:
    """Say how a layer rotates Q and K, checked on the call's own values.

    Returns
    -------
    tuple or None
        Rotary dimensions, offset of the rotated slice in a head (None when Q and K before RoPE
        cannot be had), and whether the function sees ``[B, T, heads, width]``; None when no rotary
        function ran.
    """
    width = call.query.shape[-1]
    if not call.rotations:
        return None
    pair = _pair(call.rotations[0])
    if len(call.rotations) != 1 or pair is None:
        return width, None, False
    query, key = pair[2:]
    rotary_dim = _turning(call.rotations[0])
    for transposed in (False, True):
        for offset in {0, width - query.shape[-1]}:
            if _lies_at(query, call.query, offset, transposed) and _lies_at(
                key, call.key, offset, transposed
            ):
                return rotary_dim, offset, transposed
    return rotary_dim, None, False


def before_rotation(
    rotation: Rotation, query: Tensor, key: Tensor, offset: int, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Return Q and K with the rotated slice as it was before the rotary function.

    Parameters
    ----------
    rotation : Rotation
        The layer's call of the rotary function.
    query, key : Tensor
        After RoPE, ``[B, heads, T, width]``.
    offset, transposed
        As `find_rotation` found them.
    """
    pair = _pair(rotation)
    assert pair is not None  # find_rotation has seen to it
    return (
        _put_back(pair[0], query, offset, transposed),
        _put_back(pair[1], key, offset, transposed),
    )


def _pair(rotation: Rotation) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Q and K, in and out, of a function that takes and returns the two of them first."""
    names = ("q", "k")
    found = [*rotation.args[:2], *(rotation.kwargs[n] for n in names if n in rotation.kwargs)]
    result = rotation.result
    if len(found) != 2 or not isinstance(result, tuple) or len(result) != 2:
        return None
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (*found, *result)):
        return None
    if any(x.shape != y.shape for x, y in zip(found, result, strict=True)):
        return None
    return found[0], found[1], result[0], result[1]


def _turning(rotation: Rotation) -> int:
    """Count the dimensions that turn: the map is linear in cos and sin, so doubling both shows."""

    def call(factor: int) -> Tensor:
        def change(place: int | str, value: object) -> object:
            if not isinstance(value, Tensor) or not (
                value.is_floating_point() or value.is_complex()
            ):
                return value
            return torch.ones_like(value) if place in (0, 1, "q", "k") else value * factor

        args = [change(i, value) for i, value in enumerate(rotation.args)]
        kwargs = {name: change(name, value) for name, value in rotation.kwargs.items()}
        result: Tensor = rotation.function(*args, **kwargs)[0]
        return result

    once, twice = call(1), call(2)
    return int((once != twice).flatten(0, -2).any(0).sum())


def _heads_first(x: Tensor, transposed: bool) -> Tensor:
    return x.transpose(1, 2) if transposed else x


def _lies_at(part: Tensor, whole: Tensor, offset: int, transposed: bool) -> bool:
    part = _heads_first(part, transposed)
    target = whole[..., offset : offset + part.shape[-1]]
    try:
        part = part.expand_as(target)  # MLA: one rotated key for all heads
    except RuntimeError:
        return False
    return torch.equal(part.to(target.dtype), target)


def _put_back(part: Tensor, whole: Tensor, offset: int, transposed: bool) -> Tensor:
    part = _heads_first(part, transposed).to(whole.dtype)
    if part.shape == whole.shape:
        return part
    result = whole.clone()
    result[..., offset : offset + part.shape[-1]] = part
    return result
