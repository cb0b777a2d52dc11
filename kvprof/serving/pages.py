"""What a page of an engine's cache holds for a plan: heads, widths and bytes, by layer and rank.

A page is a row of `kvprof.kernels.planes.RaggedLayout` with the page's tokens as its capacity: one
stretch of memory with everything of its tokens. Ranks that are no multiple of 16 are widened with
columns of zeros (`kvprof.kernels.planes.widened`), as the kernels ask for. Quantised latents lie in
blocks instead, of which a page holds whole ones (`kvprof.kernels.quantized.layout`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout, widened
from kvprof.kernels.quantized.codes import Bits
from kvprof.kernels.quantized.layout import Segment, SegmentsLayout
from kvprof.methods.plan import Plan
from kvprof.runtime.backends.segment_store import shared_columns, stored_as

__all__ = [
    "Assignment",
    "Codes",
    "LayerPages",
    "assign",
    "check_page",
    "imbalance",
    "layer_pages",
    "plan_codes",
    "quantised_layout",
    "token_bytes",
]

# --- Which KV heads each rank of tensor parallelism serves. An engine gives a page the same size on
# every rank. Where heads have unlike widths, a rank that got the wide ones makes the pages of all
# ranks wide, so heads change places: each rank gets as many as before, and widths that add up as
# nearly alike as whole heads allow.

# Up to so many heads the first rank's are found by looking at all choices.
_FEW = 16


@dataclass(frozen=True)
class Assignment:
    """The KV heads of a layer by rank, or the latents that several of them share."""

    heads: tuple[tuple[int, ...], ...]  # for each rank the plan's KV heads (latents), in order
    columns: tuple[int, ...]  # stored columns of each rank, the sum of its heads' widths

    @property
    def order(self) -> tuple[int, ...]:
        """The plan's KV heads (latents) in the order in which the ranks have them."""
        return tuple(head for own in self.heads for head in own)

    @property
    def widest(self) -> int:
        """Columns of the rank that has most: those that every rank's pages have room for."""
        return max(self.columns)


def assign(widths: Sequence[int], ranks: int, shared: int = 1) -> Assignment:
    """Give each rank as many KV heads, of widths that add up alike."""
    count = len(widths)
    if ranks < 1 or count % ranks:
        what = "KV heads" if shared == 1 else f"latents shared by {shared} KV heads"
        raise UsageError(f"{count} {what} are not divisible among {ranks} tensor-parallel ranks")
    each = count // ranks
    rest, heads = list(range(count)), []
    for left in range(ranks, 0, -1):
        wanted = sum(widths[head] for head in rest) / left
        own = _nearest(rest, widths, each, wanted) if left > 1 else tuple(rest)
        heads.append(own)
        rest = [head for head in rest if head not in own]
    found = _swapped(heads, widths)
    return Assignment(
        tuple(tuple(sorted(own)) for own in found),
        tuple(sum(widths[head] for head in own) for own in found),
    )


