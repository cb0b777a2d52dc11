"""From a source to batches of token ids: windows of equal length, cut at exact token counts."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from itertools import groupby, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
from numpy.typing import NDArray

from kvprof.errors import FailedError, UsageError
from kvprof.sources.grammar import EMBEDDED, RANDOM, Source, SourceKind

__all__ = [
    "ModelTokens",
    "batches",
    "embedded_documents",
    "read_documents",
    "read_token_ids",
    "windows",
]

# --- Reading documents: plain text, JSON Lines, chat logs, token ids, the embedded splits.


# Text without document borders is cut at line ends into pieces of about this many characters, so
# that a file of many gigabytes is read only as far as it is needed.
_PIECE = 1 << 16
# Characters of a line, or of a row's text, that are read or tokenised at once.
_LINE = 1 << 20
# Characters of a row of JSON Lines, which has to be held whole: more is no document.
_ROW = 1 << 28

ChatTemplate = Callable[[list[dict[str, Any]]], str]


def read_documents(
    path: Path, chat_template: ChatTemplate | None = None
) -> Iterator[Iterable[str]]:
    """Yield the documents of a text or JSON Lines file, each as pieces of text, lazily.

    A text file is one document. A row of JSON Lines is one; it has ``text``, ``prompt`` with
    ``answer``, or ``messages`` (a chat log, written out with the model's chat template).
    """
    if path.suffix not in {".jsonl", ".ndjson"}:
        yield _pieces(path)
        return
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            text = _row_text(line, f"{path.name}:{number}", chat_template)
            yield (text[start : start + _LINE] for start in range(0, len(text), _LINE))


def _pieces(path: Path) -> Iterator[str]:
    """Yield the text of a file, cut at ends of lines."""
    with _reading(path) as stream:
        while piece := stream.read(_PIECE):
            # A line may be as long as the file.
            yield piece + stream.readline(_LINE)


def _lines(path: Path) -> Iterator[str]:
    with _reading(path) as stream:
        number = 0
        while line := stream.readline(_ROW):
            number += 1
            if len(line) == _ROW:
                raise FailedError(
                    f"{path.name}:{number}: the row has {_ROW:,} characters or more; split it"
                )
            yield line


@contextmanager
def _reading(path: Path) -> Iterator[TextIO]:
    """Open a text file; what goes wrong while it is read becomes one line."""
    try:
        with path.open(encoding="utf-8") as stream:
            yield stream
    except UnicodeDecodeError as cause:
        raise FailedError(
            f"{path.name}: not UTF-8 text ({cause.reason}); convert it, for example iconv -f "
            f"LATIN1 -t UTF-8 {path.name}"
        ) from None
    except OSError as cause:
        raise FailedError(f"{path}: cannot be read: {cause.strerror or cause}") from None


def _row_text(line: str, where: str, chat_template: ChatTemplate | None) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as cause:
        raise FailedError(f"{where}: invalid JSON: {cause.msg} at column {cause.colno}") from None
    except (ValueError, RecursionError) as cause:  # numbers too long, brackets too deep
        raise FailedError(f"{where}: unreadable JSON: {cause}") from None
    text = _text_of(row, where, chat_template)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FailedError(f"{where}: contains an unpaired surrogate, not valid text") from None
    return text


def _text_of(row: Any, where: str, chat_template: ChatTemplate | None) -> str:
    if isinstance(row, dict):
        if isinstance(row.get("text"), str):
            return str(row["text"])
        if isinstance(row.get("prompt"), str):
            return str(row["prompt"]) + str(row.get("answer", ""))
        if isinstance(row.get("messages"), list):
            if chat_template is None:
                raise UsageError(f"{where}: a chat log, but this model has no chat template")
            try:
                return chat_template(row["messages"])
            except UsageError:
                raise
            except FailedError as cause:
                raise FailedError(f"{where}: {cause}") from None
            except Exception as cause:  # the template is the model's code and may raise anything
                raise FailedError(f"{where}: the chat template rejects it: {cause}") from None
    raise UsageError(f"{where}: a row needs 'text', 'prompt' (with 'answer') or 'messages'")


def embedded_documents(kind: str) -> Iterator[Iterable[str]]:
    """Yield the documents of a calibration split (``prose``, ``code`` or ``tasks``)."""
    folder = resources.files("kvprof") / "assets" / "splits" / "calibration"
    with resources.as_file(folder / f"{kind}.jsonl") as path:
        yield from read_documents(path)


def read_token_ids(path: Path) -> Iterator[Iterable[NDArray[np.integer[Any]]]]:
    """Yield sequences of token ids: ``.npy`` (one or two dimensions), or a line per sequence.

    Each comes in pieces, to be used before the next one is asked for. An array stays on disk, in
    one piece, and a line is read in parts, so that memory does not follow the file.
    """
    if path.suffix == ".npy":
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except Exception as cause:  # numpy parses the header as code: anything may come out
            raise FailedError(f"{path.name}: not a readable .npy file: {cause}") from None
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
            raise FailedError(
                f"{path.name}: token ids must be whole numbers in one or two dimensions, not "
                f"{array.ndim}-dimensional {array.dtype}"
            )
        yield from ((row,) for row in np.atleast_2d(array))
        return
    for _, pieces in groupby(_numbered_ids(path), itemgetter(0)):
        yield (ids for _, ids in pieces)


def _numbered_ids(path: Path) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield the numbers of lines with the ids that stand there, a long line in several parts."""
    try:
        with path.open(encoding="utf-8") as stream:
            number, begun = 1, ""
            while part := stream.readline(_LINE):
                text = (begun + part).replace(",", " ")
                words = text.split()
                # A number may go on in the next part; one as long as a part is none.
                cut = len(part) == _LINE and not text[-1].isspace() and len(begun) < _LINE
                begun = words.pop() if cut else ""
                if words:
                    where = f"{path.name}:{number}: {text.rstrip()[:40]!r}"
                    yield number, _whole_numbers(words, where)
                number += part.endswith("\n")
            if begun:
                yield number, _whole_numbers([begun], f"{path.name}:{number}: {begun[:40]!r}")
    except (UnicodeDecodeError, OSError) as cause:
        raise FailedError(f"{path.name}: cannot read lines of token ids: {cause}") from None


def _whole_numbers(words: list[str], where: str) -> NDArray[np.int64]:
    try:
        return np.array([int(word) for word in words], dtype=np.int64)
    except (ValueError, OverflowError):
        raise FailedError(f"{where} is not a list of whole numbers") from None


Ids = NDArray[np.int64]


class Tokenize(Protocol):
    """Turns text into token ids without adding special tokens."""

    def __call__(self, text: str, /) -> list[int]:
        """Return the ids of `text`."""


@dataclass(frozen=True)
class ModelTokens:
    """What a source has to know of the model."""

    vocab_size: int  # ids run from 0 to this, exclusive
    special_ids: frozenset[int]  # left out of random tokens
    #: Text to ids, without special tokens; called for text sources only.
    tokenize: Callable[[], Tokenize]
    #: What the tokenizer puts in front of every sequence (BOS, or nothing).
    prefix: Callable[[], tuple[int, ...]]
    separator: Callable[[], tuple[int, ...]]  # put between documents (EOS, or nothing)
    chat_template: ChatTemplate | None = None  # writes a list of messages out as text


def windows(
    source: Source, model: ModelTokens, *, tokens: int | None, seq_len: int, seed: int = 0
) -> Iterator[Ids]:
    """Yield sequences of at most `seq_len` token ids until `tokens` are reached.

    Every sequence but the last has `seq_len` tokens (``calibration`` ends with up to three
    shorter ones; sequences of a token-id file that are shorter stay as they are). Text starts
    each sequence with what the tokenizer adds (BOS), random tokens only as ``random-bos``.
    """
    if source.kind is SourceKind.RANDOM:
        if tokens is None:
            raise UsageError("random tokens require a count; write for example random:8k")
        prefix = model.prefix() if source.name == RANDOM[1] else ()
        pieces = _random(model, tokens, seq_len, seed, prefix)
    elif source.kind is SourceKind.TOKEN_IDS:
        pieces = _token_id_windows(source, model, seq_len)
    elif source.name in EMBEDDED and source.kind is SourceKind.EMBEDDED:
        kinds = EMBEDDED[:-1] if source.name == EMBEDDED[-1] else (source.name,)
        texts = [_text(embedded_documents(k), model, seq_len) for k in kinds]
        pieces = _interleave(texts, seq_len)
    else:
        documents = (d for path in source.paths for d in read_documents(path, model.chat_template))
        pieces = _text(documents, model, seq_len)

    seen = 0
    for piece in pieces:
        if tokens is not None and seen + len(piece) > tokens:
            piece = piece[: tokens - seen]
        seen += len(piece)
        if len(piece):
            yield piece
        if seen == tokens:
            return
    if tokens is not None or not seen:
        raise UsageError(
            f"{source.describe()} has {seen:,} tokens, fewer than the {tokens or 1:,} requested; "
            "request fewer or give more text"
        )


def _random(
    model: ModelTokens, tokens: int, seq_len: int, seed: int, prefix: tuple[int, ...]
) -> Iterator[Ids]:
    """Yield uniform random tokens without special ids, after a prefix that counts as tokens."""
    if len(prefix) >= seq_len:
        raise UsageError(f"--seq-len {seq_len} leaves no room after the tokenizer's own prefix")
    allowed = np.setdiff1d(np.arange(model.vocab_size), np.fromiter(model.special_ids, np.int64))
    if not len(allowed):
        raise UsageError("the vocabulary has special tokens only; no random tokens can be drawn")
    generator = np.random.default_rng(seed)
    for start in range(0, tokens, seq_len):
        length = min(seq_len, tokens - start)
        drawn = allowed[generator.integers(len(allowed), size=max(0, length - len(prefix)))]
        yield np.concatenate([np.array(prefix, dtype=np.int64), drawn])[:length]


def _text(documents: Iterable[Iterable[str]], model: ModelTokens, seq_len: int) -> Iterator[Ids]:
    """Split the running text of all documents into sequences, each after the prefix."""
    tokenize, prefix, separator = model.tokenize(), model.prefix(), model.separator()
    if len(prefix) >= seq_len:
        raise UsageError(f"--seq-len {seq_len} leaves no room after the tokenizer's own prefix")
    room = seq_len - len(prefix)
    pending: list[int] = []
    empty = True
    for ids in _tokenized(documents, tokenize, separator):
        empty = empty and all(token in separator for token in ids)
        pending += ids
        whole = len(pending) - len(pending) % room
        for start in range(0, whole, room):
            yield np.array([*prefix, *pending[start : start + room]], dtype=np.int64)
        del pending[:whole]
    if pending and not empty:
        yield np.array([*prefix, *pending], dtype=np.int64)


def _tokenized(
    documents: Iterable[Iterable[str]], tokenize: Tokenize, separator: tuple[int, ...]
) -> Iterator[Sequence[int]]:
    for document in documents:
        for piece in document:
            yield tokenize(piece)
        yield separator


def _token_id_windows(source: Source, model: ModelTokens, seq_len: int) -> Iterator[Ids]:
    for path in source.paths:
        for number, sequence in enumerate(read_token_ids(path), 1):
            for window in _cut(sequence, seq_len):
                wrong = window[(window < 0) | (window >= model.vocab_size)]
                if len(wrong):
                    raise UsageError(
                        f"{path.name}: sequence {number} contains token id {wrong[0]}, but the "
                        f"vocabulary has {model.vocab_size:,}"
                    )
                yield np.array(window, dtype=np.int64)


def _cut(pieces: Iterable[NDArray[np.integer]], seq_len: int) -> Iterator[NDArray[np.integer]]:
    """Yield a sequence that comes in pieces as windows; only the last may be shorter."""
    rest: NDArray[np.integer] = np.empty(0, dtype=np.int64)
    for piece in pieces:
        joined = np.concatenate([rest, piece]) if len(rest) else piece
        whole = len(joined) - len(joined) % seq_len
        for start in range(0, whole, seq_len):
            yield joined[start : start + seq_len]
        rest = joined[whole:]
    if len(rest):
        yield rest


def _interleave(streams: Sequence[Iterator[Ids]], seq_len: int) -> Iterator[Ids]:
    """Take a sequence of each stream in turn; what is left over at their ends comes last."""
    rests = []
    for row in zip_longest(*streams):
        for piece in row:
            if piece is not None and len(piece) == seq_len:
                yield piece
            elif piece is not None:
                rests.append(piece)
    yield from rests


def batches(
    sequences: Iterable[Ids], batch_size: int, stops: Sequence[int] = ()
) -> Iterator[NDArray[np.int64]]:
    """Group sequences of equal length into batches ``[batch, length]``."""
    ahead = sorted(set(stops), reverse=True)
    pending: list[Ids] = []
    seen = 0
    for sequence in sequences:
        if pending and (len(pending) == batch_size or len(pending[0]) != len(sequence)):
            yield np.stack(pending)
            pending = []
        pending.append(sequence)
        seen += len(sequence)
        if ahead and seen >= ahead[-1]:
            if seen > ahead[-1]:
                raise UsageError(
                    f"{ahead[-1]:,} tokens end inside a sequence of {len(sequence):,}; use "
                    "multiples of --seq-len"
                )
            ahead.pop()
            yield np.stack(pending)
            pending = []
    if pending:
        yield np.stack(pending)
