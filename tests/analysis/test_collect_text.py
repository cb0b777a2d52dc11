"""Text reaches a decoder as the ids that its own tokenizer gives, special tokens included once."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvprof.errors import FailedError, UsageError
from kvprof.models.load import load_model
from kvprof.moments.collect import model_tokens
from kvprof.sources.grammar import file_source
from kvprof.sources.windows import windows
from tests.analysis.passes import RANDOM, SEQ_LEN, ids_file, last, options, same
from tests.models.tiny import tiny


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A model with a tokenizer of words that has BOS, EOS and a chat template."""
    folder = tmp_path_factory.mktemp("spoken") / "llama"
    tiny("Llama").save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 90)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = "<s>{% for m in messages %} w8 {{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    return load_model(str(folder), device="cpu")


def ids_of(loaded, source, **others) -> list[list[int]]:
    found = windows(source, model_tokens(loaded), tokens=None, seq_len=SEQ_LEN, **others)
    return [window.tolist() for window in found]


def test_text_reaches_the_model_as_its_own_tokenizer_writes_it(spoken, tmp_path):
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "w10 w11"}\n{"text": "w12"}\n')
    assert ids_of(spoken, file_source([text], token_ids=False)) == [[1, 10, 11, 2, 12, 2]]
    moments = last(spoken, file_source([text], token_ids=False), options(None))
    alone = last(spoken, ids_file(tmp_path, [1, 10, 11, 2, 12, 2]), options(None))
    assert same(moments, alone)
    assert moments.info["source"] == "a.jsonl"
    assert moments.info["seed"] is None


def test_a_chat_has_one_bos_however_its_template_begins(spoken, tmp_path):
    text = tmp_path / "a.jsonl"
    text.write_text('{"messages": [{"role": "user", "content": "w20"}]}')
    assert ids_of(spoken, file_source([text], token_ids=False)) == [[1, 8, 20, 2]]


def test_a_damaged_chat_is_named_and_a_model_without_template_too(spoken, tmp_path):
    text = tmp_path / "a.jsonl"
    text.write_text('{"messages": [{"role": "user", "content": "w20"}]}')
    source = file_source([text], token_ids=False)
    spoken.tokenizer().chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(FailedError, match=r"a\.jsonl:1: .*: its chat template refuses: roles must"):
        ids_of(spoken, source)
    spoken.tokenizer().chat_template = None
    with pytest.raises(UsageError, match="its tokenizer has no chat template"):
        ids_of(spoken, source)


def test_random_tokens_leave_out_what_the_tokenizer_calls_special(spoken):
    drawn = [
        i
        for window in windows(RANDOM, model_tokens(spoken), tokens=5000, seq_len=64)
        for i in window.tolist()
    ]
    # 90 words; the embedding has 97 rows, so the last seven belong to no token.
    assert set(drawn) == set(range(3, 90))
