"""Files on disk: written whole or not at all, never over another, read with a clear complaint."""

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from kvprof.errors import FailedError, UsageError
from kvprof.printable import UNPRINTABLE
from kvprof.records.result import SCHEMA
from kvprof.records.schema import kinds, validate_result
from kvprof.scratch import new_temporary

__all__ = [
    "EVENTS_NAME",
    "RESULT_NAME",
    "ensure_writable",
    "json_text",
    "parse_json",
    "read_result",
    "render_result",
    "what_was_read",
    "write_beside",
    "write_bytes_atomic",
    "write_result",
    "write_text_atomic",
]

#: Name of the result inside a run's folder (``--out``).
RESULT_NAME = "result.json"
#: Name of the events of a run that keeps a journal, beside it.
EVENTS_NAME = "events.jsonl"
_ATTEMPTS = 5
_READER_SECONDS, _AGAIN_SECONDS = 10.0, 0.05  # that a pipe's reader is waited for
_MOST_BESIDE = 1000

# What no file of kvprof's holds, and what arithmetic, a table or Python's own parser fails at.
_DEEPEST = 100  # brackets within brackets
_LARGEST_INTEGER = 2**64
_LONGEST_MESSAGE = 120
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\Z)', re.DOTALL)
_NO_BRACKET = re.compile(r"[^\[\]{}]+")
_HALF = re.compile(r"(?<!\\)(?:\\\\)*\\u[dD][89a-fA-F]")


def ensure_writable(path: Path, force: bool = False) -> None:
    """Refuse a destination that could not be written later, before any work is done.

    Missing folders are fine; they are made when the file is written. What the file system says is
    found out by trying (permissions alone do not tell about read-only mounts); nothing is left
    behind.
    """
    path = Path(path)
    made: list[Path] = []
    with _naming(path):
        if not _is_new_or_file(path, force):
            return
        target = _followed(path, force)
        try:
            _make_folder(target.parent, made)
            with contextlib.suppress(FileNotFoundError):
                target.lstat()  # a name that is too long shows only now
            with new_temporary(target.parent):
                pass
        finally:
            with contextlib.suppress(OSError):  # somebody else uses it by now
                for folder in reversed(made):
                    folder.rmdir()


def write_bytes_atomic(path: Path, content: bytes, force: bool = False) -> None:
    """Write a file whole or not at all; its folder is made if need be."""
    path = Path(path)
    with _naming(path):
        if not _is_new_or_file(path, force):
            _write_through(path, content)
            return
        target = _followed(path, force)
        for attempt in reversed(range(_ATTEMPTS)):
            try:
                _make_folder(target.parent, [])
                _write_whole(target, content, force)
                break
            except FileNotFoundError:  # somebody removes the folder meanwhile
                if not attempt:
                    raise


def _followed(path: Path, force: bool) -> Path:
    """Return where a path's links lead; a circle of them is an OSError on every Python."""
    try:
        path.stat()
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            raise
    target = Path(os.path.realpath(path))
    if not force and any(one.is_symlink() and not one.exists() for one in (path, *path.parents)):
        raise UsageError(f"{path} is a link to a missing file; --force writes {target}")
    return target


def _write_through(path: Path, content: bytes) -> None:
    """Write to a device, or to a pipe once somebody reads from it."""
    late = time.monotonic() + _READER_SECONDS
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
            break
        except OSError as problem:
            if problem.errno != errno.ENXIO:
                raise
            if time.monotonic() > late:
                raise FailedError(f"cannot write {path}: nobody reads from this pipe") from None
        time.sleep(_AGAIN_SECONDS)
    with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor
        if os.name == "posix":
            os.set_blocking(descriptor, True)
        file.write(content)


def _write_whole(target: Path, content: bytes, force: bool) -> None:
    # Not tempfile: its files are private to the user, ours follow the umask.
    with new_temporary(target.parent) as (temporary, file):
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
        if force:
            temporary.replace(target)
        else:
            _put_in_place(temporary, target)


