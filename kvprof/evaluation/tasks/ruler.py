"""RULER's tasks in their own definitions, as far as they can be generated offline.

Templates, parameters and limits are RULER's (https://github.com/NVIDIA/RULER, Copyright NVIDIA
Corporation, Apache License 2.0; ``scripts/synthetic.yaml``, ``scripts/data/synthetic/`` and
``scripts/eval/synthetic/constants.py`` there; arXiv 2404.06654, section 3 and appendix B). The
generators are written anew. They differ in the following.

- Essays: the embedded prose (evaluation split) stands in for Paul Graham's, which may not be passed
  on, and a full stop and a blank end a sentence, where RULER asks nltk.
- Words: those of that prose, where RULER takes them from the package wonderwords. No two keys or
  values of a question are the same.
- Length: every question is as long as fits; RULER goes in larger steps. What is written counts for
  ``fwe`` as for the others.
- An example in front (``vt``, ``cwe``) stands inside the user's message, for ``cwe`` too.
- ``qa_1`` and ``qa_2`` are not there: they ask questions of SQuAD and HotpotQA, which would have to
  be downloaded. lm-evaluation-harness does so (``--harness ruler_qa_squad,ruler_qa_hotpot``).
"""

import math
import random
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvprof.evaluation.data import Question
from kvprof.evaluation.tasks.prose import MOST_ESSAY_WORDS, essay, lexicon, sentences

__all__ = ["ABSENT", "RULER", "Niah", "RulerTask"]

#: Draws a question: random numbers, how much text, and the length asked for, in tokens.
Draw = Callable[[random.Random, int, int], Question]


@dataclass(frozen=True)
class RulerTask:
    """One task."""

    draw: Draw  # takes a source of random numbers, a size and the length asked for, in tokens
    limit: int  # tokens that may be written
    least: int  # sizes that `draw` takes: pieces of the haystack, or words of a list
    most: int


# --- Needle in a haystack (``niah.py``).

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_NIAH = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)
_NIAH_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
_NIAH_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?"
)
_NIAH_ONE_PREFIX = " The special magic {kind} for {query} mentioned in the provided text is"
_DEPTHS = 40  # places in per cent, equally far apart from 0 to 100
_QUARTERS = 4  # depths are reported in quarters of the text


@dataclass(frozen=True)
class Niah:
    """What distinguishes one ``niah`` task from another."""

    haystack: str  # `noise`, `essay` or `needle`
    keys: str = "words"  # `words`, `numbers` or `uuids`
    values: str = "numbers"
    num_keys: int = 1  # keys that are hidden, values of each, and keys that are asked for
    num_values: int = 1
    num_queries: int = 1


def _number(rng: random.Random) -> str:
    return str(rng.randint(10**6, 10**7 - 1))


def _word(rng: random.Random) -> str:
    return "-".join(rng.sample(lexicon(), 2))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


_KINDS = {"numbers": _number, "words": _word, "uuids": _uuid}


