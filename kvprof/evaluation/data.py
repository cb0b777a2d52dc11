"""What plans are evaluated on: text of equal sequences, never the calibration split; questions."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import resources

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.models.load import OpenedModel
from kvprof.moments.collect import model_tokens
from kvprof.sources.grammar import Source, SourceKind
from kvprof.sources.windows import windows

__all__ = [
    "Question",
    "Scoring",
    "TaskAnswer",
    "TaskItem",
    "TaskSelection",
    "TextSample",
    "default_shape",
    "scored",
    "string_match_all",
    "text_samples",
]

_SPLITS = resources.files("kvprof") / "assets" / "splits" / "evaluation"
_SHORTEST = 4  # two tokens to prefill, two to decode

# Sequences and tokens of each, by kind of device: what about 30 s of a small model allow a CPU.
_CPU_SHAPE = (32, 256)
_GPU_SHAPE = (64, 1024)


@dataclass(frozen=True, eq=False)
class TextSample:
    """Sequences of one source."""

    name: str  # of the source, for tables
    #: `[n, T]` int64 on the CPU; what the tokenizer puts in front (BOS) stands at position 0.
    ids: Tensor

    @property
    def digest(self) -> str:
        """SHA-256 of name, shape and ids."""
        shape = tuple(self.ids.shape)
        digest = hashlib.sha256(f"{self.name} {shape}".encode())
        digest.update(self.ids.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def part(self, index: int, of: int) -> "TextSample":
        """Return every `of`-th sequence from `index` on."""
        return TextSample(self.name, self.ids[index::of])


def default_shape(loaded: OpenedModel) -> tuple[int, int]:
    """Return how many sequences of how many tokens an evaluation takes by default."""
    sequences, seq_len = _CPU_SHAPE if loaded.device.type == "cpu" else _GPU_SHAPE
    return sequences, min(seq_len, loaded.context_length)


def text_samples(
    loaded: OpenedModel,
    sources: Sequence[Source],
    *,
    seq_len: int,
    sequences: int,
    calibrating: bool = False,
) -> list[TextSample]:
    """Take sequences of each source.

    Embedded names (``prose``, ``code``, ``tasks``) give the evaluation split, from which sequences
    are taken at equal distances, so that a small sample is not one document. Of a file the first
    sequences are taken; its end is not read.
    """
    if seq_len < _SHORTEST:
        raise UsageError(f"--seq-len {seq_len} is too short; give {_SHORTEST} or more")
    if seq_len > loaded.context_length:
        raise UsageError(
            f"--seq-len {seq_len:,} exceeds the context of {loaded.spec}, {loaded.context_length:,}"
        )
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"--text names {twice} twice")
    return [_sample(loaded, source, seq_len, sequences, calibrating) for source in sources]


def _sample(
    loaded: OpenedModel, source: Source, seq_len: int, sequences: int, calibrating: bool
) -> TextSample:
    embedded = source.kind is SourceKind.EMBEDDED
    with _readable(source, calibrating) as readable:
        found: list[NDArray[np.int64]] = []
        longest = 0
        # The last window of a text, and any of a token-id file, may be shorter.
        for window in windows(readable, model_tokens(loaded), tokens=None, seq_len=seq_len):
            longest = max(longest, len(window))
            if len(window) == seq_len:
                found.append(window)
            if not embedded and len(found) == sequences:
                break
    if not found:
        raise UsageError(
            f"--text {source.name} has at most {longest:,} tokens per row, fewer than --seq-len "
            f"{seq_len:,}; give more text or a smaller --seq-len"
        )
    if len(found) > sequences:
        found = [found[index * len(found) // sequences] for index in range(sequences)]
    return TextSample(source.name, torch.from_numpy(np.stack(found)))


@contextmanager
def _readable(source: Source, calibrating: bool) -> Iterator[Source]:
    """Give the source that holds the text to evaluate on: of an embedded name its own split."""
    if source.kind is SourceKind.RANDOM:
        raise UsageError("--text random: random tokens cannot be predicted; give a text")
    if source.kind is SourceKind.MOMENTS:
        raise UsageError(f"--text {source.name} is a moments file, not text")
    if source.kind is not SourceKind.EMBEDDED:
        yield source
        return
    if source.name == "calibration":
        if calibrating:
            yield source
            return
        raise UsageError("--text calibration is for calibration only; give prose, code or tasks")
    with resources.as_file(_SPLITS / f"{source.name}.jsonl") as path:
        yield replace(source, kind=SourceKind.TEXT, paths=(path,))


# --- What a question is, what a model made of it, and how that is scored.


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
class TaskSelection:
    """Questions that fit a model."""

    items: list[TaskItem]
    #: Embedded questions that were passed over because prompt and answer exceed the context.
    left_out: int = 0
    lengths: tuple[int, ...] = ()  # of generated questions; empty where there are none
    notes: tuple[str, ...] = field(default=())  # what a reader must know of the tasks


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
