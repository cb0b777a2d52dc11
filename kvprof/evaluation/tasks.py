"""The embedded tasks: a prompt with something to find in it, and the answer it must give.

Needle, variables, copy and frequent words (``recipes/reference-model/tasks.py`` makes them), at
several lengths and depths. As there, a sequence starts with what the tokenizer puts in front, and
an answer is right when greedy decoding gives every token of it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from kvprof.errors import UsageError
from kvprof.models.load import LoadedModel
from kvprof.moments.collect import model_tokens

__all__ = [
    "TASKS",
    "TaskItem",
    "TaskSelection",
    "default_task_items",
    "parse_tasks",
    "select_tasks",
]

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
    """Return how many questions of each task an evaluation asks unless told otherwise."""
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
            for place, depth in enumerate(depths):
                cell = cells.get((lengths[(place + shift) % len(lengths)], depth))
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
