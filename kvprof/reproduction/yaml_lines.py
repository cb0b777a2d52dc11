"""YAML with the line of everything that stands in it, so that a complaint can name the place."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvprof.errors import UsageError

__all__ = ["Document", "Place", "parse_yaml", "read_text", "read_yaml"]

#: Where a value stands: keys and indices from the top.
Place = tuple[str | int, ...]

# libyaml's where it was built in: it is ten times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MOST_BYTES = 1_000_000
_MOST_NODES = 50_000
_DEEPEST = 50
_MOST_DIGITS = 20
# YAML 1.2's core schema. PyYAML's own is 1.1, which reads `no` as false, 12:30 as 750 and 1e-3 as
# a word.
_WORDS = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_INTEGER = re.compile(r"[-+]?[0-9]+")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass
class Document:
    """A YAML file.

    Attributes
    ----------
    name : str
        Of the file, as complaints call it.
    data : object
        Plain mappings (keys are strings), lists and scalars.
    lines : dict
        Place to line, counted from 1; of a mapping's entry the line of its key.
    texts : dict
        Place of a scalar to its characters: 0.30 is not 0.3 in a command.
    """

    name: str
    data: Any = None
    lines: dict[Place, int] = field(default_factory=dict)
    texts: dict[Place, str] = field(default_factory=dict)

    def line(self, place: Place) -> int:
        """Return the line of a place, or of what is around it where it has none itself."""
        while place not in self.lines and place:
            place = place[:-1]
        return self.lines.get(place, 1)

    def at(self, place: Place) -> str:
        """Return ``file:line`` of a place."""
        return f"{self.name}:{self.line(place)}"


def read_yaml(path: Path) -> Document:
    """Read a file; see `parse_yaml`.

    Raises
    ------
    UsageError
        As `read_text` and `parse_yaml`.
    """
    return parse_yaml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Return a recipe's file as it is written.

    Raises
    ------
    UsageError
        When it is not there, cannot be read, is too long, or is no text.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder; name a recipe's .yaml file") from None
    except OSError as problem:
        raise UsageError(f"cannot read {path}: {problem.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise UsageError(f"{path} has {len(content):,} bytes; no recipe is that long")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as problem:
        line = content[: problem.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: not UTF-8; save the file as UTF-8") from None


def parse_yaml(text: str, name: str) -> Document:
    """Read one YAML document.

    Parameters
    ----------
    text : str
    name : str
        Of the file, for complaints.

    Raises
    ------
    UsageError
        With file and line, when it is no YAML, a key is written twice or is no word, a number is
        not finite, or an alias refers to what it stands in.
    """
    document = Document(name)
    try:
        _check_depth(text, name)
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        place = f"{name}:{mark.line + 1}" if mark else name
        raise UsageError(f"{place}: no YAML: {problem.problem or problem.context}") from None
    except yaml.YAMLError as problem:
        raise UsageError(f"{name}: no YAML: {problem}") from None
    if node is None:
        raise UsageError(f"{name}:1: the file is empty; kvprof recipe new writes one to start from")
    document.data = _Reader(document).value(node, (), ())
    return document


def _check_depth(text: str, name: str) -> None:
    """Refuse what would take the composer, which calls itself for every level, past its stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _DEEPEST:
                place = f"{name}:{event.start_mark.line + 1}" if event.start_mark else name
                raise UsageError(f"{place}: nested too deeply to be a recipe")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _Reader:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._nodes = 0

    def value(self, node: yaml.Node, place: Place, around: tuple[int, ...]) -> Any:
        line = node.start_mark.line + 1
        self._document.lines.setdefault(place, line)
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise self._wrong(line, "more entries than any recipe has")
        if id(node) in around:
            raise self._wrong(line, "an alias refers to what it stands in")
        inner = (*around, id(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place, inner)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(one, (*place, i), inner) for i, one in enumerate(node.value)]
        return self._scalar(node, place, line)

    def _mapping(self, node: yaml.MappingNode, place: Place, inner: tuple[int, ...]) -> Any:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._wrong(line, "a key must be a word (quote a value that starts with {)")
            key = key_node.value
            if key in found:
                raise self._wrong(line, f"the key {key!r} is written twice")
            self._document.lines[(*place, key)] = line
            found[key] = self.value(value_node, (*place, key), inner)
        return found

    def _scalar(self, node: yaml.Node, place: Place, line: int) -> Any:
        text: str = node.value
        self._document.texts[place] = text
        if getattr(node, "style", None):  # quoted, or a block: words whatever they look like
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _NOT_FINITE.fullmatch(text):
            raise self._wrong(line, f"{text} is not finite; write a number, or leave it out")
        if _INTEGER.fullmatch(text):
            if len(text) > _MOST_DIGITS:
                raise self._wrong(line, f"a number of {len(text):,} digits is too large")
            return int(text)
        if _NUMBER.fullmatch(text):
            number = float(text)
            if not math.isfinite(number):
                raise self._wrong(line, f"{text} is too large a number")
            return number
        return text

    def _wrong(self, line: int, what: str) -> UsageError:
        return UsageError(f"{self._document.name}:{line}: {what}")
