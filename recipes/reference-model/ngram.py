"""The baseline: an interpolated Kneser-Ney 5-gram model over the same training tokens.

``python ngram.py --work WORK --splits kvprof/assets/splits --out ngram.json``. An n-gram is one
64-bit number (6144 ** 5 < 2 ** 64), a model is a sorted array of them for each order.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from batches import find_tokens
from encode import encode_texts, read_lines
from tokenizers import Tokenizer

ORDER = 5


@dataclass
class Level:
    """All n-grams of one order with what interpolation needs of their contexts."""

    keys: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    starts: np.ndarray
    totals: np.ndarray
    discount: float

    @classmethod
    def build(cls, keys: np.ndarray, counts: np.ndarray, vocabulary: int) -> Level:
        """Group sorted keys by their context; estimate the discount from counts one and two."""
        context = keys // np.uint64(vocabulary)
        starts = np.flatnonzero(np.concatenate([[True], context[1:] != context[:-1]]))
        totals = np.add.reduceat(counts, starts)
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        discount = once / max(1, once + 2 * twice)
        return cls(keys, counts, context[starts], np.append(starts, len(keys)), totals, discount)

    def find_context(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Index of each context and whether it was seen."""
        at = np.minimum(np.searchsorted(self.contexts, wanted), len(self.contexts) - 1)
        return at, self.contexts[at] == wanted

    def count(self, wanted: np.ndarray) -> np.ndarray:
        """Count of each n-gram, zero where it was not seen."""
        at = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        return np.where(self.keys[at] == wanted, self.counts[at], 0)


def count_sorted(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct keys in order, and how often each occurs; sorts ``keys`` in place."""
    keys.sort()
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return keys[first], np.diff(np.append(first, len(keys)))


class KneserNey:
    """Interpolated Kneser-Ney with one discount for each order.

    Parameters
    ----------
    ids : numpy.ndarray, shape (n,)
        Training tokens.
    vocabulary : int
    """

    def __init__(self, ids: np.ndarray, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        keys = np.zeros(len(ids) - ORDER + 1, dtype=np.uint64)
        for i in range(ORDER):
            keys *= np.uint64(vocabulary)
            keys += ids[i : len(ids) - ORDER + 1 + i]
        distinct, counts = count_sorted(keys)
        levels = [Level.build(distinct, counts, vocabulary)]
        for order in range(ORDER - 1, 0, -1):
            # Lower orders count in how many contexts an n-gram is seen, not how often.
            distinct, counts = count_sorted(distinct % np.uint64(vocabulary**order))
            levels.append(Level.build(distinct, counts, vocabulary))
        self.levels = levels[::-1]

    def _context(self, history: np.ndarray, order: int) -> np.ndarray:
        return history % np.uint64(self.vocabulary ** (order - 1))

    def probability(self, order: int, history: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Probability of each word after its history (the last four tokens as one number)."""
        if order == 0:
            return np.full(len(words), 1.0 / self.vocabulary)
        below = self.probability(order - 1, history, words)
        level = self.levels[order - 1]
        context = self._context(history, order)
        at, seen = level.find_context(context)
        counts = level.count(context * np.uint64(self.vocabulary) + words.astype(np.uint64))
        kinds = level.starts[at + 1] - level.starts[at]
        share = np.maximum(counts - level.discount, 0) + level.discount * kinds * below
        return np.where(seen, share / level.totals[at], below)

    def best(self, order: int, history: np.ndarray, chunk: int = 20_000) -> np.ndarray:
        """Return the most likely word after each history.

        Interpolation scales every unseen word by the same factor, so the best word is the best
        of one order lower or one that was seen after this context.
        """
        contexts, where = np.unique(self._context(history, order), return_inverse=True)
        if order == 1:
            level = self.levels[0]
            word = int(level.keys[np.argmax(level.counts)])
            return np.full(len(history), word, dtype=np.int64)
        lower = self.best(order - 1, contexts)
        level = self.levels[order - 1]
        best = lower.copy()
        at, seen = level.find_context(contexts)
        many = np.where(seen, level.starts[at + 1] - level.starts[at], 0)
        for low in range(0, len(contexts), chunk):
            part = slice(low, min(low + chunk, len(contexts)))
            sizes = many[part]
            owner = np.repeat(np.arange(len(sizes)), sizes)
            inside = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            followers = level.keys[level.starts[at[part]][owner] + inside]
            words = (followers % np.uint64(self.vocabulary)).astype(np.int64)
            owner = np.concatenate([owner, np.arange(len(sizes))])
            words = np.concatenate([words, lower[part]])
            values = self.probability(order, contexts[part][owner], words)
            ranked = np.lexsort((values, owner))
            last = np.flatnonzero(np.append(owner[ranked][1:] != owner[ranked][:-1], True))
            best[part] = words[ranked[last]]
        return best[where]

    def evaluate(self, documents: list[np.ndarray], separator: int) -> dict[str, float]:
        """Perplexity and next-token accuracy over every token of the documents."""
        histories, targets = [], []
        for ids in documents:
            padded = np.concatenate([np.full(ORDER - 1, separator), ids]).astype(np.uint64)
            key = np.zeros(len(ids), dtype=np.uint64)
            for i in range(ORDER - 1):
                key = key * np.uint64(self.vocabulary) + padded[i : i + len(ids)]
            histories.append(key)
            targets.append(ids.astype(np.int64))
        history, target = np.concatenate(histories), np.concatenate(targets)
        chance = self.probability(ORDER, history, target)
        return {
            "tokens": len(target),
            "perplexity": round(float(np.exp(-np.log(chance).mean())), 4),
            "next_token_accuracy": round(float((self.best(ORDER, history) == target).mean()), 5),
        }


def main() -> None:
    """Train on the training tokens, evaluate on a split."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--splits", type=Path, required=True)
    parser.add_argument("--split", default="evaluation")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    began = time.perf_counter()
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer" / "tokenizer.json"))
    model = KneserNey(find_tokens(args.work), tokenizer.get_vocab_size())
    report: dict[str, object] = {"order": ORDER, "smoothing": "interpolated Kneser-Ney"}
    report["discounts"] = [round(level.discount, 4) for level in model.levels]
    report["distinct"] = [len(level.keys) for level in model.levels]
    for kind in ("prose", "code"):
        texts = [row["text"] for row in read_lines(args.splits / args.split / f"{kind}.jsonl")]
        documents = encode_texts(tokenizer, texts)
        report[kind] = model.evaluate(documents, tokenizer.token_to_id("</s>"))
    report["seconds"] = round(time.perf_counter() - began, 1)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
