"""What fits into a GPU's memory, and throughput against batch at equal memory (TALE Fig. 5, 6)."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from kvprof.analysis.jct import ladder
from kvprof.benchmark.jct.ablations import Variant
from kvprof.benchmark.jct.composer import Composer
from kvprof.benchmark.jct.lengths import Request
from kvprof.benchmark.jct.measured import Bench
from kvprof.benchmark.jct.storage import cache_bytes, weight_bytes
from kvprof.benchmark.limits import shortage
from kvprof.benchmark.machine import free_bytes
from kvprof.benchmark.ranks import Widths
from kvprof.errors import UsageError

__all__ = ["capacity", "largest"]

_MOST_CONTEXT, _MOST_SEQUENCES = 2**26, 2**16
_MOST_BATCH = {"cuda": 512, "cpu": 16}
#: Of what is free; a pass's own states need the rest.
_SHARE = 0.95
_TRIED_ON_A_CPU = 2**30


@dataclass(frozen=True, eq=False)
class _Method:
    """A method whose bytes are counted."""

    variant: Variant
    widths: Widths | None
    bench: Bench

    def cache(self, batch: int, tokens: int) -> float:
        """Return the bytes of the cache; 0 for contexts too short for the method's levels."""
        try:
            return cache_bytes(
                self.variant, self.bench.model.attention, self.widths, batch, tokens,
                self.bench.dtype,
            )  # fmt: skip
        except UsageError:  # too short for levels: nothing to compare
            return 0.0

    def longest(self, batch: int, room: float) -> int:
        """Return the longest context whose cache fits into so many bytes."""
        return largest(lambda tokens: self.cache(batch, tokens) <= room, _MOST_CONTEXT)

    def widest(self, tokens: int, room: float) -> int:
        """Return the largest batch whose cache fits into so many bytes."""
        return largest(lambda batch: self.cache(batch, tokens) <= room, _MOST_SEQUENCES)

    @property
    def weights(self) -> int:
        return weight_bytes(self.variant, self.bench.model, self.widths, self.bench.dtype)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest whole number up to `most` that fits; 0 where 1 does not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def capacity(
    bench: Bench, methods: list[tuple[Variant, Widths | None]], context: int, batch: int
) -> dict[str, Any]:
    """Return ``data.capacity``.

    Parameters
    ----------
    bench : Bench
    methods : list of (Variant, Widths or None)
    context : int
        Tokens per sequence at which throughput is measured.
    batch : int
        At which the largest context is sought.

    Returns
    -------
    dict
        Per method: bytes of weights and of a token, the largest context that fits beside the
        weights (``tried`` says whether as many bytes were really allocated), the largest batch at
        `context`; and throughput of decoding at batches up to it.
    """
    bench.release()  # a model's weights are counted, and these are in the way
    memory = free_bytes(bench.machine.device)
    rows: list[dict[str, Any]] = []
    throughput: list[dict[str, Any]] = []
    for variant, widths in methods:
        method = _Method(variant, widths, bench)
        room = _SHARE * memory - method.weights
        most_context = method.longest(batch, room)
        most_batch = method.widest(context, room)
        held = method.weights + (method.cache(batch, most_context) if most_context else 0)
        rows.append(
            {
                "method": variant.name,
                "weights_bytes": method.weights,
                "token_bytes": method.cache(1, 2 * context) / (2 * context),
                "largest_context": most_context,
                "tried": _tried(bench, int(held)) if most_context else None,
                "largest_batch": most_batch,
            }
        )
        throughput += _throughput(bench, method, context, most_batch)
    return {
        "memory_bytes": memory,
        "batch": batch,
        "context": context,
        "methods": rows,
        "throughput": throughput,
    }


def _throughput(bench: Bench, method: _Method, context: int, most: int) -> list[dict[str, Any]]:
    """Measure decoding steps at growing batches, all layers in the same memory."""
    kind = bench.machine.device.type
    if most < 1:
        return []
    found = []
    capped = min(most, _MOST_BATCH[kind])
    for batch in ladder({1, capped}, ratio=4):
        place = bench.place("decode", batch, context)
        if shortage(place, free_bytes(place.device)) is not None:
            bench.warn(f"{method.variant.name}: batch {batch} at {context:,} tokens is not timed: "
                       "one layer and its reference do not fit beside each other")  # fmt: skip
            break
        one = Request(max(1, context - 1), 2)  # one step, at this context
        composer = Composer(bench, method.variant, method.widths, batch, [one], inf, powered=False)
        _, steps, _ = composer.decode(one)
        seconds = steps[0][1]
        found.append(
            {
                "method": method.variant.name,
                "batch": batch,
                "step_seconds": seconds,
                "tokens_per_s": batch / seconds,
                "fills_memory": batch == most,
            }
        )
    return found


def _tried(bench: Bench, nbytes: int) -> bool | None:
    """Allocate as many bytes at once; None where that would say nothing.

    A CPU hands out memory that it does not have: there only what can be filled quickly is tried.
    """
    device = bench.machine.device
    if device.type == "cpu" and nbytes > _TRIED_ON_A_CPU:
        return None
    block = None
    try:
        block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            block.fill_(1)
    except (torch.OutOfMemoryError, RuntimeError):
        return False
    finally:
        del block
        if device.type == "cuda":
            with suppress(RuntimeError):
                torch.cuda.empty_cache()
    return True
