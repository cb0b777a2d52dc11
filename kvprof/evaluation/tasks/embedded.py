"""The embedded tasks: rows with a prompt and the one answer that it must give.

Needle, variables, copy and frequent words (``recipes/reference-model/tasks.py`` makes them), at
several lengths and depths. As there, a sequence starts with what the tokenizer puts in front, and
an answer is right when greedy decoding gives every token of it.
"""

import json
import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

from kvprof.evaluation.data import TaskItem
from kvprof.models.load import OpenedModel
from kvprof.moments.collect import model_tokens

__all__ = ["EMBEDDED", "embedded_items"]

EMBEDDED = ("needle", "variables", "copy", "frequent_words")

_ROWS = resources.files("kvprof") / "assets" / "splits" / "evaluation" / "tasks.jsonl"

# Of a row's form, what one could mistake for what is asked for: other codes, other chains.
_ALIKE = re.compile(r"(?:keys|chains)=(\d+)")


def embedded_items(
    loaded: OpenedModel, task: str, most: int, longest: int
) -> tuple[list[TaskItem], int]:
    """Return questions of one task that fit a model, evenly over lengths and depths."""
    items: list[TaskItem] = []
    left_out = 0
    rows = [row for row in _rows() if row["task"] == task and row["length"] <= longest]
    for row in _spread(rows):
        if len(items) == most:
            break
        item = _item(loaded, row)
        if len(item.prompt) + len(item.answer) > loaded.context_length:
            left_out += 1
        else:
            items.append(item)
    return items, left_out


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


def _item(loaded: OpenedModel, row: dict[str, Any]) -> TaskItem:
    tokens = model_tokens(loaded)
    tokenize = tokens.tokenize()
    prompt, whole = tokenize(row["prompt"]), tokenize(row["prompt"] + row["answer"])
    # Some tokenizers write an answer that stands alone differently; most keep the prompt's tokens.
    joined = whole[: len(prompt)] == prompt and len(whole) > len(prompt)
    answer = whole[len(prompt) :] if joined else tokenize(row["answer"])
    alike = _ALIKE.search(row["form"])
    chance = 1 / int(alike[1]) if alike is not None and alike[1] != "1" else 0.0
    whole_prompt = [*tokens.prefix(), *prompt]
    return TaskItem(row["task"], row["length"], row["depth"], whole_prompt, answer, chance=chance)
