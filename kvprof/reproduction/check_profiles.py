"""What is wrong with the profiles of a recipe: their cells, and what refers to them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvprof.reproduction.allowed import forbidden
from kvprof.reproduction.measures import matching
from kvprof.reproduction.recipe import Recipe, placeholders
from kvprof.reproduction.resolve import expand, filled_measures
from kvprof.reproduction.yaml_lines import Place

__all__ = ["CommandCheck", "Problem", "profile_problems", "there_are"]

#: Takes a cell's words and returns what is wrong with them, or None.
CommandCheck = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class Problem:
    """What is wrong, and where."""

    place: Place
    message: str


def there_are(known: Sequence[str]) -> str:
    """Return the end of a complaint about a name: which ones there are."""
    return f": there are {', '.join(known)}" if known else ": there is none"


def profile_problems(recipe: Recipe, check_command: CommandCheck | None) -> Iterator[Problem]:
    """Yield what is wrong with the profiles of a recipe whose parts are right by themselves."""
    for name, profile in recipe.profiles.items():
        place: Place = ("profiles", name)
        if profile.excluded is not None:
            continue
        if name != "paper" and profile.stand_in is None:
            yield Problem(place, f"{name}: say in stand_in what differs from the claim")
        if recipe.judged is None and not profile.cells:
            yield Problem(place, f"{name}: there is no cell, so nothing could be judged")
        if recipe.judged is None and not profile.verdict:
            yield Problem(place, f"{name}: no verdict says when the claim holds")
        known = {*profile.set, *profile.matrix, "model", "data"}
        for cell in profile.cells:
            for used in placeholders(" ".join((cell.id, *cell.words))):
                if used not in known:
                    yield Problem(
                        (*cell.place, "run"),
                        f"{{{used}}} is no placeholder: give it a default under set, or a matrix",
                    )
        if {*profile.set} & {*profile.matrix}:
            both = sorted({*profile.set} & {*profile.matrix})[0]
            yield Problem((*place, "matrix", both), f"{both!r} stands under set and under matrix")
        cells = expand(profile, {})
        ids: dict[str, Place] = {}
        for one in cells:
            if one.id in ids:
                yield Problem(
                    (*one.place, "id"),
                    f"two cells have the id {one.id!r}; put the matrix's {{names}} into the id",
                )
            ids[one.id] = one.place
            if one.lacking:
                continue
            wrong = forbidden(one.words, recipe.path.parent)
            if wrong is None and check_command:
                wrong = check_command(one.words)
            if wrong is not None:
                yield Problem((*one.place, "run"), f"{one.id}: {wrong}")
        for index, measure in enumerate(filled_measures(profile, {})):
            if measure.cell is None or matching(measure.cell, ids):
                continue
            own = (*place, "measures")
            at = own if own in recipe.document.lines else ("measures",)
            yield Problem(
                (*at, index, "cell"),
                f"{measure.id}: profile {name} makes no cell {measure.cell!r}"
                f"{there_are(list(ids))}",
            )
