"""Conversations of many rounds, chains of arithmetic, and prompts as a model gets them."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprof.evaluation.data import Question, Scoring, TaskItem, scored, string_match_all
from kvprof.evaluation.tasks.prompts import Fitted, PromptWriter, largest_fitting
from kvprof.evaluation.tasks.registry import (
    ALIKE,
    OPERATIONS,
    PROMPTS,
    draw_arithmetic,
    draw_rounds,
    select_tasks,
)
from kvprof.models.load import load_model


@pytest.mark.parametrize("seed", range(8))
def test_the_line_asked_for_is_the_nth_answer_to_the_same_request(seed: int) -> None:
    question = draw_rounds(random.Random(seed), 20, 0)
    *turns, last = question.turns
    assert len(turns) == 40
    pattern = r"Write the (\w+) (\w+ about \w+) again, word for word, and nothing else\."
    ordinal, thing = re.fullmatch(pattern, last).groups()
    same = [n for n in range(20) if turns[2 * n] == f"Write a {thing}."]
    assert len(same) == ALIKE
    place = same[["first", "second", "third", "fourth"].index(ordinal)]
    assert question.references == (turns[2 * place + 1],)
    assert turns.count(turns[2 * place + 1]) == 1
    assert question.chance == 1 / ALIKE
    assert abs(question.depth - place / 19) <= 0.125


@given(st.integers(0, 10**6), st.sampled_from(OPERATIONS), st.integers(0, 40))
@settings(max_examples=60)
def test_a_chain_comes_to_its_answer_in_as_many_steps(
    seed: int, operations: int, size: int
) -> None:
    question = draw_arithmetic(operations, random.Random(seed), size, 0)
    text = question.turns[0]
    starts = {
        name: int(value) for name, value in re.findall(r"Crate (\w+) holds (\d+) apples", text)
    }
    steps = {
        name: (int(step) * (1 if word == "more" else -1), before)
        for name, step, word, before in re.findall(
            r"Crate (\w+) holds (\d+) (more|fewer) apples than crate (\w+)\.", text
        )
    }

    def value(name: str) -> tuple[int, int]:
        if name in starts:
            return starts[name], 0
        step, before = steps[name]
        found, taken = value(before)
        return found + step, taken + 1

    (asked,) = re.findall(r"does crate (\w+) hold", text)
    answer, taken = value(asked)
    assert taken == operations
    assert question.references == (str(answer),)
    every = [value(name)[0] for name in (*starts, *steps)]
    assert len(every) == operations + 1 + size
    assert min(every) > 0
    assert question.chance == every.count(answer) / len(every)


def test_numbers_count_by_the_last_one() -> None:
    item = TaskItem("arithmetic_2", 1, None, [1], [], Scoring.NUMBER, ("24",), 9)
    for text, score in (
        ("12 and 12 more. The answer is 24.", 1),
        ("The answer is 24, not 23", 0),
        ("124", 0),
        ("-24", 0),
        ("none", 0),
        ("", 0),
    ):
        assert scored(item, text) == score


def test_strings_count_as_ruler_counts_them() -> None:
    """The definition: mean over references of whether it stands in the text, in lower case."""
    assert string_match_all("7 Apples and PEARS", ("apples", "Pears", "figs", "7")) == 0.75
    assert string_match_all("report", ("port",)) == 1


@given(st.integers(1, 60), st.integers(0, 40), st.integers(20, 2000), st.integers(0, 3000))
def test_the_largest_size_that_fits_is_found(each: int, start: int, room: int, near: int) -> None:
    def take(size: int) -> tuple[Question, list[int]]:
        return Question(("",)), [0] * (start + each * size)

    found = largest_fitting(take, room, 1, 500, near)
    if start + each > room:
        assert found == start + each
        return
    assert isinstance(found, Fitted)
    assert len(found.ids) <= room
    over = start + each * (found.size + 1)
    assert found.size == 500 or over > room or room - len(found.ids) <= room / 100


def test_prompts_without_a_template_are_the_text_with_its_beginning_of_an_answer() -> None:
    loaded = load_model("reference")
    tokenizer = loaded.tokenizer()
    with PromptWriter(loaded) as write:
        single = tokenizer.decode(write(Question(("What is it?",), " It is")))
        several = tokenizer.decode(write(Question(("One?", "Yes.", "Two?"))))
    assert single.endswith("What is it? It is")
    assert several.endswith("User: One?\nAssistant: Yes.\nUser: Two?\nAssistant:")


def test_a_chat_template_puts_the_turns_into_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model("reference")
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[go]{% endif %}"
    )
    monkeypatch.setattr(loaded.tokenizer(), "chat_template", template)
    with PromptWriter(loaded) as write:
        ids = write(Question(("One?", "Yes.", "Two?"), " It is"))
    assert loaded.tokenizer().decode(ids) == "[user]One?[assistant]Yes.[user]Two?[go] It is"
    (item,) = select_tasks(loaded, ["niah_single_1"], 1, (1024,)).items
    assert len(item.prompt) + item.limit <= 1024
    assert loaded.tokenizer().decode(item.prompt).startswith("[user]A special magic number")


def test_open_questions_have_nothing_to_be_right() -> None:
    items = select_tasks(load_model("reference"), ["open_questions"], 100).items
    assert len(items) == len(set(PROMPTS)) == len(PROMPTS)
    assert {item.scoring for item in items} == {Scoring.NONE}
    assert all(item.length == len(item.prompt) + item.limit for item in items)
