"""Runs of recipes: cells as processes, results kept, equal cells once, known results not again."""

import contextlib
import hashlib
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kvprof.child import Leash, child_environment, module_command
from kvprof.environment import collect_environment
from kvprof.errors import ExitCode, FailedError, KvprofError, UsageError
from kvprof.recipes.allowed import forbidden
from kvprof.recipes.ledger import entry_of
from kvprof.recipes.machine import Machine
from kvprof.recipes.recipe import PROFILES, Recipe
from kvprof.recipes.resolve import Planned, check_settings, resolve_cells
from kvprof.records.files import read_result, write_result
from kvprof.records.schema import validate_result

__all__ = [
    "CellCommand",
    "CellRun",
    "CellStore",
    "CommandRunner",
    "Finished",
    "Outcome",
    "Runner",
    "cell_key",
    "code_version",
    "one_by_one",
    "prepare",
    "run_child",
    "run_planned",
]

# --- Results of cells on disk, each under its key.


def code_version() -> str:
    """Return kvprof's version, with its commit where it runs from a checkout."""
    own = collect_environment()["kvprof"]
    return f"{own['version']}+{own['git']['commit']}" if own["git"] else str(own["version"])


def cell_key(words: Sequence[str], version: str) -> str:
    """Return what a cell's result is known by: its command line and `code_version`."""
    return hashlib.sha256(json.dumps([version, *words]).encode()).hexdigest()[:24]


class CellStore:
    """Results of cells in a folder; what cannot be written is kept for this run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, dict[str, Any]] = {}

    def get(self, key: str) -> dict[str, Any] | None:
        """Return a result, or None; a damaged file is measured again."""
        if key in self._known:
            return self._known[key]
        path = self._path(key)
        if not path.is_file():
            return None
        try:
            result = read_result(path)
        except KvprofError:
            return None
        self._known[key] = result
        return result

    def put(self, key: str, result: dict[str, Any]) -> None:
        """Keep a result."""
        self._known[key] = result
        if result["complete"]:
            write_result(self._path(key), result, force=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


# --- A cell is a process of its own: what it does to memory or crashes with ends with it.


_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5.0
_LAST = 300  # characters of what a process said before it died


@dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    result: dict[str, Any] | None  # valid, if it is there
    code: int  # of the process
    message: str = ""  # why there is no result, in one line

    @property
    def lacking(self) -> bool:
        """Whether the machine lacks what the cell needs, rather than that it failed."""
        return self.result is None and self.code == ExitCode.LACKING


@dataclass(frozen=True)
class CellRun:
    """What became of a cell in this run."""

    outcome: Outcome
    seconds: float | None = None  # none where the result was there already


#: Takes a cell's words and whether to stop; returns what became of it.
CommandRunner = Callable[[Sequence[str], Callable[[], bool]], Outcome]


class CellCommand(Protocol):
    """What a runner has to know of a cell; see `kvprof.recipes.resolve.Cell`."""

    @property
    def words(self) -> tuple[str, ...]:
        """The command."""

    @property
    def gpus(self) -> int:
        """How many it needs."""


#: Runs cells by their keys, asking whether to stop; yields each one's key and end as it ends.
Runner = Callable[[Mapping[str, CellCommand], Callable[[], bool]], Iterator[tuple[str, CellRun]]]


def one_by_one(run: CommandRunner) -> Runner:
    """Return the runner of one machine: a cell has it for itself."""

    def run_all(
        cells: Mapping[str, CellCommand], should_stop: Callable[[], bool]
    ) -> Iterator[tuple[str, CellRun]]:
        for key, cell in cells.items():
            if should_stop():
                return
            start = time.monotonic()
            outcome = run(cell.words, should_stop)
            yield key, CellRun(outcome, time.monotonic() - start)

    return run_all


def run_child(words: Sequence[str], should_stop: Callable[[], bool]) -> Outcome:
    """Run ``kvprof WORDS --json -`` and return its result.

    The result comes through a pipe, so that no full disk can lose it.
    """
    command = [*module_command("kvprof"), *words, "--json", "-"]
    leash = Leash()
    try:
        process = leash.start(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(),
        )
    except OSError as problem:
        return Outcome(None, int(ExitCode.FAILED), f"cannot be started: {problem.strerror}")
    try:
        while True:
            try:
                out, err = process.communicate(timeout=_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                if should_stop():
                    _end(process)
                    return Outcome(None, int(ExitCode.INTERRUPTED), "interrupted")
    except BaseException:
        _end(process)
        raise
    finally:
        leash.close()
    if should_stop():
        # The terminal's Ctrl-C reached the process as well; what it has is no whole result.
        return Outcome(None, int(ExitCode.INTERRUPTED), "interrupted")
    return _read(process.returncode, out, err.decode("utf-8", "replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_GRACE_SECONDS)
        return
    process.kill()
    process.communicate()


def _read(code: int, out: bytes, err: str) -> Outcome:
    # A claim that a command was told to fail on is a result like any other.
    if code in (ExitCode.DONE, ExitCode.CLAIM_NOT_MET):
        try:
            result = json.loads(out)
            validate_result(result)
        except ValueError as problem:
            return Outcome(None, int(ExitCode.FAILED), f"its result is invalid: {problem}")
        return Outcome(result, code)
    said = [line for line in err.splitlines() if line.startswith("kvprof: ")]
    if said:
        return Outcome(None, code, said[-1].removeprefix("kvprof: "))
    last = " ".join(err.split())[-_LAST:]
    ended = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    return Outcome(None, code, f"{ended}{': ' + last if last else ''}")


# --- A run of recipes: resolved first, equal cells once, what is known already not again.


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
    runner: Runner,
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
    for key, done in runner(waiting, should_stop):
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
