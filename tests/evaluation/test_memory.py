from pathlib import Path

import pytest
import torch

from kvprof.errors import LackingError
from kvprof.evaluation import decode
from kvprof.evaluation.decode import explained_shortage, logit_budget, text_batch_size
from kvprof.models.load import LoadedModel
from tests.methods.models import model


@pytest.fixture
def loaded() -> LoadedModel:
    return model("Llama")


def shortage(loaded: LoadedModel, sequences: int, each: int) -> str:
    with (
        pytest.raises(LackingError) as caught,
        explained_shortage(loaded, "kq", sequences=sequences, tokens=64, cache=sequences * each),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    return str(caught.value)


def test_logits_stay_within_their_budget(loaded: LoadedModel) -> None:
    each = 10 * loaded.vocab_size * 4
    assert text_batch_size(loaded, 20, 10, 7 * each + 5) == 7
    assert text_batch_size(loaded, 20, 10, each - 1) == 1  # one sequence has to do
    assert text_batch_size(loaded, 512, 256, 1 << 40) == 4  # 2,048 tokens keep a CPU busy


def test_the_budget_is_a_share_of_what_is_free(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_free", lambda device: 2**30)
    assert logit_budget(loaded) == 2**28
    monkeypatch.setattr(decode, "_free", lambda device: 2**40)
    assert logit_budget(loaded) == 2**30


@pytest.mark.parametrize(
    ("sequences", "free", "advice"),
    [
        (16, 2**40, "--batch-size 8 fits"),  # never what has just failed
        (16, 7 * 2**20, "--batch-size 3 fits"),
        (16, 2**20, "--batch-size 1 fits"),
        (16, 2**19, "give a shorter --seq-len"),
        (1, 2**40, "give a shorter --seq-len"),
    ],
)
def test_what_would_fit(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, sequences: int, free: int, advice: str
) -> None:
    monkeypatch.setattr(decode, "_free", lambda device: free)
    message = shortage(loaded, sequences, 2**20)
    assert advice in message
    assert f": kq with {sequences} sequences of 64 tokens needs" in message
    assert "\n" not in message


def test_the_cpus_own_allocator_really_says_so(loaded: LoadedModel, tmp_path: Path) -> None:
    with (
        pytest.raises(LackingError),
        explained_shortage(loaded, "kq", sequences=4, tokens=64, cache=1),
    ):
        torch.empty(2**60, dtype=torch.uint8)
