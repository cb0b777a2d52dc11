"""How the tokenizer of a GGUF file splits a text before it merges bytes.

A byte-level tokenizer's merges were learned on pieces of text, cut by a rule. A GGUF file has the
rule's name alone (``tokenizer.ggml.pre``). transformers knows some of the names, and cuts as GPT-2
does for any other without a word: what comes out are tokens, and not those of the model.
"""

from functools import cache
from typing import Any

from tokenizers import pre_tokenizers

from kvprof.errors import UsageError
from kvprof.models.gguf import GgufFile

__all__ = ["check_split", "set_split"]

# As GPT-2 does.
_AS_GPT2 = frozenset(("gpt-2", "jais", "mpt", "olmo", "trillion"))
# Every digit by itself, the rest as GPT-2 does; llama.cpp's words for it are \p{N} and that.
_BY_DIGIT = frozenset(
    ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
)


def check_split(spec: str, gguf: GgufFile) -> None:
    """Refuse a tokenizer whose rule for cutting texts is not known.

    Parameters
    ----------
    spec : str
        Named in the error.
    gguf : GgufFile

    Raises
    ------
    UsageError
    """
    if not gguf.byte_level or gguf.split in (_AS_GPT2 | _BY_DIGIT | _known_to_transformers()):
        return
    named = f"is {gguf.split[:40]!r}" if gguf.split else "is missing"
    raise UsageError(
        f"{spec}: in {gguf.path.name} tokenizer.ggml.pre {named}, and no rule for cutting texts "
        "is known by that: its texts would be other tokens; use random tokens or token ids, or "
        "the model's safetensors"
    )


def set_split(tokenizer: Any, gguf: GgufFile) -> None:
    """Let a tokenizer cut texts as its file says, where transformers does not know the rule."""
    if gguf.byte_level and gguf.split in _BY_DIGIT - _known_to_transformers():
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


@cache
def _known_to_transformers() -> frozenset[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_PRE_TOKENIZER_SPLITS,
        )
    except ImportError:  # versions that cut everything as GPT-2 does
        return frozenset()
    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)
