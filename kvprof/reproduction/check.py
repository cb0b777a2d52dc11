"""What is wrong with a recipe file: by its schema first, then by what its parts say together."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from kvprof.errors import UsageError
from kvprof.reproduction.allowed import forbidden
from kvprof.reproduction.measures import matching, parse_path
from kvprof.reproduction.recipe import (
    CHECKS,
    Document,
    KeyPath,
    Profile,
    Recipe,
    build_recipe,
    placeholders,
    read_yaml,
    value_at,
)
from kvprof.reproduction.resolve import expand, filled_measures, refused_size
from kvprof.requirements import extra_names

__all__ = [
    "CommandCheck",
    "InvalidRecipeError",
    "Problem",
    "load_recipe",
    "profile_problems",
    "recipe_schema",
    "there_are",
]

# --- What is wrong with the profiles of a recipe: their cells, and what refers to them.


#: Takes a cell's words and returns what is wrong with them, or None.
CommandCheck = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class Problem:
    """What is wrong, and where."""

    key_path: KeyPath
    message: str


def there_are(known: Sequence[str]) -> str:
    """Return the end of a complaint about a name: which ones there are."""
    return f": there are {', '.join(known)}" if known else ": there is none"


def profile_problems(recipe: Recipe, check_command: CommandCheck | None) -> Iterator[Problem]:
    """Yield what is wrong with the profiles of a recipe whose parts are right by themselves."""
    for key_path, profile in _all_profiles(recipe):
        name = " on ".join(map(str, key_path[1::2]))
        if profile.excluded is not None:
            continue
        own_words = value_at(recipe.document.data, key_path)
        if profile.name != "paper" and "stand_in" not in own_words:
            yield Problem(key_path, f"{name}: say in stand_in what differs from the claim")
        if recipe.judged is None and not profile.cells:
            yield Problem(key_path, f"{name}: there is no cell, so nothing could be judged")
        if recipe.judged is None and not profile.verdict:
            yield Problem(key_path, f"{name}: no verdict says when the claim holds")
        known = {*profile.set, *profile.matrix, "model", "data"}
        for cell in profile.cells:
            for used in placeholders(" ".join((cell.id, *cell.words))):
                if used not in known:
                    yield Problem(
                        (*cell.key_path, "run"),
                        f"{{{used}}} is no placeholder: give it a default under set, or a matrix",
                    )
        if {*profile.set} & {*profile.matrix}:
            both = sorted({*profile.set} & {*profile.matrix})[0]
            yield Problem(
                (*key_path, "matrix", both), f"{both!r} stands under set and under matrix"
            )
        if (too_much := refused_size(profile)) is not None:
            yield Problem(key_path, f"{name}: {too_much}")
            continue
        cells = expand(profile, {})
        ids: dict[str, KeyPath] = {}
        for one in cells:
            if one.id in ids:
                yield Problem(
                    (*one.key_path, "id"),
                    f"two cells have the id {one.id!r}; put the matrix's {{names}} into the id",
                )
            ids[one.id] = one.key_path
            if one.lacking:
                continue
            wrong = forbidden(one.words, recipe.path.parent)
            if wrong is None and check_command:
                wrong = check_command(one.words)
            if wrong is not None:
                yield Problem((*one.key_path, "run"), f"{one.id}: {wrong}")
        for index, measure in enumerate(filled_measures(profile, {})):
            if measure.cell is None or matching(measure.cell, ids):
                continue
            at = _measures_at(recipe.document, key_path)
            yield Problem(
                (*at, index, "cell"),
                f"{measure.id}: profile {name} makes no cell {measure.cell!r}"
                f"{there_are(list(ids))}",
            )
        # A model's own measures or lines may leave the profile's other half behind.
        measures = [measure.id for measure in profile.measures]
        for line in profile.verdict:
            if len(key_path) > 2 and line.measure not in measures:
                yield Problem(
                    key_path,
                    f"{name}: no measure {line.measure!r} for its verdict{there_are(measures)}",
                )


def _all_profiles(recipe: Recipe) -> Iterator[tuple[KeyPath, Profile]]:
    """Yield every profile, and behind it what it is on other models, with where they stand."""
    for name, profile in recipe.profiles.items():
        yield ("profiles", name), profile
        for model, own in profile.models.items():
            yield ("profiles", name, "models", model), own


def _measures_at(document: Document, key_path: KeyPath) -> KeyPath:
    """Return where the measures of a profile, or of it on another model, stand."""
    for near in (key_path, key_path[:2]):
        if (*near, "measures") in document.lines:
            return (*near, "measures")
    return ("measures",)


class InvalidRecipeError(UsageError):
    """A recipe cannot be run as it is written; `lines` has every complaint."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = list(lines)
        more = len(lines) - 1
        also = f" (and {more} more: kvprof recipe validate lists them)" if more else ""
        super().__init__(f"{lines[0]}{also}")


