"""What libraries say while kvprof works with them is held back, and not afterwards."""

import logging
from collections.abc import Iterator

import pytest

from kvprof.models.interface import set_attention
from kvprof.models.noise import unheard
from tests.models.tiny import tiny

NAME = "transformers.modeling_utils"


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """Return what reaches the handlers of transformers, as it comes."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener()
    logging.getLogger("transformers").addHandler(listener)
    yield said
    logging.getLogger("transformers").removeHandler(listener)


def test_another_attention_is_set_without_a_word(
    heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a class that refuses it transformers says so; kvprof says it in its own words."""
    model = tiny("Llama")
    monkeypatch.setattr(
        type(model), "_can_set_attn_implementation_cached_value", False, raising=False
    )
    before = model.config._attn_implementation
    set_attention(model, "eager" if before == "sdpa" else "sdpa")
    assert heard == []
    assert model.config._attn_implementation == before
    model.set_attn_implementation("eager" if before == "sdpa" else "sdpa")
    assert len(heard) == 1, "afterwards transformers is heard again"


def test_others_are_heard_meanwhile(heard: list[str]) -> None:
    with unheard(NAME):
        logging.getLogger(NAME).error("held back")
        logging.getLogger("transformers.generation").error("said")
    logging.getLogger(NAME).error("said again")
    assert heard == ["said", "said again"]
