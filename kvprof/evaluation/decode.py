"""The forward passes of an evaluation: prefill, then one token at a time, through any cache.

A sequence of T tokens is split at ``T // 2``. The prefill's last logits predict the first decoded
token; after that the sequence's own tokens are fed one by one, and the last one is not fed at all.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvprof.evaluation.data import TaskItem
from kvprof.models.load import LoadedModel

__all__ = [
    "TaskBatch",
    "baseline_logits",
    "decoded_logits",
    "greedy_answers",
    "mean_context",
    "prefill_length",
    "single_pass_logits",
    "task_batches",
]

# Prompts of a batch are at least this share of its longest: padding is work without a result.
_ALIKE = 0.75

Advance = Callable[[int], None]
NewCache = Callable[[], Any]


@dataclass(frozen=True)
class TaskBatch:
    """Questions that are answered at once.

    Attributes
    ----------
    indices : tuple of int
        Where they stand in the list that was batched.
    items : tuple of TaskItem
    """

    indices: tuple[int, ...]
    items: tuple[TaskItem, ...]

    @property
    def prompt_tokens(self) -> int:
        """Columns of the padded prompts."""
        return max(len(item.prompt) for item in self.items)

    @property
    def answer_tokens(self) -> int:
        """Tokens of the longest answer."""
        return max(len(item.answer) for item in self.items)


def prefill_length(tokens: int) -> int:
    """Return how many of a sequence's tokens are prefilled; the rest is decoded and scored."""
    return tokens // 2


def mean_context(tokens: int) -> int:
    """Return the mean number of tokens before a decoded one, rounded up."""
    return (prefill_length(tokens) + tokens) // 2


@torch.inference_mode()
def baseline_logits(loaded: LoadedModel, ids: Tensor) -> Tensor:
    """Return the uncompressed model's logits for every decoded token, from a single pass.

    Parameters
    ----------
    loaded : LoadedModel
    ids : Tensor
        ``[B, T]``.

    Returns
    -------
    Tensor
        ``[B, T - T // 2, vocabulary]`` in the model's dtype.
    """
    keep = ids.shape[1] - prefill_length(ids.shape[1])
    return _forward(loaded, ids[:, :-1].to(loaded.device), keep, use_cache=False)[0]


@torch.inference_mode()
def single_pass_logits(loaded: LoadedModel, ids: Tensor, cache: Any) -> Iterator[Tensor]:
    """Yield ``[B, vocabulary]`` per decoded token from one pass through `cache`."""
    keep = ids.shape[1] - prefill_length(ids.shape[1])
    logits, _ = _forward(loaded, ids[:, :-1].to(loaded.device), keep, past_key_values=cache)
    yield from logits.unbind(1)


def decoded_logits(loaded: LoadedModel, ids: Tensor, cache: Any) -> Iterator[Tensor]:
    """Yield ``[B, vocabulary]`` per decoded token: prefill, then a step for each.

    Parameters
    ----------
    loaded : LoadedModel
        Running with the plan that `cache` belongs to.
    ids : Tensor
        ``[B, T]``.
    cache : CompressedCache
        Empty; at the end it has seen ``T - 1`` tokens.
    """
    ids = ids.to(loaded.device)
    start = prefill_length(ids.shape[1])
    for first, last in [(0, start), *((t, t + 1) for t in range(start, ids.shape[1] - 1))]:
        with torch.inference_mode():
            logits, _ = _forward(loaded, ids[:, first:last], 1, past_key_values=cache)
        yield logits[:, -1]


def task_batches(items: Sequence[TaskItem], tokens: int, batch_size: int | None) -> list[TaskBatch]:
    """Put questions of one task and of similar lengths together.

    Parameters
    ----------
    items : sequence of TaskItem
    tokens : int
        Columns times rows of a batch's prompts, at most.
    batch_size : int or None
        Rows, at most.
    """
    batches: list[TaskBatch] = []
    order = sorted(range(len(items)), key=lambda i: (items[i].task, len(items[i].prompt)))
    pending: list[int] = []

    def close() -> None:
        if pending:
            batches.append(TaskBatch(tuple(pending), tuple(items[i] for i in pending)))
            pending.clear()

    for index in order:
        width = len(items[index].prompt)
        if pending:
            first = items[pending[0]]
            rows = len(pending) + 1
            if (
                first.task != items[index].task
                or len(first.prompt) < _ALIKE * width
                or rows * width > tokens
                or (batch_size is not None and rows > batch_size)
            ):
                close()
        pending.append(index)
    close()
    return batches


@torch.inference_mode()
def greedy_answers(
    loaded: LoadedModel, batch: TaskBatch, new_cache: NewCache | None, advance: Advance
) -> list[bool]:
    """Answer questions by greedy decoding; an answer is right when every token of it is.

    Prompts are padded on the left. A row is decided at its first wrong token; the batch ends when
    all rows are.

    Parameters
    ----------
    loaded : LoadedModel
    batch : TaskBatch
    new_cache : callable or None
        Makes an empty cache; None takes the model's own.
    advance : callable
        Called with 1 per decode step, and at the end the steps that an early end saved.

    Returns
    -------
    list of bool
        One per question.
    """
    device = loaded.device
    width, longest = batch.prompt_tokens, batch.answer_tokens
    ids = torch.zeros(len(batch.items), width, dtype=torch.long)
    mask = torch.zeros(len(batch.items), width + longest, dtype=torch.long)
    wanted = torch.full((len(batch.items), longest), -1)
    for row, item in enumerate(batch.items):
        ids[row, width - len(item.prompt) :] = torch.tensor(item.prompt)
        mask[row, width - len(item.prompt) :] = 1
        wanted[row, : len(item.answer)] = torch.tensor(item.answer)
    ids, mask, wanted = ids.to(device), mask.to(device), wanted.to(device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    right = torch.ones(len(batch.items), dtype=torch.bool, device=device)
    cache = new_cache() if new_cache is not None else None
    start, stop = 0, width
    for step in range(longest):
        given: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        logits, cache = _forward(
            loaded,
            ids,
            1,
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
            **given,
        )
        ids = logits[:, -1].argmax(-1, keepdim=True).to(device)
        expected = wanted[:, step : step + 1]
        right &= ((ids == expected) | (expected < 0)).squeeze(1)
        if step:
            advance(1)
        if not bool((right & (wanted[:, step + 1 :] >= 0).any(1)).any()):
            advance(longest - 1 - step)
            break
        start, stop = stop, stop + 1
    found: list[bool] = right.tolist()
    return found


def _forward(loaded: LoadedModel, ids: Tensor, keep: int, **inputs: Any) -> tuple[Tensor, Any]:
    """Run the model and return the last `keep` logits of every row, and the cache."""
    parameters = inspect.signature(loaded.model.forward).parameters
    if "logits_to_keep" in parameters:  # 128k logits for every token of a prompt add up
        inputs["logits_to_keep"] = keep
    output = loaded.model(input_ids=ids, **inputs)
    return output.logits[:, -keep:], output.get("past_key_values")