@cache
def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema of recipe files."""
    file = resources.files("kvprof.reproduction") / "recipe-file.schema.json"
    schema: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return schema


def load_recipe(path: Path, check_command: CommandCheck | None = None) -> Recipe:
    """Read and check a recipe.

    Parameters
    ----------
    path : Path
    check_command : callable, optional
        Looks into the words of the cells; without it only their first one is checked.

    Raises
    ------
    InvalidRecipeError
        With ``file:line`` of everything that is wrong.
    UsageError
        When the file cannot be read, or is no YAML.
    """
    document = read_yaml(path)
    if not (found := _problems_of_parts(document, path)):
        recipe = build_recipe(document, path)
        if not (found := list(profile_problems(recipe, check_command))):
            return recipe
    ordered = sorted(found, key=lambda one: document.line(one.key_path))
    raise InvalidRecipeError([f"{document.at(one.key_path)}: {one.message}" for one in ordered])


def _problems_of_parts(document: Document, path: Path) -> list[Problem]:
    """Return what is wrong with the parts of a file by themselves."""
    errors = sorted(Draft202012Validator(recipe_schema()).iter_errors(document.data), key=str)
    if errors:
        # Keys that are lacking are an error each, and told in one line.
        return list(dict.fromkeys(problem for error in errors for problem in _problems_of(error)))
    found = [*_names(document, path), *_published(document), *_commands(document)]
    found += _extras(document)
    for key_path in _sections(document, "measures"):
        found += _measures(document, key_path)
    for key_path in _sections(document, "verdict"):
        found += _lines(document, key_path)
    return found


def _problems_of(error: ValidationError) -> Iterator[Problem]:
    key_path = tuple(error.absolute_path)
    if error.validator == "additionalProperties":
        known = list(error.schema.get("properties", {}))
        for key in [key for key in error.instance if key not in known]:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            yield Problem((*key_path, key), f"unknown key {key!r}: {hint}")
        return
    yield Problem(key_path, f"{_name(key_path)}: {_schema_words(error)}")


def _name(key_path: KeyPath) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in key_path)
    return "".join(steps).lstrip(".") or "the file"


def _schema_words(error: ValidationError) -> str:
    value, shown = error.validator_value, json.dumps(error.instance, ensure_ascii=False)[:60]
    match error.validator:
        case "required":
            lacking = [key for key in value if key not in error.instance]
            return f"lacks {', '.join(lacking)}"
        case "oneOf":
            return "is true, or a sentence that says why it cannot be judged"
        case "enum":
            return f"{shown} is none of {', '.join(map(str, value))}"
        case "const":
            return f"is {shown}, and this kvprof knows {value} only"
        case "type":
            wanted = value if isinstance(value, str) else " or ".join(value)
            return f"{shown} is no {wanted}"
        case "minimum" | "exclusiveMaximum" if "tolerance" in str(error.absolute_path):
            why = (
                "below 0 nothing passes" if error.validator == "minimum" else "from 1 on, 0 passes"
            )
            return f"{shown} is an impossible tolerance: {why}"
        case "minLength":
            return f"{shown} is too short to tell anything"
        case "minItems" | "minProperties":
            return f"has {len(error.instance)} entries, and {value} are needed"
        case "maxItems":
            return f"has {len(error.instance)} entries, and {value} are all it takes"
    return " ".join(error.message.split())[:160]


def _names(document: Document, path: Path) -> Iterator[Problem]:
    if document.data["name"] != path.stem:
        yield Problem(("name",), f"name is {document.data['name']!r}, but the file is {path.name}")


def _published(document: Document) -> Iterator[Problem]:
    entries = document.data.get("published", [])
    yield from _twice([one["id"] for one in entries], ("published",))
    for index, one in enumerate(entries):
        key_path: KeyPath = ("published", index)
        single, ends = "value" in one, [key for key in ("low", "high") if key in one]
        if single == bool(ends) or len(ends) == 1:
            yield Problem(key_path, f"{one['id']}: give a value, or low and high")
        elif ends and one["low"] > one["high"]:
            yield Problem(key_path, f"{one['id']}: low {one['low']} is above high {one['high']}")


def _twice(ids: Sequence[str], key_path: KeyPath) -> Iterator[Problem]:
    for index, one in enumerate(ids):
        if one in ids[:index]:
            yield Problem((*key_path, index, "id"), f"the id {one!r} is given twice")


def _sections(document: Document, key: str) -> Iterator[KeyPath]:
    """Yield where a key stands: for all profiles, in one, or in one for a model."""
    if key in document.data:
        yield (key,)
    for name, profile in document.data["profiles"].items():
        if key in profile:
            yield ("profiles", name, key)
        for model, own in profile.get("models", {}).items():
            if key in own:
                yield ("profiles", name, "models", model, key)


def _extras(document: Document) -> Iterator[Problem]:
    known = extra_names()
    for needs in _sections(document, "needs"):
        for index, name in enumerate(value_at(document.data, needs).get("extras", ())):
            if name not in known:
                key_path: KeyPath = (*needs, "extras", index)
                yield Problem(key_path, f"kvprof has no extra {name!r}{there_are(known)}")


def _commands(document: Document) -> Iterator[Problem]:
    for cells in _sections(document, "cells"):
        for index, cell in enumerate(value_at(document.data, cells)):
            key_path: KeyPath = (*cells, index, "run")
            try:
                words = shlex.split(cell["run"])
            except ValueError as problem:
                yield Problem(key_path, f"{cell['run']!r}: {str(problem).lower()}")
                continue
            if wrong := _first_words(words):
                yield Problem(key_path, wrong)


def _first_words(words: Sequence[str]) -> str | None:
    if not words:
        return "run is empty: write a command such as eval reference --method fdc --rate 0.3"
    if words[0] == "kvprof":
        return "leave out the word kvprof: run begins with the command"
    return None


def _measures(document: Document, key_path: KeyPath) -> Iterator[Problem]:
    entries = value_at(document.data, key_path)
    yield from _twice([one["id"] for one in entries], key_path)
    known: list[str] = []
    for index, one in enumerate(entries):
        here = (*key_path, index)
        kinds = [key for key in ("figure", "data", "divide", "subtract") if key in one]
        if len(kinds) != 1:
            said = " and ".join(kinds) or "none"
            yield Problem(here, f"{one['id']}: give one of figure, data, divide, subtract ({said})")
        elif kinds[0] in ("divide", "subtract"):
            if not any(isinstance(other, str) for other in one[kinds[0]]):
                yield Problem(
                    (*here, kinds[0]), f"{one['id']}: two numbers are no measure; name one"
                )
            if kinds[0] == "divide" and one["divide"][-1] == 0:
                yield Problem((*here, "divide"), f"{one['id']}: nothing can be divided by 0")
            for other in one[kinds[0]]:
                if isinstance(other, str) and other not in known:
                    yield Problem(
                        (*here, kinds[0]), f"{one['id']}: no measure {other!r} stands above it"
                    )
            if extra := [key for key in ("cell", "where", "over") if key in one]:
                yield Problem((*here, extra[0]), f"{one['id']}: {kinds[0]} takes no {extra[0]}")
        else:
            if "cell" not in one:
                yield Problem(here, f"{one['id']}: name the cell whose result has it")
            if kinds[0] == "data":
                if "where" in one:
                    yield Problem(
                        (*here, "where"), f"{one['id']}: where belongs to figure; write [key=value]"
                    )
                try:
                    parse_path(one["data"])
                except ValueError as problem:
                    yield Problem((*here, "data"), f"{one['id']}: {problem}")
        known.append(one["id"])


def _lines(document: Document, key_path: KeyPath) -> Iterator[Problem]:
    at = _measures_at(document, key_path[:-1])
    measures = [one["id"] for one in (value_at(document.data, at) if at in document.lines else ())]
    published = [one["id"] for one in document.data.get("published", [])]
    for index, one in enumerate(value_at(document.data, key_path)):
        here = (*key_path, index)
        if one["measure"] not in measures:
            yield Problem((*here, "measure"), f"no measure {one['measure']!r}{there_are(measures)}")
        if "published" in one and one["published"] not in published:
            yield Problem(
                (*here, "published"),
                f"no published number {one['published']!r}{there_are(published)}",
            )
        checks = [key for key in CHECKS if key in one]
        if len(checks) != 1:
            yield Problem(here, f"{one['measure']}: give one of {', '.join(CHECKS)}")
            continue
        yield from _tolerance(one, checks[0], here)


def _tolerance(one: Mapping[str, Any], check: str, here: KeyPath) -> Iterator[Problem]:
    given = [key for key in ("tolerance", "tolerance_share") if key in one]
    if len(given) == 2:
        yield Problem((*here, given[1]), "give tolerance or tolerance_share, not both")
    if check == "about" and not given:
        yield Problem(here, "about needs a tolerance or a tolerance_share: no two runs are equal")
    if check == "about" and given and one[given[0]] == 0:
        yield Problem(
            (*here, given[0]), "0 is an impossible tolerance of about: no two runs are equal"
        )
    if check == "between" and one["between"][0] > one["between"][1]:
        yield Problem(
            (*here, "between"), "nothing lies between: the first number is the larger one"
        )
    if "tolerance_share" in one and 0 in (one[check] if check == "between" else [one[check]]):
        yield Problem((*here, "tolerance_share"), "a share of 0 is nothing: give a tolerance")
