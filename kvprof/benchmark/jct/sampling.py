"""Which layers and which steps of a request are timed part by part, and what each stands for."""

import math
import statistics
from dataclasses import dataclass
from functools import cached_property

from kvprof.benchmark.jct.steps import Runner

__all__ = ["OVERHEAD", "Sampling", "choose_sampling"]

#: What timing the parts may add to a decoding step.
OVERHEAD = 0.03

#: Above this share of it fewer marks are made: what the first steps show is uncertain.
_MARGIN = 1 / 3

#: Decoding steps whose parts are told. Each stands for its neighbours where there are more: a run
#: of 100,000 tokens would be tens of millions of lines.
_MOST_STEPS = 256
_PAIRS = 8
_ROUNDS = 2  # of all turns; in fewer steps some parts would hang on one of them


@dataclass(frozen=True)
class Sampling:
    """A rotating choice of layers over the decoding steps of a request.

    Attributes
    ----------
    layers : int
        Of the model.
    steps : int
        Decoding steps of the request.
    every : int
        One of so many layers is timed in a step; in the next block of steps it is the next one's
        turn.
    apart : bool
        What belongs to no layer has a turn of its own, after the layers. Otherwise it is timed in
        every step.
    idle : int
        Turns after those in which nothing is timed.
    """

    layers: int
    steps: int
    every: int = 1
    apart: bool = False
    idle: int = 0

    @property
    def block(self) -> int:
        """Steps in a row with the same layers, of which one is told."""
        return max(1, math.ceil(self.steps / _MOST_STEPS))

    def at(self, step: int) -> tuple[int, ...]:
        """Return the layers to time in a step; prefill, step 0, has them all."""
        if step == 0:
            return tuple(range(self.layers))
        turn = self._turn(step)
        return tuple(range(turn, self.layers, self.every)) if turn < self.every else ()

    def outside(self, step: int) -> bool:
        """Tell whether a step times what belongs to no layer."""
        if step == 0 or self._turn(step) < self.every:
            return step == 0 or not self.apart
        return self.apart and self._turn(step) == self.every

    def told(self, step: int) -> int:
        """Return how many steps this one stands for: 0 where another one stands for it."""
        if step == 0:
            return 1
        first = (step - 1) // self.block * self.block + 1
        count = min(self.block, self.steps - first + 1)
        return count if step == first + count // 2 else 0

    def weight(self, step: int) -> float:
        """Return how many layers each timed one stands for, of other steps' turns too."""
        whole = self.layers / len(self.at(step))
        return whole if step == 0 else whole * self.steps / self._covered[0]

    def outside_weight(self, step: int) -> float:
        """Return how many passes this one's work outside the layers stands for."""
        return 1.0 if step == 0 else self.steps / self._covered[1]

    def _turn(self, step: int) -> int:
        return (step - 1) // self.block % (self.every + self.apart + self.idle)

    @cached_property
    def _covered(self) -> tuple[int, int]:
        """Steps in which layers are timed, and those in which the rest is."""
        steps = range(1, self.steps + 1)
        return (
            sum(self._turn(step) < self.every for step in steps),
            sum(self.outside(step) for step in steps),
        )


def choose_sampling(runner: Runner, wanted: str | int, *, layers: int, steps: int) -> Sampling:
    """Warm a request up, and find out how many layers can be timed at once.

    Parameters
    ----------
    runner : Runner
    wanted : str or int
        One of so many layers; ``auto`` takes all, unless that makes the first decoding steps more
        than a third of `OVERHEAD` slower: then as few as bring it down to that, of numbers that
        divide the number of layers. On a GPU, where a mark costs as much as a small kernel, what
        belongs to no layer then has turns too, and there are turns without marks where even a layer
        at a time costs more; each only as far as there are steps for two rounds.
    layers, steps : int
        Of the model, and of the request's decoding.
    """
    every = tuple(range(layers))
    runner.begin()
    runner.step()
    pairs = max(0, min(_PAIRS, (steps - 2) // 2))
    for timed in (None, every)[: min(2, steps)]:
        runner.step(timed)

    def sampled(every: int, turns: int = 0) -> Sampling:
        most = steps // _ROUNDS
        apart = runner.on_gpu and 1 < every < most
        idle = max(0, min(turns, most) - (every + 1)) if apart else 0
        return Sampling(layers, steps, every, apart, idle)

    if isinstance(wanted, int):
        return sampled(min(wanted, layers))
    # Plain first, then marked: of neighbours, so that a machine that changes its pace hits both.
    ratios = [1 / runner.step().seconds * runner.step(every).seconds for _ in range(pairs)]
    if not ratios:
        return Sampling(layers, steps)
    overhead = statistics.median(ratios) - 1.0
    allowed = _MARGIN * OVERHEAD
    turns = math.ceil(overhead / allowed) if overhead > allowed else 1
    least = min(layers, turns)
    return sampled(next(n for n in range(least, layers + 1) if layers % n == 0), turns)
