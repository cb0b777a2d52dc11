"""The tokenizer that a GGUF file describes.

A byte-level tokenizer merges bytes within pieces of a text, cut by a rule of which the file has the
name alone (``tokenizer.ggml.pre``). transformers cuts by names that its version knows, as GPT-2
does for all others, and takes apart special tokens that are spelled beyond its alphabet: so such a
tokenizer is built here of what the file says. Others, of SentencePiece's kind, are transformers'.
Either is tried on texts.
"""

from functools import partial
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, __version__

from kvprof.errors import UsageError
from kvprof.models.gguf import CONTROL, GgufFile, open_gguf

__all__ = ["byte_level_tokenizer", "check_texts"]

# The expressions of tokenizer.json, one cutting what the one before left in a piece.
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s| "
    r"?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DF1E}]]"
)
_EAST_ASIAN = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_RULES: dict[str, tuple[str, ...]] = {
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum": (_GPT2,),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (r"\p{N}", _GPT2),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 "
    "chatglm-bpe": (rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_END}",),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": (
        rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_END}",
    ),
    "tekken": (_BY_CASE % ("", "", r"\p{N}"),),
    "gpt-4o llama4 kanana2 talkie minimax-m2": (
        _BY_CASE % (f"{_SHORT}?", f"{_SHORT}?", r"\p{N}{1,3}"),
    ),
    "deepseek-llm": (
        *(r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+", r"\s+$"),
        *(_EAST_ASIAN, r"\p{N}+"),
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"),
    "deepseek-v3 hunyuan-dense joyai-llm": (
        *(r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"),
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
_RULES = {name: rule for names, rule in _RULES.items() for name in names.split()}
# A piece that is a token is that token, whatever merges give; a text begins with BOS.
_WHOLE = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_USER_DEFINED = 4
_NAMED = ("bos", "eos", "unknown", "padding")

# Of digits, contractions, scripts, marks, emoji, spaces, lines and punctuation.
_AWKWARD = (
    "I'll DON'T l'été 1234567 3.14 ½ ٣٤ x_1",
    "Straße ПРИВЕТ Ωmega 你好，世界 カナ ไทย हिन्दी 한국어 עברית e\u0301 ǅ",
    "a\tb\t\t c   d    \n\n\r\n  e \u00a0\u3000f",
    "!!!...({[<->]})//\\\\ ¿? “‘’” €$ ∑≠ 👩‍👩‍👧 🇪🇺",
)


def byte_level_tokenizer(spec: str, gguf: GgufFile) -> PreTrainedTokenizerBase:
    """Build the tokenizer of a file whose merges are of bytes."""
    if (rule := _RULES.get(gguf.split)) is None:
        raise UsageError(
            f"{spec}: {gguf.path.name}: tokenizer.ggml.pre {gguf.split[:40]!r} is not supported; "
            "use random tokens, token ids or the model's safetensors"
        )
    fields = open_gguf(gguf.path).fields

    def said(key: str, default: Any = None) -> Any:
        return fields[f"tokenizer.{key}"].contents() if f"tokenizer.{key}" in fields else default

    tokens, whole = said("ggml.tokens"), gguf.split in (*_WHOLE, "tekken")
    merges = [tuple(merge.split(" ")) for merge in said("ggml.merges", ())]
    backend = Tokenizer(
        BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=whole)
    )
    cuts = [pre_tokenizers.Split(Regex(one), "isolated") for one in rule]
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, plain])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, gguf.token_types, strict=True)
            if kind in (CONTROL, _USER_DEFINED)
        ]
    )
    ids = {name: gguf.token_ids.get(f"{name}_token_id") for name in _NAMED}
    named = {f"{name[:3]}_token": tokens[i] for name, i in ids.items() if i is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=said("ggml.add_bos_token", whole),
        add_eos_token=said("ggml.add_eos_token", False),
        chat_template=said("chat_template"),
        **named,
    )


def check_texts(spec: str, gguf: GgufFile, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that loses text, takes special tokens apart or has lost its merges."""

    def of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    decoded = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    fields = open_gguf(gguf.path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    lost = (text for text in _AWKWARD if decoded(of(text)) != text)
    control = (i for i, kind in enumerate(gguf.token_types) if kind == CONTROL)
    apart = (tokens[i] for i in control if of(tokens[i]) != [i])
    wrong = next(lost, None) or next(apart, None)
    if wrong is None and isinstance(tokenizer.backend_tokenizer.model, BPE):
        return
    rule = f"pre {gguf.split!r}" if gguf.byte_level else "model 'llama'"
    cuts = f"cuts {wrong!r}" if wrong else "merges"
    raise UsageError(
        f"{spec}: for {gguf.path.name} transformers {__version__} builds a tokenizer that {cuts} "
        f"differently from tokenizer.ggml.{rule}; use random tokens, token ids, the model's "
        "safetensors or a newer transformers"
    )
