"""Decoding in short stretches of time, from when each token came: what a line is fitted through."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvprof.serving.load.requests import Outcome

__all__ = ["longest_gap", "spans_of"]

_MOST = 200  # stretches of a case
_GAPS = 5  # median times between tokens that a stretch lasts at least
_LEAST_TOKENS = 3

Floats = NDArray[np.float64]


def longest_gap(outcome: Outcome) -> float | None:
    """Return the longest time between two tokens of a request; None for fewer than two."""
    times = outcome.tokens
    return float(np.diff(np.asarray(times)).max()) if len(times) > 1 else None


def spans_of(outcomes: Sequence[Outcome], engines: int = 1) -> list[dict[str, float]]:
    """Return stretches of equal length from the first token to the last arrival.

    Parameters
    ----------
    outcomes : sequence of Outcome
        Of one rate; those that failed count as far as they came.
    engines : int
        That share the requests: a step is one engine's, and holds what it holds, in the mean.

    Returns
    -------
    list of dict
        As `kvprof.records.events.LoadRateFinished` has them. A request decodes from its first
        token to its last, and holds its prompt and what it wrote so far. Nobody outside the engine
        sees when a prompt is read: each is taken as read evenly from when it was sent, or the first
        token before its own where that is later, to its first token.
    """
    decoding = [one for one in outcomes if len(one.tokens) > 1]
    if not decoding:
        return []
    times = np.concatenate([np.asarray(one.tokens[1:]) for one in decoding])
    gaps = np.concatenate([np.diff(np.asarray(one.tokens)) for one in decoding])
    begin = min(one.tokens[0] for one in decoding)
    end = max(one.request.arrival for one in outcomes)
    if end <= begin:
        end = max(one.tokens[-1] for one in decoding)
    width = max((end - begin) / _MOST, _GAPS * float(np.median(gaps)))
    count = int((end - begin) / width)
    if count < 1 or width <= 0:
        return []
    edges: Floats = (begin + width * np.arange(count + 1)).astype(np.float64)
    span = np.floor((times - begin) / width).astype(np.int64)
    inside = (span >= 0) & (span < count)
    tokens = np.bincount(span[inside], minlength=count)
    between = np.bincount(span[inside], gaps[inside], minlength=count) / np.maximum(tokens, 1)
    batch, context = _held(decoding, edges)
    read = _read([one for one in outcomes if one.tokens], edges)
    return [
        {
            "at": float(edges[n] + width / 2),
            "tokens": float(tokens[n]),
            "between": float(between[n]),
            "batch": float(batch[n] / engines),
            "context": float(context[n] / engines),
            "prefill": float(read[n] * between[n] / width / engines),
        }
        for n in range(count)
        if tokens[n] >= _LEAST_TOKENS
    ]


def _overlap(edges: Floats, first: float, last: float) -> Floats:
    """Seconds of each stretch that lie between two times."""
    inside: Floats = np.minimum(edges[1:], last) - np.maximum(edges[:-1], first)
    return np.maximum(inside, 0.0)


def _held(decoding: Sequence[Outcome], edges: Floats) -> tuple[Floats, Floats]:
    """Return the mean number of requests that decode, and of the tokens that they hold together."""
    width = edges[1] - edges[0]
    batch, context = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
    middles = edges[:-1] + width / 2
    for one in decoding:
        share = _overlap(edges, one.tokens[0], one.tokens[-1]) / width
        written = np.searchsorted(np.asarray(one.tokens), middles)
        batch += share
        context += share * (one.request.prompt + written)
    return batch, context


def _read(outcomes: Sequence[Outcome], edges: Floats) -> Floats:
    """Return the prompt tokens that were read in each stretch."""
    found = np.zeros(len(edges) - 1)
    before = 0.0
    for one in sorted(outcomes, key=lambda outcome: outcome.tokens[0]):
        first = one.tokens[0]
        since = min(max(one.sent, before), first)
        before = max(before, first)
        if first > since:
            found += _overlap(edges, since, first) * one.request.prompt / (first - since)
        else:
            span = int(np.searchsorted(edges, first)) - 1
            if 0 <= span < len(found):
                found[span] += one.request.prompt
    return found
