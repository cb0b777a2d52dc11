"""Which tokens are kept, at which level, quantised or not: a pure function of their number.

The byte account and the runtime share it, so that what is stored is what is counted, whatever the
sequence of appends was (TALE §2.2.1 and appendix A state the rule as a process instead).
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvprof.methods.plan import Eviction, LayerPlan, Levels, Plan, Quantiser

__all__ = [
    "Form",
    "Segment",
    "eviction_units",
    "kept",
    "level_ends",
    "quantised_tokens",
    "quantises",
    "readings",
    "segments",
    "stored_tokens",
]

# Shares are written in decimal: 0.1 * 30 must count as 3 whatever binary makes of it.
_SLACK = 1e-9


@dataclass(frozen=True)
class Segment:
    """Adjacent stored tokens that are stored alike.

    Attributes
    ----------
    start, stop : int
        Among the kept tokens, oldest first.
    level : int
        Index into ``HeadGroup.ranks`` and ``SideQuantiser.bits``; sinks have the top level.
    quantised : bool
        False where they are at full precision.
    """

    start: int
    stop: int
    level: int
    quantised: bool

    @property
    def tokens(self) -> int:
        """How many."""
        return self.stop - self.start


def kept(eviction: Eviction | None, tokens: int) -> int:
    """Return how many of `tokens` tokens an eviction keeps: ``ceil(keep * tokens)``.

    Never fewer than the sinks and one recent token, never more than there are. The number grows
    with the sequence, so that the rate is the same at every context.
    """
    if eviction is None:
        return tokens
    return min(tokens, max(eviction.sink + 1, math.ceil(eviction.keep * tokens - _SLACK)))


def level_ends(levels: Levels, tokens: int) -> list[int]:
    """Return where each level ends among the tokens after the sinks, lowest level first.

    The levels above i hold at most their share, rounded down (the paper's "does not exceed p"),
    plus what does not fill a batch yet.

    Parameters
    ----------
    levels : Levels
    tokens : int
        Those after the sinks.
    """
    ends = []
    for level in range(len(levels.shares) - 1):
        above = math.floor(sum(levels.shares[level + 1 :]) * tokens + _SLACK)
        ends.append((tokens - above) // levels.batch * levels.batch)
    return [*ends, tokens]


def quantised_tokens(quantiser: Quantiser | None, tokens: int) -> int:
    """Return how many of the `tokens` tokens after the sinks are quantised: the oldest ones."""
    if quantiser is None:
        return 0
    return max(0, tokens - quantiser.window) // quantiser.block * quantiser.block


def stored_tokens(plan: Plan, layer: LayerPlan, tokens: int) -> int:
    """Return how many tokens a layer stores after `tokens` tokens were seen."""
    if layer.shared:
        return 0
    if layer.sliding_window is not None:
        return min(tokens, layer.sliding_window - 1)
    return tokens if layer.left_out else kept(plan.eviction, tokens)


def quantises(plan: Plan, layer: LayerPlan) -> bool:
    """Return whether the plan's quantiser applies to a layer (see ``plan``, sliding windows)."""
    quantiser = plan.quantiser
    if layer.left_out or quantiser is None:
        return False
    sides = ((quantiser.keys, layer.keys.groups), (quantiser.values, layer.values.groups))
    if not any(side is not None and group.quantised for side, own in sides for group in own):
        return False
    return layer.sliding_window is None or (quantiser.window == 0 and quantiser.block == 1)


def segments(plan: Plan, layer: LayerPlan, tokens: int) -> list[Segment]:
    """Return how a layer stores its tokens after `tokens` tokens were seen.

    Parameters
    ----------
    plan : Plan
    layer : LayerPlan
        One of its layers.
    tokens : int
        Seen so far in this sequence, padding left out.

    Returns
    -------
    list of Segment
        In order of time, covering the stored tokens; none is empty.
    """
    stored = stored_tokens(plan, layer, tokens)
    if not stored:
        return []
    top = len(plan.levels.shares) - 1
    if layer.sliding_window is not None or layer.left_out:
        return [Segment(0, stored, top, quantises(plan, layer))]
    sink = min(plan.levels.sink, stored)
    rest = stored - sink
    ends = level_ends(plan.levels, rest)
    quantised = quantised_tokens(plan.quantiser, rest)
    found = [Segment(0, sink, top, False)] if sink else []
    start = 0
    for stop in sorted({*ends, quantised}):
        if stop > start:
            level = next(index for index, end in enumerate(ends) if end > start)
            found.append(Segment(sink + start, sink + stop, level, start < quantised))
            start = stop
    return found


@dataclass(frozen=True)
class Form:
    """How a query reads a token.

    Attributes
    ----------
    level : int
    quantised : tuple of int
        The levels at which the token was quantised, one after the other; empty where it is not.
    exact : bool
        Whether it is read as the model gives it, without projection (a lazy plan's prompt).
    """

    level: int
    quantised: tuple[int, ...] = ()
    exact: bool = False


def readings(
    plan: Plan, layer: LayerPlan, seen: int, tokens: int, prompt: int
) -> dict[Form, NDArray[np.int64]]:
    """Return which query of a pass reads which tokens in which form.

    Query i of the pass has ``seen + i`` tokens before it. Within the first `prompt` tokens it reads
    them as the pass of a prompt does, uncompressed; from there on each older token as it is stored
    by then, and its own token projected and not quantised.

    Parameters
    ----------
    plan : Plan
        Without eviction.
    layer : LayerPlan
        One of its layers.
    seen : int
        Tokens before the pass; of a plan with several levels 0.
    tokens : int
        Of the pass.
    prompt : int
        Tokens at the start of the sequence that are read uncompressed by one another; 0 for plans
        that read by age.

    Returns
    -------
    dict of Form to array
        ``[ranges, 2, tokens]`` each: where the ranges start and stop that a query reads, among the
        tokens stored before the pass and its own; of a query that reads fewer, some are empty. What
        is later than a query, or out of a sliding window, is in none.
    """
    first = seen - stored_tokens(plan, layer, seen)  # the token of column 0
    top = len(plan.levels.shares) - 1
    plain = layer.sliding_window is not None or layer.left_out
    forms: dict[Form, list[list[int]]] = {}  # by query, starts and stops in turn

    def read(form: Form, query: int, start: int, stop: int) -> None:
        if form not in forms:
            forms[form] = [[] for _ in range(tokens)]
        ends = forms[form][query]
        if ends and ends[-1] == start - first:
            ends[-1] = stop - first
        else:
            ends += [start - first, stop - first]

    def level_of(token: int, total: int) -> int:
        sink = plan.levels.sink
        if plain or token < sink:
            return top
        ends = level_ends(plan.levels, total - sink)
        return next(level for level, end in enumerate(ends) if end > token - sink)

    exact = (plan.lazy or plan.online_bases) and prompt > 1
    if exact:
        runs = [(Form(top, exact=True), 0, prompt)]
    else:
        levels = [level_of(token, prompt) for token in range(prompt)]
        edges = [0, *(i for i in range(1, prompt) if levels[i] != levels[i - 1]), prompt]
        runs = [(Form(levels[a]), a, b) for a, b in pairwise(edges) if a < b]
    for query in range(min(tokens, max(0, prompt - seen))):
        for form, start, stop in runs:
            if start <= seen + query:
                read(form, query, start, min(stop, seen + query + 1))
    chains: list[tuple[int, int, tuple[int, ...]]] = []  # of quantised tokens, from … to
    for query in range(max(0, prompt - seen), tokens):
        before = seen + query
        oldest = before - stored_tokens(plan, layer, before)
        longer: list[tuple[int, int, tuple[int, ...]]] = []
        for segment in segments(plan, layer, before):
            start, stop, level = oldest + segment.start, oldest + segment.stop, segment.level
            if not segment.quantised:
                read(Form(level), query, start, stop)
                continue
            known = [(a, min(b, stop), c) for a, b, c in chains if a < stop and start < b]
            known.append((known[-1][1] if known else start, stop, ()))
            for a, b, chain in known:
                a, chain = max(a, start), chain if chain[-1:] == (level,) else (*chain, level)
                if a < b:
                    read(Form(level, chain), query, a, b)
                    if longer and longer[-1][1:] == (a, chain):
                        a = longer.pop()[0]
                    longer.append((a, b, chain))
        chains = longer
        read(Form(level_of(before, before + 1)), query, before, before + 1)
    return {form: _as_array(ends) for form, ends in forms.items()}


def _as_array(ends: list[list[int]]) -> NDArray[np.int64]:
    found = np.zeros((len(ends), max(map(len, ends))), dtype=np.int64)
    for query, own in enumerate(ends):
        found[query, : len(own)] = own
    return found.reshape(len(ends), -1, 2).transpose(1, 2, 0)


def eviction_units(layer: LayerPlan) -> list[tuple[int, int]]:
    """Return the runs of KV heads that are evicted together, as (first, heads).

    One head each, unless a group of heads shares a latent: a token leaves a latent for all.
    """
    joined = {
        head
        for groups in (layer.keys.groups, layer.values.groups)
        for group in groups
        for head in range(group.first + 1, group.first + group.heads)
    }
    heads = layer.kv_heads
    starts = [head for head in range(heads) if head not in joined]
    return [(start, stop - start) for start, stop in zip(starts, [*starts[1:], heads], strict=True)]
