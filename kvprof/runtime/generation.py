"""Text from a model, token by token, and where the texts of two runs part."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from kvprof.errors import Interrupted, UsageError
from kvprof.models.chat import ChatWriter
from kvprof.models.load import LoadedModel, OpenedModel, blaming
from kvprof.models.noise import quiet

__all__ = [
    "Generated",
    "GenerationSettings",
    "difference",
    "generate_text",
    "prompt_ids",
]


@dataclass(frozen=True)
class GenerationSettings:
    """How tokens are chosen."""

    max_new_tokens: int = 128
    sample: bool = False  # else the most probable token
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Generated:
    """What one run wrote."""

    tokens: list[int]  # the new ones
    ended: str  # end_of_text, length or interrupted
    logits: Tensor | None = None  # [tokens, vocabulary], as the model gave them
    broken: bool = False  # in the middle of a step, so that the cache holds a part of a token


def prompt_ids(loaded: OpenedModel, prompt: str, *, chat: bool) -> tuple[str, list[int]]:
    """Return the prompt as the model gets it, as text and as ids."""
    tokenizer = loaded.tokenizer()
    if chat:
        if tokenizer.chat_template is None:
            raise UsageError(f"--chat: the tokenizer of {loaded.spec} has no chat template")
        message = [{"role": "user", "content": prompt}]
        writer = ChatWriter(tokenizer, loaded.spec)
        try:
            prompt = writer(message, add_generation_prompt=True)
        finally:
            writer.close()
    _refuse_what_cannot_fit(loaded, tokenizer, prompt)
    # A template writes its own special tokens.
    ids = loaded.token_ids(prompt, add_special_tokens=not chat)
    if not ids:
        raise UsageError(f"the prompt {prompt!r} is empty, and {loaded.spec} adds no first token")
    return prompt, ids


def _refuse_what_cannot_fit(loaded: OpenedModel, tokenizer: Any, prompt: str) -> None:
    """Refuse a prompt that has more tokens than the context whatever they are, before it is cut."""
    if loaded.context_length >= sys.maxsize:
        return
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    if len(prompt) > longest * loaded.context_length:
        raise UsageError(
            f"the prompt has {len(prompt):,} characters, far more than the context of "
            f"{loaded.spec} ({loaded.context_length:,} tokens); shorten it"
        )


def generate_text(
    loaded: LoadedModel,
    prompt: Sequence[int],
    settings: GenerationSettings,
    *,
    write: Callable[[str], None] | None = None,
    keep_logits: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> Generated:
    """Continue a prompt with transformers' own ``generate`` and the active cache."""
    tokenizer = loaded.tokenizer()
    own = loaded.model.generation_config
    ends = loaded.end_ids
    choice: dict[str, Any] = {"temperature": None, "top_p": None, "top_k": None}
    if settings.sample:
        # 0 turns off the 50 that transformers would cut to by default.
        choice = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}
    ids = torch.tensor([list(prompt)], device=loaded.device)
    torch.manual_seed(settings.seed)
    doing = blaming(f"{loaded.spec}: its generation config cannot be used")
    asked = _Asked(should_stop)
    with quiet(), torch.inference_mode(), doing:
        try:
            result: Any = loaded.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=settings.max_new_tokens,
                do_sample=settings.sample,
                num_beams=1,
                pad_token_id=own.pad_token_id if own.pad_token_id is not None else (ends or [0])[0],
                streamer=_Streamer(tokenizer, write) if write is not None else None,
                stopping_criteria=StoppingCriteriaList([asked]),
                return_dict_in_generate=True,
                output_logits=keep_logits,
                **choice,
            )
        except Interrupted:
            if asked.ids is None:
                raise
            return Generated(asked.ids[0, len(prompt) :].tolist(), "interrupted", broken=True)
    tokens = result.sequences[0, len(prompt) :].tolist()
    ended = "length" if len(tokens) == settings.max_new_tokens else "interrupted"
    if tokens and tokens[-1] in ends:
        ended = "end_of_text"
    logits = torch.cat(result.logits).float().cpu() if keep_logits else None
    return Generated(tokens, ended, logits)


def difference(
    compressed: Generated, full: Generated, decode: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """Return where two continuations of a prompt first differ, as JSON values."""
    ours, theirs = compressed.tokens, full.tokens
    assert compressed.logits is not None
    assert full.logits is not None
    both = min(len(ours), len(theirs))
    same = next((i for i in range(both) if ours[i] != theirs[i]), both)
    position = None if ours == theirs else same
    # The step that chose different tokens still had the same text before it.
    steps = both if position is None else min(same + 1, both)
    mine = compressed.logits[:steps].double().log_softmax(-1)
    other = full.logits[:steps].double().log_softmax(-1)
    terms = torch.where(other > -torch.inf, other.exp() * (other - mine), 0.0)

    def choice(tokens: list[int]) -> dict[str, Any] | None:
        if position is None or position >= steps:
            return None
        token = tokens[position]
        return {
            "id": token,
            "text": decode([token]),
            "compressed_probability": float(mine[position, token].exp()),
            "full_probability": float(other[position, token].exp()),
        }

    return {
        "text": decode(theirs),
        "tokens": theirs,
        "ended": full.ended,
        "position": position,
        "common_text": decode(ours[:same]),
        "compressed_rest": decode(ours[same:]),
        "full_rest": decode(theirs[same:]),
        "compressed_token": choice(ours),
        "full_token": choice(theirs),
        "length": {
            "tokens": len(ours),
            "full_tokens": len(theirs),
            "ratio": len(ours) / len(theirs) if theirs else None,
            "ends": compressed.ended == "end_of_text",
            "full_ends": full.ended == "end_of_text",
        },
        # Equal distributions may come out a rounding error below 0.
        "kl": terms.sum(-1).clamp(min=0).tolist(),
    }


class _Asked(StoppingCriteria):  # type: ignore[misc]  # transformers carries no types
    """Stops when the user asks for it."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop
        self.ids: Tensor | None = None  # after the last whole step

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.ids = input_ids
        return torch.full((len(input_ids),), self._should_stop(), device=input_ids.device)


class _Streamer(TextStreamer):  # type: ignore[misc]  # transformers carries no types
    """Hands out text as soon as no later token can change it."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass a piece on."""
        if text:
            self._write(text)
