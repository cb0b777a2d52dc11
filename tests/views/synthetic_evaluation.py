"""Results of `kvprof eval` as a real run writes them, from made-up scores, without a model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvprof.evaluation.data import Scoring, TaskAnswer, TaskItem
from kvprof.evaluation.scores import (
    Pair,
    TokenScores,
    answer_lengths,
    task_figures,
    text_figures,
    worst_tokens,
)
from kvprof.evaluation.tasks.embedded import EMBEDDED
from tests.results.made import made


def evaluation_result(
    methods: Sequence[str] = ("full", "fp8", "kq", "fdc+keyformer"),
    *,
    texts: Sequence[str] = ("prose",),
    tasks: Sequence[str] = EMBEDDED,
    complete: bool = True,
    warnings: Sequence[str] = (),
    harness: bool = False,
    protocol: str = "decode",
    at_chance: Sequence[str] = (),
    written: bool = False,
) -> dict[str, Any]:
    """Return a result; each method is a little worse than the one before it.

    The uncompressed model gets nothing right in the tasks `at_chance`; with `written` there are
    answers whose length is known, of methods a little longer than of the one before.
    """
    items = [
        TaskItem(task, length, None if task == "frequent_words" else depth, [1], [2])
        for task in tasks
        for length in (256, 1536)
        for depth in (0.0, 0.5, 1.0)
    ]
    if written:
        items += [TaskItem("vt", 1024, None, [1], [], Scoring.STRINGS, ("A", "B"), 30)] * 4
        items += [TaskItem("open_questions", 300, None, [1], [], Scoring.NONE, limit=256)] * 4
    rows = [
        _evaluation(name, place, texts, items, protocol, at_chance)
        for place, name in enumerate(methods)
    ]
    return made(
        "eval",
        {
            **{"dtype": "float32", "context": 384, "evaluations": rows},
            "harness": _harness(methods) if harness else None,
        },
        inputs={
            **{"text": texts, "sequences": 32 * len(texts), "seq_len": 256},
            **{"tasks": tasks, "task_items": len(items), "protocol": protocol},
        },
        warnings=warnings,
        complete=complete,
    )


def _evaluation(
    name: str,
    place: int,
    texts: Sequence[str],
    items: list[TaskItem],
    protocol: str,
    at_chance: Sequence[str],
) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    pairs = {}
    for text in texts:
        loss = rng.gamma(2.0, 1.2, size=(32, 128))
        correct = loss < 1.5
        base = TokenScores(correct, loss, np.zeros_like(loss))
        kl = place * rng.gamma(0.5, 0.02, size=loss.shape)
        found = TokenScores(correct & (rng.random(loss.shape) > 0.01 * place), loss + kl, kl)
        pairs[text] = Pair(base, found)
    base_answers = [_answer(item, item.task not in at_chance, 0) for item in items]
    answers = [_answer(item, index % 7 >= place, place) for index, item in enumerate(items)]

    def describe(source: str, sequence: int, position: int) -> dict[str, Any]:
        before = "return [bold]x[/bold] + some longer text"
        return {"token": 17, "text": "\n  def", "before": before}

    calibrated = {"calibration": {"source": "random", "tokens": 8192}}
    return {
        **{"method": name, "rate": min(0.25 * place, 1.0), "context": 384},
        **{"bytes_per_token": 24576.0 * max(1 - 0.25 * place, 0) + 16, "protocol": protocol},
        **text_figures(pairs),
        "tasks": task_figures(items, base_answers, answers),
        "answer_lengths": answer_lengths(items, base_answers, answers),
        "worst_tokens": worst_tokens(pairs, 10, 256, describe) if place else [],
        **{"measured_bytes": 1000.0 if place else None, "accounted_bytes": 1000},
        **{"seconds": 12.3, "complete": True},
        "plan": {"made": {} if name in ("full", "fp8") else calibrated} if place else None,
    }


def _answer(item: TaskItem, right: bool, place: int) -> TaskAnswer:
    if item.scoring is Scoring.TOKENS:
        return TaskAnswer(float(right), right)
    tokens = item.limit // 2 + 5 * place
    return TaskAnswer(1.0 if right else 0.5, right, min(tokens, item.limit), tokens < item.limit)


def _harness(methods: Sequence[str]) -> dict[str, Any]:
    rows = [
        {"method": name, "task": "arc_easy", "metric": metric, "stderr": 0.07, "items": 50}
        for name in methods
        for metric in ("acc", "acc_norm")
    ]
    return {"tasks": ["arc_easy"], "protocol": "lm-evaluation-harness, its own way", "rows": rows}