def _put_in_place(temporary: Path, target: Path) -> None:
    """Give a file its name, unless somebody else has taken that since it was found free."""
    try:
        target.hardlink_to(temporary)
    except FileExistsError:
        raise UsageError(f"{target} exists; --force overwrites it") from None
    except OSError:  # a file system without links
        if target.exists():
            raise UsageError(f"{target} exists; --force overwrites it") from None
        temporary.replace(target)


def write_beside(path: Path, content: bytes) -> Path:
    """Write `content` to ``stem.suffix``, or ``stem-2.suffix`` and so on where that exists."""
    for number in range(1, _MOST_BESIDE):
        own = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        if own.exists():
            continue
        try:
            write_bytes_atomic(own, content)
        except UsageError:  # it has come to exist
            continue
        return own
    raise FailedError(
        f"{path.parent} already has {_MOST_BESIDE - 1} files named {path.name}; move some"
    )


def write_text_atomic(path: Path, content: str, force: bool = False) -> None:
    """Write text as UTF-8; see `write_bytes_atomic`."""
    write_bytes_atomic(path, content.encode("utf-8"), force)


def render_result(result: dict[str, Any]) -> str:
    """Return a result as strict JSON: indented, but with each row of a table on one line."""
    validate_result(result)
    return _render(result, "") + "\n"


def write_result(path: Path, result: dict[str, Any], force: bool = False) -> None:
    """Check a result against the schema and write it; see `write_bytes_atomic`."""
    write_text_atomic(path, render_result(result), force)


def read_result(path: Path) -> dict[str, Any]:
    """Read a result file, or the ``result.json`` of a run's folder."""
    path = Path(path)
    if path.is_dir():
        if not (path / RESULT_NAME).is_file():
            raise UsageError(f"{path} has no {RESULT_NAME}; give a run's folder or a result")
        path /= RESULT_NAME
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    with _naming(path, "read"):
        content = path.read_bytes()
    result = _parse(path, content)
    if not isinstance(result, dict) or not isinstance(result.get("schema"), str):
        raise FailedError(f'{path} is JSON, but not a kvprof result (it has no "schema")')
    _check_schema_name(path, result["schema"])
    if isinstance(result.get("kind"), str) and result["kind"] not in kinds():
        raise FailedError(
            f"{path}: kind {result['kind'][:40]!r} is unknown; upgrade kvprof to read it "
            f"(known: {', '.join(kinds())})"
        )
    try:
        validate_result(result)
    except ValueError as problem:
        raise FailedError(f"{path} does not match the schema {SCHEMA}: {problem}") from None
    return result


@contextlib.contextmanager
def what_was_read(name: str | Path) -> Iterator[None]:
    """Let the body work on what was read from a file, and tell in a line where that fails.

    A schema sees to the types of a record, not to whether its parts agree: a list that is shorter
    than another, a case that no row is of, a figure that overflows when it is squared.
    """
    cause: Exception
    try:
        yield
    except UnicodeError:  # of a stream, not of the record
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
        said, cause = f"{type(problem).__name__}: {problem}", problem
    except (StopIteration, RuntimeError) as problem:
        # A search that finds nothing; within a generator Python wraps it.
        if not isinstance(problem, StopIteration) and not isinstance(
            problem.__cause__, StopIteration
        ):
            raise
        said, cause = "an entry that others refer to is missing", problem
    else:
        return
    raise FailedError(
        f"{name} is damaged or was not written by kvprof: its parts are inconsistent "
        f"({said[:_LONGEST_MESSAGE]})"
    ) from cause


def parse_json(content: bytes | str) -> Any:
    """Return the value of one JSON text, of a form and with numbers that a file of kvprof's has.

    Every JSON file that another program may have written, or damaged, is read through this.
    """
    if isinstance(content, bytes):
        try:
            content = content.decode("utf-8")
        except UnicodeDecodeError as problem:
            if problem.reason != "unexpected end of data":  # else cut off within a character
                raise ValueError(f"is not text (byte {problem.start} is not UTF-8)") from None
            content = problem.object.decode("utf-8", "replace")
    if content.startswith("\ufeff"):
        raise ValueError(
            "begins with a byte order mark, which JSON does not allow; save it without one"
        )
    if not content.strip():
        raise ValueError("is empty")
    if _too_deep(content):
        raise ValueError("is nested too deeply for a kvprof file")
    try:
        value = _DECODER.decode(content)
    except json.JSONDecodeError as problem:
        where = f"line {problem.lineno}, column {problem.colno}"
        raise ValueError(f"is damaged or cut off: {problem.msg} at {where}") from None
    if "\\u" in content and _HALF.search(content) is not None:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(
                "has half a surrogate pair, which strict JSON does not allow"
            ) from None
    return value


