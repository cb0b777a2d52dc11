"""How long an engine's step takes, by what is in it: fitted to steps that were measured.

A step computes some tokens, each once through the model's products, and lets each of them attend
to its context. Its seconds are taken to be ``dense(tokens) + per_context · contexts + per_pair ·
pairs``: the first a line from measured point to measured point, the others what reading a decoding
sequence's cache costs by the token, and a prompt's attention by the pair of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

__all__ = ["StepSample", "StepTimes", "fit_step_times", "pairs_of"]

#: Tokens up to which the products' time has a point for each number that was measured, as weights
#: are read by all of them together; beyond, it is a line.
_LAST_POINT = 4096
_MOST_POINTS = 16


def pairs_of(before: int, tokens: int) -> float:
    """Return the pairs that a piece of a prompt attends to.

    Parameters
    ----------
    before : int
        Tokens of the prompt that lie in the cache.
    tokens : int
        Of the piece; each attends to all before it and to itself.
    """
    return tokens * before + tokens * (tokens + 1) / 2


@dataclass(frozen=True)
class StepSample:
    """A step that was measured.

    Attributes
    ----------
    decode : int
        Sequences that decode a token.
    context : float
        Tokens in the cache of all of them together, those being computed included.
    prefill : int
        Tokens of prompts.
    pairs : float
        See `pairs_of`, over all prompts.
    seconds : float
    source : str
        Which record it is from.
    """

    decode: int
    context: float
    prefill: int
    pairs: float
    seconds: float
    source: str = ""

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return self.decode + self.prefill


@dataclass(frozen=True)
class StepTimes:
    """What a step takes.

    Attributes
    ----------
    tokens, seconds : tuple
        Points of the products' time, and all that a step does once; a line between two of them,
        and beyond the last one a line of slope `beyond`.
    beyond : float
        Seconds per token.
    per_context : float
        Seconds per token of the decoding sequences' contexts.
    per_pair : float
        Seconds per pair of tokens of prompts.
    residual : float or None
        Largest relative difference from a step that was fitted; None where none was.
    samples : int
        Steps that were fitted.
    """

    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    beyond: float
    per_context: float = 0.0
    per_pair: float = 0.0
    residual: float | None = None
    samples: int = 0
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
        return self.dense(decode + prefill) + self.per_context * context + self.per_pair * pairs


def fit_step_times(samples: Sequence[StepSample]) -> StepTimes:
    """Fit step times to measured steps, by relative error; no part of them is negative.

    Parameters
    ----------
    samples : sequence of StepSample

    Raises
    ------
    ValueError
        Without a step that decodes and one that reads a prompt: the other's costs are unknown.
    """
    kept = [one for one in samples if one.seconds > 0 and one.tokens > 0]
    if not any(one.decode for one in kept) or not any(one.prefill for one in kept):
        raise ValueError("steps that decode and steps that read prompts are needed, of both one")
    points = _points([one.tokens for one in kept])
    rows = [_row(one, points) for one in kept]
    matrix = np.array(rows) / np.array([[one.seconds] for one in kept])
    # Columns differ by ten orders of magnitude.
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0.0] = 1.0
    found = nnls(matrix / scale, np.ones(len(kept)))[0] / scale
    off = float(np.abs(matrix @ found - 1.0).max())
    count = len(points)
    return StepTimes(
        tuple(points),
        tuple(float(value) for value in np.cumsum(found[:count])),
        float(found[count]),
        float(found[count + 1]),
        float(found[count + 2]),
        off,
        len(kept),
    )


def _points(tokens: Sequence[int]) -> list[float]:
    """Return where the line of the products' time bends: what was measured, or one per octave."""
    distinct = sorted({float(value) for value in tokens if value <= _LAST_POINT})
    if not distinct:
        return [float(min(tokens))]
    if len(distinct) <= _MOST_POINTS:
        return distinct
    octaves: dict[int, list[float]] = {}
    for value in tokens:
        if value <= _LAST_POINT:
            octaves.setdefault(round(log2(value)), []).append(log2(value))
    means = [2 ** (sum(each) / len(each)) for _, each in sorted(octaves.items())]
    return [distinct[0], *(value for value in means[1:] if value > distinct[0])]


def _row(one: StepSample, points: Sequence[float]) -> NDArray[np.float64]:
    """Return a step's share of each unknown: what each point adds to the one before, and the rest.

    As increments that are not negative, more tokens never take less time.
    """
    row = np.zeros(len(points) + 3)
    row[0] = 1.0
    for index in range(1, len(points)):
        low, high = points[index - 1], points[index]
        row[index] = min(1.0, max(0.0, (one.tokens - low) / (high - low)))
    row[-3:] = max(0.0, one.tokens - points[-1]), one.context, one.pairs
    return row
