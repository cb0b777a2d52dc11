"""Train the byte-level BPE tokenizer on the training text: ``python build_tokenizer.py``."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tasks import single_token_words
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 6144
SPECIAL = ("<s>", "</s>", "<pad>")
# Digits stand alone, so that a code is read digit by digit and copied the same way everywhere;
# whitespace before a word stays whole, so that indentation is cheap.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def make_tokenizer(texts: Iterator[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train a byte-level BPE whose encoding starts with ``<s>`` unless told otherwise."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that ``AutoTokenizer.from_pretrained`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Train on a seeded sample of documents; also write the words that the tasks use."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--characters", type=int, default=80_000_000)
    parser.add_argument("--seed", type=int, default=2026)
    args = parser.parse_args()
    with (args.work / "train.jsonl").open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    random.Random(args.seed).shuffle(texts)
    total, sample = 0, []
    for text in texts:
        if total < args.characters:
            sample.append(text)
            total += len(text)
    tokenizer = make_tokenizer(iter(sample), args.vocabulary)
    save_tokenizer(tokenizer, args.work / "tokenizer")
    counts: Counter = Counter()
    for text in sample:
        counts.update(re.findall(r"\b[a-z]{4,}\b", text))
    words = single_token_words(tokenizer, counts, least=max(1, total // 100_000))
    (args.work / "words.txt").write_text("\n".join(words) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens, {len(words)} words, {total} characters")


if __name__ == "__main__":
    main()
