"""Questions as a model gets them: in its chat template where it has one, and as long as fits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvprof.evaluation.data import Question
from kvprof.models.chat import ChatWriter
from kvprof.models.load import OpenedModel
from kvprof.moments.collect import model_tokens

__all__ = ["Fitted", "PromptWriter", "largest_fitting"]

_ROLES = ("user", "assistant")
_NEAR = 100  # a hundredth of the room left is near enough
_TRIES = 16


class PromptWriter:
    """Turns questions into token ids.

    With a chat template the turns become its messages and the answer begins with the question's
    prefix, as RULER does it; without one, a single turn and the prefix are joined, and of several
    each has its speaker in front. Used as a context manager: a template runs in a process.

    Parameters
    ----------
    loaded : OpenedModel
        With a tokenizer.
    """

    def __init__(self, loaded: OpenedModel) -> None:
        self._tokens = model_tokens(loaded)
        self._tokenize = self._tokens.tokenize()
        template = loaded.tokenizer().chat_template
        self._chat = ChatWriter(loaded.tokenizer(), loaded.spec) if template is not None else None

    def __enter__(self) -> "PromptWriter":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._chat is not None:
            self._chat.close()

    def __call__(self, question: Question) -> list[int]:
        """Return the prompt of a question."""
        turns = question.turns
        if self._chat is not None:
            messages = [
                {"role": _ROLES[number % 2], "content": turn} for number, turn in enumerate(turns)
            ]
            # A template writes its own special tokens.
            text = self._chat(messages, add_generation_prompt=True)
            return self._tokenize(text + question.prefix)
        text = turns[0]
        if len(turns) > 1:
            said = [f"{_ROLES[n % 2].capitalize()}: {turn}\n" for n, turn in enumerate(turns)]
            text = "".join(said) + f"{_ROLES[1].capitalize()}:"
        return [*self._tokens.prefix(), *self._tokenize(text + question.prefix)]


@dataclass(frozen=True)
class Fitted:
    """A question of some size that fits, and its prompt."""

    size: int
    question: Question
    ids: list[int]


def largest_fitting(
    take: Callable[[int], tuple[Question, list[int]]],
    room: int,
    least: int,
    most: int,
    near: int | None = None,
) -> Fitted | int:
    """Return about the largest size whose prompt fits; where none does, the tokens of the least.

    Prompts grow with their size nearly along a line, which is followed until a hundredth of the
    room is left at most.
    """
    question, ids = take(least)
    if len(ids) > room:
        return len(ids)
    start = len(ids)
    found, over = Fitted(least, question, ids), most + 1
    guess = near if near is not None else 2 * least + 16
    for _ in range(_TRIES):
        if room - len(found.ids) <= room // _NEAR or over - found.size <= 1:
            break
        guess = min(max(guess, found.size + 1), over - 1)
        question, ids = take(guess)
        if len(ids) <= room:
            found = Fitted(guess, question, ids)
        else:
            over = guess
        each = max(1e-3, (len(ids) - start) / (guess - least))
        aim = room - room // (2 * _NEAR) - len(found.ids)
        guess = found.size + int(aim / each)
    return found
