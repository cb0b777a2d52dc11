"""Packs codes of 2, 3, 4 or 8 bits densely into bytes, one token's row at a time."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvprof.runtime.shapes import unflatten

__all__ = ["pack", "unpack"]

_GROUP = 8  # so many codes fill whole bytes at any number of bits


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack each row of codes into ``ceil(r * bits / 8)`` bytes, lowest bits first.

    Parameters
    ----------
    codes : Tensor
        ``[..., r]`` integers in ``0 … 2^bits - 1``.
    bits : int
        1 to 8.

    Returns
    -------
    Tensor
        ``[..., ceil(r * bits / 8)]`` uint8.
    """
    if bits == 8:
        return codes.to(torch.uint8)
    columns = codes.shape[-1]
    padded = pad(codes.to(torch.int64), (0, -columns % _GROUP))
    words = unflatten(padded, -1, (-1, _GROUP))
    shifts = bits * torch.arange(_GROUP, device=codes.device)
    words = (words << shifts).sum(-1, keepdim=True)
    octets = (words >> (8 * torch.arange(bits, device=codes.device))) & 255
    return octets.flatten(-2)[..., : math.ceil(columns * bits / 8)].to(torch.uint8)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Undo `pack`.

    Parameters
    ----------
    packed : Tensor
        As `pack` returned it.
    bits : int
    columns : int
        Codes per row, r.

    Returns
    -------
    Tensor
        ``[..., columns]``, uint8 or int64.
    """
    if bits == 8:
        return packed
    if 8 % bits == 0:  # no code lies in two bytes
        steps = bits * torch.arange(8 // bits, device=packed.device, dtype=torch.uint8)
        codes: Tensor = (packed.unsqueeze(-1) >> steps) & (2**bits - 1)
        return codes.flatten(-2)[..., :columns]
    octets = unflatten(pad(packed.to(torch.int64), (0, -packed.shape[-1] % bits)), -1, (-1, bits))
    words = (octets << (8 * torch.arange(bits, device=packed.device))).sum(-1, keepdim=True)
    shifts = bits * torch.arange(_GROUP, device=packed.device)
    codes = (words >> shifts) & (2**bits - 1)
    return codes.flatten(-2)[..., :columns]
