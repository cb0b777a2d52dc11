"""What a plan takes of a memory: its weights, and which context and batch fit beside them.

Pure arithmetic on plans. A length fits when every shorter one does too: with a quantiser that works
in blocks the bytes fall each time a block is quantised, so that the account has to be searched and
cannot be divided.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvprof.errors import UsageError
from kvprof.methods.accounting import bytes_at, full_bytes, weight_bytes
from kvprof.methods.across import coded_tokens
from kvprof.methods.plan import Plan
from kvprof.methods.tokens import kept, level_ends, quantised_tokens
from kvprof.models.layout import LayerLayout, ModelLayout

__all__ = [
    "Fit",
    "Memory",
    "RunningWeights",
    "fit_plan",
    "largest_batch",
    "largest_context",
    "peak_bytes",
    "running_weights",
]

# --- What a plan adds to the weights in memory while it runs.
#
# `kvprof.methods.accounting.weight_bytes` counts a folded projection at its rank, which is what a
# method costs in principle. Here it has the width that it is run with.


@dataclass(frozen=True)
class RunningWeights:
    """What a plan adds to the model's weights while it runs, in bytes."""

    # By a server that folds once: matrices that run online, W_O's growth (negative where it
    # shrinks), a second W_O. W_K, W_V and W_Q keep their width when a basis is folded into them.
    added: int
    beside: int  # more than that by ``kvprof.compressed``, which keeps what it replaces


def running_weights(plan: Plan, layout: ModelLayout, *, itemsize: int) -> RunningWeights:
    """Return what a plan adds to the weights as the runtime lays them out."""
    counted = weight_bytes(plan, layout, itemsize=itemsize)
    hidden = layout.hidden_size
    output = beside = 0
    for layer, facts in zip(plan.layers, layout.layers, strict=True):
        for side in (layer.keys, layer.values):
            for group in side.groups:
                if group.down is not None:
                    beside += group.width * group.rank * (side.fold_down + side.fold_up)
        if layer.values.fold_up:
            output += hidden * sum(
                group.heads * facts.group * (group.rank - group.head_dim)
                for group in layer.values.groups
                if group.down is not None
            )
            if not plan.lazy:
                beside += hidden * facts.num_heads * facts.v_head_dim
        beside += hidden * _replaced_columns(
            facts,
            query=layer.keys.fold_up,
            key=layer.keys.fold_down,
            value=layer.values.fold_down,
        )
    added = counted.online + counted.kept_twice + output * itemsize
    return RunningWeights(added, beside * itemsize)


def _replaced_columns(facts: LayerLayout, *, query: bool, key: bool, value: bool) -> int:
    """Return how many columns the input projections have that a fold replaces."""
    columns = {
        "q": facts.num_heads * facts.qk_head_dim,
        "k": facts.num_kv_heads * facts.qk_head_dim,
        "v": facts.num_kv_heads * facts.v_head_dim,
    }
    if facts.fused_qkv:
        return sum(columns.values()) if query or key or value else 0
    return query * columns["q"] + key * columns["k"] + value * columns["v"]


# --- What fits beside the weights.


# Longer than any context; what still fits there has no limit (sliding windows alone).
_ENDLESS = 2**40


@dataclass(frozen=True)
class Memory:
    """A memory and what is taken from it before the cache gets any."""

    total: int
    reserve: int
    weights: int

    def __post_init__(self) -> None:
        if self.total <= 0 or self.weights < 0:
            raise UsageError(f"a memory of {self.total:,} bytes holds nothing")
        if not 0 <= self.reserve < self.total:
            raise UsageError(
                f"a reserve of {self.reserve:,} bytes leaves nothing of {self.total:,} bytes"
            )

    @property
    def lacking(self) -> int:
        """Bytes that the model alone lacks; 0 where it fits."""
        return max(0, self.weights + self.reserve - self.total)


@dataclass(frozen=True)
class Fit:
    """What of one plan fits."""

    weights: RunningWeights
    room: int
    contexts: dict[int, int | None]  # by batch; 0 where none fits, None where there is no limit
    batches: dict[int, int]  # by context


