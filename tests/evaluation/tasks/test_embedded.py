from collections import Counter
from pathlib import Path

import pytest

from kvprof.errors import UsageError
from kvprof.evaluation.tasks.embedded import EMBEDDED
from kvprof.evaluation.tasks.registry import parse_tasks, select_tasks
from kvprof.models.load import LoadedModel, load_model
from tests.models.folder import byte_tokenizer
from tests.models.tiny import tiny


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Return a model whose tokenizer writes a letter as a token, with room for 2k of them."""
    folder = tmp_path_factory.mktemp("long")
    tiny("Llama", max_position_embeddings=2048).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return load_model(str(folder))


def test_few_questions_cover_lengths_and_depths() -> None:
    loaded = load_model("reference")
    items = select_tasks(loaded, EMBEDDED, 8).items
    assert Counter(item.task for item in items) == dict.fromkeys(EMBEDDED, 8)
    needles = [item for item in items if item.task == "needle"]
    assert Counter(item.length for item in needles) == {256: 4, 512: 4}  # of a CPU
    assert {item.depth for item in needles} == {0.0, 0.25, 0.5, 0.75, 1.0}
    assert max(Counter(item.depth for item in needles).values()) == 2
    assert {item.depth for item in items if item.task == "frequent_words"} == {None}
    tokenizer = loaded.tokenizer()
    for item in items:
        # Lengths are those of the reference model's tokenizer; the prefix comes on top.
        assert item.length - 64 < len(item.prompt) + len(item.answer) <= item.length
        assert item.prompt[0] == tokenizer.bos_token_id
        assert item.prompt.count(tokenizer.bos_token_id) == 1
        text = tokenizer.decode(item.prompt + item.answer)
        assert text.endswith(tokenizer.decode(item.answer))
    (needle,) = {tokenizer.decode(needles[0].answer).strip()} - {""}
    assert f"is {needle}." in tokenizer.decode(needles[0].prompt)


def test_a_smaller_choice_is_the_start_of_a_larger_one(loaded: LoadedModel) -> None:
    assert (
        select_tasks(loaded, ["needle"], 10).items[:4] == select_tasks(loaded, ["needle"], 4).items
    )


def test_questions_longer_than_the_context_are_counted(loaded: LoadedModel) -> None:
    chosen = select_tasks(loaded, ["needle", "copy"], 1000)
    assert len(chosen.items) + chosen.left_out == 70
    assert chosen.left_out > 0
    assert max(len(item.prompt) + len(item.answer) for item in chosen.items) <= 2048


def test_names() -> None:
    assert parse_tasks("all") == EMBEDDED
    assert parse_tasks("none") == ()
    assert parse_tasks("frequent-words, needle") == ("needle", "frequent_words")


def test_none_needs_no_tokenizer(tmp_path: Path) -> None:
    tiny("Llama").save_pretrained(tmp_path)
    bare = load_model(str(tmp_path))
    assert select_tasks(bare, (), 8).items == []
    with pytest.raises(UsageError, match="has no tokenizer"):
        select_tasks(bare, ["needle"], 1)
