"""What keys and values of several layers have in common: their moments together, and a sample.

A token's keys of all KV heads of the layers of a group, side by side, are one row, its values
another. Second moments with a constant column beside them hold the rows' mean too; a sequence that
they leave out shows what codes of such rows cost.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["AcrossMoments", "layer_groups"]

# Tokens that are widened to float64 at a time.
_BLOCK = 2048


def layer_groups(layers: tuple[int, ...], size: int) -> tuple[tuple[int, ...], ...]:
    """Cut layers into runs of `size`, the last perhaps shorter; 0 takes all together.

    Parameters
    ----------
    layers : tuple of int
        In ascending order.
    size : int
    """
    step = size or max(1, len(layers))
    return tuple(layers[start : start + step] for start in range(0, len(layers), step))


@dataclass
class AcrossMoments:
    """Moments of rows that go across layers.

    Attributes
    ----------
    groups : tuple of tuple of int
        Layers that are taken together, in ascending order.
    skip : int
        First tokens of each sequence that are not counted.
    grams : dict
        By side (``keys``, ``values``) and number of the group, ``[w + 1, w + 1]`` float64: of the
        rows with a 1 behind them.
    samples : dict
        By the same, the rows ``[n, w]`` of the first sequence, which no gram counts.
    """

    groups: tuple[tuple[int, ...], ...]
    skip: int
    grams: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    samples: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _waiting: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)

    def add(self, layer: int, vectors: Mapping[str, Tensor]) -> None:
        """Take one layer of a forward pass; a group is counted when its last layer comes.

        Parameters
        ----------
        layer : int
            In ascending order within a pass.
        vectors : mapping of str to Tensor
            ``keys`` and ``values``, ``[batch, heads, T, d]``.
        """
        number = next((at for at, own in enumerate(self.groups) if layer in own), None)
        if number is None:
            return
        for side, states in vectors.items():
            rows = self._waiting.setdefault((side, number), [])
            rows.append(states[:, :, self.skip :].transpose(1, 2).flatten(2))
            if layer == self.groups[number][-1]:
                device = rows[0].device
                joined = torch.cat([one.to(device) for one in rows], dim=-1)
                del self._waiting[side, number]
                self._count((side, number), joined)

    def _count(self, key: tuple[str, int], rows: Tensor) -> None:
        width = rows.shape[-1] + 1
        if key not in self.grams:
            self.samples[key] = rows[0].clone()
            rows = rows[1:]
            self.grams[key] = torch.zeros(width, width, dtype=torch.float64, device=rows.device)
        for sequence in rows:
            for block in sequence.split(_BLOCK):
                wide = torch.nn.functional.pad(block.double(), (0, 1), value=1.0)
                self.grams[key].addmm_(wide.T, wide)
