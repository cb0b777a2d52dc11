"""A recipe's file, and what it says once checked."""

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
    "Line",
    "Measure",
    "Needs",
    "Profile",
    "Published",
    "Recipe",
    "build_recipe",
    "placeholders",
    "read_text",
    "read_yaml",
]


# Far more than any recipe has: letters, values with what aliases stand for, and levels.
_LETTERS, _VALUES, _LEVELS = 1 << 20, 10_000, 50


class _Loader(yaml.SafeLoader):
    """Reads YAML of a bounded size, each alias counting as all that it stands for."""

    count = level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Read a value; refuse one too many, one too deep, an alias of nothing or of itself."""
        before, self.level = self.count, self.level + 1
        # PyYAML has no types.
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        alias = event.anchor if isinstance(event, yaml.AliasEvent) else None
        self.count += 1 if alias is None else getattr(self.anchors.get(alias), "count", _VALUES)
        if self.count > _VALUES or self.level > _LEVELS:
            raise yaml.YAMLError(
                f"more than {_VALUES:,} values or {_LEVELS} levels, or an unknown alias"
            )
        node: Any = super().compose_node(parent, index)
        node.count, self.level = self.count - before, self.level - 1
        return node


def read_yaml(path: Path) -> Any:
    """Return what a recipe's file holds."""
    try:
        return yaml.load(read_text(path), _Loader)
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, ValueError) as problem:
        raise UsageError(f"{path}: invalid YAML: {' '.join(str(problem).split())}") from None


def read_text(path: Path) -> str:
    """Return a recipe's file as it is written."""
    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(_LETTERS + 1)
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "not UTF-8"
        raise UsageError(f"cannot read {path}: {reason}") from None
    if len(text) > _LETTERS:
        raise UsageError(f"cannot read {path}: larger than {_LETTERS:,} characters")
    return text


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
    """What a profile cannot do without."""

    gpus: int = 0  # of each cell
    weights: tuple[str, ...] = ()  # hub ids or folders
    data: tuple[str, ...] = ()  # what the user must bring, in words
    extras: tuple[str, ...] = ()  # of kvprof's package


@dataclass(frozen=True)
class CellTemplate:
    """A cell as it is written: its words still have placeholders."""

    id: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Measure:
    """A number to be had from the cells' results."""

    id: str
    cell: str | None = None  # of whose result; may hold `*`
    figure: str | None = None  # of `kvprof.records.figures`
    where: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None  # A path into the result's data instead
    over: str | None = None  # how several matches become one number
    divide: tuple[str | float, str | float] | None = None  # instead of `cell`
    subtract: tuple[str | float, str | float] | None = None
    unit: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Line:
    """What must hold of a measure."""

    measure: str
    check: str
    limit: tuple[float, ...]  # one number; two for `between`
    published: str | None = None  # the number of the paper that this is about
    #: How far beyond the limit still counts, as a number or as a share of the limit.
    tolerance: float | None = None
    tolerance_share: float | None = None
    #: Whether it is of the direction that the paper states, without its number.
    direction: bool = False
    note: str | None = None


@dataclass(frozen=True)
class Profile:
    """One way to run a recipe; with `excluded`, why there is no such way."""

    name: str
    excluded: str | None = None
    stand_in: str | None = None
    needs: Needs = Needs()
    set: Mapping[str, str | None] = field(default_factory=dict)
    matrix: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cells: tuple[CellTemplate, ...] = ()
    measures: tuple[Measure, ...] = ()
    verdict: tuple[Line, ...] = ()
    #: The same way where `--model` names another model: what suits its size and shape.
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
    """One table or figure: the claim, the published numbers, what to run, when it holds."""

    name: str
    path: Path
    paper: str
    item: str
    claim: str
    published: Mapping[str, Published]
    judged: str | None  # why kvprof cannot judge it at all; None where it can
    profiles: Mapping[str, Profile]
    #: The direction that the paper states, which lines with `direction` are of.
    direction: str | None = None
    accuracy: bool = False  # whether the claim is of a trained model's accuracy

    def profile(self, name: str, model: str | None = None) -> Profile | None:
        """Return a profile as ``--model`` runs it; None where there is none of that name."""
        found = self.profiles.get(name)
        return None if found is None else found.for_model(model)


def build_recipe(data: Mapping[str, Any], path: Path) -> Recipe:
    """Return the recipe of a file whose content matches the schema."""
    return Recipe(
        name=data["name"],
        path=path,
        paper=data["paper"],
        item=data["item"],
        claim=_one_line(data["claim"]),
        published={one["id"]: Published(**one) for one in data.get("published", [])},
        judged=None if data["judged"] is True else _one_line(data["judged"]),
        profiles={name: _with_models(data, name) for name in PROFILES if name in data["profiles"]},
        direction=_one_line(data["direction"]) if "direction" in data else None,
        accuracy=data.get("accuracy", False),
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _with_models(data: Mapping[str, Any], name: str) -> Profile:
    own = data["profiles"][name]
    variants = {
        model: _profile(name, (data, own, variant))
        for model, variant in own.get("models", {}).items()
    }
    return replace(_profile(name, (data, own)), models=variants)


def _profile(name: str, parts: Sequence[Mapping[str, Any]]) -> Profile:
    """Return a profile whose keys stand in several parts: the last that has one counts."""
    if "excluded" in parts[-1]:
        return Profile(name, excluded=_one_line(parts[-1]["excluded"]))

    def last(key: str, default: Any) -> Any:
        return next((part[key] for part in reversed(parts) if key in part), default)

    needs, stand_in = last("needs", {}), last("stand_in", None)
    settings = {key: value for part in parts for key, value in part.get("set", {}).items()}
    return Profile(
        name,
        stand_in=_one_line(stand_in) if stand_in else None,
        needs=Needs(
            int(needs.get("gpu", 0)),
            *(tuple(needs.get(key, ())) for key in ("weights", "data", "extras")),
        ),
        set={key: None if value in (None, "") else str(value) for key, value in settings.items()},
        matrix={key: tuple(map(str, values)) for key, values in last("matrix", {}).items()},
        cells=tuple(
            CellTemplate(one["id"], tuple(shlex.split(one["run"]))) for one in last("cells", ())
        ),
        measures=tuple(_measure(one) for one in last("measures", ())),
        verdict=tuple(_line(one) for one in last("verdict", ())),
    )


def _measure(given: Mapping[str, Any]) -> Measure:
    pairs = {key: tuple(given[key]) for key in ("divide", "subtract") if key in given}
    return Measure(**{**given, **pairs})


def _line(given: Mapping[str, Any]) -> Line:
    check = next(key for key in CHECKS if key in given)
    limit = given[check]
    rest = {key: value for key, value in given.items() if key != check}
    return Line(check=check, limit=tuple(limit) if check == "between" else (limit,), **rest)
