"""Bytes of a method's cache and of the weights beside it: its plan's, by the one account."""

import torch

from kvprof.benchmark.jct import steps
from kvprof.benchmark.jct.ablations import Variant, parse_variant
from kvprof.benchmark.jct.layer import ModelShape
from kvprof.benchmark.ranks import Widths
from kvprof.benchmark.shapes import Shape, layout_of
from kvprof.methods import accounting

__all__ = ["cache_bytes", "full_bytes", "level_tokens", "weight_bytes"]


def full_bytes(shape: Shape, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of all layers' K and V at full width."""
    plan = parse_variant("full").plan(shape, None)
    return accounting.full_bytes(plan, tokens, itemsize=dtype.itemsize, batch=batch)


def cache_bytes(
    variant: Variant,
    shape: Shape,
    widths: Widths | None,
    batch: int,
    tokens: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of all layers' caches: scales and a request's bases included.

    Parameters
    ----------
    variant : Variant
    shape : Shape
    widths : Widths or None
        From the variant.
    batch, tokens : int
    dtype : torch.dtype
        Of what is not quantised.
    """
    plan = variant.plan(shape, widths)
    return accounting.bytes_at(plan, tokens, itemsize=dtype.itemsize, batch=batch).total


def level_tokens(
    variant: Variant, shape: Shape, widths: Widths | None, tokens: int
) -> dict[str, int]:
    """Return how many tokens each level holds; empty for a method without levels."""
    return steps.level_tokens(variant.plan(shape, widths), tokens)


def weight_bytes(
    variant: Variant, model: ModelShape, widths: Widths | None, dtype: torch.dtype
) -> int:
    """Return the bytes of one GPU's weights, with what a method folds into them or runs beside."""
    shape = model.attention
    full = shape.num_kv_heads * shape.head_dim
    own = model.weight_values(full, full, shape.num_heads * shape.head_dim) * dtype.itemsize
    plan = variant.plan(shape, widths)
    return own + accounting.weight_bytes(plan, layout_of(shape), itemsize=dtype.itemsize).total
