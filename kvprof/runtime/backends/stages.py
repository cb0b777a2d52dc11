"""Which slot of which segment a token lies in, where tokens change how they are stored as they age.

A function of the number of tokens alone, as `kvprof.methods.tokens` has it, so that nothing has to
be remembered: tables say for every token of any row where it lies, and for every length how many
tokens each segment holds. The kernels read a segment from its first slot on, so each holds its
tokens without gaps: a token that comes takes the slot of the one that leaves, or the next one.

Segment 0 is at full precision: the sinks, then what is newest. Then come, from new to old, what has
been cut or quantised:

====================  ==========================================  ==================
plan                  segment 0 behind the sinks                  further segments
====================  ==========================================  ==================
quantised             the newest `window` tokens, and a step's    the older ones
two levels            the recent level                            the lower one
two levels quantised  a step's own token                          recent, lower
====================  ==========================================  ==================
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kvprof.methods.storage import Levels
from kvprof.methods.tokens import level_ends

__all__ = ["NOWHERE", "Stages", "Step", "Tables"]

#: From which segment and slots to which, ``[batch]`` int32.
Move = tuple[int, Tensor, int, Tensor]
#: The slot of a token that lies in no segment.
NOWHERE = -1


@dataclass(frozen=True, eq=False)
class Tables:
    """For tokens and lengths counted behind the sinks."""

    ends: np.ndarray  # `[n + 2]`: how many tokens the last segment holds once there are so many
    slots: np.ndarray  # `[n + 1]`: a token's slot in the ring that it passes through


@dataclass(frozen=True, eq=False)
class Step:
    """A decoding step's slots, ``[batch]`` int32 each, `NOWHERE` for none."""

    lengths: Tensor  # `[segments, batch]` int32: what the step's query sees
    newest: Tensor  # in segment 0, of the step's own token
    #: `[batch]` bool: the token goes straight to the lowest level, and is attended to at its rank;
    #: None where no level is lower.
    low: Tensor | None
    #: After attention: from which segment and slot a token goes to which; in this order.
    moves: tuple[Move, ...]
    tables: tuple[Tensor, Tensor]  # what it was read from, which a captured step reads again


@dataclass(frozen=True)
class Stages:
    """How a layer's tokens go from segment to segment."""

    levels: Levels  # one or two, moving down one by one
    quantised: bool  # one by one
    window: int  # newest tokens that are not

    @property
    def two(self) -> bool:
        """Whether there are two levels."""
        return len(self.levels.shares) == 2

    @property
    def segments(self) -> int:
        """How many."""
        return 1 + self.two + self.quantised

    def rooms(self, capacity: int) -> list[int]:
        """Return the slots per segment that rows of `capacity` tokens need, at least 1."""
        sink, rest = self.levels.sink, max(1, capacity - self.levels.sink)
        tables = self.tables(rest)
        ring = int(tables.slots[:rest].max()) + 1
        last = max(1, int(tables.ends[rest]))
        if not self.two:
            return [sink + self.window + 1, last]
        return [sink + 1, ring, last] if self.quantised else [sink + ring, last]

    def tables(self, tokens: int) -> Tables:
        """Return the tables for rows of up to `tokens` tokens behind the sinks."""
        # Rounded up, so that a growing cache does not ask anew at every length.
        return _tables(self, 1 << max(6, (tokens + 1).bit_length()))

    def slots_of(self, start: int, stop: int, total: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the segments and slots of tokens `start` … `stop` of a row after `total`."""
        tokens = np.arange(start, stop)
        age = tokens - self.levels.sink  # behind the sinks
        rest = max(0, total - self.levels.sink)
        tables = self.tables(rest)
        behind = age >= 0
        own = np.clip(age, 0, None)
        last = behind & (own < tables.ends[rest])
        ring = 1 if self.two and self.quantised else 0
        first = self.levels.sink if ring == 0 else 0
        segments = np.where(last, self.segments - 1, np.where(behind, ring, 0))
        slots = np.where(last, own, np.where(behind, first + tables.slots[own], tokens))
        return segments, slots

    def counts(self, total: int) -> list[int]:
        """Return how many tokens of a row each segment holds after `total`."""
        sink = min(self.levels.sink, total)
        rest = total - sink
        last = int(self.tables(rest).ends[rest])
        if self.two and self.quantised:
            return [sink, rest - last, last]
        return [sink + rest - last, last]

    def step(self, start: Tensor, hidden: Tensor | None, capacity: int) -> Step:
        """Return what a decoding step does; nothing waits for the device."""
        sink = self.levels.sink
        ends, slots = _on(self, max(1, capacity - sink), start.device)
        age = start - sink
        own = age.clamp(0, len(slots) - 1).long()
        behind = age >= 0
        if hidden is not None:
            behind = behind & (hidden == 0)
        nowhere = torch.full_like(start, NOWHERE)
        end, after = ends[own], ends[own + 1]
        # What leaves the ring for the last segment in this step, and where it lay.
        leaves = behind & (after > end)
        leaving, left = torch.where(leaves, end, nowhere), slots[end.long()]
        older = torch.where(behind, end, torch.zeros_like(end))
        low = behind & (after > own) if self.two else None
        if self.two and self.quantised:
            assert low is not None
            newest = torch.where(behind, sink, start)
            recent = torch.where(behind, own.int() - end, torch.zeros_like(end))
            lengths = [newest + 1, recent, older]
            keeps = behind & ~low
            # The ring's oldest goes before the newest takes its slot; or the newest goes at once.
            moves: tuple[Move, ...] = (
                (1, left.where(leaves & ~low, nowhere), 2, leaving.where(~low, nowhere)),
                (0, newest.where(low, nowhere), 2, leaving.where(low, nowhere)),
                (0, newest.where(keeps, nowhere), 1, slots[own].where(keeps, nowhere)),
            )
        else:
            newest = torch.where(behind, sink + slots[own], start)
            recent = torch.where(behind, sink + own.int() - end + 1, start + 1)
            lengths = [recent, older]
            moves = ((0, torch.where(leaves, sink + left, nowhere), 1, leaving),)
        if hidden is not None:
            newest = torch.where(hidden == 0, newest, nowhere)
        return Step(torch.stack(lengths).int(), newest, low, moves, (ends, slots))


@lru_cache(maxsize=32)
def _tables(stages: Stages, tokens: int) -> Tables:
    count = np.arange(tokens + 2)
    if stages.two:
        # The last entry is the level that everything else is left to.
        ends = np.array([level_ends(stages.levels, int(n))[0] for n in count])
    else:
        ends = np.maximum(0, count - stages.window)
    slots = np.zeros(tokens + 1, dtype=np.int64)
    # Where a step's own token passes through segment 0 its slot is taken before anything leaves.
    early = not (stages.two and stages.quantised)
    for token in range(tokens + 1):
        before = token - 1 if early else token
        end = ends[before] if before >= 0 else 0
        if before >= 0 and ends[before + 1] > end and end < token:
            slots[token] = slots[end]
        else:
            slots[token] = token - (ends[token] if early else end)
    return Tables(ends, slots)


@lru_cache(maxsize=32)
def _on(stages: Stages, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tables on a device, int32; not as inference tensors, which graphs would keep."""
    found = stages.tables(tokens)
    with torch.inference_mode(False):
        ends, slots = (
            torch.from_numpy(table.astype(np.int32)).to(device)
            for table in (found.ends, found.slots)
        )
    return ends, slots
