"""How long an engine's step takes, by what is in it: fitted to steps that were measured.

A step computes some tokens, each once through the model's products, and lets each of them attend
to its context. Its seconds are taken to be ``dense(tokens) + per_context · contexts + per_pair ·
pairs``: the first a line from measured point to measured point, the others what reading a decoding
sequence's cache costs by the token, and a prompt's attention by the pair of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

__all__ = ["StepSample", "StepTimes", "fit_step_times"]

#: Tokens up to which the products' time has a point for each number that was measured, as weights
#: are read by all of them together; beyond, it is a line.
_LAST_POINT = 4096
_ROUNDS = 8  # of weighting steps anew
_LEAST_SHARE = 0.05  # of its time that a step is expected to take at least, as a weight


@dataclass(frozen=True)
class StepSample:
    """A step that was measured."""

    decode: float  # sequences that decode a token
    context: float  # tokens in the cache of all of them together, those being computed included
    prefill: float  # tokens of prompts
    #: Of tokens: each of a prompt's with all before it and with itself, over all prompts.
    pairs: float
    seconds: float
    source: str = ""  # which record it is from
    mean: bool = False  # whether it is no single step, but the mean of several unlike ones
    weight: float = 1.0  # of a mean: how many it is of

    @property
    def tokens(self) -> float:
        """Tokens that are computed."""
        return self.decode + self.prefill


@dataclass(frozen=True)
class StepTimes:
    """What a step takes."""

    #: Points of the products' time, and all that a step does once; a line between two of them, and
    #: beyond the last one a line of slope `beyond`.
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    beyond: float  # seconds per token
    per_context: float = 0.0  # seconds per token of the decoding sequences' contexts
    per_pair: float = 0.0  # seconds per pair of tokens of prompts
    #: Seconds per decoding sequence, beside what its token costs as any; negative where that is
    #: less.
    per_sequence: float = 0.0
    #: Largest relative difference from a step that was fitted; of means the mean difference over
    #: their mean. None where none was fitted.
    residual: float | None = None
    samples: int = 0  # steps that were fitted
    _known: dict[int, float] = field(default_factory=dict, repr=False, compare=False)

    def dense(self, tokens: int) -> float:
        """Return the seconds of a step's products over so many tokens."""
        found = self._known.get(tokens)
        if found is None:
            last = self.tokens[-1]
            found = float(np.interp(tokens, self.tokens, self.seconds))
            found += self.beyond * max(0.0, tokens - last)
            self._known[tokens] = found
        return found

    def step(self, decode: int, context: float, prefill: int = 0, pairs: float = 0.0) -> float:
        """Return the seconds of a step; see `StepSample`."""
        seconds = self.dense(decode + prefill) + self.per_sequence * decode
        return seconds + self.per_context * context + self.per_pair * pairs


def fit_step_times(samples: Sequence[StepSample]) -> StepTimes:
    """Fit non-negative step times to measured steps, by relative error."""
    kept = [one for one in samples if one.seconds > 0 and one.tokens > 0]
    if not any(one.decode for one in kept) or not any(one.prefill for one in kept):
        raise ValueError("at least one decode step and one prefill step are required")
    means = any(one.mean for one in kept)
    points = [0.0]
    if not means:
        points = sorted({float(one.tokens) for one in kept if one.tokens <= _LAST_POINT})
    matrix = np.array([_row(one, points, means) for one in kept])
    seconds = np.array([one.seconds for one in kept])
    expected = seconds
    if means:
        expected = np.array([one.weight**-0.5 for one in kept]) * seconds.mean()
        found = _least_squares(matrix / expected[:, None], seconds / expected)
    for _ in range(0 if means else _ROUNDS):
        # Relative to what is expected: relative to what was measured, a step that took too long
        # by chance would count for less than one that was too short, and all come out too short.
        found = _least_squares(matrix / expected[:, None], seconds / expected)
        expected = np.maximum(matrix @ found, _LEAST_SHARE * seconds)
    differences = np.abs(matrix @ found - seconds)
    if means:
        weights = [one.weight for one in kept]
        off = float(np.average(differences, weights=weights) / np.average(seconds, weights=weights))
    else:
        off = float((differences / seconds).max())
    count = len(points)
    return StepTimes(
        tuple(points),
        tuple(float(value) for value in np.cumsum(found[:count])),
        float(found[count]),
        float(found[count + 1]),
        float(found[count + 2]),
        float(found[count + 3] - found[count]) if means else 0.0,
        off,
        len(kept),
    )


def _least_squares(matrix: NDArray[np.float64], side: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve with no negative unknown; columns may differ by ten orders of magnitude."""
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0.0] = 1.0
    solved: NDArray[np.float64] = nnls(matrix / scale, side)[0] / scale
    return solved


def _row(one: StepSample, points: Sequence[float], means: bool) -> NDArray[np.float64]:
    """Return a step's coefficients, as increments, so that more tokens never take less time."""
    row = np.zeros(len(points) + 4)
    row[0] = 1.0
    for index in range(1, len(points)):
        low, high = points[index - 1], points[index]
        row[index] = min(1.0, max(0.0, (one.tokens - low) / (high - low)))
    tokens = one.prefill if means else max(0.0, one.tokens - points[-1])
    row[-4:] = tokens, one.context, one.pairs, one.decode if means else 0.0
    return row
