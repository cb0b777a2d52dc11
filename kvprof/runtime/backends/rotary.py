"""How a model's rotary function pairs columns and reads its tables, as the kernels have to know it.

The torch path calls the function itself; a kernel computes ``k1 cos - k2 sin`` and ``k2 cos +
k1 sin`` of every pair. Which columns are a pair, and where its angle lies in a table, is
found by calling the function with angles that are all different.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from kvprof.kernels.reconstruct.rebuild_config import halves
from kvprof.models.interface import text_decoder, wrapped_rotations
from kvprof.models.load import LoadedModel

__all__ = ["RotaryForm", "rotary_form", "rotary_functions"]


@dataclass(frozen=True)
class RotaryForm:
    """How a rotary function works."""

    width: int  # columns that turn, the first of a head
    #: Whether neighbours are pairs (GLM, Cohere), and not column i and `width / 2 + i`.
    interleaved: bool
    stride: int  # pair i's angle is in column `i * stride` of a table

    def pairs(self, table: Tensor) -> Tensor:
        """Return a table's columns with one angle per pair, ``[..., width / 2]``: a view."""
        return table[..., : self.width // 2 * self.stride : self.stride]

    def rotated(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate ``[..., d]`` by angles ``[..., width / 2]``."""
        first, second = halves(self.width, self.interleaved)
        one, other = keys[..., first], keys[..., second]
        result = keys.clone()
        result[..., first] = one * cos - other * sin
        result[..., second] = other * cos + one * sin
        return result


@lru_cache(maxsize=64)
def rotary_form(function: Callable[..., Any], width: int, transposed: bool) -> RotaryForm | None:
    """Find out how a function ``f(q, k, cos, sin)`` works; None where no kernel knows it."""
    generator = torch.Generator().manual_seed(0)
    angles = 6 * torch.rand(1, 3, width // 2, generator=generator, dtype=torch.float64)
    keys = torch.randn(1, 1, 3, width, generator=generator, dtype=torch.float64)
    for whole, stride in ((_twice, 1), (_doubled, 2), (_once, 1)):
        cos, sin = whole(angles.cos()), whole(angles.sin())
        given = keys.transpose(1, 2) if transposed else keys
        try:
            found = function(given, given, cos, sin)[1]
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            continue  # a function of other arguments, or a table of another width
        if not isinstance(found, Tensor) or found.shape != given.shape:
            continue
        found = found.transpose(1, 2) if transposed else found
        for interleaved in (False, True):
            form = RotaryForm(width, interleaved, stride)
            wanted = form.rotated(keys, form.pairs(cos), form.pairs(sin))
            # Some functions compute in float32 whatever they get.
            if torch.allclose(found.double(), wanted, atol=1e-4):
                return form
    return None


def _twice(angles: Tensor) -> Tensor:
    return torch.cat([angles, angles], dim=-1)


def _doubled(angles: Tensor) -> Tensor:
    return angles.repeat_interleave(2, dim=-1)


def _once(angles: Tensor) -> Tensor:
    return angles


def rotary_functions(loaded: LoadedModel) -> tuple[Callable[..., Any], ...]:
    """Return the rotary functions that a model's attention may call."""
    functions: list[Callable[..., Any]] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        # Another context may be watching the same function.
        functions.append(unwrap(function))
        return function

    with wrapped_rotations(text_decoder(loaded.model), noted):
        pass
    return tuple(functions)
