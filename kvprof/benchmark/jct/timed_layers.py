"""Which layers are timed part by part in which step, and what each stands for."""

import math
import statistics
from dataclasses import dataclass
from functools import cached_property

from kvprof.benchmark.jct.steps import Runner

__all__ = [
    "OVERHEAD",
    "TimedLayers",
    "choose_timed_layers",
]

#: What timing the parts may add to a decoding step.
OVERHEAD = 0.03

#: Above this share of it fewer marks are made: what the first steps show is uncertain.
_MARGIN = 1 / 3

#: Decoding steps whose parts are emitted. Each stands for its neighbours where there are more: a
#: run of 100,000 tokens would be tens of millions of lines.
_MOST_STEPS = 256
_PAIRS = 8
_SOON = 1.0  # seconds of a prompt that is run once more, as the first is slower
_ROUNDS = 2  # of all layers; with fewer some parts would hang on one step


def _block(steps: int) -> int:
    return max(1, math.ceil(steps / _MOST_STEPS))


@dataclass(frozen=True)
class TimedLayers:
    """A rotating choice of layers over the decoding steps of a request.

    Attributes
    ----------
    layers : int
        Of the model.
    steps : int
        Decoding steps of the request.
    every : int
        One of so many layers is timed in a step; in another block of steps it is the one after
        each.
    rounds : int
        So often everything is timed, evenly over the request: the layers, and in steps of its own
        what belongs to none. All other steps are left without marks. With 0 each step times some
        layers, and what belongs to none.
    """

    layers: int
    steps: int
    every: int = 1
    rounds: int = 0

    @property
    def block(self) -> int:
        """Steps in a row that time the same, of which one is emitted."""
        return _block(self.steps)

    def at(self, step: int) -> tuple[int, ...]:
        """Return the layers to time in a step; prefill, step 0, has them all."""
        if step == 0:
            return tuple(range(self.layers))
        first = self._first(step)
        return tuple(range(first, self.layers, self.every)) if first in range(self.every) else ()

    def outside(self, step: int) -> bool:
        """Tell whether a step times what belongs to no layer."""
        return step == 0 or not self.rounds or self._first(step) == self.every

    def stands_for(self, step: int) -> int:
        """Return how many steps this one stands for: 0 where another one stands for it."""
        if step == 0:
            return 1
        first = (step - 1) // self.block * self.block + 1
        count = min(self.block, self.steps - first + 1)
        return count if step == first + count // 2 else 0

    def weight(self, step: int) -> float:
        """Return how many layers each timed one stands for, those of other steps too."""
        whole = self.layers / len(self.at(step))
        return whole if step == 0 else whole * self.steps / self._covered[0]

    def outside_weight(self, step: int) -> float:
        """Return how many passes this one's work outside the layers stands for."""
        return 1.0 if step == 0 else self.steps / self._covered[1]

    def _first(self, step: int) -> int:
        """Return a step's first timed layer: `every` is the work outside the layers, -1 nothing."""
        block = (step - 1) // self.block
        return self._firsts.get(block, -1) if self.rounds else block % self.every

    @cached_property
    def _firsts(self) -> dict[int, int]:
        """By block. Each lies in the middle of its share of the request.

        Every second round goes backwards: what grows with the context is then neither too small
        for the first layers nor too large for the last.
        """
        blocks, choices = math.ceil(self.steps / self.block), self.every + 1
        slots = self.rounds * choices
        found = {}
        for slot in range(slots):
            backwards, first = slot // choices % 2, slot % choices
            block = (2 * slot + 1) * blocks // (2 * slots)
            found[block] = choices - 1 - first if backwards else first
        return found

    @cached_property
    def _covered(self) -> tuple[int, int]:
        """Steps in which layers are timed, and those in which the rest is."""
        steps = range(1, self.steps + 1)
        return (
            sum(bool(self.at(step)) for step in steps),
            sum(self.outside(step) for step in steps),
        )


def choose_timed_layers(
    runner: Runner,
    wanted: str | int,
    *,
    layers: int,
    steps: int,
) -> TimedLayers:
    """Warm a request up, and find out how many layers can be timed at once.

    On a GPU a mark costs as much as a small kernel: where not all layers are timed at once, what
    belongs to none has steps of its own, and where even a layer at a time costs too much some steps
    are left without marks. Both need steps for two rounds.

    Parameters
    ----------
    runner : Runner
    wanted : str or int
        One of so many layers; ``auto`` takes all, unless that makes the first decoding steps more
        than a third of `OVERHEAD` slower: then as few as bring it down to that, of numbers that
        divide the number of layers.
    layers, steps : int
        Of the model, and of the request's decoding.
    """
    every = tuple(range(layers))
    runner.begin()
    # What is compiled or awaited in a GPU's first steps would stand in the parts.
    first = runner.step(None if runner.on_gpu else every)
    if runner.on_gpu or first.seconds < _SOON:
        runner.begin()
        runner.step(every, after=first.queued if runner.on_gpu else None)
    pairs = max(0, min(_PAIRS, (steps - 2) // 2))
    if steps:
        plain = runner.step()
    if steps > 1:
        runner.step(every, after=plain.queued if runner.on_gpu else None)

    def sampled(every: int, one_in: int = 0) -> TimedLayers:
        blocks = math.ceil(steps / _block(steps))
        if not runner.on_gpu or every == 1 or blocks < _ROUNDS * (every + 1):
            return TimedLayers(layers, steps, every)
        rounds = blocks // max(one_in, every + 1)
        return TimedLayers(layers, steps, every, max(_ROUNDS, rounds - rounds % 2))

    if isinstance(wanted, int):
        return sampled(min(wanted, layers))
    # Plain first, then marked: of neighbours, so that a machine that changes its pace hits both.
    ratios = []
    for _ in range(pairs):
        plain, timed = runner.step(), runner.step(every)
        ratios.append(timed.seconds / plain.seconds)
    if not ratios:
        return TimedLayers(layers, steps)
    overhead = statistics.median(ratios) - 1.0
    allowed = _MARGIN * OVERHEAD
    one_in = math.ceil(overhead / allowed) if overhead > allowed else 1
    least = min(layers, one_in)
    return sampled(next(n for n in range(least, layers + 1) if layers % n == 0), one_in)