def _nearest(
    heads: Sequence[int], widths: Sequence[int], each: int, wanted: float
) -> tuple[int, ...]:
    """Choose `each` heads whose widths add up to nearly `wanted`, the widest head among them."""
    order = sorted(heads, key=lambda head: (-widths[head], head))
    if len(order) <= _FEW:
        first, others = order[0], order[1:]
        choices = ((first, *more) for more in combinations(others, each - 1))
        return min(choices, key=lambda own: abs(sum(widths[head] for head in own) - wanted))
    # The widest, then the narrowest of what is left, in turn.
    return tuple(order[at // 2] if at % 2 == 0 else order[-1 - at // 2] for at in range(each))


def _swapped(heads: Sequence[Sequence[int]], widths: Sequence[int]) -> list[list[int]]:
    """Let ranks swap heads while that makes the fullest one narrower."""
    found = [list(own) for own in heads]
    while True:
        sums = [sum(widths[head] for head in own) for own in found]
        full = max(range(len(found)), key=lambda rank: sums[rank])
        best: tuple[int, int, int, int] | None = None
        for rank, own in enumerate(found):
            for here, mine in enumerate(found[full]):
                for there, other in enumerate(own):
                    moved = widths[mine] - widths[other]
                    after = max(sums[full] - moved, sums[rank] + moved)
                    if rank != full and after < (best[0] if best else sums[full]):
                        best = (after, rank, here, there)
        if best is None:
            return found
        _, rank, here, there = best
        found[full][here], found[rank][there] = found[rank][there], found[full][here]


# --- What lies in a page.


@dataclass(frozen=True)
class Codes:
    """How latents are quantised in pages."""

    keys: Bits  # bits of a column; None stays as it is
    values: Bits
    columns: int | None  # that share a scale; None for a token's whole row


def plan_codes(plan: Plan) -> Codes | None:
    """Return how a plan's latents are quantised in pages; None where they are not."""
    quantiser = plan.quantiser
    if quantiser is None:
        return None
    layer = plan.layers[0]  # all are stored alike, as `kvprof.serving.refusals` has it
    return Codes(
        stored_as(quantiser, quantiser.keys, 0, layer.keys.groups),
        stored_as(quantiser, quantiser.values, 0, layer.values.groups),
        shared_columns(quantiser),
    )


def quantised_layout(pool: RaggedLayout, codes: Codes, dtype: torch.dtype) -> SegmentsLayout:
    """Return how quantised latents of a pool of pages lie."""
    segment = Segment(pool, codes.keys, codes.values, codes.columns, paged=True)
    return SegmentsLayout((segment,), dtype)


def check_page(plan: Plan, page: int) -> None:
    """Refuse pages that hold no whole blocks."""
    step = 16 if plan.quantiser is None else 64
    if page % step:
        raise UsageError(f"--block-size {page}: it must be a multiple of {step} for {plan.method}")


@dataclass(frozen=True)
class LayerPages:
    """How a layer's tokens lie in pages."""

    #: Stored columns of each of the plan's latents: of a KV head, or of several that share one.
    key_widths: tuple[int, ...]
    value_widths: tuple[int, ...]
    assignment: Assignment  # the ranks' latents
    codes: Codes | None = None  # how latents are quantised
    heads: int = 1  # KV heads of a latent

    @property
    def order(self) -> tuple[int, ...]:
        """The plan's KV heads in the order in which the ranks have them."""
        return tuple(
            latent * self.heads + head
            for latent in self.assignment.order
            for head in range(self.heads)
        )

    @property
    def columns(self) -> int:
        """Values of a token in a page, the same on every rank."""
        return self.assignment.widest

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of a token in a page, the same on every rank."""
        if self.codes is None:
            return self.columns * itemsize
        dtype, page = {2: torch.bfloat16, 4: torch.float32}[itemsize], 64
        rows = (
            quantised_layout(RaggedLayout(*self.of_rank(rank), 1, 1, page), self.codes, dtype).row
            for rank in range(len(self.assignment.heads))
        )
        return -(-max(rows) // page)

    def of_rank(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the widths of K and of V of a rank's latents."""
        own = self.assignment.heads[rank]
        return tuple(self.key_widths[head] for head in own), tuple(
            self.value_widths[head] for head in own
        )


def layer_pages(plan: Plan, ranks: int = 1) -> list[LayerPages]:
    """Return what each layer of a plan stores."""
    found = []
    for layer in plan.layers:
        keys = tuple(widened(group.rank) for group in layer.keys.groups)
        values = tuple(widened(group.rank) for group in layer.values.groups)
        both = [key + value for key, value in zip(keys, values, strict=True)]
        heads = layer.keys.groups[0].heads
        found.append(LayerPages(keys, values, assign(both, ranks, heads), plan_codes(plan), heads))
    return found


def token_bytes(layers: Sequence[LayerPages], itemsize: int) -> int:
    """Return the bytes of a token in the pages of all layers of one rank."""
    return sum(layer.token_bytes(itemsize) for layer in layers)


def imbalance(layers: Sequence[LayerPages]) -> float:
    """Return the share of all pages that stays empty because ranks are unlike."""
    stored = sum(sum(layer.assignment.columns) for layer in layers)
    room = sum(layer.columns * len(layer.assignment.columns) for layer in layers)
    return 1 - stored / room
