"""Who may see whom: masks in full, and where each row's real tokens begin."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import find_packed_sequence_indices, sdpa_mask

from kvprof.errors import UsageError
from kvprof.runtime.tensors import is_capturing

__all__ = ["MaskFacts", "Masks", "mask_facts", "masks", "visible_keys", "whole_mask", "without"]


class Masks(threading.local):
    """Whether the pass needs masks; the kernels apply causality themselves."""

    needed = True


masks = Masks()


def whole_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Give the whole mask, always: its absence means causal to one kernel, all to another."""
    if not masks.needed:
        return None
    kwargs["allow_is_causal_skip"] = False
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def without(lent: Callable[[], object]) -> Callable[..., Any]:
    """Return transformers' mask options as if there were no cache, so packed texts are found."""
    read = masking_utils._preprocess_mask_arguments

    def reading(*args: Any, **kwargs: Any) -> Any:
        hidden = lent()
        kwargs = {name: None if value is hidden else value for name, value in kwargs.items()}
        return read(*(None if value is hidden else value for value in args), **kwargs)

    return reading


def visible_keys(mask: Tensor | None, stored: int, tokens: int) -> Tensor | None:
    """Return which stored and own keys each query sees, ``[rows, 1, t, stored + t]``."""
    if mask is None:
        return None
    if mask.is_floating_point():
        mask = mask > torch.finfo(mask.dtype).min / 2
    if mask.shape[-1] - tokens < stored:
        raise UsageError(
            f"the attention mask covers {mask.shape[-1]} keys, but there are {stored + tokens}"
        )
    return mask[..., mask.shape[-1] - tokens - stored :]


@dataclass(frozen=True)
class MaskFacts:
    """What the host knows of a pass's attention mask."""

    starts: list[int]  # where each row's first real token stands
    holes: bool  # whether tokens after it are hidden
    plain: bool  # whether nothing but padding on the left is hidden, as far as the mask can be read


def mask_facts(
    mask: Any, batch: int, tokens: int, past: int, positions: Tensor | None = None
) -> MaskFacts:
    """Read a pass's attention mask; a GPU is asked once."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        packed = False
        if mask is None and positions is not None:  # of M-RoPE the first, where there are several
            rows = positions[0] if positions.dim() == 3 else torch.atleast_2d(positions)
            packed = find_packed_sequence_indices(rows) is not None
        return MaskFacts([0] * batch, packed, mask is None and not packed)
    if is_capturing(mask.device):
        raise UsageError(
            "a CUDA graph cannot read an attention mask; capture the step without attention_mask "
            "and give position_ids"
        )
    real = mask.bool()[:, : past + tokens]
    first = torch.where(real.any(1), real.int().argmax(dim=1), past + tokens)
    holes = (real.int().diff(dim=1) < 0).any(1)
    starts, torn = torch.stack([first, holes.to(first)]).tolist()
    return MaskFacts(starts, any(torn), not any(torn) and real.shape[1] == past + tokens)
