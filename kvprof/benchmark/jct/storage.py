"""Bytes of a method's cache and of the weights beside it, counted without making either."""

from collections.abc import Callable

import torch

from kvprof.benchmark.jct.ablations import Variant
from kvprof.benchmark.jct.layer import ModelShape
from kvprof.benchmark.jct.levels import levels_layout
from kvprof.benchmark.ranks import Widths
from kvprof.benchmark.shapes import Shape
from kvprof.kernels.planes import RaggedLayout

__all__ = ["cache_bytes", "full_bytes", "level_tokens", "weight_bytes"]

_TALE_LEVELS = ("sink", "middle", "recent")


def full_bytes(shape: Shape, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of all layers' K and V at full width."""
    row = 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    return _over_layers(shape, tokens, lambda kept: batch * kept * row)


def cache_bytes(
    variant: Variant,
    shape: Shape,
    widths: Widths | None,
    batch: int,
    tokens: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of all layers' caches: scales, padding and a request's bases included.

    Parameters
    ----------
    variant : Variant
    shape : Shape
    widths : Widths or None
        From the variant.
    batch, tokens : int
    dtype : torch.dtype
        Of what is not quantised.

    Raises
    ------
    UsageError
        When a sequence is too short for TALE's levels.
    """
    family = variant.family
    if family == "full":
        return full_bytes(shape, batch, tokens, dtype)
    if family == "levels":
        return _over_layers(
            shape,
            tokens,
            lambda kept: levels_layout(variant.method, shape, widths, batch, kept, dtype).nbytes,
        )
    assert widths is not None  # every other method has them
    group = shape.num_heads // len(widths.keys)
    extra = 0
    if family == "strawman":
        extra = 2 * batch * shape.num_kv_heads * shape.head_dim * widths.keys[0]

    def layer(kept: int) -> int:
        layout = RaggedLayout(widths.keys, widths.values, group, batch, kept)
        return (layout.elements + extra) * dtype.itemsize

    return _over_layers(shape, tokens, layer)


def level_tokens(variant: Variant, shape: Shape, tokens: int) -> dict[str, int]:
    """Return how many tokens each level holds; empty for a method without levels."""
    if variant.method.kind != "tale":
        return {}
    layout = levels_layout(variant.method, shape, None, 1, tokens, torch.float32)
    held = [segment.layout.capacity for segment in layout.segments]
    return dict(zip(_TALE_LEVELS, held, strict=True))


def weight_bytes(
    variant: Variant, model: ModelShape, widths: Widths | None, dtype: torch.dtype
) -> int:
    """Return the bytes of one GPU's weights, with what a method folds into them."""
    shape = model.attention
    full = shape.num_kv_heads * shape.head_dim
    keys = values = full
    output = shape.num_heads * shape.head_dim
    family = variant.family
    low = widths is not None and variant.method.kind != "tale" and family != "strawman"
    if low and widths is not None:
        heads = shape.num_kv_heads // len(widths.keys)
        values, output = sum(widths.values), sum(heads * shape.group * v for v in widths.values)
        if family == "latents" or variant.folded_for(shape):
            keys = sum(widths.keys)
        if family == "latents":
            output += shape.num_heads * shape.head_dim  # prefill keeps the model's own W_O
    return model.weight_values(keys, values, output) * dtype.itemsize


def _over_layers(shape: Shape, tokens: int, layer: Callable[[int], int]) -> int:
    """Sum over layers; one with a sliding window keeps its window."""
    full = shape.full_layers
    total = full * layer(tokens) if full else 0
    if full < shape.layers and shape.sliding_window is not None:
        total += (shape.layers - full) * layer(min(tokens, shape.sliding_window))
    return total
