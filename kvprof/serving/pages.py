"""What a page of an engine's cache holds for a plan: widths and bytes, by layer and rank.

A page is a row of `kvprof.kernels.planes.RaggedLayout` with the page's tokens as its capacity: one
stretch of memory with everything of its tokens. Ranks that are no multiple of 16 are widened with
columns of zeros (`kvprof.kernels.planes.widened`), as the kernels ask for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvprof.kernels.planes import widened
from kvprof.methods.plan import Plan
from kvprof.serving.ranks import Assignment, assign

__all__ = ["LayerPages", "full_token_bytes", "imbalance", "layer_pages", "token_bytes"]


@dataclass(frozen=True)
class LayerPages:
    """How a layer's tokens lie in pages.

    Attributes
    ----------
    key_widths, value_widths : tuple of int
        Stored columns of each of the plan's KV heads.
    assignment : Assignment
        The ranks' heads.
    """

    key_widths: tuple[int, ...]
    value_widths: tuple[int, ...]
    assignment: Assignment

    @property
    def columns(self) -> int:
        """Values of a token in a page, the same on every rank."""
        return self.assignment.widest

    def of_rank(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the widths of K and of V of a rank's heads."""
        own = self.assignment.heads[rank]
        return tuple(self.key_widths[head] for head in own), tuple(
            self.value_widths[head] for head in own
        )


def layer_pages(plan: Plan, ranks: int = 1) -> list[LayerPages]:
    """Return what each layer of a plan stores.

    Parameters
    ----------
    plan : Plan
        One that can be served (`kvprof.serving.refusals`).
    ranks : int
        Of tensor parallelism.

    Raises
    ------
    UsageError
        When heads cannot be dealt out evenly, or a width cannot run.
    """
    found = []
    for layer in plan.layers:
        keys = tuple(widened(group.rank) for group in layer.keys.groups)
        values = tuple(widened(group.rank) for group in layer.values.groups)
        both = [key + value for key, value in zip(keys, values, strict=True)]
        found.append(LayerPages(keys, values, assign(both, ranks)))
    return found


def token_bytes(layers: Sequence[LayerPages], itemsize: int) -> int:
    """Return the bytes of a token in the pages of all layers of one rank."""
    return sum(layer.columns for layer in layers) * itemsize


def full_token_bytes(plan: Plan, itemsize: int, ranks: int = 1) -> int:
    """Return the bytes of a token at full width, of one rank."""
    return (
        sum(
            group.width * itemsize
            for layer in plan.layers
            for side in (layer.keys, layer.values)
            for group in side.groups
        )
        // ranks
    )


def imbalance(layers: Sequence[LayerPages]) -> float:
    """Return the share of all pages that stays empty because ranks are unlike."""
    stored = sum(sum(layer.assignment.columns) for layer in layers)
    room = sum(layer.columns * len(layer.assignment.columns) for layer in layers)
    return 1 - stored / room
