"""Files of requests that people have: ShareGPT-like chats, Mooncake's traces, Azure's.

- ShareGPT-like: a JSON array or JSON Lines of ``{"conversations": [{"from": "human", "value": …},
  {"from": "gpt", "value": …}, …]}``; ``messages`` with ``role`` and ``content``, or ``prompt`` with
  ``completion``, ``output`` or ``response``, are read as well. Of a chat the first question and the
  answer to it count, as in vLLM's benchmark. Lengths are the model's tokenizer's; the text goes no
  further.
- Mooncake (arXiv 2407.00079, FAST 2025): JSON Lines of ``timestamp`` (milliseconds),
  ``input_length``, ``output_length`` and ``hash_ids``, one for every 512 tokens of the prompt, or
  whatever power of two fits all lines (others write 16); an id stands for its block and all before
  it.
- Azure's LLM inference traces (2023, 2024): CSV with ``TIMESTAMP,ContextTokens,GeneratedTokens``.
"""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvprof.errors import FailedError, UsageError
from kvprof.serving.load.requests import Request
from kvprof.sizes import MOST

__all__ = ["RecordedTrace", "read_trace_file"]

Count = Callable[[str], int]

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
#: Tokens of a block: Mooncake's, which files of short prompts alone are taken to have, and others'.
_BLOCKS = [512, *(2**n for n in range(13) if n != 9)]
_ASKED = ("human", "user")
_ANSWERED = ("gpt", "assistant", "chatgpt", "bard", "bing")
_ANSWERS = ("completion", "output", "response")
_FORMATS = (
    "use ShareGPT-like JSON or JSON Lines (conversations, messages or prompt), Mooncake's JSON "
    f"Lines (timestamp, input_length, output_length) or Azure's CSV ({','.join(_AZURE)})"
)


@dataclass(frozen=True)
class RecordedTrace:
    """Requests of a file."""

    name: str  # without its folders
    format: str  # sharegpt, mooncake or azure
    requests: tuple[Request, ...]  # by time, from 0; without times in the file's order
    timed: bool
    skipped: int = 0  # entries without a question and its answer, or of no tokens


def read_trace_file(path: Path, count: Count | None = None) -> RecordedTrace:
    """Read a file of requests; its form is recognised by what it holds."""
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"--lengths {path}: no such file") from None
    except IsADirectoryError:
        raise UsageError(f"--lengths {path} is a folder; name a file in it") from None
    except UnicodeDecodeError as wrong:
        raise FailedError(
            f"{path} is not text: byte {wrong.start:,} is not UTF-8; unpack or convert it first"
        ) from None
    except OSError as problem:
        raise FailedError(f"cannot read {path}: {problem.strerror}") from None
    first = text.lstrip()[:1]
    if not first:
        raise FailedError(f"{path} is empty")
    if first == "[":
        return _chats(path, _array(path, text), count)
    if first == "{":
        _, head = next(_lines(path, text))
        if "input_length" in head:
            return _mooncake(path, text)
        return _chats(path, _lines(path, text), count)
    if _is_azure(text):
        return _azure(path, text)
    raise UsageError(f"--lengths {path}: unknown format; {_FORMATS}")


def _is_azure(text: str) -> bool:
    """Whether a CSV's header names Azure's columns."""
    header = [cell.strip().lower() for cell in text.lstrip().splitlines()[0].split(",")]
    return {name.lower() for name in _AZURE} <= set(header)


# --- Mooncake and Azure: lengths and times, no text.


