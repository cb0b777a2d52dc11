"""What is wrong with a recipe file: by its schema first, then by what its parts say together."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from kvprof.errors import UsageError
from kvprof.recipes.allowed import forbidden
from kvprof.recipes.measures import matching, parse_path
from kvprof.recipes.recipe import (
    CHECKS,
    Line,
    Measure,
    Profile,
    Recipe,
    build_recipe,
    placeholders,
    read_yaml,
)
from kvprof.recipes.resolve import expand, filled_measures
from kvprof.requirements import extra_names

__all__ = ["CommandCheck", "InvalidRecipeError", "load_recipe", "recipe_schema"]

#: Takes a cell's words and returns what is wrong with them, or None.
CommandCheck = Callable[[Sequence[str]], str | None]


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
    file = resources.files("kvprof.recipes") / "recipe-file.schema.json"
    schema: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return schema


def load_recipe(path: Path, check_command: CommandCheck | None = None) -> Recipe:
    """Read and check a recipe."""
    data = read_yaml(path)
    found = [*_schema_problems(data)] or [*_file_problems(data, path)]
    if not found:
        recipe = build_recipe(data, path)
        for at, profile in _all_profiles(recipe):
            if profile.excluded is None:
                found += _profile_problems(at, profile, recipe, check_command)
        if not found:
            return recipe
    raise InvalidRecipeError([f"{path}: {one}" for one in dict.fromkeys(found)])


def _schema_problems(data: Any) -> Iterator[str]:
    for error in sorted(Draft202012Validator(recipe_schema()).iter_errors(data), key=str):
        steps = (f"[{one}]" if isinstance(one, int) else f".{one}" for one in error.absolute_path)
        at = "".join(steps).lstrip(".") or "the file"
        if error.validator != "additionalProperties":
            yield f"{at}: {_schema_words(error)}"
            continue
        known = list(error.schema.get("properties", {}))
        for key in [key for key in error.instance if key not in known]:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(known)}"
            yield f"{at}: unknown key {key!r}: {hint}"


def _schema_words(error: ValidationError) -> str:
    if error.validator == "required":
        lacking = [key for key in error.validator_value if key not in error.instance]
        return f"lacks {', '.join(lacking)}"
    return " ".join(error.message.split())[:160]


def _file_problems(data: Mapping[str, Any], path: Path) -> Iterator[str]:
    if data["name"] != path.stem:
        yield f"name is {data['name']!r}, but the file is {path.name}"
    ids = [one["id"] for one in data.get("published", [])]
    yield from (f"published: the id {one!r} appears twice" for one in _duplicates(ids))
    for one in data.get("published", []):
        ends = [key for key in ("low", "high") if key in one]
        if ("value" in one) == bool(ends) or len(ends) == 1:
            yield f"published {one['id']}: give a value, or low and high"
        elif ends and one["low"] > one["high"]:
            yield f"published {one['id']}: low {one['low']} is above high {one['high']}"
    for part in _parts(data):
        for cell in part.get("cells", ()):
            try:
                words = shlex.split(cell["run"])
            except ValueError as problem:
                yield f"cell {cell['id']}: {cell['run']!r}: {str(problem).lower()}"
                continue
            if not words or words[0] == "kvprof":
                yield f"cell {cell['id']}: run must begin with a command, without the word kvprof"
        for line in part.get("verdict", ()):
            if sum(key in line for key in CHECKS) != 1:
                yield f"verdict {line['measure']}: give one of {', '.join(CHECKS)}"


def _parts(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield data
    for profile in data["profiles"].values():
        yield profile
        yield from profile.get("models", {}).values()


def _duplicates(ids: Sequence[str]) -> list[str]:
    return [one for index, one in enumerate(ids) if one in ids[:index]]


def _all_profiles(recipe: Recipe) -> Iterator[tuple[str, Profile]]:
    for name, profile in recipe.profiles.items():
        yield name, profile
        for model, own in profile.models.items():
            yield f"{name} on {model}", own


def _profile_problems(
    at: str, profile: Profile, recipe: Recipe, check_command: CommandCheck | None
) -> Iterator[str]:
    if profile.name != "paper" and profile.stand_in is None:
        yield f"{at}: state in stand_in what differs from the claim"
    if recipe.judged is None and not (profile.cells and profile.verdict):
        yield f"{at}: requires a cell and a verdict"
    for name in profile.needs.extras:
        if name not in extra_names():
            yield f"{at}: kvprof has no extra {name!r}{_choices_hint(extra_names())}"
    if both := {*profile.set} & {*profile.matrix}:
        yield f"{at}: {min(both)!r} is in both set and matrix; use one"
    known = {*profile.set, *profile.matrix, "model", "data"}
    for written in profile.cells:
        for used in placeholders(" ".join((written.id, *written.words))):
            if used not in known:
                yield (
                    f"{at}, cell {written.id}: placeholder {{{used}}} requires a default in "
                    "set, or a matrix"
                )
    cells = expand(profile, {})
    ids = [one.id for one in cells]
    for one in dict.fromkeys(_duplicates(ids)):
        yield f"{at}: two cells have the id {one!r}; put the matrix's {{names}} into the id"
    for cell in cells:
        if cell.lacking:
            continue
        wrong = forbidden(cell.words, recipe.path.parent)
        if wrong is None and check_command:
            wrong = check_command(cell.words)
        if wrong is not None:
            yield f"{at}, cell {cell.id}: {wrong}"
    measures: list[str] = []
    for measure in filled_measures(profile, {}):
        yield from (f"{at}, {measure.id}: {one}" for one in _of_measure(measure, measures, ids))
        measures.append(measure.id)
    yield from (f"{at}: the id {one!r} appears twice" for one in _duplicates(measures))
    for line in profile.verdict:
        found = _of_line(line, measures, recipe)
        yield from (f"{at}, verdict {line.measure}: {one}" for one in found)


def _of_measure(one: Measure, above: Sequence[str], cells: Sequence[str]) -> Iterator[str]:
    pair = one.divide or one.subtract
    kinds = [key for key in ("figure", "data", "divide", "subtract") if getattr(one, key)]
    if len(kinds) != 1:
        yield f"give one of figure, data, divide, subtract ({' and '.join(kinds) or 'none'})"
    elif pair is not None:
        named = [other for other in pair if isinstance(other, str)]
        if not named or (one.divide and pair[1] == 0):
            yield "requires at least one measure, and a divisor other than 0"
        if unknown := [other for other in named if other not in above]:
            yield f"no measure {unknown[0]!r} above it"
        if one.cell or one.where or one.over:
            yield f"{kinds[0]} takes no cell, where or over"
    elif one.cell is None:
        yield "requires a cell"
    else:
        if not matching(one.cell, cells):
            yield f"no such cell: {one.cell!r}{_choices_hint(cells)}"
        if one.data is not None:
            if one.where:
                yield "where requires figure; write [key=value]"
            try:
                parse_path(one.data)
            except ValueError as problem:
                yield str(problem)


def _of_line(line: Line, measures: Sequence[str], recipe: Recipe) -> Iterator[str]:
    if line.measure not in measures:
        yield f"no such measure{_choices_hint(measures)}"
    if line.published is not None and line.published not in recipe.published:
        yield f"no published number {line.published!r}{_choices_hint(list(recipe.published))}"
    given = [one for one in (line.tolerance, line.tolerance_share) if one is not None]
    # A limit that nobody published decides nothing; a direction's is where there is no effect.
    if line.direction:
        if recipe.direction is None:
            yield "requires the paper's direction under direction"
        if given or line.check in ("about", "between") or line.limit[0] not in (0, 1):
            yield "a direction must be above or below 0 or 1, without a tolerance"
    elif line.published is None:
        yield "requires a published number, or direction: true"
    if len(given) == 2:
        yield "give tolerance or tolerance_share, not both"
    if line.check == "about" and given in ([], [0]):
        yield "about requires a tolerance, since runs vary"
    if line.check == "between" and line.limit[0] > line.limit[1]:
        yield "between requires the smaller number first"


def _choices_hint(known: Sequence[str]) -> str:
    """Return the end of a complaint about a name: which ones there are."""
    return f": use {', '.join(known)}" if known else ": none exists"