class _Fresh:
    """Draws strings, none of them twice."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._seen: set[str] = set()

    def __call__(self, kind: str) -> str:
        while (drawn := _KINDS[kind](self._rng)) in self._seen:
            pass
        self._seen.add(drawn)
        return drawn


def _niah(form: Niah, rng: random.Random, size: int, length: int) -> Question:
    fresh = _Fresh(rng)
    hidden = {
        fresh(form.keys): [fresh(form.values) for _ in range(form.num_values)]
        for _ in range(max(form.num_keys, form.num_queries))
    }

    def needle(key: str, value: str) -> str:
        return _NEEDLE.format(kind=form.values, key=key, value=value)

    needles = [needle(key, value) for key, values in hidden.items() for value in values]
    rng.shuffle(needles)
    queries = rng.sample(sorted(hidden), form.num_queries)
    answers = tuple(value for query in queries for value in hidden[query])
    others = 0
    if form.haystack == "essay":
        pieces = sentences(essay(size))
        percents = rng.sample(range(_DEPTHS), len(needles))
        positions = sorted(len(pieces) * round(100 * i / (_DEPTHS - 1)) // 100 for i in percents)
        joint = " "
    else:
        others = size if form.haystack == "needle" else 0
        pieces = [_NOISE] * size
        if others:
            pieces = [needle(fresh(form.keys), fresh(form.values)) for _ in range(size)]
        positions = sorted(rng.sample(range(size), len(needles)))
        joint = "\n"
    depth = _quarter(positions[0] / max(1, len(pieces))) if len(needles) == 1 else None
    for position, hides in reversed(list(zip(positions, needles, strict=True))):
        pieces.insert(position, hides)
    one = len(answers) == 1
    query = queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
    asked = {"kind": form.values.removesuffix("s") if one else form.values, "query": query}
    text = (_NIAH_ONE if one else _NIAH).format(context=joint.join(pieces), **asked)
    prefix = (_NIAH_ONE_PREFIX if one else _NIAH_PREFIX).format(**asked)
    candidates = len(needles) + others
    chance = len(answers) / candidates if candidates > len(answers) else 0.0
    return Question((text,), prefix, answers, chance, depth)


def _quarter(share: float) -> float:
    return round(share * _QUARTERS) / _QUARTERS


def _niah_task(form: Niah) -> RulerTask:
    hidden = max(form.num_keys, form.num_queries) * form.num_values
    most = MOST_ESSAY_WORDS if form.haystack == "essay" else 100_000
    return RulerTask(partial(_niah, form), 128, 0 if form.haystack == "essay" else hidden, most)


# --- Variable tracking (``variable_tracking.py``): one chain, four hops.

_VT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {query} in the text above."
)
# The spelling is RULER's.
_VT_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {number} "
    "variables are assgined the value {query}, they are: "
)
_HOPS = 4
_VT_NAME, _VT_EXAMPLE_NAME = 5, 3  # letters
_VT_EXAMPLE_LINES = 10  # of noise; about the 500 tokens at most that RULER's example has


def _chain(rng: random.Random, lines: int, letters: int) -> tuple[str, str, list[str]]:
    """Return a text with one chain in it, the value that it begins with, and its names."""
    names: list[str] = []
    while len(names) < _HOPS + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = str(rng.randrange(10_000, 99_999))
    links = [f"VAR {names[0]} = {value}"]
    links += [f"VAR {names[hop + 1]} = VAR {names[hop]} " for hop in range(_HOPS)]
    pieces = [_NOISE + "\n"] * lines
    positions = sorted(rng.sample(range(lines), len(links)))
    for position, link in reversed(list(zip(positions, links, strict=True))):
        pieces.insert(position, link)
    return " ".join(pieces).replace(". \n", ".\n"), value, names


def _vt(rng: random.Random, size: int, length: int) -> Question:
    def asked(lines: int, letters: int) -> tuple[str, str, list[str]]:
        context, value, names = _chain(rng, lines, letters)
        prefix = _VT_PREFIX.format(number=len(names), query=value)
        return _VT.format(context=context, query=value), prefix, names

    shown, shown_prefix, shown_names = asked(_VT_EXAMPLE_LINES, _VT_EXAMPLE_NAME)
    text, prefix, names = asked(size, _VT_NAME)
    example = f"{shown}{shown_prefix} {' '.join(shown_names)}\n\n"
    return Question((f"{example}\n\n{text}",), prefix, tuple(names))


# --- Common words (``common_words_extraction.py``): ten that stand there more often than others.

_CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
_CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
_COMMON = 10
_CWE_LONG = 4096  # tokens from which on lists have more repeats
# Distinct words, and repeats of common and of other ones: of the example, then of the question.
_CWE_SHORT_FORM = ((20, 3, 1), (6, 1))
_CWE_LONG_FORM = ((40, 10, 3), (30, 3))


def _list(rng: random.Random, words: int, often: int, seldom: int) -> tuple[str, list[str]]:
    drawn = rng.sample(lexicon(), words)
    listed = drawn[:_COMMON] * often + drawn[_COMMON:] * seldom
    rng.shuffle(listed)
    return " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1)), drawn[:_COMMON]


def _cwe(rng: random.Random, size: int, length: int) -> Question:
    example, repeats = _CWE_SHORT_FORM if length < _CWE_LONG else _CWE_LONG_FORM
    context, answer = _list(rng, *example)
    numbered = " ".join(f"{number}. {word}" for number, word in enumerate(answer, 1))
    shown = f"{_CWE.format(context=context)}{_CWE_PREFIX}{numbered}"  # no blank there either
    context, common = _list(rng, size, *repeats)
    text = f"{shown}\n{_CWE.format(context=context)}"
    return Question((text,), _CWE_PREFIX, tuple(common), _COMMON / size)


# --- Frequent words (``freq_words_extraction.py``): the first of a zeta distribution.

_FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
    "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
    "text?"
)
_FWE_PREFIX = (
    " Answer: According to the coded text above, the three most frequently appeared words are:"
)
_LETTERS = 6
_DOTS = "..."  # in place of the most frequent word
_ZETA = math.pi**2 / 6  # of the exponent 2
_TOKENS_PER_WORD = 50  # tokens of the length for each word of the vocabulary


def _fwe(rng: random.Random, size: int, length: int) -> Question:
    vocabulary: list[str] = [_DOTS]
    while len(vocabulary) < max(4, length // _TOKENS_PER_WORD):
        word = "".join(rng.choices(string.ascii_lowercase, k=_LETTERS))
        if word not in vocabulary:
            vocabulary.append(word)
    counts = [int(size / rank**2 / _ZETA) for rank in range(1, len(vocabulary) + 1)]
    text = [word for word, count in zip(vocabulary, counts, strict=True) for _ in range(count)]
    distinct = len(set(text)) - 1
    rng.shuffle(text)
    answers = tuple(vocabulary[1:4])
    chance = len(answers) / distinct if distinct > len(answers) else 0.0
    return Question((_FWE.format(context=" ".join(text)),), _FWE_PREFIX, answers, chance)


# From here on the third of the words asked for stands there more often than the next.
_FWE_LEAST = 34

#: RULER's tasks by their names there (``scripts/synthetic.yaml``).
RULER: dict[str, RulerTask] = {
    "niah_single_1": _niah_task(Niah("noise")),
    "niah_single_2": _niah_task(Niah("essay")),
    "niah_single_3": _niah_task(Niah("essay", values="uuids")),
    "niah_multikey_1": _niah_task(Niah("essay", num_keys=4)),
    "niah_multikey_2": _niah_task(Niah("needle")),
    "niah_multikey_3": _niah_task(Niah("needle", keys="uuids", values="uuids")),
    "niah_multivalue": _niah_task(Niah("essay", num_values=4)),
    "niah_multiquery": _niah_task(Niah("essay", num_queries=4)),
    "vt": RulerTask(_vt, 30, _HOPS + 2, 100_000),
    "cwe": RulerTask(_cwe, 120, _COMMON + 1, 1_500),
    "fwe": RulerTask(_fwe, 50, _FWE_LEAST, 1_000_000),
}

#: Those that need a data set, and which.
ABSENT = {"qa_1": "SQuAD", "qa_2": "HotpotQA"}
