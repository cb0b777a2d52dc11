"""What an evaluation has to run: batches of sequences, batches of questions, and how long it is."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.evaluation.data import TextSample
from kvprof.evaluation.decode import TaskBatch, mean_context, prefill_length, task_batches
from kvprof.evaluation.memory import logit_budget, task_tokens, text_batch_size
from kvprof.evaluation.scores import TokenScores
from kvprof.evaluation.tasks import TaskItem
from kvprof.models.load import LoadedModel

__all__ = ["TextBatch", "Workload"]

# Tokens whose prefill takes about as long as a decode step of the same batch: a CPU computes, a
# GPU reads all weights for a single token as well. They only shape the progress bar.
_CPU_TOKENS_PER_STEP = 4
_GPU_TOKENS_PER_STEP = 256


@dataclass(eq=False)
class TextBatch:
    """Sequences that run together, and what the uncompressed model made of them.

    Attributes
    ----------
    sample : int
        Which source they are of.
    ids : Tensor
        ``[B, T]`` on the CPU.
    base : TokenScores or None
        Of the uncompressed model; None before it has run.
    logits : Tensor or None
        ``[B, T - T // 2, vocabulary]``, its logits where there is room for all of them.
    """

    sample: int
    ids: Tensor
    base: TokenScores | None = None
    logits: Tensor | None = None


class Workload:
    """The batches of an evaluation.

    Parameters
    ----------
    loaded : LoadedModel
    samples : sequence of TextSample
    items : sequence of TaskItem
    batch_size : int or None
        Sequences at once; None by device and memory.

    Attributes
    ----------
    seq_len, start : int
        Tokens of a sequence, and position of its first decoded token.
    context : int
        Mean number of tokens before a decoded one.
    batch_size : int
    text : list of TextBatch
    tasks : list of TaskBatch
    keeps_logits : bool
        Whether the uncompressed model's logits of all batches may be held at once.

    Raises
    ------
    UsageError
        When sequences differ in length, or a question does not fit the model's context.
    """

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
        longest = max((len(item.prompt) + len(item.answer) for item in items), default=0)
        if longest > loaded.context_length:
            raise UsageError(
                f"a task of {longest:,} tokens does not fit the context of {loaded.spec}, "
                f"{loaded.context_length:,}"
            )
        self._loaded = loaded
        self.seq_len = lengths.pop()
        self.start = prefill_length(self.seq_len)
        self.context = mean_context(self.seq_len)
        budget = logit_budget(loaded)
        self.batch_size = batch_size or text_batch_size(
            loaded, self.seq_len, self.seq_len - self.start, budget
        )
        self.text = [
            TextBatch(index, ids)
            for index, sample in enumerate(samples)
            for ids in torch.split(sample.ids, self.batch_size)
        ]
        self.tasks = task_batches(items, task_tokens(loaded), batch_size)
        sequences = sum(len(sample.ids) for sample in samples)
        self.keeps_logits = self.logit_bytes(sequences) <= budget

    def logit_bytes(self, sequences: int) -> int:
        """Return the bytes of one model's logits for all decoded tokens of some sequences."""
        each = (self.seq_len - self.start) * self._loaded.vocab_size
        return sequences * each * self._loaded.dtype.itemsize

    def prefill_steps(self, tokens: int) -> int:
        """Return how many steps of the progress bar a prefill is worth."""
        cpu = self._loaded.device.type == "cpu"
        return max(1, tokens // (_CPU_TOKENS_PER_STEP if cpu else _GPU_TOKENS_PER_STEP))

    def baseline_steps(self) -> int:
        """Return the steps of the uncompressed model's turn."""
        return self._single_passes() + self._task_steps()

    def steps(self, *, teacher_forced: bool) -> int:
        """Return the steps of evaluating one plan."""
        again = 0 if self.keeps_logits else self._single_passes()
        if teacher_forced:
            return again + self._single_passes() + self._task_steps()
        each = self.prefill_steps(self.start) + self.seq_len - self.start - 1
        return again + len(self.text) * each + self._task_steps()

    def _single_passes(self) -> int:
        return len(self.text) * self.prefill_steps(self.seq_len)

    def _task_steps(self) -> int:
        return sum(self.task_steps(batch) for batch in self.tasks)

    def task_steps(self, batch: TaskBatch) -> int:
        """Return the steps of one batch of questions."""
        return self.prefill_steps(batch.prompt_tokens) + batch.answer_tokens - 1
