"""What a question is, what a model made of it, and how that is scored."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Question", "Scoring", "TaskAnswer", "TaskItem", "scored", "string_match_all"]

_INTEGER = re.compile(r"-?\d+")


class Scoring(StrEnum):
    """How an answer is scored."""

    #: Greedy decoding gives every token of one answer.
    TOKENS = "tokens"
    #: RULER's ``string_match_all``: the share of the strings asked for that were written.
    STRINGS = "strings"
    #: The last integer that was written.
    NUMBER = "number"
    #: Nothing to be right: only the length of the answer is of interest.
    NONE = "none"


@dataclass(frozen=True)
class Question:
    """One question as text, before a model's tokenizer and chat template have seen it."""

    #: What the user and the assistant said in turn; the last one is the user's question.
    turns: tuple[str, ...]
    prefix: str = ""  # with which the answer begins
    references: tuple[str, ...] = ()  # what has to be written
    #: The score of one who picks among the strings of the asked kind in the prompt; 0 where all of
    #: them are asked for.
    chance: float = 0.0
    #: Where the statement asked for stands, 0 (start) to 1; None where there are several.
    depth: float | None = None


@dataclass(frozen=True)
class TaskItem:
    """One question to one model."""

    task: str  # A name of `kvprof.evaluation.tasks.registry.TASKS`
    length: int  # tokens that prompt and answer take at most, as asked for
    depth: float | None  # as in `Question`
    prompt: list[int]  # token ids, with what the tokenizer or the chat template puts in front
    answer: list[int]  # that greedy decoding has to give; empty where what is written is scored
    scoring: Scoring = Scoring.TOKENS
    references: tuple[str, ...] = ()  # as in `Question`
    limit: int = 0  # tokens that may be written; 0 where the answer's own number decides
    chance: float = 0.0  # as in `Question`

    @property
    def answer_tokens(self) -> int:
        """How many tokens are decoded at most."""
        return self.limit or len(self.answer)

    @property
    def asked(self) -> int:
        """How many strings are asked for, each of which may be right or wrong."""
        return max(1, len(self.references))


@dataclass(frozen=True)
class TaskAnswer:
    """What one model made of one question."""

    score: float  # 0 to 1
    exact: bool  # whether everything asked for is there
    #: Tokens up to the end of text, it included, or up to the limit; None where decoding ended as
    #: soon as the score was known.
    written: int | None = None
    ended: bool = False  # whether the text ended within the limit


def string_match_all(text: str, references: Sequence[str]) -> float:
    """Return the share of the references that stand in a text, whatever the case of its letters.

    RULER's score of one question (``scripts/eval/synthetic/constants.py`` there), which it gives
    in per cent over all of them.
    """
    lower = text.lower()
    return sum(reference.lower() in lower for reference in references) / len(references)


def scored(item: TaskItem, text: str) -> float:
    """Return the score, 0 to 1, of what was written as an answer."""
    if item.scoring is Scoring.NUMBER:
        found = _INTEGER.findall(text.replace(",", ""))
        return float(bool(found) and found[-1] == item.references[0])
    return string_match_all(text, item.references) if item.references else 0.0
