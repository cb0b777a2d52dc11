"""Store an engine's keys before RoPE: its rotary embedding then rotates queries only.

Reading rotates keys by the embedding's own table, whose form is checked before weights load.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kvprof.errors import UsageError
from kvprof.runtime.backends.rotary import RotaryForm

__all__ = ["QueriesAlone", "keep_keys"]

# How far rotated keys may be from what the form says; a wrong form is wrong by a factor.
_FAR = 0.05


class QueriesAlone(nn.Module):
    """A model's rotary embedding of which keys come out as they went in."""

    def __init__(self, rotary: Any, form: RotaryForm) -> None:
        super().__init__()
        self.rotary: Any = rotary  # the model's own, `f(positions, query, key)`
        self.form = form

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the queries."""
        return self.rotary(positions, query, None)[0], key

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position, ``[positions, width / 2]`` each."""
        cos, sin = self.rotary.cos_sin_cache.chunk(2, dim=-1)
        return cos, sin


def keep_keys(parent: nn.Module, head_dim: int, longest: int) -> None:
    """Let a layer's keys reach its attention as they are before RoPE."""
    found: list[tuple[str, Any]] = [
        (name, child)
        for name, child in parent.named_children()
        if isinstance(getattr(child, "cos_sin_cache", None), Tensor)
    ]
    what = f"keys of {type(parent).__name__} cannot be rebuilt"
    if len(found) != 1:
        raise UsageError(f"{what}: it has {len(found)} rotary embeddings with tables, not one")
    ((name, rotary),) = found
    table = rotary.cos_sin_cache
    if table.dim() != 2 or len(table) < longest:
        raise UsageError(
            f"{what} at {longest:,} positions: its rotary table has shape {tuple(table.shape)}; "
            "use a smaller --max-model-len"
        )
    form = RotaryForm(table.shape[1], not getattr(rotary, "is_neox_style", True), 1)
    if not _rotates_so(rotary, form, head_dim, longest):
        raise UsageError(f"{what}: {type(rotary).__name__} does not rotate as its table says")
    setattr(parent, name, QueriesAlone(rotary, form))


def _rotates_so(rotary: Any, form: RotaryForm, head_dim: int, longest: int) -> bool:
    """Whether keys at some positions are rotated as the form says."""
    table = rotary.cos_sin_cache
    positions = torch.tensor([0, 1, longest // 2, longest - 1], device=table.device)
    # An engine that builds its model has made the GPU torch's own device, and the generator is not.
    generator = torch.Generator("cpu").manual_seed(0)
    shape = len(positions), 2, head_dim
    keys = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    keys = keys.to(table)
    flat = keys.flatten(1)
    try:
        rotated = rotary.forward_native(positions, flat.clone(), flat.clone())[1]
    except (IndexError, RuntimeError, TypeError, ValueError):
        return False
    cos, sin = table[positions, None].chunk(2, dim=-1)
    apart = rotated.unflatten(1, (2, -1)).float() - form.rotated(keys, cos, sin).float()
    return bool(apart.norm() <= _FAR * keys.float().norm())
