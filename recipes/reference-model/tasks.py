"""Synthetic sequences with an answer to get right: needles, variables, frequent words, copying.

An instance is a list of token ids: filler taken from text, statements hidden in it, a
question at the end and the answer. Statements start with a newline and filler is cut before
newlines, so that joining pieces never changes how the text is tokenized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from tokenizers import Tokenizer

TASKS = ("needle", "variables", "frequent_words", "copy")
SHARES = {"needle": 0.34, "variables": 0.36, "frequent_words": 0.15, "copy": 0.15}


@dataclass(frozen=True)
class Instance:
    """One question with its answer, as token ids without the leading ``<s>``."""

    task: str
    form: str
    prompt: list[int]
    answer: list[int]
    depth: float | None

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + len(self.answer)


def single_token_words(tokenizer: Tokenizer, counts: dict[str, int], least: int) -> list[str]:
    """Lower-case words of four letters or more that are one token after a space."""
    words = []
    for token in tokenizer.get_vocab():
        word = token[1:]
        plain = len(word) >= 4 and word.isascii() and word.isalpha() and word.islower()
        if token[0] == "Ġ" and plain and counts.get(word, 0) >= least:
            words.append(word)
    return sorted(words)


class TaskMaker:
    """Draws instances from a seed, a tokenizer, filler tokens and a word list.

    Parameters
    ----------
    tokenizer : Tokenizer
        With tokens that break digits and newlines as ``build_tokenizer.py`` makes it.
    filler : numpy.ndarray, shape (n,)
        Token ids of text, documents joined by ``</s>``.
    words : list of str
        Single-token words for keys and lists.
    seed : int
        The whole sequence of instances follows from it.
    """

    def __init__(
        self, tokenizer: Tokenizer, filler: np.ndarray, words: list[str], seed: int
    ) -> None:
        self.tokenizer = tokenizer
        self.words = np.array(words)
        self.rng = np.random.default_rng(seed)
        vocabulary = tokenizer.get_vocab()
        newline = np.zeros(tokenizer.get_vocab_size(), dtype=bool)
        word_start = newline.copy()
        for token, index in vocabulary.items():
            newline[index] = token.startswith("Ċ")
            word_start[index] = len(token) > 1 and token[0] == "Ġ" and token[1].isalpha()
        self.eos = vocabulary["</s>"]
        self.filler = np.where(filler == self.eos, vocabulary["Ċ"], filler).astype(np.int64)
        self.breaks = np.flatnonzero(newline[self.filler])
        self.is_newline = newline
        self.is_word_start = word_start
        self.ids: Callable[[str], tuple[int, ...]] = lru_cache(maxsize=100_000)(self._encode)
        self.makers = {
            "needle": self._needle,
            "variables": self._variables,
            "frequent_words": self._frequent_words,
            "copy": self._copy,
        }

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def draw(self, task: str, length: int, depth: float | None = None) -> Instance:
        """One instance of at most ``length`` tokens, close to it.

        Parameters
        ----------
        task : str
            One of ``TASKS``.
        length : int
            Tokens of prompt and answer together, at most.
        depth : float, optional
            Where the statement asked for stands, 0 (start) to 1 (just before the question).
        """
        for attempt in range(25):
            instance = self.makers[task](length - attempt * length // 50, depth)
            if instance.length <= length:
                return instance
        raise ValueError(f"no {task} instance fits into {length} tokens")

    def _pick(self, count: int) -> list[str]:
        return [str(w) for w in self.rng.choice(self.words, size=count, replace=False)]

    def _number(self, digits: int) -> str:
        return "".join(str(d) for d in self.rng.integers(0, 10, size=digits))

    def _place(self, statements: list[list[int]], depths: list[float], room: int) -> list[int]:
        """Filler of at most ``room`` tokens with the statements at their depths."""
        room -= sum(map(len, statements))
        if room < 8:
            return [token for statement in statements for token in statement]
        for _ in range(100):
            first = int(self.rng.integers(0, len(self.breaks) - 1))
            start = int(self.breaks[first])
            last = int(np.searchsorted(self.breaks, start + room, side="right")) - 1
            if self.breaks[last] - start >= 0.8 * room:
                break
        cuts = self.breaks[first : last + 1]
        text = self.filler
        parts: list[int] = []
        at = start
        for statement, depth in zip(statements, depths, strict=True):
            wanted = start + depth * (int(cuts[-1]) - start)
            cut = int(cuts[np.argmin(np.abs(cuts - wanted))])
            cut = max(cut, at)
            parts += text[at:cut].tolist()
            parts += statement
            at = cut
        return parts + text[at : int(cuts[-1])].tolist()

    def _depths(self, count: int) -> list[float]:
        return sorted(self.rng.random(count).tolist())

    def _needle(self, length: int, depth: float | None) -> Instance:
        most = max(1, min(8, length // 40))
        count = int(self.rng.integers(1, most + 1))
        keys = self._pick(count)
        codes = [self._number(int(self.rng.integers(4, 7))) for _ in keys]
        ids = self.ids
        statements = [
            [*ids("\nNote: the code of"), *ids(" " + key), *ids(" is"), *ids(" " + code), *ids(".")]
            for key, code in zip(keys, codes, strict=True)
        ]
        depths = [float(d) for d in self.rng.random(count)]
        if depth is not None:
            depths[0] = depth
        asked = depths[0]
        order = sorted(range(count), key=lambda i: depths[i])
        question = [*ids("\nQuestion: what is the code of"), *ids(" " + keys[0])]
        question += ids("?\nAnswer:")
        answer = [*ids(" " + codes[0])]
        room = length - len(question) - len(answer)
        body = self._place([statements[i] for i in order], [depths[i] for i in order], room)
        return Instance("needle", f"keys={count}", body + question, answer, asked)

    def _variables(self, length: int, depth: float | None) -> Instance:
        chains = int(self.rng.integers(1, 1 + max(1, min(3, length // 100))))
        size = int(self.rng.integers(2, 6))
        ids = self.ids
        words = self._pick(chains * (size + 1))
        placed: list[tuple[float, int, list[int]]] = []
        for chain in range(chains):
            links = words[chain * (size + 1) : (chain + 1) * (size + 1)]
            depths = self._depths(size)
            if chain == 0 and depth is not None:
                depths = sorted([depth, *(depth + (1 - depth) * self.rng.random(size - 1))])
            for i in range(size):
                verb = "\nCopy" if i else "\nPut"
                text = [*ids(verb), *ids(" " + links[i]), *ids(" into"), *ids(" " + links[i + 1])]
                placed.append((depths[i], len(placed), [*text, *ids(".")]))
        asked = min(p[0] for p in placed[:size])
        placed.sort()
        question = [*ids("\nQuestion: which names hold"), *ids(" " + words[0])]
        question += ids("?\nAnswer:")
        answer = [token for name in words[1 : size + 1] for token in ids(" " + name)]
        room = length - len(question) - len(answer)
        body = self._place([p[2] for p in placed], [p[0] for p in placed], room)
        return Instance(
            "variables", f"chains={chains},names={size}", body + question, answer, asked
        )

    def _frequent_words(self, length: int, depth: float | None) -> Instance:
        ids = self.ids
        question = [*ids("\nQuestion: which three words are most frequent?\nAnswer:")]
        room = length - len(question) - 3
        total = int(room / 1.25) - 8
        exponent = float(self.rng.uniform(1.3, 2.0))
        distinct = int(np.clip(total // 4, 8, 60))
        weights = np.arange(1, distinct + 1, dtype=float) ** -exponent
        counts = np.maximum(1, (total * weights / weights.sum()).astype(int))
        counts[2] = max(counts[2], counts[3] + 2)
        counts[1] = max(counts[1], counts[2] + 2)
        counts[0] = max(counts[0], counts[1] + 2)
        words = self._pick(distinct)
        listed = np.repeat(np.arange(distinct), counts)
        self.rng.shuffle(listed)
        body: list[int] = []
        for at in range(0, len(listed), 12):
            body += ids("\nWords:")
            for index in listed[at : at + 12]:
                body += ids(" " + words[index])
        answer = [token for word in words[:3] for token in ids(" " + word)]
        return Instance("frequent_words", f"distinct={distinct}", body + question, answer, None)

    def _copy(self, length: int, depth: float | None) -> Instance:
        size = int(self.rng.integers(8, max(9, min(48, length // 5))))
        count = 1 if length < 200 or self.rng.random() < 0.5 else 2
        keys = self._pick(count)
        spans = [self._span(size) for _ in keys]
        ids = self.ids
        statements = [
            [*ids("\nPassage"), *ids(" " + key), *ids(":"), *span, *ids("\nEnd of passage.")]
            for key, span in zip(keys, spans, strict=True)
        ]
        depths = [float(d) for d in self.rng.random(count)]
        if depth is not None:
            depths[0] = depth
        asked = depths[0]
        order = sorted(range(count), key=lambda i: depths[i])
        question = [*ids("\nRepeat passage"), *ids(" " + keys[0]), *ids(":")]
        room = length - len(question) - len(spans[0])
        body = self._place([statements[i] for i in order], [depths[i] for i in order], room)
        return Instance("copy", f"tokens={size}", body + question, spans[0], asked)

    def _span(self, size: int) -> list[int]:
        """Random words, or a run of text without a line break that starts at a word."""
        if self.rng.random() < 0.5:
            return [token for word in self._pick(size) for token in self.ids(" " + word)]
        for _ in range(200):
            at = int(self.rng.integers(0, len(self.filler) - size - 200))
            starts = np.flatnonzero(self.is_word_start[self.filler[at : at + 100]])
            if not len(starts):
                continue
            at += int(starts[0])
            ends = np.flatnonzero(self.is_word_start[self.filler[at + size : at + size + 20]])
            if len(ends):
                span = self.filler[at : at + size + int(ends[0])]
                if not self.is_newline[span].any():
                    return span.tolist()
        return [token for word in self._pick(size) for token in self.ids(" " + word)]
