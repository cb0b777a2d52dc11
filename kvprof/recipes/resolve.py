"""From a recipe and what the user set to the very commands that are run."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvprof.errors import UsageError
from kvprof.recipes.allowed import CELL_COMMANDS
from kvprof.recipes.recipe import CellTemplate, Measure, Profile, Recipe, placeholders

__all__ = [
    "Cell",
    "Planned",
    "check_settings",
    "expand",
    "filled_measures",
    "resolve_cells",
]

_NAME = re.compile(r"\{([a-z_][a-z0-9_]*)\}")
# Whose first word that is no option names a model.
_MODEL_FIRST = frozenset(CELL_COMMANDS) - {"bench"}


@dataclass(frozen=True)
class Cell:
    """A command to run."""

    id: str  # in its recipe
    words: tuple[str, ...]  # without `kvprof` and `--json`
    #: Placeholders that nobody gave a value; the command cannot be run.
    lacking: tuple[str, ...] = ()
    gpus: int = 0  # that it needs


@dataclass(frozen=True)
class Planned:
    """A recipe with the commands that a run of it is."""

    recipe: Recipe
    profile: Profile | None  # none where it has no such profile
    cells: tuple[tuple[Cell, str], ...] = ()  # each with its key; empty where nothing is run
    open: str | None = None  # why nothing is run
    #: Whether that is because something is missing here, which somebody else may have.
    lacking: bool = False


def expand(profile: Profile, settings: Mapping[str, str]) -> list[Cell]:
    """Return a cell for every combination of the matrix that its text names."""
    defaults = {key: value for key, value in profile.set.items() if value is not None}
    matrix = {
        key: (settings[key],) if key in settings else values
        for key, values in profile.matrix.items()
    }
    found = []
    for cell in profile.cells:
        used = dict.fromkeys(placeholders(" ".join((cell.id, *cell.words))))
        keys = [key for key in matrix if key in used]
        for combination in itertools.product(*(matrix[key] for key in keys)):
            values = {**defaults, **settings, **dict(zip(keys, combination, strict=True))}
            found.append(_filled(cell, values, profile.needs.gpus))
    return found


def filled_measures(profile: Profile, settings: Mapping[str, str]) -> list[Measure]:
    """Return the measures of a profile with the placeholders of their cells and keys filled."""
    values = {key: value for key, value in profile.set.items() if value is not None}
    values |= settings

    def fill(text: str) -> str:
        return _NAME.sub(lambda match: values.get(match[1], match[0]), text)

    return [
        replace(
            one,
            cell=fill(one.cell) if one.cell is not None else None,
            data=fill(one.data) if one.data is not None else None,
            where={
                key: fill(value) if isinstance(value, str) else value
                for key, value in one.where.items()
            },
        )
        for one in profile.measures
    ]


def _filled(cell: CellTemplate, values: Mapping[str, str], gpus: int) -> Cell:
    lacking: dict[str, None] = {}

    def fill(text: str) -> str:
        # A value is one word, whatever it holds: the words were split before.
        return _NAME.sub(one, text)

    def one(match: re.Match[str]) -> str:
        if match[1] not in values:
            lacking[match[1]] = None
            return match[0]
        return values[match[1]]

    words = tuple(fill(word) for word in cell.words)
    return Cell(fill(cell.id), words, tuple(lacking), gpus)


def resolve_cells(
    recipe: Recipe, profile: Profile, settings: Mapping[str, str], model: str | None
) -> list[Cell]:
    """Return the cells of a profile with everything that the user set."""
    if model is not None:
        settings = {**settings, "model": model}
    cells = expand(profile, settings)
    named = any("model" in placeholders(" ".join(cell.words)) for cell in profile.cells)
    if model is None or named or not cells:
        return cells
    slots = [_model_slot(cell.words) for cell in cells]
    models = dict.fromkeys(
        cell.words[slot] for cell, slot in zip(cells, slots, strict=True) if slot is not None
    )
    if len(models) != 1:
        said = f"name several ({', '.join(models)})" if models else "name none"
        raise UsageError(
            f"--model {model}: the cells of {recipe.name}, profile {profile.name}, {said}; use "
            "{model} in a copy of the recipe"
        )
    return [
        cell
        if slot is None
        else replace(cell, words=(*cell.words[:slot], model, *cell.words[slot + 1 :]))
        for cell, slot in zip(cells, slots, strict=True)
    ]


def _model_slot(words: Sequence[str]) -> int | None:
    """Return which word names the model that is loaded; a shape to time is none."""
    if words[0] in _MODEL_FIRST:
        return 1 if len(words) > 1 and not words[1].startswith("-") else None
    if "--real" in words and "--model" in words[:-1]:
        return words.index("--model") + 1
    return None


def check_settings(recipes: Sequence[tuple[Recipe, Profile]], settings: Mapping[str, str]) -> None:
    """Refuse a ``--set`` that no recipe knows: it would do nothing."""
    known: dict[str, None] = {}
    for _, profile in recipes:
        used = [name for cell in profile.cells for name in placeholders(" ".join(cell.words))]
        known |= dict.fromkeys([*profile.set, *profile.matrix, *used])
    for key in settings:
        if key not in known:
            there = ", ".join(known) if known else "none"
            raise UsageError(f"--set {key}: unknown placeholder; known are {there}")
