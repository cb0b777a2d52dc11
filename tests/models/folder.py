"""Saves a tiny model with a tokenizer, as a user's local folder would hold them."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.models.tiny import VOCABULARY, tiny

SPECIAL = ("<pad>", "<bos>", "<eos>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer whose ids fit the tiny vocabulary; it prefixes ``<bos>``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [letter for letter in alphabet if letter.isascii()] + ["Ġ", "Ċ"]
    vocabulary = {word: i for i, word in enumerate(SPECIAL)}
    for letter in printable[: VOCABULARY - len(SPECIAL) - 1]:
        vocabulary[letter] = len(vocabulary)
    vocabulary["<unk>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def save_tiny(folder: Path, *, seed: int = 0, arch: str = "Llama", **overrides: Any) -> Path:
    """Write a tiny model of `arch` and a byte tokenizer into `folder`."""
    tiny(arch, seed=seed, **overrides).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
