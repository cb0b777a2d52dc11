"""How a GGUF file's tokenizer cuts texts: as its file says, or not at all."""

from pathlib import Path

import pytest

from kvprof.errors import UsageError
from kvprof.models import gguf_tokenizer
from kvprof.models.load import load_model
from tests.commands.running import kvprof
from tests.models.gguf_files import write_llama

pytest.importorskip("gguf", reason="the package gguf is not installed")


def pieces(tmp_path: Path, pre: str | None, text: str) -> list[str]:
    path = write_llama(tmp_path / "x.gguf", pre=pre)
    return load_model(str(path), device="cpu").tokenizer().tokenize(text)


def test_digits_stand_alone_where_the_file_says_so(tmp_path: Path) -> None:
    # GPT-2 keeps digits together, and cuts the last of several spaces off for what follows.
    assert pieces(tmp_path, "gpt-2", "a  12") == ["a", "Ġ", "Ġ", "12"]
    assert pieces(tmp_path, "smollm", "a  12") == ["a", "ĠĠ", "1", "2"]
    assert pieces(tmp_path, "starcoder", "12") == ["1", "2"]
    assert pieces(tmp_path, "gpt-2", "12") == ["12"]


def test_a_rule_that_transformers_knows_is_its(tmp_path: Path) -> None:
    # Qwen 2 cuts every digit off, Llama 3 up to three at a time.
    assert pieces(tmp_path, "qwen2", "12") == ["1", "2"]
    assert pieces(tmp_path, "llama-bpe", "12") == ["12"]


@pytest.mark.parametrize(
    ("pre", "said"),
    [("of-tomorrow", "pre is 'of-tomorrow', and no rule"), (None, "pre is missing, and no rule")],
)
def test_an_unknown_rule_is_refused_where_texts_are_cut(
    tmp_path: Path, pre: str | None, said: str
) -> None:
    path = write_llama(tmp_path / "x.gguf", pre=pre)
    loaded = load_model(str(path), device="cpu")
    assert 2 in loaded.special_ids  # random tokens need no rule
    with pytest.raises(UsageError, match=said):
        loaded.tokenizer()
    done = kvprof("generate", path, "--prompt", "a", "--method", "full")
    assert done.code == 2
    assert said in done.error
    assert kvprof("spectrum", path, "--tokens", 128, "--seq-len", 64).code == 0


def test_a_transformers_that_knows_no_rule_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_tokenizer, "_known_to_transformers", frozenset)
    with pytest.raises(UsageError, match="pre is 'llama-bpe'"):
        pieces(tmp_path, "llama-bpe", "12")
    assert pieces(tmp_path, "smollm", "12") == ["1", "2"]