def json_text(value: Any) -> str:
    """Return a value as strict JSON on one line, in which everything can be printed."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    return UNPRINTABLE.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _too_deep(text: str) -> bool:
    """Tell whether brackets stand too deep within each other; the parser would fall over them."""
    if text.count("[") + text.count("{") <= _DEEPEST:
        return False
    rest = _NO_BRACKET.sub("", _STRING.sub("", text))
    for _ in range(_DEEPEST):
        inner = rest.replace("[]", "").replace("{}", "")
        if len(inner) == len(rest):
            break
        rest = inner
    # Of what is merely cut off, one bracket per level is left.
    return len(rest) > _DEEPEST


def _parse(path: Path, content: bytes) -> Any:
    try:
        return parse_json(content)
    except ValueError as problem:
        raise FailedError(f"{path} {problem}") from None


def _check_schema_name(path: Path, name: str) -> None:
    if name == SCHEMA:
        return
    family, _, version = name.partition("/")
    own_family, _, own_version = SCHEMA.partition("/")
    newer = re.fullmatch("[0-9]{1,9}", version) and int(version) > int(own_version)
    if family == own_family and newer:
        raise FailedError(
            f"{path} was written by a newer kvprof (schema {name}, this one reads {SCHEMA}); "
            "upgrade kvprof to read it"
        )
    raise FailedError(
        f"{path}: schema {name[:40]!r} is not {SCHEMA}, so this is not a kvprof result"
    )


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"has {name}, which strict JSON does not allow")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"has {digits[:40]}, which is too large for a float")
    return value


def _integer(digits: str) -> int:
    if len(digits) > 40 or abs(value := int(digits)) > _LARGEST_INTEGER:
        shown = digits if len(digits) <= 40 else f"a number of {len(digits):,} digits"
        raise ValueError(f"has {shown}, which is too large for any count")
    return value


# Made once: a journal is read line by line.
_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, parse_int=_integer)


def _render(value: Any, indent: str) -> str:
    inner = indent + " "
    if isinstance(value, dict) and value:
        rows = [f"{json_text(key)}: {_render(entry, inner)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}}}"
    if isinstance(value, list) and not _is_flat(value):
        rows = [json_text(entry) if _is_flat(entry) else _render(entry, inner) for entry in value]
        return "[\n" + ",\n".join(inner + row for row in rows) + f"\n{indent}]"
    return json_text(value)


def _is_flat(value: Any) -> bool:
    """Tell what fits on a line: a scalar, a list of scalars, a table's row."""
    entries = value.values() if isinstance(value, dict) else value
    return not isinstance(value, dict | list) or not any(
        isinstance(entry, dict | list) for entry in entries
    )


def _is_new_or_file(path: Path, force: bool) -> bool:
    """Return False for a device or a pipe, which is written to in place; refuse what must stay."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    if not path.exists():
        return True
    if path.is_file() and not force:
        raise UsageError(f"{path} exists; --force overwrites it")
    return path.is_file()


def _make_folder(folder: Path, made: list[Path]) -> None:
    """Make a folder with its parents; `made` receives those that did not exist, outermost first."""
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    for part in reversed(missing):
        part.mkdir(exist_ok=True)
        made.append(part)


@contextlib.contextmanager
def _naming(path: Path, verb: str = "write") -> Iterator[None]:
    """Turn what the operating system says into one line that names the path as it was given."""
    try:
        yield
    except OSError as problem:
        reason = os.strerror(problem.errno) if problem.errno else str(problem)
        if problem.errno in (errno.EEXIST, errno.ENOTDIR):
            reason = "a part of the path is a file, not a folder"
        raise FailedError(f"cannot {verb} {path}: {reason}") from problem