def _mooncake(path: Path, text: str) -> RecordedTrace:
    found = []
    sizes = _BLOCKS
    for number, entry in _lines(path, text):
        where = f"{path} line {number}"
        stamp = entry.get("timestamp", 0)
        if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not 0 <= stamp < 1e15:
            raise _damaged(where, "timestamp", stamp, "milliseconds")
        ids = entry.get("hash_ids", [])
        if not isinstance(ids, list) or any(type(one) is not int for one in ids):
            raise _damaged(where, "hash_ids", ids, "a list of whole numbers")
        prompt = _tokens(where, "input_length", entry.get("input_length"))
        output = _tokens(where, "output_length", entry.get("output_length"))
        found.append((stamp / 1000, prompt, output, tuple(ids)))
        if ids:  # of a block that is not full some write an id, some none
            fitting = [n for n in sizes if len(ids) in (prompt // n, -(-prompt // n))]
            if not fitting:
                raise FailedError(
                    f"{where}: {len(ids):,} hash_ids do not match an input_length of {prompt:,} "
                    f"in blocks of {sizes[0]} tokens{', as before' if len(sizes) == 1 else ''} "
                    "or another power of two"
                )
            sizes = fitting
    return _timed(path, "mooncake", found, sizes[0])


def _azure(path: Path, text: str) -> RecordedTrace:
    found = []
    rows = _rows(path, text)
    header = next(names for _, cells in rows if any(names := [c.strip().lower() for c in cells]))
    columns = [header.index(name.lower()) for name in _AZURE]
    for number, cells in rows:
        if not any(cell.strip() for cell in cells):
            continue
        where = f"{path} line {number}"
        # A number with a comma in it is two cells.
        if len(cells) <= max(columns) or any(cell.strip() for cell in cells[len(header) :]):
            raise FailedError(f"{where} has {len(cells)} cells, not {len(header)}: {_short(cells)}")
        stamp, prompt, output = (cells[column].strip() for column in columns)
        found.append(
            (
                _moment(where, stamp),
                _tokens(where, _AZURE[1], _whole(prompt)),
                _tokens(where, _AZURE[2], _whole(output)),
                (),
            )
        )
    return _timed(path, "azure", found)


def _rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    lines = csv.reader(text.splitlines())
    try:
        for cells in lines:
            yield lines.line_num, cells
    except csv.Error as wrong:
        raise FailedError(f"{path} line {lines.line_num} is not valid CSV: {wrong}") from None


def _moment(where: str, stamp: str) -> float:
    try:
        # 2023's traces have seven digits of a second, of which Python takes six.
        head, dot, rest = stamp.partition(".")
        digits = len(rest) - len(rest.lstrip("0123456789"))
        moment = datetime.fromisoformat(head + dot + rest[: min(digits, 6)] + rest[digits:])
    except ValueError:
        raise _damaged(where, _AZURE[0], stamp, "a date and time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _timed(
    path: Path, form: str, found: Sequence[tuple[float, int, int, tuple[int, ...]]], block: int = 1
) -> RecordedTrace:
    """Return requests by time; those of no tokens are counted as skipped."""
    whole = sorted((one for one in found if one[1] and one[2]), key=lambda one: one[0])
    if not whole:
        raise FailedError(f"{path} has no request with one input and one output token or more")
    begin = whole[0][0]
    requests = [
        Request(number, stamp - begin, prompt, output, blocks=blocks, block=block)
        for number, (stamp, prompt, output, blocks) in enumerate(whole)
    ]
    return RecordedTrace(
        path.name, form, tuple(_with_prefixes(requests)), True, len(found) - len(whole)
    )


def _with_prefixes(requests: list[Request]) -> list[Request]:
    """Say of each request which of its blocks another has as well, and name its session."""
    seen: dict[int, int] = {}
    for request in requests:
        for block in dict.fromkeys(request.blocks):
            seen[block] = seen.get(block, 0) + 1
    found = []
    for request in requests:
        shared = 0
        while shared < len(request.blocks) and seen[request.blocks[shared]] > 1:
            shared += 1
        found.append(
            replace(
                request,
                prefix=min(shared * request.block, request.prompt),
                session=request.blocks[0],
            )
            if shared
            else request
        )
    return found


# --- Texts: what counts is how many tokens they have.


def _chats(
    path: Path, entries: Iterator[tuple[int, dict[str, Any]]], count: Count | None
) -> RecordedTrace:
    found: list[Request] = []
    skipped = 0
    for number, entry in entries:
        pair = _pair(f"{path} entry {number}", entry)
        if count is None:
            raise UsageError(
                f"--lengths {path} contains texts; name a model with a tokenizer (--tokenizer or "
                "--model)"
            )
        sizes = (0, 0) if pair is None else (count(pair[0]), count(pair[1]))
        if min(sizes) < 1:
            skipped += 1
            continue
        found.append(Request(len(found), 0.0, *sizes))
    if not found:
        raise FailedError(f"{path} has no question with an answer")
    return RecordedTrace(path.name, "sharegpt", tuple(found), False, skipped)


def _pair(where: str, entry: dict[str, Any]) -> tuple[str, str] | None:
    """Return the first question of a chat and the answer to it; None where there is none."""
    if "prompt" in entry:
        answer = next((entry[key] for key in _ANSWERS if key in entry), None)
        return _texts(where, entry["prompt"], answer)
    for key, who, what in (("conversations", "from", "value"), ("messages", "role", "content")):
        turns = entry.get(key)
        if turns is None:
            continue
        if not isinstance(turns, list) or any(not isinstance(turn, dict) for turn in turns):
            raise _damaged(where, key, turns, "a list of turns")
        for one, other in pairwise(turns):
            if one.get(who) in _ASKED and other.get(who) in _ANSWERED:
                return _texts(where, one.get(what), other.get(what))
        return None
    raise FailedError(f"{where} has no conversations, messages or prompt: {_short(list(entry))}")


def _texts(where: str, question: Any, answer: Any) -> tuple[str, str] | None:
    if answer is None:
        return None
    for text in (question, answer):
        if not isinstance(text, str):
            raise FailedError(f"{where}: {_short(text)} is not a text")
    return _paired(question), _paired(answer)


def _paired(text: str) -> str:
    """Replace unpaired surrogates in a text, which no tokenizer accepts."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# --- Lines and values.


def _lines(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, _object(path, number, line)


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise FailedError(f"{path} line {number} is not JSON: {_short(line.strip())}") from None
    if not isinstance(entry, dict):
        raise FailedError(f"{path} line {number} is not a JSON object: {_short(line.strip())}")
    return entry


def _array(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as wrong:
        near = text.split("\n")[wrong.lineno - 1].strip()
        raise FailedError(f"{path} line {wrong.lineno} is not JSON: {_short(near)}") from None
    except (ValueError, RecursionError):
        raise FailedError(f"{path} is not readable JSON") from None
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise FailedError(f"{path} entry {number} is not a JSON object: {_short(entry)}")
        yield number, entry


def _tokens(where: str, name: str, value: Any) -> int:
    if value is None:
        raise FailedError(f"{where} has no {name}")
    if type(value) is not int or not 0 <= value <= MOST:
        raise _damaged(where, name, value, "a token count")
    return value


def _whole(cell: str) -> int | str:
    digits = cell.isascii() and cell.isdecimal() and len(cell) <= len(str(MOST))
    return int(cell) if digits else cell


def _damaged(where: str, name: str, value: Any, wanted: str) -> FailedError:
    return FailedError(f"{where}: {name} is {_short(value)}; it must be {wanted}")


def _short(value: Any) -> str:
    # A text in quotation marks, anything else as JSON has it.
    shown = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return shown if len(shown) <= 42 else shown[:42] + "…"
