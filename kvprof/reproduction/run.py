"""A run of recipes: resolved first, equal cells once, what is known already not again."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvprof.errors import ExitCode, FailedError, UsageError
from kvprof.reproduction.allowed import forbidden
from kvprof.reproduction.cells import CellRun, CellStore, Outcome, Pool, cell_key
from kvprof.reproduction.ledger import entry_of
from kvprof.reproduction.machine import Machine
from kvprof.reproduction.recipe import PROFILES, Recipe
from kvprof.reproduction.resolve import Planned, check_settings, resolve_cells

__all__ = ["Finished", "prepare", "run_planned"]

# Cells that a warning names; sixty may have the same.
_NAMED = 3


@dataclass
class Finished:
    """A run's entries of the ledger, and what went wrong on the way."""

    entries: list[dict[str, Any]] = field(default_factory=list)  # one per recipe
    #: What cells warned of, each text once, with the cells in front.
    warnings: list[str] = field(default_factory=list)
    #: Results that count and that could not be written.
    unkept: list[str] = field(default_factory=list)
    interrupted: bool = False


def prepare(
    recipes: Sequence[Recipe],
    profile: str,
    settings: Mapping[str, str],
    model: str | None,
    machine: Machine,
    version: str,
    *,
    trusted: bool = False,
) -> list[Planned]:
    """Return what a run will do, without doing it."""
    if profile not in PROFILES:
        raise UsageError(f"--profile {profile}: use {', '.join(PROFILES)}")
    there = [
        (one, own)
        for one in recipes
        if (own := one.profile(profile, model)) is not None and own.excluded is None
    ]
    check_settings(there, settings)
    data = settings.get("data")
    if data is not None and not Path(data).is_file():
        raise UsageError(f"--set data={data}: no such file")
    planned = [_planned(one, profile, settings, model, machine, version) for one in recipes]
    given = [*settings.values(), *([model] if model is not None else [])]
    for one in planned:
        for cell, _ in one.cells:
            wrong = forbidden(cell.words, one.recipe.path.parent, given, trusted=trusted)
            if wrong is not None:
                raise UsageError(f"{one.recipe.path}: {cell.id}: {wrong}")
    return planned


def _planned(
    recipe: Recipe,
    name: str,
    settings: Mapping[str, str],
    model: str | None,
    machine: Machine,
    version: str,
) -> Planned:
    profile = recipe.profile(name, model)
    if profile is None:
        there = ", ".join(recipe.profiles)
        return Planned(recipe, None, open=f"it has no profile {name}, only {there}")
    if profile.excluded is not None:
        return Planned(recipe, profile, open=profile.excluded)
    if not profile.cells:
        return Planned(recipe, profile, open=recipe.judged)
    cells = resolve_cells(recipe, profile, settings, model)
    lacks = machine.lacks(profile, model_given=model is not None)
    if lacks is not None:
        return Planned(recipe, profile, open=lacks, lacking=True)
    if wanting := list(dict.fromkeys(name for cell in cells for name in cell.lacking)):
        bring = f": {'; '.join(profile.needs.data)}" if profile.needs.data else ""
        give = ", ".join("--model" if one == "model" else f"--set {one}=…" for one in wanting)
        return Planned(recipe, profile, open=f"give {give}{bring}", lacking=True)
    keyed = tuple((cell, cell_key(cell.words, version)) for cell in cells)
    return Planned(recipe, profile, keyed)


def run_planned(
    planned: Sequence[Planned],
    store: CellStore,
    pool: Pool,
    *,
    machine: Machine,
    settings: Mapping[str, str],
    fresh: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Finished:
    """Run every cell that has no result yet, and judge every recipe."""
    finished = Finished()
    todo = {key: cell for one in planned for cell, key in one.cells}
    stopped = CellRun(Outcome(None, int(ExitCode.INTERRUPTED), "interrupted"))
    runs = dict.fromkeys(todo, stopped)
    place = itertools.count(1)

    def tell(key: str, words: str) -> None:
        progress(f"{next(place)}/{len(todo)} {words}: {' '.join(todo[key].words)}")

    known = {} if fresh else {key: found for key in todo if (found := store.get(key)) is not None}
    for key, result in known.items():
        tell(key, "known")
        runs[key] = CellRun(Outcome(result, 0))
    waiting = {key: cell for key, cell in todo.items() if key not in known}
    for key, done in pool(waiting, should_stop):
        runs[key] = done
        tell(key, "failed" if done.outcome.result is None else "done")
        if done.outcome.result is None:
            continue
        try:
            store.put(key, done.outcome.result)
        except FailedError as problem:
            # It still counts; only the next run will not find it.
            finished.unkept.append(f"{problem}; the result was used but not saved")
    finished.interrupted = should_stop() and any(
        one.outcome.code == ExitCode.INTERRUPTED for one in runs.values()
    )
    for one in planned:
        own = [(cell, runs[key]) for cell, key in one.cells]
        finished.entries.append(entry_of(one, own, machine=machine, settings=settings))
    finished.warnings = _warned(planned, runs)
    return finished


def _warned(planned: Sequence[Planned], runs: Mapping[str, CellRun]) -> list[str]:
    """Return the doubts that cells' results have about their figures, each with whose they are."""
    whose: dict[str, list[str]] = {}
    for one in planned:
        for cell, key in one.cells:
            result = runs[key].outcome.result
            for text in result["warnings"] if result is not None else ():
                whose.setdefault(text, []).append(f"{one.recipe.name} {cell.id}")
    return [
        f"{', '.join(cells[:_NAMED])}"
        + (f" and {len(cells) - _NAMED} more" if len(cells) > _NAMED else "")
        + f": {text}"
        for text, cells in whose.items()
    ]
