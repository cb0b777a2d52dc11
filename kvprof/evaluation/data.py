"""What plans are evaluated on: sequences of equal length and tasks, never the calibration split."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvprof.errors import UsageError
from kvprof.models.load import LoadedModel
from kvprof.moments.collect import model_tokens
from kvprof.sources.grammar import Source, SourceKind
from kvprof.sources.windows import windows

__all__ = [
    "TASKS",
    "TaskItem",
    "TaskSelection",
    "TextSample",
    "default_shape",
    "default_task_items",
    "parse_tasks",
    "select_tasks",
    "text_samples",
]

_SPLITS = resources.files("kvprof") / "assets" / "splits" / "evaluation"
_SHORTEST = 4  # two tokens to prefill, two to decode

# Sequences and tokens of each, by kind of device: what about 30 s of a small model allow a CPU.
_CPU_SHAPE = (16, 512)
_GPU_SHAPE = (64, 1024)


@dataclass(frozen=True, eq=False)
class TextSample:
    """Sequences of one source.

    Attributes
    ----------
    name : str
        Of the source, for tables.
    ids : Tensor
        ``[n, T]`` int64 on the CPU; what the tokenizer puts in front (BOS) stands at position 0.
    digest : str
        SHA-256 of name, shape and ids.
    """

    name: str
    ids: Tensor
    digest: str


def default_shape(loaded: LoadedModel) -> tuple[int, int]:
    """Return how many sequences of how many tokens an evaluation takes by default."""
    sequences, seq_len = _CPU_SHAPE if loaded.device.type == "cpu" else _GPU_SHAPE
    return sequences, min(seq_len, loaded.context_length)


def text_samples(
    loaded: LoadedModel, sources: Sequence[Source], *, seq_len: int, sequences: int
) -> list[TextSample]:
    """Take sequences of each source.

    Embedded names (``prose``, ``code``, ``tasks``) give the evaluation split, from which sequences
    are taken at equal distances, so that a small sample is not one document. Of a file the first
    sequences are taken; its end is not read.

    Parameters
    ----------
    loaded : LoadedModel
    sources : sequence of Source
        Embedded, text or token ids.
    seq_len : int
        Tokens of each sequence.
    sequences : int
        Of each source, at most; a short source gives what it has.

    Raises
    ------
    UsageError
        When a source is shorter than one sequence, cannot be evaluated on (random tokens, moments,
        the calibration split), is named twice, or `seq_len` does not fit the model.
    """
    if seq_len < _SHORTEST:
        raise UsageError(f"--seq-len {seq_len}: half of it is decoded; take {_SHORTEST} or more")
    if seq_len > loaded.context_length:
        raise UsageError(
            f"--seq-len {seq_len:,} is over the context of {loaded.spec}, {loaded.context_length:,}"
        )
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"--text: {twice} is named twice; rows are told apart by their names")
    return [_sample(loaded, source, seq_len, sequences) for source in sources]


def _sample(loaded: LoadedModel, source: Source, seq_len: int, sequences: int) -> TextSample:
    embedded = source.kind is SourceKind.EMBEDDED
    with _readable(source) as readable:
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
            f"--text {source.name} has at most {longest:,} tokens in a row, fewer than one "
            f"sequence of {seq_len:,}; give more text, or a smaller --seq-len"
        )
    if len(found) > sequences:
        found = [found[index * len(found) // sequences] for index in range(sequences)]
    ids = np.stack(found)
    digest = hashlib.sha256(f"{source.name} {ids.shape}".encode())
    digest.update(ids.astype("<i8").tobytes())
    return TextSample(source.name, torch.from_numpy(ids), digest.hexdigest())


@contextmanager
def _readable(source: Source) -> Iterator[Source]:
    """Give the source that holds the text to evaluate on: of an embedded name its own split."""
    if source.kind is SourceKind.RANDOM:
        raise UsageError("--text random: nothing in random tokens can be predicted; give a text")
    if source.kind is SourceKind.MOMENTS:
        raise UsageError(f"--text {source.name} holds saved moments, not text")
    if source.kind is not SourceKind.EMBEDDED:
        yield source
        return
    if source.name == "calibration":
        raise UsageError(
            "--text calibration: it is kept for calibrating; evaluate on prose, code or tasks"
        )
    with resources.as_file(_SPLITS / f"{source.name}.jsonl") as path:
        yield replace(source, kind=SourceKind.TEXT, paths=(path,))


# --- The embedded tasks: a prompt with something to find in it, and the answer it must give.
#
# Needle, variables, copy and frequent words (``recipes/reference-model/tasks.py`` makes them), at
# several lengths and depths. As there, a sequence starts with what the tokenizer puts in front, and
# an answer is right when greedy decoding gives every token of it.


TASKS = ("needle", "variables", "copy", "frequent_words")

_ROWS = resources.files("kvprof") / "assets" / "splits" / "evaluation" / "tasks.jsonl"

# Questions of each task, by kind of device. On a CPU each costs the reference model about a second;
# five have every depth once.
_CPU_ITEMS = 5
_GPU_ITEMS = 24


@dataclass(frozen=True)
class TaskItem:
    """One question.

    Attributes
    ----------
    task : str
        One of `TASKS`.
    length : int
        Nominal length of prompt and answer, in tokens of the reference model.
    depth : float or None
        Where the statement asked for stands, 0 (start) to 1; None where that means nothing.
    prompt : list of int
        Token ids, with what the tokenizer puts in front.
    answer : list of int
    """

    task: str
    length: int
    depth: float | None
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class TaskSelection:
    """Questions that fit a model.

    Attributes
    ----------
    items : list of TaskItem
    left_out : int
        Questions that were passed over because prompt and answer exceed the context.
    """

    items: list[TaskItem]
    left_out: int


def parse_tasks(text: str) -> tuple[str, ...]:
    """Read ``all``, ``none`` or names joined by commas.

    Raises
    ------
    UsageError
        For a name that is no task.
    """
    if text in ("all", "none"):
        return TASKS if text == "all" else ()
    names = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TASKS:
            raise UsageError(
                f"--tasks: {name!r} is no task; choose from all, none, {', '.join(TASKS)}"
            )
    return tuple(task for task in TASKS if task in names)


def default_task_items(loaded: LoadedModel) -> int:
    """Return how many questions of each task an evaluation asks by default."""
    return _CPU_ITEMS if loaded.device.type == "cpu" else _GPU_ITEMS


def select_tasks(loaded: LoadedModel, names: Sequence[str], per_task: int) -> TaskSelection:
    """Take questions of each task, evenly over lengths and depths.

    Parameters
    ----------
    loaded : LoadedModel
    names : sequence of str
        Among `TASKS`.
    per_task : int
        Questions of each task, at most.

    Raises
    ------
    UsageError
        For an unknown task, or a model without a tokenizer.
    """
    parse_tasks(",".join(names) or "none")
    items: list[TaskItem] = []
    left_out = 0
    rows = list(_rows()) if names else []
    for task in names:
        chosen = 0
        for row in _spread([row for row in rows if row["task"] == task]):
            if chosen == per_task:
                break
            item = _item(loaded, row)
            if len(item.prompt) + len(item.answer) > loaded.context_length:
                left_out += 1
                continue
            items.append(item)
            chosen += 1
    return TaskSelection(items, left_out)


def _rows() -> Iterator[dict[str, Any]]:
    with _ROWS.open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def _spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Order rows so that every beginning of the list has lengths and depths in equal parts.

    Walks the table of lengths and depths along its diagonals: the first n rows hold n different
    depths, each at the next length.
    """
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows}, key=lambda depth: (depth is not None, depth))
    cells: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["length"], row["depth"]), []).append(row)
    ordered = []
    while any(cells.values()):
        for shift in range(len(lengths)):
            for index, depth in enumerate(depths):
                cell = cells.get((lengths[(index + shift) % len(lengths)], depth))
                if cell:
                    ordered.append(cell.pop(0))
    return ordered


def _item(loaded: LoadedModel, row: dict[str, Any]) -> TaskItem:
    tokens = model_tokens(loaded)
    tokenize = tokens.tokenize()
    prompt, whole = tokenize(row["prompt"]), tokenize(row["prompt"] + row["answer"])
    # Some tokenizers write an answer that stands alone differently; most keep the prompt's tokens.
    joined = whole[: len(prompt)] == prompt and len(whole) > len(prompt)
    answer = whole[len(prompt) :] if joined else tokenize(row["answer"])
    return TaskItem(row["task"], row["length"], row["depth"], [*tokens.prefix(), *prompt], answer)
