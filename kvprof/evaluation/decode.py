"""The forward passes of an evaluation: whole sequences, or prefill and then one token at a time.

A sequence of T tokens is split at ``T // 2``. The prefill's last logits predict the first decoded
token; after that the sequence's own tokens are fed one by one, or in runs within which nothing is
stored otherwise, and the last one is not fed at all.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from kvprof.evaluation.tasks.items import Scoring, TaskItem
from kvprof.models.interface import text_decoder
from kvprof.models.load import LoadedModel
from kvprof.runtime.generation import end_ids

__all__ = [
    "TaskBatch",
    "checked_answers",
    "decoded_logits",
    "greedy_answers",
    "last_states",
    "mean_context",
    "prefill_length",
    "state_logits",
    "task_batches",
    "written_answers",
]

# Logits that the head makes at once, in bytes: of all tokens they would be the largest tensor.
_SLICE = 1 << 26

# Prompts of a batch are at least this share of its longest: padding is work without a result.
_ALIKE = 0.75

Advance = Callable[[int], None]
NewCache = Callable[[], Any]


@dataclass(frozen=True)
class TaskBatch:
    """Questions that are answered at once."""

    indices: tuple[int, ...]  # where they stand in the list that was batched
    items: tuple[TaskItem, ...]

    @property
    def prompt_tokens(self) -> int:
        """Columns of the padded prompts."""
        return max(len(item.prompt) for item in self.items)

    @property
    def answer_tokens(self) -> int:
        """Tokens that are decoded at most."""
        return max(item.answer_tokens for item in self.items)

    @property
    def written(self) -> bool:
        """Whether the model writes freely, so that only decoding shows what."""
        return self.items[0].scoring is not Scoring.TOKENS


def prefill_length(tokens: int) -> int:
    """Return how many of a sequence's tokens are prefilled; the rest is decoded and scored."""
    return tokens // 2


def mean_context(tokens: int) -> int:
    """Return the mean number of tokens before a decoded one, rounded up."""
    return (prefill_length(tokens) + tokens) // 2


