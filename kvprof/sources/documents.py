"""Reading documents: plain text, JSON Lines, chat logs, token ids, the embedded splits."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import resources
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from kvprof.errors import FailedError, UsageError

__all__ = ["embedded_documents", "read_documents", "read_token_ids"]

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

    Raises
    ------
    FailedError
        When a line is no JSON or beyond what is read at once, the file is not UTF-8, or the chat
        template refuses a row.
    UsageError
        When a row has none of the known keys.
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
                    f"{path.name}:{number}: a row of {_ROW:,} characters or more is not read; "
                    "make several of it"
                )
            yield line


@contextmanager
def _reading(path: Path) -> Iterator[TextIO]:
    """Open a text file; what goes wrong while it is read becomes one line."""
    try:
        with path.open(encoding="utf-8") as stream:
            yield stream
    except UnicodeDecodeError as cause:
        raise FailedError(f"{path.name}: not UTF-8 text (byte {cause.start} of a block)") from None
    except OSError as cause:
        raise FailedError(f"{path}: cannot be read: {cause.strerror or cause}") from None


def _row_text(line: str, where: str, chat_template: ChatTemplate | None) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as cause:
        raise FailedError(f"{where}: no valid JSON: {cause.msg} at column {cause.colno}") from None
    except (ValueError, RecursionError) as cause:  # numbers too long, brackets too deep
        raise FailedError(f"{where}: JSON that cannot be read: {cause}") from None
    text = _text_of(row, where, chat_template)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FailedError(f"{where}: holds half a surrogate pair, which is no text") from None
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
                raise FailedError(f"{where}: the chat template refuses it: {cause}") from None
    raise UsageError(f"{where}: a row needs 'text', 'prompt' (with 'answer') or 'messages'")


def embedded_documents(kind: str, split: str = "calibration") -> Iterator[Iterable[str]]:
    """Yield the documents of an embedded sample (``prose``, ``code`` or ``tasks``)."""
    folder = resources.files("kvprof") / "assets" / "splits" / split
    with resources.as_file(folder / f"{kind}.jsonl") as path:
        yield from read_documents(path)


def read_token_ids(path: Path) -> Iterator[Iterable[NDArray[np.integer[Any]]]]:
    """Yield sequences of token ids: ``.npy`` (one or two dimensions), or a line per sequence.

    Each comes in pieces, to be used before the next one is asked for. An array stays on disk, in
    one piece, and a line is read in parts, so that memory does not follow the file.

    Raises
    ------
    FailedError
        When the file is damaged or holds something other than whole numbers.
    """
    if path.suffix == ".npy":
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except Exception as cause:  # numpy parses the header as code: anything may come out
            raise FailedError(f"{path.name}: no readable .npy file: {cause}") from None
        if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
            raise FailedError(
                f"{path.name}: holds {array.ndim}-dimensional {array.dtype}; "
                "token ids are whole numbers in one or two dimensions"
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
        raise FailedError(f"{path.name}: cannot be read as lines of token ids: {cause}") from None


def _whole_numbers(words: list[str], where: str) -> NDArray[np.int64]:
    try:
        return np.array([int(word) for word in words], dtype=np.int64)
    except (ValueError, OverflowError):
        raise FailedError(f"{where} is not a sequence of whole numbers") from None
