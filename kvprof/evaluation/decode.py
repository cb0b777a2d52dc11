"""The forward passes of an evaluation: whole sequences, or prefill and then one token at a time.

A sequence of T tokens is split at ``T // 2``. The prefill's last logits predict the first decoded
token; after that the sequence's own tokens are fed one by one, or in runs within which nothing is
stored otherwise, and the last one is not fed at all.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import psutil
import torch
from torch import Tensor

from kvprof.errors import LackingError, UsageError, no_memory
from kvprof.evaluation.data import Scoring, TaskItem, TextSample
from kvprof.evaluation.scores import TokenScores
from kvprof.models.interface import text_decoder
from kvprof.models.load import LoadedModel, OpenedModel
from kvprof.sizes import format_bytes

__all__ = [
    "TaskBatch",
    "TextBatch",
    "Workload",
    "check_steps",
    "checked_answers",
    "decoded_logits",
    "explained_shortage",
    "greedy_answers",
    "last_states",
    "logit_budget",
    "mean_context",
    "prefill_length",
    "state_logits",
    "task_batches",
    "task_tokens",
    "text_batch_size",
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


def check_steps(opened: OpenedModel, tokens: int) -> None:
    """Refuse to decode sequences over the length at which a model's RoPE changes."""
    config = opened.config.get_text_config(decoder=True)
    start, stop = prefill_length(tokens), tokens - 1
    stated = getattr(config, "rope_parameters", None) or {}
    for rope in (stated, *stated.values()):
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind not in ("dynamic", "longrope"):
            continue
        border = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if border < stop and (start <= border or kind == "dynamic"):
            raise UsageError(
                f"RoPE ({kind}) changes at {border:,} tokens, and decoding goes from {start:,} to "
                f"{stop:,}; use --seq-len {border:,} or less"
            )


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
    ends = torch.tensor(loaded.end_ids, dtype=torch.long, device=loaded.device)
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
            raise UsageError(
                f"sequences of an evaluation must have one length, not {sorted(lengths)}"
            )
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
