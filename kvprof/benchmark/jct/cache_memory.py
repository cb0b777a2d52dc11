"""What a plan holds of a request: ranks and bytes of its layers, tokens by level, memory."""

from dataclasses import replace
from typing import Any

import psutil
import torch

from kvprof.methods.accounting import bytes_at, full_bytes
from kvprof.methods.plan import HeadGroup, Plan
from kvprof.methods.tokens import segments
from kvprof.records.events import MemorySample
from kvprof.runtime.cache import CompressedCache

__all__ = ["layer_facts", "level_tokens", "memory_sample", "peak_bytes"]


def level_tokens(plan: Plan, tokens: int) -> dict[str, int]:
    """Return a sequence's tokens per level, sinks and window apart; empty without levels."""
    aged = (x for x in plan.layers if x.sliding_window is None and not x.left_out)
    layer = next(aged, None)
    if layer is None or len(plan.levels.shares) == 1:
        return {}
    found: dict[str, int] = {}
    for segment in segments(plan, layer, tokens):
        name = f"level {segment.level}"
        if segment.start == 0 and plan.levels.sink:
            name = "sinks"
        elif plan.quantiser is not None and not segment.quantised:
            name += ", uncompressed"
        found[name] = found.get(name, 0) + segment.tokens
    return found


def peak_bytes(device: torch.device) -> int:
    """Return a GPU's most allocated bytes since they were last reset, or a CPU's resident ones."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def memory_sample(
    time: float,
    case: str,
    plan: Plan,
    cache: CompressedCache,
    context: int,
    *,
    batch: int,
    itemsize: int,
    peak: int,
) -> MemorySample:
    """Return what a cache holds at a context."""
    return MemorySample(
        time,
        case,
        context,
        cache.nbytes,
        cache.allocated_bytes,
        full_bytes(plan, context, itemsize=itemsize, batch=batch),
        peak,
        level_tokens(plan, context),
    )


def layer_facts(plan: Plan, tokens: int, *, itemsize: int, batch: int) -> list[dict[str, Any]]:
    """Return each layer's facts for `CaseStarted`; shared latents are divided among heads."""
    found = []
    for index, layer in enumerate(plan.layers):
        alone = replace(plan, layers=(layer,))
        found.append(
            {
                "layer": index,
                "key_ranks": _by_head(layer.keys.groups),
                "value_ranks": _by_head(layer.values.groups),
                "nbytes": bytes_at(alone, tokens, itemsize=itemsize, batch=batch).total,
            }
        )
    return found


def _by_head(groups: tuple[HeadGroup, ...]) -> list[float]:
    return [
        group.rank if group.heads == 1 else group.rank / group.heads
        for group in groups
        for _ in range(group.heads)
    ]
