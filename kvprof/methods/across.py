"""Tokens stored together by several layers, as plans say it; `kvprof.methods.plan` has the rule."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvprof.errors import UsageError

if TYPE_CHECKING:
    from kvprof.analysis.transform_coding import Blocks

__all__ = ["Across", "LayerGroup", "check_across", "coded_layers", "coded_tokens", "read_alike"]


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers whose keys, or values, are one row per token.

    Attributes
    ----------
    side : str
        ``keys`` or ``values``.
    layers : tuple of int
        In ascending order; the row has their KV heads side by side.
    width : int
        Columns of the row, w.
    rank : int
        Coefficients of a row, r.
    basis : Tensor or None
        ``[w, r]`` float32, orthonormal columns; None where each sequence finds its own.
    mean : Tensor or None
        ``[w]`` float32; None for 0.
    blocks : Blocks
        Of the r coefficients: adjacent columns and the bits of each, see
        `kvprof.analysis.transform_coding`; empty where they stay in the model's dtype.
    measured : tuple of (int, int)
        Bytes after DEFLATE of a sample, and its tokens; empty where DEFLATE is not used.
    """

    side: str
    layers: tuple[int, ...]
    width: int
    rank: int
    basis: Tensor | None = None
    mean: Tensor | None = None
    blocks: "Blocks" = ()
    measured: tuple[int, ...] = ()

    @property
    def kept(self) -> int:
        """Coefficients that are stored: of blocks those that have bits."""
        stored = sum(columns for columns, bits in self.blocks if bits)
        return stored if self.blocks else self.rank

    @property
    def token_bytes(self) -> Fraction:
        """Bytes of a token at rest: exact, or after DEFLATE what the sample took on average."""
        if self.measured:
            return Fraction(*self.measured)
        from kvprof.analysis.transform_coding import packed_bytes

        return Fraction(packed_bytes(self.blocks))


@dataclass(frozen=True, eq=False)
class Across:
    """How tokens are stored across layers.

    Attributes
    ----------
    groups : tuple of LayerGroup
        Of both sides; the others' keys and values stay as they are.
    window : int
        Newest tokens that stay at full precision; at rest, of the prompt.
    block : int
        Tokens that become latents at a time, which decoding reads; 0 for a cache at rest, from
        which nothing decodes.
    deflate : bool
        Whether DEFLATE comes last, at rest.
    sample : dict
        JSON values: which text the bytes were measured on.
    """

    groups: tuple[LayerGroup, ...]
    window: int
    block: int = 0
    deflate: bool = False
    sample: dict[str, Any] = field(default_factory=dict)

    @property
    def at_rest(self) -> bool:
        """Whether what is stored is not decoded from."""
        return not self.block


def coded_tokens(across: Across, sink: int, tokens: int) -> int:
    """Return how many tokens of a context are coded: all but the first and the newest ones."""
    rest = max(0, tokens - sink - across.window)
    return rest if across.at_rest else rest // across.block * across.block


def read_alike(across: Across, sink: int, start: int, stop: int) -> list[tuple[int, int]]:
    """Cut decoded tokens into runs within which no older token is read otherwise than before.

    A pass over a run attends as a pass over each of its tokens would.

    Parameters
    ----------
    across : Across
    sink : int
        Of the plan's levels.
    start, stop : int
        The first decoded token, after a prompt of so many, and the one after the last.
    """

    def stored(tokens: int) -> int:
        # At rest the prompt alone is coded, in front of a pass over a single token.
        return min(tokens, start + 1) if across.at_rest else coded_tokens(across, sink, tokens)

    borders = [start, *(i for i in range(start + 1, stop) if stored(i) != stored(i - 1)), stop]
    return [(first, last) for first, last in pairwise(borders) if first < last]


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
    if min(across.window, across.block) < 0 or not across.groups:
        raise UsageError(
            f"across layers: window {across.window} and block {across.block} must be 0 or more, "
            "with 1 or more groups"
        )
    seen: set[tuple[str, int]] = set()
    for group in across.groups:
        name = f"{group.side[:40]} of layers {', '.join(map(str, group.layers))[:80]}"
        if group.side not in widths:
            raise UsageError(f"across layers: {group.side[:40]!r} is neither keys nor values")
        known = widths[group.side]
        if not group.layers or list(group.layers) != sorted(set(group.layers)):
            raise UsageError(f"{name}: list each layer once, in ascending order")
        own = [known[x] if 0 <= x < len(known) else None for x in group.layers]
        columns = [x for x in own if x is not None]
        if len(columns) < len(own):
            raise UsageError(
                f"{name}: a layer does not exist, is skipped or has a sliding window; leave it out"
            )
        taken = {(group.side, layer) for layer in group.layers}
        if taken & seen:
            raise UsageError(f"{name}: a layer is in two groups; use one")
        seen |= taken
        shapes = [
            (matrix, shape)
            for matrix, shape in (
                (group.basis, (group.width, group.rank)),
                (group.mean, (group.width,)),
            )
            if matrix is not None
        ]
        if sum(columns) != group.width or any(tuple(x.shape) != shape for x, shape in shapes):
            raise UsageError(
                f"{name}: {group.width} columns, a basis or a mean that do not match the "
                f"layers' {sum(columns)} columns"
            )
        if not 0 <= group.rank <= group.width:
            raise UsageError(f"{name}: rank {group.rank} is not between 0 and {group.width}")
        _check_stored(name, group, across)
    sides = [{x.layers for x in across.groups if x.side == side} for side in widths]
    if not across.at_rest and sides[0] != sides[1]:
        raise UsageError("across layers: keys and values must have the same groups of layers")


def _check_stored(name: str, group: LayerGroup, across: Across) -> None:
    if not across.at_rest:
        if group.blocks or group.measured or across.deflate or group.rank < 1:
            raise UsageError(
                f"{name}: latents used in decode require rank 1 or more and cannot have bits or "
                "DEFLATE"
            )
        if group.mean is not None:
            raise UsageError(f"{name}: latents used in decode cannot have a mean")
        return
    from kvprof.analysis.transform_coding import BITS

    if group.basis is None or group.mean is None:
        raise UsageError(f"{name}: coding at rest requires a basis and a mean in the plan")
    if sum(width for width, _ in group.blocks) != group.rank or any(
        width < 1 or bits not in BITS for width, bits in group.blocks
    ):
        raise UsageError(
            f"{name}: blocks {group.blocks[:4]} … must cover {group.rank} coefficients; bits: "
            f"{', '.join(map(str, BITS))}"
        )
    sizes = group.measured
    if bool(sizes) is not across.deflate or (sizes and (len(sizes) != 2 or min(sizes) < 1)):
        raise UsageError(
            f"{name}: measured bytes require DEFLATE, and DEFLATE requires two of them"
        )
