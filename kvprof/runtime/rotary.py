"""Rotates rebuilt keys as the model rotated them: with its own function, at their own positions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.methods.plan import LayerPlan, Placement
from kvprof.models.interface import Rotation, rotary_tables
from kvprof.models.layout import LayerLayout
from kvprof.runtime.tensors import unflatten

__all__ = ["RotaryTable", "angles", "rebuilds", "rotated"]


def rebuilds(layer: LayerPlan, facts: LayerLayout) -> bool:
    """Whether keys are stored before RoPE, in a layer that has it, and rebuilt at every use."""
    return layer.keys.placement is Placement.PRE_ROPE and facts.rotary_dim > 0


@dataclass
class RotaryTable:
    """Cosines and sines of every token, ``[batch, T, rotary width]`` each; not counted."""

    cos: Tensor
    sin: Tensor

    def extended(self, cos: Tensor, sin: Tensor) -> "RotaryTable":
        """Return the table with the tokens of one more pass."""
        batch = self.cos.shape[0]
        cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
        return RotaryTable(torch.cat([self.cos, cos], 1), torch.cat([self.sin, sin], 1))

    def at(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Look up tokens."""
        index = rows.view(-1, 1, 1)
        return self.cos[index, positions], self.sin[index, positions]


def angles(rotation: Rotation, batch: int) -> RotaryTable:
    """Return the cosines and sines that a call of a rotary function got."""
    tables = rotary_tables(rotation)
    if tables is None:
        name = getattr(rotation.function, "__name__", "its rotary function")
        raise UsageError(f"keys cannot be rebuilt before RoPE: {name} takes no cos and sin tables")
    return RotaryTable(*(x.expand(batch, -1, -1) for x in tables))


def rotated(
    rotation: Rotation, keys: Tensor, cos: Tensor, sin: Tensor, offset: int, transposed: bool
) -> Tensor:
    """Rotate keys by the model's own function."""
    flat = keys.flatten(0, 1)
    width = (rotation.args[1] if len(rotation.args) > 1 else rotation.kwargs["k"]).shape[-1]
    part = flat[..., offset : offset + width]
    part = part.transpose(1, 2) if transposed else part
    tables = {"q": part, "k": part, "cos": cos.flatten(0, 1), "sin": sin.flatten(0, 1)}
    names = ("q", "k", "cos", "sin")
    args = [tables[n] for n, _ in zip(names, rotation.args, strict=False)] + [*rotation.args[4:]]
    kwargs = {name: tables.get(name, value) for name, value in rotation.kwargs.items()}
    own: Tensor = rotation.function(*args, **kwargs)[1]
    own = own.transpose(1, 2) if transposed else own
    result = flat.clone() if width != flat.shape[-1] else own
    if width != flat.shape[-1]:
        result[..., offset : offset + width] = own
    return unflatten(result.to(keys.dtype), 0, keys.shape[:2])
