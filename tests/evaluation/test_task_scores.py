"""Scores of tasks, whether they judge, and the lengths of answers."""

from dataclasses import replace

import numpy as np
import pytest

from kvprof.evaluation.data import Scoring, TaskAnswer, TaskItem, text_samples
from kvprof.evaluation.evaluator import EvaluationSettings, Evaluator
from kvprof.evaluation.scores import answer_lengths, task_figures
from kvprof.evaluation.tasks.registry import select_tasks
from kvprof.models.load import load_model
from kvprof.sources.grammar import parse_source
from tests.evaluation.sample import plan, questions, text
from tests.methods.models import model


def item(task: str, *, asked: int = 1, chance: float = 0.0, limit: int = 0) -> TaskItem:
    scoring = Scoring.STRINGS if limit else Scoring.TOKENS
    references = tuple(str(one) for one in range(asked)) if limit else ()
    return TaskItem(task, 9, None, [1], [] if limit else [2], scoring, references, limit, chance)


def answer(score: float, written: int | None = None, *, ended: bool = True) -> TaskAnswer:
    return TaskAnswer(score, score == 1, written, ended)


@pytest.mark.parametrize(
    ("chance", "scores", "judges"),
    [
        (0.25, [1, 1, 1, 0, 0], False),  # guessing gets three or more of five in 10 % of cases
        (0.25, [1, 1, 1, 1, 0], True),  # four or more in 1.6 %
        (0.0, [0, 0, 0, 0, 0], False),
        (0.0, [1, 0, 0, 0, 0], True),
    ],
)
def test_a_task_judges_where_the_model_does_better_than_chance(
    chance: float, scores: list[float], judges: bool
) -> None:
    items = [item("needle", chance=chance)] * 5
    base = [answer(float(score)) for score in scores]
    found = task_figures(items, base, [answer(1.0)] * 5)["needle"]
    assert found["judges"] is judges
    assert found["chance"] == chance
    assert (found["accuracy"], found["baseline"]) == (1, np.mean(scores))


def test_strings_are_counted_one_by_one() -> None:
    # 12 of 40 strings, of which guessing gets 4: no question was wholly right.
    items = [item("cwe", asked=10, chance=0.1, limit=9)] * 4
    found = task_figures(items, [answer(0.3, 9)] * 4, [answer(0.2, 9), *[answer(1, 9)] * 3])
    assert found["cwe"]["judges"]
    assert found["cwe"]["exact_match"] == 0.75
    assert found["cwe"]["baseline_exact_match"] == 0
    assert found["cwe"]["accuracy"] == 0.8
    half = task_figures(items, [answer(0.15, 9)] * 4, [answer(0.1, 9)] * 4)
    assert not half["cwe"]["judges"]


def test_lengths_are_compared_on_the_same_prompts() -> None:
    items = [item("vt", limit=30), item("vt", limit=30), item("needle"), item("cwe", limit=120)]
    base = [answer(1, 10), answer(1, 30, ended=False), answer(1), answer(1, 40)]
    other = [answer(1, 20), answer(1, 30, ended=False), answer(1), answer(1, 120, ended=False)]
    found = answer_lengths(items, base, other)
    assert found is not None
    assert (found["prompts"], found["tokens"], found["baseline_tokens"]) == (3, 170 / 3, 80 / 3)
    assert found["ratio"] == 170 / 80
    assert (found["never_ended"], found["baseline_never_ended"]) == (2 / 3, 1 / 3)
    assert found["by_task"]["vt"]["ratio"] == 50 / 40
    assert found["by_task"]["vt"]["limit"] == 30
    assert found["ratio_interval"] is None
    assert answer_lengths(items[2:3], base[2:3], other[2:3]) is None
    # Of what one of them did not come to nothing is compared.
    assert answer_lengths(items, [None, *base[1:]], other)["prompts"] == 2


def test_every_answer_twice_as_long_is_a_ratio_of_two_for_sure() -> None:
    items = [item("vt", limit=99)] * 32
    base = [answer(1, 5 + n) for n in range(32)]
    found = answer_lengths(items, base, [answer(1, 2 * (5 + n)) for n in range(32)])
    assert found["ratio"] == 2
    assert found["ratio_interval"] == pytest.approx([2, 2])


def test_the_baseline_writes_answers_and_counts_their_steps() -> None:
    loaded = load_model("reference")
    chosen = select_tasks(loaded, ["niah_single_1", "open_questions"], 2, (512,)).items
    items = [replace(one, limit=5) for one in chosen]
    samples = text_samples(loaded, [parse_source("prose", what="--text")], seq_len=16, sequences=2)
    one = Evaluator(loaded, samples, items, EvaluationSettings())
    told: list[int] = []
    base = one.baseline(told.append)
    assert sum(told) == one.baseline_steps
    assert list(base["tasks"]) == ["niah_single_1"]
    lengths = base["answer_lengths"]
    assert lengths["prompts"] == 4
    assert lengths["ratio"] == 1
    assert lengths["ratio_interval"] is None
    assert set(lengths["by_task"]) == {"niah_single_1", "open_questions"}


def test_tasks_that_are_not_written_have_no_length() -> None:
    items, _ = questions(model("Llama"))
    one = Evaluator(model("Llama"), [text()], items, EvaluationSettings())
    assert one.evaluate(plan("kq", 0.5, 15))["answer_lengths"] is None
