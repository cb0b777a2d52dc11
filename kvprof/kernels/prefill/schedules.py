"""Cut a prompt's work into blocks of rows and order them (FDC §5.3).

Row ``r`` of a block is query head ``r % G`` at token ``r
G``.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.kernels.planes import RaggedLayout
from kvprof.kernels.prefill.tuning import Tile

__all__ = [
    "COST_PER_SCORE",
    "SCHEDULES",
    "BlockRow",
    "Blocks",
    "Work",
    "block_costs",
    "cut_blocks",
    "equal_blocks",
    "makespan_over_mean",
    "plain_blocks",
]

#: Columns that a score costs beside its head's own: exponential, maximum and sum. From cuDNN's
#: times at widths 128 and 64 (15.03 and 9.76 ms at 32K on an H200); FDC counts 1.
COST_PER_SCORE = 110

#: Ways to cut and order a prompt's work.
SCHEDULES = ("equal", "plain")

Block = tuple[int, int, int, int]


class BlockRow(NamedTuple):
    """A block as the kernel takes it: rows of one KV head of one sequence."""

    sequence: int
    head: int
    first: int  # A head's row is its query head `row % G` at new token `row // G`
    rows: int


@dataclass(frozen=True)
class Work:
    """What there is to do."""

    layout: RaggedLayout
    tokens: int  # new tokens of every sequence
    #: Tokens before them, per sequence; negative for a sequence padded on the left.
    past: tuple[int, ...]
    tiles: tuple[Tile, ...]  # of each head
    window: int = 0  # tokens that a token sees, itself included; 0 for all
    # Sums of scores, the same for all heads of one tile: a prompt waits while its work is cut.
    _known: dict[tuple[int, Tile], NDArray[np.float64]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def rows(self) -> int:
        """Rows of a head of a sequence."""
        return self.tokens * self.layout.group

    def score_cost(self, head: int) -> float:
        """Return what one score of a head costs."""
        widths = (self.layout.key_widths[head], self.layout.value_widths[head])
        return float(sum(widths) + COST_PER_SCORE)

    def sums(self, sequence: int, head: int) -> NDArray[np.float64]:
        """Return what all of a head's tiles before each boundary between two cost."""
        tile, past = self.tiles[head], self.past[sequence]
        if (past, tile) not in self._known:
            bounds = np.minimum(np.arange(-(-self.rows // tile.rows) + 1) * tile.rows, self.rows)
            scores = _scores(self, sequence, tile, bounds[:-1], bounds[1:])
            self._known[past, tile] = np.concatenate([[0.0], np.cumsum(scores)])
        return self._known[past, tile] * self.score_cost(head)

    def cost(self, block: Block) -> float:
        """Return what a block costs."""
        sequence, head, first, rows = block
        tile = self.tiles[head]
        starts = np.arange(first, first + rows, tile.rows)
        stops = np.minimum(starts + tile.rows, first + rows)
        return float(_scores(self, sequence, tile, starts, stops).sum()) * self.score_cost(head)


def _scores(
    work: Work, sequence: int, tile: Tile, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the scores that tiles of rows ``start … stop - 1`` compute, masked ones included."""
    group, past = work.layout.group, work.past[sequence]
    end = np.maximum(0, past + (stops - 1) // group + 1)
    begin = np.maximum(0, past + starts // group + 1 - work.window) if work.window else 0
    visited = np.maximum(0, -(-end // tile.keys) - begin // tile.keys)
    # One more tile of keys: the queries are read and the outputs written.
    found: NDArray[np.float64] = tile.rows * tile.keys * (visited + 1.0)
    return found


@dataclass(frozen=True)
class Blocks:
    """A schedule."""

    items: tuple[Block, ...]  # in the order in which they are to start
    costs: tuple[float, ...]  # of each
    programs: int  # programs that run at once

    @cached_property
    def makespan_over_mean(self) -> float:
        """Predicted: when the last program is done over when all could be, 1 at best."""
        return makespan_over_mean(self.costs, self.programs)

    def table(self, device: torch.device) -> Tensor:
        """Return the rows of `BlockRow`, int32."""
        return (
            torch.tensor(self.items, dtype=torch.int32).view(-1, len(BlockRow._fields)).to(device)
        )


def makespan_over_mean(costs: Sequence[float], programs: int) -> float:
    """Return the makespan over the mean load when the next block goes to the first free program."""
    loads = [0.0] * programs
    for cost in costs:
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads) * programs / max(sum(loads), 1e-300)


def cut_blocks(
    schedule: str, work: Work, heads: Sequence[int], programs: int, *, pieces: int
) -> Blocks:
    """Cut the work of some heads.

    Parameters
    ----------
    schedule : str
        One of `SCHEDULES`.
    work : Work
    heads : sequence of int
    programs : int
        Programs that run at once, on all multiprocessors.
    pieces : int
        Blocks per program, for ``equal``.

    Raises
    ------
    UsageError
        For an unknown schedule.
    """
    if schedule == "equal":
        items = equal_blocks(work, heads, pieces * programs)
    elif schedule == "plain":
        items = plain_blocks(work, heads)
    else:
        raise UsageError(f"schedule {schedule!r}: use {', '.join(SCHEDULES)}")
    costs = np.array(block_costs(work, items))
    # Heavy first: what is left for the end is small.
    order = np.argsort(-costs, kind="stable") if schedule == "equal" else np.arange(len(items))
    return Blocks(tuple(items[n] for n in order), tuple(costs[order].tolist()), programs)


def block_costs(work: Work, blocks: Sequence[Block]) -> list[float]:
    """Return what each block costs; those of whole tiles from the same sums."""
    sequences, heads, first, rows = np.array(blocks, dtype=np.int64).reshape(-1, 4).T
    heights = np.array([tile.rows for tile in work.tiles])[heads]
    stop = first + rows
    torn = (first % heights != 0) | ((stop % heights != 0) & (stop != work.rows))
    found = np.zeros(len(blocks))
    for at in np.flatnonzero(torn).tolist():
        found[at] = work.cost(blocks[at])
    # By task, so that thousands of blocks cost a few calls: this is done while a prompt waits.
    tasks, task = np.unique(sequences * len(work.tiles) + heads, return_inverse=True)
    for number, (sequence, head) in enumerate(zip(*divmod(tasks, len(work.tiles)), strict=True)):
        own = np.flatnonzero((task == number) & ~torn)
        if len(own):
            sums, height = work.sums(int(sequence), int(head)), work.tiles[int(head)].rows
            found[own] = sums[-(-stop[own] // height)] - sums[first[own] // height]
    return [float(cost) for cost in found]


def plain_blocks(work: Work, heads: Sequence[int]) -> list[Block]:
    """Return a block per tile of rows, in order: what a kernel that knows no ranks does."""
    return [
        (sequence, head, first, min(work.tiles[head].rows, work.rows - first))
        for sequence in range(len(work.past))
        for head in heads
        for first in range(0, work.rows, work.tiles[head].rows)
    ]


def equal_blocks(work: Work, heads: Sequence[int], pieces: int) -> list[Block]:
    """Return about `pieces` blocks of equal cost, causality counted."""
    tasks = [
        (sequence, head, work.sums(sequence, head))
        for sequence in range(len(work.past))
        for head in heads
    ]
    share = sum(float(sums[-1]) for *_, sums in tasks) / max(1, pieces)
    found: list[Block] = []
    for sequence, head, sums in tasks:
        height = work.tiles[head].rows
        count = min(len(sums) - 1, max(1, round(float(sums[-1]) / share)))
        # The tile boundary nearest to each equal share of the head's own cost.
        wanted = sums[-1] * np.arange(1, count) / count
        after = np.searchsorted(sums, wanted)
        nearest = np.where(sums[after] - wanted <= wanted - sums[after - 1], after, after - 1)
        bounds = np.unique([0, *np.minimum(nearest * height, work.rows), work.rows])
        found += [
            (sequence, head, start, rows)
            for start, rows in zip(bounds[:-1].tolist(), np.diff(bounds).tolist(), strict=True)
        ]
    return found
