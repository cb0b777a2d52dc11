"""A recipe's file: its YAML with the line of every value, and what it says once checked."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from kvprof.errors import UsageError

__all__ = [
    "CHECKS",
    "PROFILES",
    "CellTemplate",
    "Document",
    "KeyPath",
    "Line",
    "Measure",
    "Needs",
    "Profile",
    "Published",
    "Recipe",
    "build_recipe",
    "parse_yaml",
    "placeholders",
    "read_text",
    "read_yaml",
    "value_at",
]

# --- YAML with the line of everything that stands in it, so that a complaint says where.


#: Where a value stands: keys and indices from the top.
KeyPath = tuple[str | int, ...]

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
        Key path to line, counted from 1; of a mapping's entry the line of its key.
    texts : dict
        Key path of a scalar to its characters: 0.30 is not 0.3 in a command.
    """

    name: str
    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    texts: dict[KeyPath, str] = field(default_factory=dict)

    def line(self, key_path: KeyPath) -> int:
        """Return the line of a key path, or of what is around it where it has none itself."""
        while key_path not in self.lines and key_path:
            key_path = key_path[:-1]
        return self.lines.get(key_path, 1)

    def at(self, key_path: KeyPath) -> str:
        """Return ``file:line`` of a key path."""
        return f"{self.name}:{self.line(key_path)}"


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
        at = f"{name}:{mark.line + 1}" if mark else name
        raise UsageError(f"{at}: no YAML: {problem.problem or problem.context}") from None
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
                at = f"{name}:{event.start_mark.line + 1}" if event.start_mark else name
                raise UsageError(f"{at}: nested too deeply to be a recipe")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _Reader:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._nodes = 0

    def value(self, node: yaml.Node, key_path: KeyPath, around: tuple[int, ...]) -> Any:
        line = node.start_mark.line + 1
        self._document.lines.setdefault(key_path, line)
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise self._wrong(line, "more entries than any recipe has")
        if id(node) in around:
            raise self._wrong(line, "an alias refers to what it stands in")
        inner = (*around, id(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key_path, inner)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(one, (*key_path, i), inner) for i, one in enumerate(node.value)]
        return self._scalar(node, key_path, line)

    def _mapping(self, node: yaml.MappingNode, key_path: KeyPath, inner: tuple[int, ...]) -> Any:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._wrong(line, "a key must be a word (quote a value that starts with {)")
            key = key_node.value
            if key in found:
                raise self._wrong(line, f"the key {key!r} is written twice")
            self._document.lines[(*key_path, key)] = line
            found[key] = self.value(value_node, (*key_path, key), inner)
        return found

    def _scalar(self, node: yaml.Node, key_path: KeyPath, line: int) -> Any:
        text: str = node.value
        self._document.texts[key_path] = text
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


PROFILES = ("smoke", "small", "paper")
#: What a line of a verdict may ask of a measure.
CHECKS = ("at_least", "at_most", "above", "below", "about", "between")

_PLACEHOLDER = re.compile(r"\{([a-z_][a-z0-9_]*)\}")


def placeholders(text: str) -> list[str]:
    """Return the names in braces, in their order."""
    return _PLACEHOLDER.findall(text)


@dataclass(frozen=True)
class Published:
    """A number of a paper, with where it stands; `value`, or a range from `low` to `high`."""

    id: str
    unit: str
    cell: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    model: str | None = None
    data: str | None = None
    gpu: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Needs:
    """What a profile cannot do without.

    Attributes
    ----------
    gpus : int
        Of each cell.
    weights : tuple of str
        Hub ids or folders.
    data : tuple of str
        What the user must bring, in words.
    extras : tuple of str
        Of kvprof's package.
    """

    gpus: int = 0
    weights: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()


@dataclass(frozen=True)
class CellTemplate:
    """A cell as it is written: its words still have placeholders."""

    id: str
    words: tuple[str, ...]
    key_path: KeyPath


@dataclass(frozen=True)
class Measure:
    """A number to be had from the cells' results.

    Attributes
    ----------
    id : str
    cell : str or None
        Of whose result; may hold ``*``.
    figure, where : str, mapping
        Of `kvprof.records.figures`.
    data : str or None
        A path into the result's data instead.
    over : str or None
        How several matches become one number.
    divide, subtract : pair of measures or numbers, or None
        Instead of `cell`.
    """

    id: str
    cell: str | None = None
    figure: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    over: str | None = None
    divide: tuple[str | float, str | float] | None = None
    subtract: tuple[str | float, str | float] | None = None
    unit: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Line:
    """What must hold of a measure.

    Attributes
    ----------
    measure : str
    check : str
        One of `CHECKS`.
    limit : tuple of float
        One number; two for ``between``.
    published : str or None
        The number of the paper that this is about.
    tolerance, tolerance_share : float or None
        How far beyond the limit still counts, as a number or as a share of the limit.
    direction : bool
        Whether it is the weaker claim.
    by_construction : str or None
        Why no measurement decides it: a count, or what the method is.
    """

    measure: str
    check: str
    limit: tuple[float, ...]
    published: str | None = None
    tolerance: float | None = None
    tolerance_share: float | None = None
    direction: bool = False
    by_construction: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Profile:
    """One way to run a recipe; with `excluded`, why there is no such way.

    Attributes
    ----------
    models : mapping of str to Profile
        The same way where ``--model`` names another model: what suits its size and shape.
    """

    name: str
    excluded: str | None = None
    stand_in: str | None = None
    needs: Needs = Needs()
    set: Mapping[str, str | None] = field(default_factory=dict)
    matrix: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cells: tuple[CellTemplate, ...] = ()
    measures: tuple[Measure, ...] = ()
    verdict: tuple[Line, ...] = ()
    models: Mapping[str, "Profile"] = field(default_factory=dict)

    def for_model(self, model: str | None) -> "Profile":
        """Return the profile as it is run with ``--model``; what it says of itself says so."""
        if model is None or model in self.models:
            return self if model is None else self.models[model]
        if self.stand_in is None:
            return self
        return replace(
            self, stand_in=f"{model} in place of the model that this names: {self.stand_in}"
        )


