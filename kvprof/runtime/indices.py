"""Index tensors that the same few heads and rows ask for at every step.

Making one anew copies it to the device and waits for that, several times per layer and step.
"""

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["index_of", "inverse_of"]


@lru_cache(maxsize=1024)
def index_of(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `places` as an index on `device`, ``[len(places)]`` int64; not to be written to."""
    with torch.inference_mode(False):
        return torch.tensor(places, device=device)


@lru_cache(maxsize=1024)
def inverse_of(order: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the index that puts what lies in `order` back into ascending order."""
    with torch.inference_mode(False):
        return torch.tensor(order, device=device).argsort()
