"""What a recipe says, once it has been checked."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvprof.reproduction.yaml_lines import Document, Place

__all__ = [
    "CHECKS", "FORMAT", "PROFILES", "CellTemplate", "Line", "Measure", "Needs", "Profile",
    "Published", "Recipe", "build_recipe", "placeholders",
]  # fmt: skip

FORMAT = "kvprof-recipe/1"
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
    place: Place


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
    divide, subtract : pair of measures, or None
        Instead of `cell`.
    """

    id: str
    cell: str | None = None
    figure: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    over: str | None = None
    divide: tuple[str, str] | None = None
    subtract: tuple[str, str] | None = None
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
            name: _profile(document, name, data["profiles"][name])
            for name in PROFILES
            if name in data["profiles"]
        },
        document=document,
    )


def _profile(document: Document, name: str, given: Mapping[str, Any]) -> Profile:
    if "excluded" in given:
        return Profile(name, excluded=" ".join(given["excluded"].split()))
    top = document.data
    place: Place = ("profiles", name)
    needs = given.get("needs", {})
    stand_in = given.get("stand_in")
    return Profile(
        name,
        stand_in=" ".join(stand_in.split()) if stand_in else None,
        needs=Needs(
            int(needs.get("gpu", 0)),
            *(tuple(needs.get(key, ())) for key in ("weights", "data", "extras")),
        ),
        set=_settings(document, ("set",)) | _settings(document, (*place, "set")),
        matrix={
            key: tuple(document.texts[(*place, "matrix", key, i)] for i in range(len(values)))
            for key, values in given.get("matrix", {}).items()
        },
        cells=tuple(
            CellTemplate(one["id"], tuple(shlex.split(one["run"])), (*place, "cells", index))
            for index, one in enumerate(given["cells"])
        ),
        measures=tuple(_measure(one) for one in given.get("measures", top.get("measures", ()))),
        verdict=tuple(_line(one) for one in given.get("verdict", top.get("verdict", ()))),
    )


def _settings(document: Document, place: Place) -> dict[str, str | None]:
    """Return placeholders as they are written; one without a default is None."""
    found: Any = document.data
    for step in place:
        found = found.get(step, {})
    return {
        key: None if value in (None, "") else document.texts[(*place, key)]
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
