"""A vocabulary of single characters, so that every id of a test can be written by hand."""

from kvprof.sources.windows import ModelTokens

BOS, EOS = 1, 2
#: Ids from 3: the letters.
LETTERS = "abcdefghijklmnopqrstuvwxyz \n"


def ids(text: str) -> list[int]:
    return [3 + LETTERS.index(letter) for letter in text]


def model(*, prefix=(BOS,), separator=(EOS,), vocab_size=40, special=(0, 1, 2), chat=None):
    return ModelTokens(
        vocab_size, frozenset(special), lambda: ids, lambda: prefix, lambda: separator, chat
    )
