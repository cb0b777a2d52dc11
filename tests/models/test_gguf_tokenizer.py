"""The tokenizer of a GGUF file: it cuts texts as the file says, or is refused."""

from pathlib import Path

import numpy as np
import pytest

from kvprof.errors import UsageError
from kvprof.models.gguf import read_gguf
from kvprof.models.load import load_model, read_tokenizer
from tests.commands.running import kvprof
from tests.models.gguf_files import TOKENS, write_llama

pytest.importorskip("gguf", reason="the package gguf is not installed")

#: What rules make of one text, by hand from their expressions: pieces end at each bar.
TEXT = "I'LL s1234  c\n\n HeLLo’s… e\u0301 你好。カ½!\n"
CUT = {
    "gpt-2": "I|'|LL| s|1234| | c|\n\n| HeLLo|’|s|…| e|\u0301| 你好|。|カ|½|!|\n",
    "smollm": "I|'|LL| s|1|2|3|4| | c|\n\n| HeLLo|’|s|…| e|\u0301| 你好|。|カ|½|!|\n",
    "llama-bpe": "I|'LL| s|123|4| | c|\n\n| HeLLo|’s|…| e|\u0301| 你好|。カ|½|!\n",
    "qwen2": "I|'LL| s|1|2|3|4| | c|\n\n| HeLLo|’s|…| e|\u0301| 你好|。カ|½|!\n",
    "tekken": "I|'LL| s|1|2|3|4| | c|\n\n| He|LLo|’s|…| e\u0301| 你好|。カ|½|!\n",
    "gpt-4o": "I'LL| s|123|4| | c|\n\n| He|LLo|’s|…| e\u0301| 你好|。カ|½|!\n",
    "deepseek-llm": "I|'|LL| s|1234| | c|\n|\n| HeLLo|’|s|…| e|\u0301 |你好|。|カ|½|!|\n",
    "deepseek-coder": "I|'|LL| s|1|2|3|4| | c|\n|\n| HeLLo|’|s|…| e|\u0301| |你好|。|カ|½|!|\n",
    "deepseek-v3": "I|'LL| s|123|4| | c|\n\n| HeLLo|’|s|…| e\u0301| |你好|。|カ|½|!\n",
}


@pytest.mark.parametrize("pre", CUT)
def test_texts_are_cut_by_the_rule_that_the_file_names(tmp_path: Path, pre: str) -> None:
    path = write_llama(tmp_path / "x.gguf", pre=pre)
    tokenizer = read_tokenizer("x", tmp_path, read_gguf("x", path))
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert "|".join(TEXT[start:end] for _, (start, end) in pieces) == CUT[pre]
    ids = tokenizer(f"{TEXT}<｜User｜>", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids[:-1]) == TEXT
    assert tokenizer.convert_ids_to_tokens(ids[-1]) == "<｜User｜>"
    assert len(tokenizer) == len(TOKENS)
    # A merge takes nothing across a cut, and a piece that is a token needs none.
    assert len(tokenizer.tokenize("12")) == (2 if "|1|2|" in CUT[pre] else 1)


@pytest.mark.parametrize("pre", ["of-tomorrow", None])
def test_an_unknown_rule_is_refused_where_texts_are_cut_before_weights(
    tmp_path: Path, pre: str | None
) -> None:
    path = write_llama(tmp_path / "x.gguf", pre=pre)
    assert kvprof("spectrum", path, "--tokens", 128, "--seq-len", 64).code == 0
    with pytest.raises(UsageError):
        load_model(str(path), device="cpu").tokenizer()
    nan = {"output.weight": np.full((len(TOKENS), 64), np.nan, np.float32)}
    path = write_llama(tmp_path / "nan.gguf", pre=pre, extra=nan)
    asked = (
        ("generate", path, "--prompt", "a", "--method", "full"),
        ("eval", path, "--method", "full", "--text", "prose"),
        ("frontier", path, "--method", "kq"),
        ("spectrum", path, "--source", "prose"),
        ("stability", path),
    )
    for words in asked:
        done = kvprof(*words)
        assert (done.code, f"pre {pre or ''!r}" in done.error) == (2, True), done.error
    assert kvprof("spectrum", path, "--tokens", 128, "--seq-len", 64).code == 1


def test_a_tokenizer_that_loses_text_or_takes_tokens_apart_is_refused(tmp_path: Path) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(len(TOKENS) - 3))]
    twice = [*TOKENS[:-1], "<s>"]
    kinds = [3 if token == "<s>" else 1 for token in twice]
    for tokens in (words, twice):
        change = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
        path = write_llama(tmp_path / "x.gguf", keys=change)
        with pytest.raises(UsageError) as caught:
            read_tokenizer("x", tmp_path, read_gguf("x", path))
        assert "model 'llama'" in str(caught.value)


def test_rows_that_no_text_has_are_not_drawn(tmp_path: Path) -> None:
    loaded = load_model(str(write_llama(tmp_path / "x.gguf", pre="qwen2")), device="cpu")
    text = {*range(259)} - {2}  # bytes and merges, without the end of a text
    assert set(range(loaded.vocab_size)) - loaded.special_ids == text
