"""Which KV heads each rank of tensor parallelism serves, so that pages are as small as they can be.

An engine gives a page the same size on every rank. Where heads have unlike widths, a rank that got
the wide ones makes the pages of all ranks wide, so heads change places: each rank gets as many as
before, and widths that add up as nearly alike as whole heads allow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from kvprof.errors import UsageError

__all__ = ["Assignment", "assign"]

# Up to so many heads the first rank's are found by looking at all choices.
_FEW = 16


@dataclass(frozen=True)
class Assignment:
    """The KV heads of a layer by rank, or the latents that several of them share.

    Attributes
    ----------
    heads : tuple of tuple of int
        For each rank the plan's KV heads (latents), in order.
    columns : tuple of int
        Stored columns of each rank, the sum of its heads' widths.
    """

    heads: tuple[tuple[int, ...], ...]
    columns: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The plan's KV heads (latents) in the order in which the ranks have them."""
        return tuple(head for own in self.heads for head in own)

    @property
    def widest(self) -> int:
        """Columns of the rank that has most: those that every rank's pages have room for."""
        return max(self.columns)

    @property
    def imbalance(self) -> float:
        """Share of the pages' room that stays empty because ranks are unlike."""
        return 1 - sum(self.columns) / (self.widest * len(self.columns))


def assign(widths: Sequence[int], ranks: int, shared: int = 1) -> Assignment:
    """Give each rank as many KV heads, of widths that add up alike.

    Parameters
    ----------
    widths : sequence of int
        Stored columns of each KV head, or of each latent that several share, K's and V's together.
    ranks : int
    shared : int
        KV heads that have a latent together.

    Raises
    ------
    UsageError
        When the heads cannot be dealt out evenly.
    """
    count = len(widths)
    if ranks < 1 or count % ranks:
        what = "KV heads" if shared == 1 else f"latents that {shared} KV heads share each"
        raise UsageError(
            f"{count} {what} cannot be served by {ranks} ranks of tensor parallelism: each takes "
            f"as many whole {'heads' if shared == 1 else 'latents'}"
        )
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