def fit_plan(
    plan: Plan,
    memory: Memory,
    layout: ModelLayout,
    *,
    itemsize: int,
    batches: Sequence[int],
    contexts: Sequence[int],
) -> Fit:
    """Return which context fits at each batch and which batch at each context."""
    for what, values in (("batch", batches), ("context", contexts)):
        if values and min(values) < 1:
            raise UsageError(f"a {what} of {min(values)} makes no sense")
    weights = running_weights(plan, layout, itemsize=itemsize)
    room = memory.total - memory.reserve - memory.weights - weights.added
    return Fit(
        weights,
        room,
        {batch: largest_context(plan, room // batch, itemsize=itemsize) for batch in batches},
        {context: largest_batch(plan, room, context, itemsize=itemsize) for context in contexts},
    )


def largest_context(plan: Plan, room: int, *, itemsize: int) -> int | None:
    """Return the longest sequence whose cache fits, at every length on the way to it."""

    def stored(tokens: int) -> int:
        return bytes_at(plan, tokens, itemsize=itemsize).total

    if room < stored(1):
        return 0
    high = 2
    while stored(high) <= room:
        if high >= _ENDLESS:
            return None
        high *= 2

    def last(fits: int, above: int) -> int:
        """Return the last length that fits, of those from one that does to one that does not."""
        lengths = range(fits + 1, above)
        return fits + bisect_left(lengths, True, key=lambda tokens: stored(tokens) > room)

    longest = last(high // 2, high)
    # The next length does not fit, but a peak before it may not fit either.
    fall = _largest_fall(plan, itemsize)
    safe, unsure = 1, []
    for peak in _peaks(plan, longest):
        size = stored(peak)
        if size + fall <= room:
            safe = peak
            break
        unsure.append((peak, size))
    for peak, size in reversed(unsure):
        if size > room:
            return last(safe, peak)
        safe = peak
    return longest


def largest_batch(plan: Plan, room: int, context: int, *, itemsize: int) -> int:
    """Return how many sequences of a context fit, at every length on the way to it."""
    return max(0, room) // peak_bytes(plan, context, itemsize=itemsize)


def peak_bytes(plan: Plan, tokens: int, *, itemsize: int) -> int:
    """Return the most bytes that one sequence's cache holds on its way to `tokens` tokens."""
    most = bytes_at(plan, tokens, itemsize=itemsize).total
    for peak in _peaks(plan, tokens):
        size = bytes_at(plan, peak, itemsize=itemsize).total
        most = max(most, size)
        if size + _largest_fall(plan, itemsize) <= most:
            break
    return most


def _peaks(plan: Plan, tokens: int) -> Iterator[int]:
    """Yield, newest first, the lengths below `tokens` after which a block of tokens shrinks."""
    block, across = _block(plan), plan.across
    if block == 1 and plan.levels.batch == 1:
        return  # one token at a time: what it costs is always more than what an older one frees

    def moved(length: int) -> tuple[int, ...]:
        if across is not None:
            return (coded_tokens(across, plan.levels.sink, length),)
        rest = max(0, kept(plan.eviction, length) - plan.levels.sink)
        quantised = quantised_tokens(plan.quantiser, rest) if block > 1 else 0
        ends = level_ends(plan.levels, rest)[:-1] if plan.levels.batch > 1 else []
        return quantised, *ends

    after = moved(tokens)
    for length in range(tokens - 1, 0, -1):
        before = moved(length)
        if before != after:
            yield length
        after = before


def _largest_fall(plan: Plan, itemsize: int) -> int:
    """Return more bytes than the cache ever lies above the line that it grows along."""
    # Eviction keeps a token for several that come; a block of those that are kept moves at once.
    return 2 * (_block(plan) + plan.levels.batch) * full_bytes(plan, 1, itemsize=itemsize)


def _block(plan: Plan) -> int:
    """Return how many tokens shrink at a time."""
    if plan.across is not None:
        return max(1, plan.across.block)
    return plan.quantiser.block if plan.quantiser is not None else 1