@dataclass(frozen=True)
class Recipe:
    """One table or figure: the claim, the published numbers, what to run, when it holds.

    Attributes
    ----------
    judged : str or None
        Why kvprof cannot judge it at all; None where it can.
    document : Document
        The file, for complaints about a line of it.
    """

    name: str
    path: Path
    paper: str
    item: str
    claim: str
    published: Mapping[str, Published]
    judged: str | None
    profiles: Mapping[str, Profile]
    document: Document

    def profile(self, name: str, model: str | None = None) -> Profile | None:
        """Return a profile as ``--model`` runs it; None where there is none of that name."""
        found = self.profiles.get(name)
        return None if found is None else found.for_model(model)


def build_recipe(document: Document, path: Path) -> Recipe:
    """Return the recipe of a file whose content matches the schema."""
    data = document.data
    return Recipe(
        name=data["name"],
        path=path,
        paper=data["paper"],
        item=data["item"],
        claim=" ".join(data["claim"].split()),
        published={one["id"]: Published(**one) for one in data.get("published", [])},
        judged=None if data["judged"] is True else " ".join(data["judged"].split()),
        profiles={
            name: _with_models(document, name) for name in PROFILES if name in data["profiles"]
        },
        document=document,
    )


def _with_models(document: Document, name: str) -> Profile:
    key_path: KeyPath = ("profiles", name)
    models = value_at(document.data, key_path).get("models", {})
    variants = {
        model: _profile(document, name, ((), key_path, (*key_path, "models", model)))
        for model in models
    }
    return replace(_profile(document, name, ((), key_path)), models=variants)


def _profile(document: Document, name: str, key_paths: Sequence[KeyPath]) -> Profile:
    """Return a profile whose keys stand in several key_paths: the last that has one counts."""
    parts = [(key_path, value_at(document.data, key_path)) for key_path in key_paths]
    if "excluded" in parts[-1][1]:
        return Profile(name, excluded=" ".join(parts[-1][1]["excluded"].split()))

    def last(key: str, default: Any) -> tuple[KeyPath, Any]:
        found = [((*key_path, key), part[key]) for key_path, part in parts if key in part]
        return found[-1] if found else ((key,), default)

    _, needs = last("needs", {})
    _, stand_in = last("stand_in", None)
    matrix_at, matrix = last("matrix", {})
    cells_at, cells = last("cells", ())
    settings: dict[str, str | None] = {}
    for key_path in key_paths:
        settings |= _settings(document, (*key_path, "set"))
    return Profile(
        name,
        stand_in=" ".join(stand_in.split()) if stand_in else None,
        needs=Needs(
            int(needs.get("gpu", 0)),
            *(tuple(needs.get(key, ())) for key in ("weights", "data", "extras")),
        ),
        set=settings,
        matrix={
            key: tuple(document.texts[(*matrix_at, key, i)] for i in range(len(values)))
            for key, values in matrix.items()
        },
        cells=tuple(
            CellTemplate(one["id"], tuple(shlex.split(one["run"])), (*cells_at, index))
            for index, one in enumerate(cells)
        ),
        measures=tuple(_measure(one) for one in last("measures", ())[1]),
        verdict=tuple(_line(one) for one in last("verdict", ())[1]),
    )


def value_at(data: Any, key_path: KeyPath) -> Any:
    """Return what stands at a key path of a file's content."""
    for step in key_path:
        data = data[step]
    return data


def _settings(document: Document, key_path: KeyPath) -> dict[str, str | None]:
    """Return placeholders as they are written; one without a default is None."""
    found: Any = document.data
    for step in key_path:
        found = found.get(step, {})
    return {
        key: None if value in (None, "") else document.texts[(*key_path, key)]
        for key, value in found.items()
    }


def _measure(given: Mapping[str, Any]) -> Measure:
    pairs = {key: tuple(given[key]) for key in ("divide", "subtract") if key in given}
    return Measure(**{**given, **pairs})


def _line(given: Mapping[str, Any]) -> Line:
    check = next(key for key in CHECKS if key in given)
    limit = given[check]
    rest = {key: value for key, value in given.items() if key != check}
    return Line(check=check, limit=tuple(limit) if check == "between" else (limit,), **rest)
