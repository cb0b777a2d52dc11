"""What an evaluation runs: batches of sequences and of questions, how many at once, how long."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from kvprof.errors import LackingError, UsageError, no_memory
from kvprof.evaluation.data import TextSample
from kvprof.evaluation.decode import TaskBatch, mean_context, prefill_length, task_batches
from kvprof.evaluation.scores import TokenScores
from kvprof.evaluation.tasks.items import TaskItem
from kvprof.models.load import LoadedModel
from kvprof.sizes import format_bytes

__all__ = [
    "TextBatch",
    "Workload",
    "explained_shortage",
    "logit_budget",
    "task_tokens",
    "text_batch_size",
]

# --- How much an evaluation may hold at once, and what is said when it was too much.


_GIB = 2**30
_CPU_LOGITS = 1 * _GIB
_GPU_LOGITS = 8 * _GIB
_SHARE = 0.25  # of the free memory, where that is less
_LOGIT_BYTES = 4  # float32 at most

# Tokens per forward pass that keep a device busy.
_CPU_TOKENS = 2048
_GPU_TOKENS = 65536


def logit_budget(loaded: LoadedModel) -> int:
    """Return the bytes of logits by which batches of text go."""
    most = _CPU_LOGITS if loaded.device.type == "cpu" else _GPU_LOGITS
    free = _free(loaded.device)
    return most if free is None else min(most, int(_SHARE * free))


def task_tokens(loaded: LoadedModel) -> int:
    """Return how many tokens of prompts make a sensible forward pass on the device."""
    return _CPU_TOKENS if loaded.device.type == "cpu" else _GPU_TOKENS


def text_batch_size(loaded: LoadedModel, seq_len: int, decoded: int, budget: int) -> int:
    """Return how many sequences run at once, with `budget` bytes for `decoded` tokens' logits."""
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
    loaded: LoadedModel, what: str, *, sequences: int, tokens: int, cache: int
) -> Iterator[None]:
    """Say what was too large, and what would fit, when the body runs out of memory.

    `what` is the method or the uncompressed model; `cache` is the batch's bytes.
    """
    free = _free(loaded.device)
    try:
        yield
    except RuntimeError as problem:  # torch.OutOfMemoryError is one
        if not no_memory(problem):
            raise
        raise LackingError(
            f"out of memory on {loaded.device}: {what} with {sequences} sequences of {tokens:,} "
            f"tokens needs {format_bytes(cache)} of cache; "
            + _way_out(sequences, cache / sequences, free)
        ) from problem


def _way_out(sequences: int, each: float, free: int | None) -> str:
    """Name a batch size that fits by the account; half of what failed at most.

    Activations come on top of the cache, so what fits by the account alone may not.
    """
    if sequences == 1 or (free is not None and free < each):
        return "give a shorter --seq-len, or a device with more memory"
    fits = sequences // 2
    if free is not None:
        fits = max(1, min(fits, int(free / (2 * each))))
    return f"--batch-size {fits} fits"


# --- Batches, and how long they take.


# Tokens whose prefill takes about as long as a decode step of the same batch: a CPU computes, a
# GPU reads all weights for a single token as well. They only shape the progress bar.
_CPU_TOKENS_PER_STEP = 4
_GPU_TOKENS_PER_STEP = 256


@dataclass(eq=False)
class TextBatch:
    """Sequences that run together, and what the uncompressed model made of them."""

    sample: int  # which source they are of
    ids: Tensor  # [B, T] on the CPU
    base: TokenScores | None = None
    states: Any = None  # what its head makes logits of, as `last_states` returns it


class Workload:
    """The batches of an evaluation."""

    def __init__(
        self,
        loaded: LoadedModel,
        samples: Sequence[TextSample],
        items: Sequence[TaskItem],
        batch_size: int | None,
    ) -> None:
        lengths = {int(sample.ids.shape[1]) for sample in samples}
        if len(lengths) != 1:
            raise UsageError(f"sequences of an evaluation have one length, not {sorted(lengths)}")
        longest = max((len(item.prompt) + item.answer_tokens for item in items), default=0)
        if longest > loaded.context_length:
            raise UsageError(
                f"a task of {longest:,} tokens exceeds the context of {loaded.spec}, "
                f"{loaded.context_length:,}"
            )
        self._loaded = loaded
        #: Tokens of a sequence, and position of its first decoded token.
        self.seq_len = lengths.pop()
        self.start = prefill_length(self.seq_len)
        self.context = mean_context(self.seq_len)  # mean number of tokens before a decoded one
        #: Sequences at once; None by device and memory.
        self.batch_size = batch_size or text_batch_size(
            loaded, self.seq_len, self.seq_len - self.start, logit_budget(loaded)
        )
        self.text = [
            TextBatch(index, ids)
            for index, sample in enumerate(samples)
            for ids in torch.split(sample.ids, self.batch_size)
        ]
        self.tasks = task_batches(items, task_tokens(loaded), batch_size)

    def prefill_steps(self, tokens: int) -> int:
        """Return how many steps of the progress bar a prefill is worth."""
        cpu = self._loaded.device.type == "cpu"
        return max(1, tokens // (_CPU_TOKENS_PER_STEP if cpu else _GPU_TOKENS_PER_STEP))

    def baseline_steps(self, *, decode: bool) -> int:
        """Return the steps of the uncompressed model, whose text is one pass in any case."""
        passes = len(self.text) * self.prefill_steps(self.seq_len)
        return passes + self._task_steps(decode)

    def steps(self, *, decode: bool) -> int:
        """Return the steps of evaluating one plan."""
        if not decode:
            return self.baseline_steps(decode=decode)
        each = self.prefill_steps(self.start) + self.seq_len - self.start - 1
        return len(self.text) * each + self._task_steps(decode)

    def _task_steps(self, decode: bool) -> int:
        return sum(self.task_steps(batch, decode=decode) for batch in self.tasks)

    def task_steps(self, batch: TaskBatch, *, decode: bool) -> int:
        """Return the steps of one batch of questions, which one pass answers unless decoded."""
        fed = batch.answer_tokens - 1
        if decode or batch.written:
            return self.prefill_steps(batch.prompt_tokens) + fed
        return self.prefill_steps(batch.prompt_tokens + fed)
