"""Words and running text of the embedded prose, for questions that are generated offline."""

import json
import re
from collections import Counter
from functools import cache
from importlib import resources

__all__ = ["MOST_ESSAY_WORDS", "essay", "lexicon", "sentences"]

_PROSE = resources.files("kvprof") / "assets" / "splits" / "evaluation" / "prose.jsonl"

# A word by itself: no part of a path, a call or a hyphenated one.
_WORD = re.compile(r"(?<![\w.\-/'])[a-z]{4,9}(?![\w\-/'(])")
_SEEN = 3  # times, which leaves out names and misprints
_SENTENCE = re.compile(r"(?<=[.!?])\s+")

#: Words of `essay` beyond which there is no more text.
MOST_ESSAY_WORDS = 100_000


@cache
def lexicon() -> tuple[str, ...]:
    """Return about two thousand lower-case words of four to nine letters, in alphabetical order."""
    counts = Counter(word for text in _texts() for word in _WORD.findall(text))
    return tuple(sorted(word for word, count in counts.items() if count >= _SEEN))


def essay(words: int) -> str:
    """Return the beginning of the prose, its white space written as single blanks."""
    return " ".join(_words()[:words])


def sentences(text: str) -> list[str]:
    """Cut a text after full stops, exclamation and question marks."""
    return _SENTENCE.split(text) if text else []


@cache
def _words() -> tuple[str, ...]:
    return tuple(" ".join(_texts()).split()[:MOST_ESSAY_WORDS])


@cache
def _texts() -> tuple[str, ...]:
    with _PROSE.open(encoding="utf-8") as stream:
        return tuple(json.loads(line)["text"] for line in stream)
