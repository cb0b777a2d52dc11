"""Batches of questions, and greedy answers of models that treat positions in different ways."""

from contextlib import nullcontext

import pytest
import torch

from kvprof.errors import UsageError
from kvprof.evaluation.data import Scoring, TaskItem
from kvprof.evaluation.decode import (
    TaskBatch,
    check_steps,
    greedy_answers,
    mean_context,
    prefill_length,
    task_batches,
    written_answers,
)
from kvprof.runtime.compressed import compressed
from tests.evaluation.sample import greedy, plan, questions
from tests.methods.models import model
from tests.models.tiny import token_ids


def item(length: int, task: str = "needle") -> TaskItem:
    return TaskItem(task, length, None, [5] * length, [6])


def test_batches_hold_like_questions() -> None:
    items = [item(n) for n in (10, 100, 98, 11, 50, 12)] + [item(100, "copy")]
    batches = task_batches(items, tokens=200, batch_size=None)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(7))
    for batch in batches:
        assert batch.items == tuple(items[index] for index in batch.indices)
        assert len({one.task for one in batch.items}) == 1
        assert batch.prompt_tokens * len(batch.items) <= 200
        assert min(len(one.prompt) for one in batch.items) >= 0.75 * batch.prompt_tokens
    assert [len(batch.items) for batch in batches] == [1, 3, 1, 2]
    assert len(task_batches(items, tokens=10, batch_size=None)) == 7  # each alone is over it
    assert max(len(b.items) for b in task_batches(items, tokens=9999, batch_size=2)) == 2


@pytest.mark.parametrize("arch", ["Llama", "Gemma2", "GPT2", "OPT", "Qwen3"])
def test_padding_changes_no_answer(arch: str) -> None:
    loaded = model(arch)
    items, right = questions(loaded)
    batch = TaskBatch(tuple(range(len(items))), tuple(items))
    told: list[int] = []
    assert greedy_answers(loaded, batch, None, told.append) == right
    assert sum(told) == batch.answer_tokens - 1
    with compressed(loaded, plan("full", 0, 15, arch)) as session:
        assert greedy_answers(loaded, batch, session.new_cache, told.append) == right
    for one, good in zip(items, right, strict=True):
        assert greedy_answers(loaded, TaskBatch((0,), (one,)), None, told.append) == [good]


def test_decoding_ends_when_every_row_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = model("Llama")
    passes: list[int] = []
    forward = type(loaded.model).forward

    def counted(module: torch.nn.Module, *args: object, **kwargs: object) -> object:
        passes.append(1)
        return forward(module, *args, **kwargs)

    monkeypatch.setattr(type(loaded.model), "forward", counted)
    prompt = token_ids(1, 9)[0].tolist()
    logits = loaded.model(torch.tensor([prompt])).logits[0, -1]
    passes.clear()
    wrong = TaskItem("copy", 9, None, prompt, [int(logits.argmin())] * 6)
    told: list[int] = []
    assert greedy_answers(loaded, TaskBatch((0,), (wrong,)), None, told.append) == [False]
    assert len(passes) == 1
    assert sum(told) == 5


@pytest.mark.parametrize("arch", ["Llama", "Gemma2"])
def test_answers_are_written_to_the_end_of_text_as_generate_does(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = model(arch)
    limits = (9, 4, 9, 9)
    prompts = [token_ids(1, length, seed=length)[0].tolist() for length in (12, 9, 30, 31)]
    whole = [greedy(loaded, prompt, 9) for prompt in prompts]
    end = whole[0][3]  # ends the first answer there, and others where they have it
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", [end, 10**6])
    wanted = []
    for tokens, limit in zip(whole, limits, strict=True):
        cut = tokens[:limit]
        stops = end in cut
        wanted.append((cut[: cut.index(end) + 1] if stops else cut, stops))
    assert wanted[0] == (whole[0][: whole[0].index(end) + 1], True)
    items = tuple(
        TaskItem("vt", 1, None, prompt, [], Scoring.STRINGS, ("a",), limit)
        for prompt, limit in zip(prompts, limits, strict=True)
    )
    batch = TaskBatch((0, 1, 2, 3), items)
    told: list[int] = []
    assert written_answers(loaded, batch, None, told.append) == wanted
    assert sum(told) == 8
    with compressed(loaded, plan("full", 0, 15, arch)) as session:
        assert written_answers(loaded, batch, session.new_cache, told.append) == wanted
    monkeypatch.setattr(loaded.model.generation_config, "eos_token_id", None)
    found = written_answers(loaded, TaskBatch((0,), items[:1]), None, told.append)
    assert found == [(whole[0], False)]


def test_halves() -> None:
    assert (prefill_length(512), prefill_length(7)) == (256, 3)
    # Decoded tokens of 512 have 256 to 511 before them, those of 7 have 3 to 6.
    assert mean_context(512) == 384
    assert mean_context(7) == 5


@pytest.mark.parametrize(
    ("kind", "tokens", "refused"),
    [
        ("longrope", 50, True),
        ("longrope", 97, True),
        ("longrope", 49, False),
        ("longrope", 98, False),
        ("dynamic", 98, True),
        ("linear", 64, False),
    ],
)
def test_steps_cross_no_change_of_the_rotation(
    monkeypatch: pytest.MonkeyPatch, kind: str, tokens: int, refused: bool
) -> None:
    loaded = model("Llama")
    rope = {"rope_type": kind, "original_max_position_embeddings": 48}
    monkeypatch.setattr(loaded.config, "rope_parameters", rope)
    with pytest.raises(UsageError) if refused else nullcontext():
        check_steps(loaded, tokens)