@dataclass(frozen=True)
class _Padded:
    """Questions as tensors: prompts padded on the left, what follows them on the right."""

    ids: Tensor  # [B, prompt_tokens]
    wanted: Tensor  # [B, answer_tokens], -1 behind an answer's end
    mask: Tensor  # [B, prompt_tokens + answer_tokens]
    positions: Tensor  # the same, counted from the first real token

    @classmethod
    def of(cls, batch: TaskBatch, device: torch.device) -> "_Padded":
        """Put a batch where the model runs."""
        rows, width, longest = len(batch.items), batch.prompt_tokens, batch.answer_tokens
        ids = torch.zeros(rows, width, dtype=torch.long)
        wanted = torch.full((rows, longest), -1)
        mask = torch.zeros(rows, width + longest, dtype=torch.long)
        for row, item in enumerate(batch.items):
            ids[row, width - len(item.prompt) :] = torch.tensor(item.prompt)
            wanted[row, : len(item.answer)] = torch.tensor(item.answer)
            mask[row, width - len(item.prompt) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return cls(*(one.to(device) for one in (ids, wanted, mask, positions)))


@torch.inference_mode()
def last_states(loaded: LoadedModel, ids: Tensor) -> Any:
    """Return what the head makes the second half's logits of, from a single pass of ``[B, T]`` ids.

    It is what the decoder returns, with states ``[B, T - T // 2, hidden size]`` and nothing else.
    """
    found: list[Any] = []
    hook = text_decoder(loaded.model).register_forward_hook(lambda *given: found.append(given[-1]))
    try:
        _forward(loaded, ids[:, :-1].to(loaded.device), 1, use_cache=False)
    finally:
        hook.remove()
    return _with_states(found[0], found[0][0][:, prefill_length(ids.shape[1]) - 1 :].clone())


@torch.inference_mode()
def state_logits(loaded: LoadedModel, states: Any) -> Iterator[Tensor]:
    """Yield ``[B, vocabulary]`` per token of what `last_states` returned, made slice by slice."""
    decoder, kept = text_decoder(loaded.model), states[0]
    tokens = max(1, _SLICE // (len(kept) * loaded.vocab_size * 4))
    for part in kept.split(tokens, dim=1):
        given = _with_states(states, part)
        ids = torch.zeros(part.shape[:2], dtype=torch.long, device=loaded.device)
        # What torch calls in place of a compiled module, past all hooks: the head alone runs.
        decoder._compiled_call_impl = lambda *_, given=given, **__: given
        try:
            logits = loaded.model(input_ids=ids, use_cache=False).logits
        finally:
            del decoder._compiled_call_impl
        yield from logits.unbind(1)


def _with_states(output: Any, states: Tensor) -> Any:
    return (states,) if isinstance(output, tuple) else type(output)(last_hidden_state=states)


def decoded_logits(
    loaded: LoadedModel, ids: Tensor, cache: Any, runs: Iterable[tuple[int, int]] | None = None
) -> Iterator[Tensor]:
    """Yield ``[B, vocabulary]`` per decoded token of ``[B, T]`` ids: prefill, then a step each.

    Passes after the prefill may be `runs` instead: first token, and the one after the last.
    """
    ids = ids.to(loaded.device)
    start, stop = prefill_length(ids.shape[1]), ids.shape[1] - 1
    runs = pairwise(range(start, stop + 1)) if runs is None else runs
    for first, last in chain([(0, start)], runs):
        keep = last - first if first else 1
        with torch.inference_mode():
            logits, _ = _forward(loaded, ids[:, first:last], keep, past_key_values=cache)
        yield from logits.unbind(1)


def task_batches(items: Sequence[TaskItem], tokens: int, batch_size: int | None) -> list[TaskBatch]:
    """Put questions of one task and of similar lengths together.

    Columns times rows of a batch's prompts are `tokens` at most, rows `batch_size`.
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
def checked_answers(loaded: LoadedModel, batch: TaskBatch) -> list[bool]:
    """Find out in one pass what `greedy_answers` does: whether each token is the likeliest."""
    # Up to its first wrong token decoding feeds a row the very tokens of the answer.
    padded, longest = _Padded.of(batch, loaded.device), batch.answer_tokens
    ids = torch.cat([padded.ids, padded.wanted[:, :-1].clamp(min=0)], dim=1)
    logits, _ = _forward(
        loaded,
        ids,
        longest,
        attention_mask=padded.mask[:, :-1],
        position_ids=padded.positions[:, :-1],
        use_cache=False,
    )
    likeliest = logits.argmax(-1).to(loaded.device)
    found: list[bool] = ((likeliest == padded.wanted) | (padded.wanted < 0)).all(1).tolist()
    return found


def greedy_answers(
    loaded: LoadedModel, batch: TaskBatch, new_cache: NewCache | None, advance: Advance
) -> list[bool]:
    """Answer questions by greedy decoding; an answer is right when every token of it is.

    A row is decided at its first wrong token; the batch ends when all rows are. Without `new_cache`
    it is the model's own. `advance` gets 1 per decode step, and at the end the steps saved.
    """
    longest = batch.answer_tokens
    wanted = _Padded.of(batch, loaded.device).wanted
    right = torch.ones(len(batch.items), dtype=torch.bool, device=loaded.device)
    for step, ids in enumerate(_greedy(loaded, batch, new_cache, advance)):
        expected = wanted[:, step]
        right &= (ids == expected) | (expected < 0)
        if not bool((right & (wanted[:, step + 1 :] >= 0).any(1)).any()):
            advance(longest - 1 - step)
            break
    found: list[bool] = right.tolist()
    return found


def written_answers(
    loaded: LoadedModel, batch: TaskBatch, new_cache: NewCache | None, advance: Advance
) -> list[tuple[list[int], bool]]:
    """Let the model write by greedy decoding until the text ends, or the limit is reached.

    Returns per question the tokens, with the one that ends the text, and whether it ended.
    """
    limits = torch.tensor([item.answer_tokens for item in batch.items], device=loaded.device)
    ends = torch.tensor(end_ids(loaded), dtype=torch.long, device=loaded.device)
    lengths = limits.clone()
    ended = torch.zeros(len(batch.items), dtype=torch.bool, device=loaded.device)
    steps: list[Tensor] = []
    for step, ids in enumerate(_greedy(loaded, batch, new_cache, advance)):
        steps.append(ids)
        ends_here = torch.isin(ids, ends) & ~ended & (step < limits)
        lengths[ends_here] = step + 1
        ended |= ends_here
        if bool((ended | (step + 1 >= limits)).all()):
            advance(batch.answer_tokens - 1 - step)
            break
    tokens = torch.stack(steps, dim=1).tolist()
    return [
        (row[:length], bool(end))
        for row, length, end in zip(tokens, lengths.tolist(), ended.tolist(), strict=True)
    ]


def _greedy(
    loaded: LoadedModel, batch: TaskBatch, new_cache: NewCache | None, advance: Advance
) -> Iterator[Tensor]:
    """Yield the likeliest next token of every row, ``[B]``, for as long as any may be asked for.

    Prompts are padded on the left. A pass runs when its token is asked for.
    """
    padded = _Padded.of(batch, loaded.device)
    ids = padded.ids
    cache = new_cache() if new_cache is not None else None
    start, stop = 0, batch.prompt_tokens
    for step in range(batch.answer_tokens):
        with torch.inference_mode():
            logits, cache = _forward(
                loaded,
                ids,
                1,
                attention_mask=padded.mask[:, :stop],
                position_ids=padded.positions[:, start:stop],
                past_key_values=cache,
                use_cache=True,
            )
            ids = logits[:, -1].argmax(-1, keepdim=True).to(loaded.device)
        if step:
            advance(1)
        yield ids.squeeze(1)
        start, stop = stop, stop + 1


def _forward(loaded: LoadedModel, ids: Tensor, keep: int, **inputs: Any) -> tuple[Tensor, Any]:
    """Run the model and return the last `keep` logits of every row, and the cache."""
    parameters = inspect.signature(loaded.model.forward).parameters
    if "logits_to_keep" in parameters:  # 128k logits for every token of a prompt add up
        inputs["logits_to_keep"] = keep
    output = loaded.model(input_ids=ids, **inputs)
    return output.logits[:, -keep:], output.get("past_key_values")
