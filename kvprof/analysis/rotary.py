"""Rotary pairs: which dimensions of a head RoPE turns into each other, and what that is made of."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RotaryPairs"]


@dataclass(frozen=True, eq=False)
class RotaryPairs:
    """Which dimensions of a head a layer's RoPE turns into each other, and by which angle.

    Pair f turns ``(x, y)`` into ``(x cos - s y sin, y cos + s x sin)``.

    Attributes
    ----------
    first, second : Tensor
        ``[F]`` int64, the dimensions x and y of each pair.
    sign : Tensor
        ``[F]`` float64, s: 1 or -1.
    column : Tensor
        ``[F]`` int64, the column of the model's tables of cosines and sines.
    """

    first: Tensor
    second: Tensor
    sign: Tensor
    column: Tensor

    @property
    def count(self) -> int:
        """How many pairs, F."""
        return len(self.first)

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int, int, int]]) -> "RotaryPairs":
        """Return them from ``(x, y, s, column)`` of each pair."""
        first, second, sign, column = torch.tensor(pairs, dtype=torch.int64).view(-1, 4).unbind(1)
        return cls(first, second, sign.double(), column)

    def to(self, device: torch.device) -> "RotaryPairs":
        """Return the same on a device."""
        return RotaryPairs(
            *(x.to(device) for x in (self.first, self.second, self.sign, self.column))
        )

    def angles(self, cos: Tensor, sin: Tensor) -> Tensor:
        """Return ``c_j``, ``[…, 2F + 1]``, of the model's tables ``[…, columns]``."""
        one = torch.ones_like(cos[..., :1])
        return torch.cat([cos[..., self.column], sin[..., self.column], one], dim=-1)

    def rotated(self, mean: Tensor) -> Tensor:
        """Return B with ``R_j m = B c_j``: ``[…, d, 2F + 1]`` of ``[…, d]``."""
        width, count = mean.shape[-1], self.count
        result = mean.new_zeros(*mean.shape, 2 * count + 1)
        sign, pair = self.sign.to(mean.dtype), torch.arange(count, device=mean.device)
        x, y = mean[..., self.first], mean[..., self.second]
        result[..., self.first, pair] = x
        result[..., self.first, count + pair] = -sign * y
        result[..., self.second, pair] = y
        result[..., self.second, count + pair] = sign * x
        still = self.still(width)
        result[..., still, 2 * count] = mean[..., still]
        return result

    def still(self, width: int) -> Tensor:
        """Return the dimensions that RoPE leaves as they are, of a head of `width`."""
        turned = torch.zeros(width, dtype=torch.bool, device=self.first.device)
        turned[self.first] = turned[self.second] = True
        return (~turned).nonzero().squeeze(-1)
