"""Who may see whom: masks in full, and where each row's real tokens begin."""

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from kvprof.errors import UsageError

__all__ = ["first_real", "has_holes", "visible_keys", "whole_mask"]


def whole_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Give the whole mask, always: its absence means causal to one kernel, all to another."""
    kwargs["allow_is_causal_skip"] = False
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def visible_keys(mask: Tensor | None, stored: int, tokens: int) -> Tensor | None:
    """Return which stored and own keys each query sees, ``[rows, 1, t, stored + t]``."""
    if mask is None:
        return None
    if mask.is_floating_point():
        mask = mask > torch.finfo(mask.dtype).min / 2
    if mask.shape[-1] - tokens < stored:
        raise UsageError(
            f"the attention mask is for {mask.shape[-1]} keys, but {stored + tokens} are there"
        )
    return mask[..., mask.shape[-1] - tokens - stored :]


def first_real(mask: Any, batch: int, tokens: int, past: int) -> list[int]:
    """Return where each row's first real token stands."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return [0] * batch
    real = mask.bool()
    first = real.int().argmax(dim=1)
    return torch.where(real.any(1), first, past + tokens).tolist()


def has_holes(mask: Any) -> bool:
    """Whether a 2D mask hides tokens after the first real one."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return False
    return bool((mask.int().diff(dim=1) < 0).any())
