"""Results of `kvprof eval` as a real run writes them, from made-up scores, without a model."""

from collections.abc import Sequence
from datetime import UTC, datetime
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
from kvprof.records.result import build_result
from tests.records.sample import ENVIRONMENT


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
    data = {
        "dtype": "float32",
        "context": 384,
        "evaluations": rows,
        "harness": _harness(methods) if harness else None,
    }
    inputs = {
        "model": "reference",
        "fingerprint": "ab12cd34ef56",
        "dtype": "float32",
        "device": "cpu",
        "text": list(texts),
        "sequences": 32 * len(texts),
        "seq_len": 256,
        "tasks": list(tasks),
        "task_items": len(items),
        "protocol": protocol,
        "plan": None,
    }
    return build_result(
        "eval",
        environment=ENVIRONMENT,
        inputs=inputs,
        data=data,
        warnings=warnings,
        complete=complete,
        created=datetime(2026, 1, 1, tzinfo=UTC),
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
        return {
            "token": 17,
            "text": "\n  def",
            "before": "return [bold]x[/bold] + some longer text",
        }

    plan = {"dim_rate": 0.5, "paper_rate": 0.5, "made": {}}
    if name not in ("full", "fp8"):
        plan["made"] = {"calibration": {"source": "random", "tokens": 8192}}
    return {
        "method": name,
        "rate": 0.25 * place,
        "bytes_per_token": 24576.0 * (1 - 0.25 * place) + 16,
        "context": 384,
        **text_figures(pairs),
        "tasks": task_figures(items, base_answers, answers),
        "answer_lengths": answer_lengths(items, base_answers, answers),
        "worst_tokens": worst_tokens(pairs, 10, 256, describe) if place else [],
        "protocol": protocol,
        "measured_bytes": 1000.0 if place else None,
        "accounted_bytes": 1000,
        "seconds": 12.3,
        "complete": True,
        "warnings": [],
        "plan": plan if place else None,
    }


def _answer(item: TaskItem, right: bool, place: int) -> TaskAnswer:
    if item.scoring is Scoring.TOKENS:
        return TaskAnswer(float(right), right)
    tokens = item.limit // 2 + 5 * place
    return TaskAnswer(1.0 if right else 0.5, right, min(tokens, item.limit), tokens < item.limit)


def _harness(methods: Sequence[str]) -> dict[str, Any]:
    return {
        "tasks": ["arc_easy"],
        "limit": 50,
        "include": None,
        "batch_size": 1,
        "version": "0.4.13",
        "protocol": "lm-evaluation-harness, its own way",
        "rows": [
            {
                "method": name,
                "task": "arc_easy",
                "metric": metric,
                "value": 0.5,
                "stderr": 0.07,
                "items": 50,
            }
            for name in methods
            for metric in ("acc", "acc_norm")
        ],
    }
