"""Tokens stored together by several layers, as plans say it; `kvprof.methods.plan` has the rule."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import Tensor

from kvprof.analysis.transform_coding import BITS, Blocks, packed_bytes
from kvprof.errors import UsageError

__all__ = ["Across", "LayerGroup", "check_across", "coded_layers", "coded_tokens"]


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers whose keys, or values, are one row per token.

    Attributes
    ----------
    side : str
        ``keys`` or ``values``.
    layers : tuple of int
        In ascending order; the row has their KV heads side by side, w columns in all.
    basis : Tensor
        ``[w, r]`` float32, orthonormal columns.
    mean : Tensor
        ``[w]`` float32.
    blocks : Blocks
        Of the r coefficients: adjacent columns and the bits of each, see
        `kvprof.analysis.transform_coding`.
    measured : tuple of (int, int)
        Bytes after DEFLATE of a sample, and its tokens; empty where DEFLATE is not used.
    """

    side: str
    layers: tuple[int, ...]
    basis: Tensor
    mean: Tensor
    blocks: Blocks
    measured: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Columns of a row, w."""
        return int(self.basis.shape[0])

    @property
    def rank(self) -> int:
        """Coefficients of a row, r."""
        return int(self.basis.shape[1])

    @property
    def token_bytes(self) -> Fraction:
        """Bytes of a coded token: exact, or after DEFLATE what the sample took on average."""
        return Fraction(*self.measured) if self.measured else Fraction(packed_bytes(self.blocks))


@dataclass(frozen=True, eq=False)
class Across:
    """How a prompt's cache is coded across layers.

    Attributes
    ----------
    groups : tuple of LayerGroup
        Of both sides; the others' keys and values stay as they are.
    window : int
        Newest tokens of the prompt that stay at full precision.
    deflate : bool
        Whether DEFLATE comes last.
    sample : dict
        JSON values: which text the bytes were measured on.
    """

    groups: tuple[LayerGroup, ...]
    window: int
    deflate: bool
    sample: dict[str, Any] = field(default_factory=dict)


def coded_tokens(across: Across, sink: int, tokens: int) -> int:
    """Return how many tokens of a context are coded: all but the first and the newest ones."""
    return max(0, tokens - sink - across.window)


def coded_layers(across: Across | None, side: str) -> frozenset[int]:
    """Return the layers whose keys, or values, are coded."""
    groups = () if across is None else across.groups
    return frozenset(layer for group in groups if group.side == side for layer in group.layers)


def check_across(across: Across, widths: dict[str, Sequence[int | None]]) -> None:
    """Refuse what contradicts itself.

    Parameters
    ----------
    across : Across
    widths : dict
        By side, each layer's columns; None where a layer cannot be coded.

    Raises
    ------
    UsageError
        Naming what makes no sense.
    """
    if across.window < 0 or not across.groups:
        raise UsageError(f"across layers: a window of {across.window} or no group makes no sense")
    seen: set[tuple[str, int]] = set()
    for group in across.groups:
        name = f"{group.side} of layers {', '.join(map(str, group.layers))[:80]}"
        if group.side not in widths:
            raise UsageError(f"across layers: {group.side[:40]!r} is neither keys nor values")
        known = widths[group.side]
        if not group.layers or list(group.layers) != sorted(set(group.layers)):
            raise UsageError(f"{name}: layers must ascend, each once")
        own = [known[x] if 0 <= x < len(known) else None for x in group.layers]
        columns = [x for x in own if x is not None]
        if len(columns) < len(own):
            raise UsageError(
                f"{name}: one is not there, is left out, or has a sliding window, and is not coded"
            )
        taken = {(group.side, layer) for layer in group.layers}
        if taken & seen:
            raise UsageError(f"{name}: a layer is in two groups")
        seen |= taken
        if group.basis.dim() != 2 or group.rank > group.width:
            raise UsageError(f"{name}: a basis of {tuple(group.basis.shape)}")
        if sum(columns) != group.width or group.mean.shape != (group.width,):
            raise UsageError(
                f"{name}: a basis of {group.width} rows for {sum(columns)} columns, or another mean"
            )
        if sum(width for width, _ in group.blocks) != group.rank or any(
            width < 1 or bits not in BITS for width, bits in group.blocks
        ):
            raise UsageError(
                f"{name}: blocks of {group.blocks[:4]} … do not make up {group.rank} coefficients "
                f"of {', '.join(map(str, BITS))} bits"
            )
        sizes = group.measured
        if bool(sizes) is not across.deflate or (sizes and (len(sizes) != 2 or min(sizes) < 1)):
            raise UsageError(f"{name}: bytes after DEFLATE are measured, and of nothing else")
