"""Rows of a batch that have seen the same number of real tokens: what one layer stores for them.

Left padding makes the rows of a batch start at different tokens. Sinks, windows, levels and
eviction count from a row's first real token, so rows that start together are stored together, each
tensor dense, and no padding is stored at all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvprof.runtime.parts import Part

__all__ = ["Cohort"]


@dataclass(eq=False)
class Cohort:
    """What a layer stores for some rows of a batch.

    Attributes
    ----------
    rows : list of int
        In the batch.
    seen : int
        Real tokens of each row so far.
    keys, values : list of list of Part
        Per bundle of head groups, oldest part first.
    places : Tensor or None
        ``[rows, units, N]`` int32, where each stored token stood in the padded sequence; kept when
        tokens are evicted from under keys that are rebuilt.
    scores, noise : Tensor or None
        ``[rows, units, N]`` float32, of the eviction.
    record : bool
        Whether a layer with a sliding window keeps what a pass pushes out of it, so that the pass
        can be taken back.
    bases : dict
        A sequence's own bases (strawman), ``[rows, g, n * d, r]`` by side and bundle.
    """

    rows: list[int]
    seen: int = 0
    keys: list[list[Part]] = field(default_factory=list)
    values: list[list[Part]] = field(default_factory=list)
    places: Tensor | None = None
    scores: Tensor | None = None
    noise: Tensor | None = None
    record: bool = False
    bases: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @property
    def stored(self) -> int:
        """Tokens stored per row."""
        return sum(part.tokens for part in self.keys[0]) if self.keys else 0

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that counts as cache."""
        for side in (self.keys, self.values):
            for parts in side:
                for part in parts:
                    yield from part.stored.values()
        for tensor in (self.places, self.scores, self.noise):
            if tensor is not None:
                yield tensor
        yield from self.bases.values()

    def kept(self, start: int, stop: int) -> None:
        """Keep the stored tokens `start` … `stop` alone, oldest first, of plain rows."""

        def cut(parts: list[Part]) -> list[Part]:
            found, begin = [], 0
            for part in parts:
                piece = part.cut(
                    min(max(start - begin, 0), part.tokens), min(max(stop - begin, 0), part.tokens)
                )
                assert piece is not None  # nothing that is stored plainly shares scales
                if piece.tokens:
                    found.append(piece)
                begin += part.tokens
            return found

        self.keys = [cut(parts) for parts in self.keys]
        self.values = [cut(parts) for parts in self.values]

    def selected(self, places: list[int], rows: list[int]) -> "Cohort":
        """Return the rows at `places` of this cohort as the rows `rows` of a new batch."""

        def pick(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, torch.tensor(places, device=tensor.device))

        def pick_all(side: list[list[Part]]) -> list[list[Part]]:
            return [[part.mapped(pick) for part in parts] for parts in side]

        def pick_one(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else pick(tensor)

        return Cohort(
            rows=rows,
            seen=self.seen,
            keys=pick_all(self.keys),
            values=pick_all(self.values),
            record=self.record,
            places=pick_one(self.places),
            scores=pick_one(self.scores),
            noise=pick_one(self.noise),
            bases={key: pick(basis) for key, basis in self.bases.items()},
        )
