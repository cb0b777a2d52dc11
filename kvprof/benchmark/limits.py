"""What fits: memory before it is allocated, and a prefill's length before its time is spent."""

import time
from bisect import bisect_left
from dataclasses import replace

import torch

from kvprof.benchmark.case import Workload
from kvprof.benchmark.machine import Machine
from kvprof.sizes import format_bytes, format_count

__all__ = ["flop_rate", "largest_context", "needed_bytes", "prefill_length", "shortage"]

# Seconds that one prefill may take: a row takes some tens of them on a GPU, fewer on a CPU.
_GPU_SECONDS = 0.1
_CPU_SECONDS = 0.4
_LEAST_PREFILL = 512
#: Share of a plain matrix product's rate that attention reaches.
_ATTENTION_SHARE = 0.5
# torch's inputs, kvprof's own uncompressed or a method's, and what building them holds for a time.
_COPIES = 3


def needed_bytes(workload: Workload) -> int:
    """Return about how many bytes a workload's rows hold at once, at most."""
    shape = workload.shape
    states = 6 * workload.batch * workload.queries * shape.num_heads * shape.head_dim
    # The reference in float64: K, V and the scores of a head.
    reference = 8 * workload.seq * (2 * shape.head_dim + 32 * shape.group)
    full = workload.full_bytes
    return _COPIES * workload.copies(full) * full + states * workload.dtype.itemsize + reference


def largest_context(workload: Workload, free: int) -> int:
    """Return the longest context, in tokens, whose rows fit into `free` bytes; 0 for none."""
    lengths = range(1, workload.seq + 1)
    most = bisect_left(
        lengths, True, key=lambda tokens: needed_bytes(replace(workload, seq=tokens)) > free
    )
    # Whole thousands of tokens read better, and an estimate is no more exact than that.
    return most // 1024 * 1024 if most >= 2048 else most


def shortage(workload: Workload, free: int) -> str | None:
    """Say in one line why a workload does not fit, and what would; None when it does."""
    needed = needed_bytes(workload)
    if needed <= free:
        return None
    most = largest_context(workload, free)
    fits = (
        f"the largest context that fits is about {format_count(most)} tokens"
        if most
        else "no context fits" + (", try --batch 1" if workload.batch > 1 else "")
    )
    return (
        f"{workload.phase} at batch {workload.batch} and {workload.seq:,} tokens needs about "
        f"{format_bytes(needed)}, and {format_bytes(free)} are free: {fits}"
    )


def flop_rate(machine: Machine, dtype: torch.dtype) -> float:
    """Return the rate of a matrix product in flop/s, the best of three."""
    size = 4096 if machine.is_gpu else 768
    source = torch.Generator(device=machine.device).manual_seed(0)
    left, right = (
        torch.randn(size, size, generator=source, dtype=dtype, device=machine.device)
        for _ in range(2)
    )
    times = []
    for _ in range(4):
        start = time.perf_counter()
        left @ right
        if machine.is_gpu:
            torch.cuda.synchronize(machine.device)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times[1:])


def prefill_length(workload: Workload, machine: Machine, rate: float) -> int:
    """Return the longest prefill that fits the time: the context, or a power of two below."""
    allowed = (_GPU_SECONDS if machine.is_gpu else _CPU_SECONDS) * rate * _ATTENTION_SHARE
    columns = workload.shape.num_heads * workload.shape.head_dim
    if workload.attention_flops(columns, columns) <= allowed:
        return workload.seq
    length = 1 << (workload.seq - 1).bit_length() - 1
    while length > _LEAST_PREFILL:
        if replace(workload, seq=length).attention_flops(columns, columns) <= allowed:
            break
        length //= 2
    return min(workload.seq, max(length, _LEAST_PREFILL))
