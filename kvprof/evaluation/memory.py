"""How much an evaluation may hold at once, and what is said when it was too much."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from kvprof.errors import LackingError
from kvprof.models.load import LoadedModel
from kvprof.sizes import format_bytes

__all__ = ["explained_shortage", "logit_budget", "task_tokens", "text_batch_size"]

_GIB = 2**30
_CPU_LOGITS = 1 * _GIB
_GPU_LOGITS = 8 * _GIB
_SHARE = 0.25  # of the free memory, where that is less
_LOGIT_BYTES = 4  # float32 at most

# Tokens per forward pass that keep a device busy.
_CPU_TOKENS = 8192
_GPU_TOKENS = 65536


def logit_budget(loaded: LoadedModel) -> int:
    """Return how many bytes of the uncompressed model's logits may be held."""
    most = _CPU_LOGITS if loaded.device.type == "cpu" else _GPU_LOGITS
    free = _free(loaded.device)
    return most if free is None else min(most, int(_SHARE * free))


def task_tokens(loaded: LoadedModel) -> int:
    """Return how many tokens of prompts make a sensible forward pass on the device."""
    return _CPU_TOKENS if loaded.device.type == "cpu" else _GPU_TOKENS


def text_batch_size(loaded: LoadedModel, seq_len: int, decoded: int, budget: int) -> int:
    """Return how many sequences to evaluate at once.

    Parameters
    ----------
    loaded : LoadedModel
    seq_len : int
        Tokens of a sequence.
    decoded : int
        Tokens of it whose logits are held.
    budget : int
        Bytes for these logits.
    """
    by_logits = budget // (decoded * loaded.vocab_size * _LOGIT_BYTES)
    return max(1, min(by_logits, task_tokens(loaded) // seq_len))


def _free(device: torch.device) -> int | None:
    """Return the bytes that could be allocated now; None where nobody tells."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return int(psutil.virtual_memory().available) if device.type == "cpu" else None


@contextmanager
def explained_shortage(
    loaded: LoadedModel, what: str, *, sequences: int, tokens: int, cache: int, logits: int
) -> Iterator[None]:
    """Say what was too large, and what would fit, when the body runs out of memory.

    Parameters
    ----------
    loaded : LoadedModel
    what : str
        Whose memory it is: the method, or the uncompressed model.
    sequences, tokens : int
        Of the batch.
    cache, logits : int
        Bytes of each that the whole batch takes.

    Raises
    ------
    LackingError
        Instead of torch's own error.
    """
    free = _free(loaded.device)
    try:
        yield
    except RuntimeError as problem:  # torch.OutOfMemoryError is one
        if not _is_shortage(problem):
            raise
        raise LackingError(
            f"out of memory on {loaded.device}: {what} with {sequences} sequences of {tokens:,} "
            f"tokens takes {format_bytes(cache)} of cache and {format_bytes(logits)} of logits; "
            + _way_out(sequences, (cache + logits) / sequences, free)
        ) from problem


def _is_shortage(problem: RuntimeError) -> bool:
    return isinstance(problem, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(problem)


def _way_out(sequences: int, each: float, free: int | None) -> str:
    """Name a batch size that fits by the account; half of what failed at most.

    Activations come on top of cache and logits, so what fits by the account alone may not.
    """
    if sequences == 1 or (free is not None and free < each):
        return "take a shorter --seq-len, or a device with more memory"
    fits = sequences // 2
    if free is not None:
        fits = max(1, min(fits, int(free / (2 * each))))
    return f"--batch-size {fits} would fit"
