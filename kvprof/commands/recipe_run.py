"""What ``kvprof recipe run`` does: resolve, save, run, judge, keep, show."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from platformdirs import user_cache_path

from kvprof import console
from kvprof.commands.bench_load import baseline_first, check_offered
from kvprof.commands.bench_load_servers import served_method
from kvprof.commands.options import Command
from kvprof.commands.output import Outputs, check_folder
from kvprof.errors import (
    ClaimNotMetError,
    FailedError,
    KvprofError,
    LackingError,
    UsageError,
    usage_message,
)
from kvprof.interrupt import graceful_interrupt
from kvprof.methods.named import method_entries
from kvprof.recipes.allowed import REMOTE_CODE
from kvprof.recipes.check import load_recipe
from kvprof.recipes.find import find_recipes
from kvprof.recipes.ledger import NOT_REPRODUCED, NOT_TESTABLE, ledger_data, merge_entries
from kvprof.recipes.machine import Machine, this_machine
from kvprof.recipes.on_ray import ray_runner
from kvprof.recipes.resolve import Planned
from kvprof.recipes.runs import (
    CellStore,
    CommandRunner,
    code_version,
    one_by_one,
    prepare,
    run_child,
    run_planned,
)
from kvprof.records.files import (
    RESULT_NAME,
    read_result,
    render_result,
    what_was_read,
    write_beside,
    write_result,
)
from kvprof.scratch import alone_in

__all__ = ["RunRequest", "check_command", "run_recipes"]

# --- Whether a recipe's cell is a command that there is; the command is not run.


# Of everything that a wrong command line raises; see kvprof.cli.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]


def check_command(words: Sequence[str]) -> str | None:
    """Return what is wrong with a cell's words (an option, its value, a method), or None."""
    name = words[0]
    command = _command(name)
    try:
        with command.make_context(name, list(words[1:])) as context:
            values = dict(context.params)
    except _CommandLineError as problem:
        return f"{usage_message(problem)} (see kvprof {name} --help)"
    except UsageError as problem:  # of an option that reads its value itself
        return str(problem)
    except typer.Exit:
        return f"{' '.join(words)}: this command does not measure"
    try:
        _check_methods(name, values)
        if values.get("load"):
            offered = ("rates", "arrivals", "slo", "requests", "seconds", "refine")
            check_offered(**{option: values[option] for option in offered})
    except UsageError as problem:
        return str(problem)
    except KvprofError:
        pass  # a library that is missing here may be there where the recipe runs
    return None


@cache
def _command(name: str) -> Any:
    function = getattr(import_module(f"kvprof.commands.{name}"), name)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, cls=Command)(function)
    return typer.main.get_command(alone)


def _check_methods(command: str, values: dict[str, Any]) -> None:
    """Refuse a method that does not exist."""
    named = values.get("methods") or values.get("method")
    if not named:
        return
    text = named if isinstance(named, str) else ",".join(named)
    if command == "bench" and not values.get("real"):
        from kvprof.benchmark.jct.ablations import parse_variant
        from kvprof.benchmark.shape_plans import parse_method

        labels = [label for label, _, _ in method_entries(text)]
        if values.get("load") and not values.get("plan"):
            baseline_first(labels, values["baseline"])
        for label in labels:
            if values.get("load"):
                method, options, own = served_method(label)
                if values.get("simulate") and own is not None:
                    raise UsageError(
                        f"--methods {label}: --simulate has recorded rates only; leave out its rate"
                    )
                parse_method(f"{method}:{','.join(options)}" if options else method)
            else:
                (parse_variant if values.get("jct") else parse_method)(label)
        return
    from kvprof.methods.registry import calibration_needs

    for _, method, _ in method_entries(text):
        calibration_needs(method)


@dataclass(frozen=True)
class RunRequest:
    """The options of ``kvprof recipe run``."""

    names: tuple[str, ...]
    profile: str = "smoke"
    model: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    out: Path | None = None
    fresh: bool = False
    json: Path | None = None
    force: bool = False
    ray: str | None = None
    trust_remote_code: bool = False


def run_recipes(
    request: RunRequest, *, run: CommandRunner = run_child, machine: Machine | None = None
) -> None:
    """Run recipes and show what became of them."""
    outputs = Outputs(json=request.json, force=request.force)
    outputs.check()
    folder = request.out if request.out is not None else _default_folder()
    _older(folder)  # before the work: a folder of something else is refused
    recipes = [load_recipe(path, check_command) for path in find_recipes(list(request.names))]
    machine, runner = machine or this_machine(), one_by_one(run)
    if request.ray is not None:
        runner, gpus = ray_runner(request.ray)
        machine = replace(machine, gpus=("a GPU of the cluster",) * gpus)
    settings = dict(request.settings)
    planned = prepare(
        recipes,
        request.profile,
        settings,
        request.model,
        machine,
        code_version(),
        trusted=request.trust_remote_code,
    )
    if request.trust_remote_code:
        _tell_whom_it_trusts(planned)
    # The model counts as a setting from here on: results of two models are two entries.
    known = {**settings, **({"model": request.model} if request.model else {})}
    total = len({key for one in planned for _, key in one.cells})
    with graceful_interrupt() as stop, console.track("recipes", total) as tracker:

        def say(words: str) -> None:
            if sys.stderr is not None and sys.stderr.isatty():
                tracker.describe(words)
                tracker.advance()
            else:
                console.note(words)

        finished = run_planned(
            planned,
            CellStore(folder / "cells"),
            runner,
            machine=machine,
            settings=known,
            fresh=request.fresh,
            progress=say,
            should_stop=stop,
        )
        interrupted = finished.interrupted or stop()

        def keep(result: dict[str, Any]) -> list[str]:
            lost = [*finished.unkept, *_keep(result, folder)]
            if not lost:
                console.note(
                    f"results are in {folder}; kvprof recipe report {folder} prints the ledger"
                )
            if interrupted:
                console.warn(f"interrupted; the same command resumes from {folder}")
            return lost

        outputs.end(
            "recipe",
            inputs={
                "recipes": [entry["recipe"] for entry in finished.entries],
                "profile": request.profile,
                "set": dict(request.settings),
                "model": request.model,
            },
            data=ledger_data(finished.entries),
            warnings=[*finished.warnings, *finished.unkept],
            complete=not interrupted,
            problem=None if interrupted else _failing(finished.entries),
            keep=keep,
        )


def _tell_whom_it_trusts(planned: list[Planned]) -> None:
    trusted = [
        one.recipe.name
        for one in planned
        if any(REMOTE_CODE in cell.words for cell, _ in one.cells)
    ]
    if not trusted:
        raise UsageError(f"{REMOTE_CODE} has no effect on these recipes; leave it out")
    console.warn(f"running code from models' repositories for {', '.join(trusted)}")


def _default_folder() -> Path:
    if stated := os.environ.get("KVPROF_CACHE"):
        return Path(stated) / "recipes"
    return user_cache_path("kvprof") / "recipes"


def _older(folder: Path) -> list[dict[str, Any]]:
    """Return the entries that a folder has; refuse one that is something else's."""
    check_folder(folder)
    path = folder / RESULT_NAME
    if not path.exists():
        return []
    result = read_result(path)
    if result["kind"] != "recipe":
        raise UsageError(f"--out {folder} has a {result['kind']} result; name another folder")
    entries: list[dict[str, Any]] = result["data"]["entries"]
    with what_was_read(path):
        ledger_data(merge_entries(entries, []))  # before hours of measuring, not after them
    return entries


def _keep(result: dict[str, Any], folder: Path) -> list[str]:
    """Add the entries to the folder's ledger; return what could not be kept."""
    path = folder / RESULT_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone_in(folder):
            # Read now: another run into the folder may have added to it meanwhile.
            merged = merge_entries(_older(folder), result["data"]["entries"])
            write_result(path, {**result, "data": ledger_data(merged)}, force=True)
    except (OSError, KvprofError) as problem:
        try:
            other = write_beside(path, render_result(result).encode("utf-8"))
        except KvprofError:
            return [f"the ledger was not written: {problem}"]
        return [f"{problem}; this run's entries are in {other}"]
    return []


def _failing(entries: list[dict[str, Any]]) -> KvprofError | None:
    """Return what the run ends with, when not all is well."""
    if fallen := [entry["recipe"] for entry in entries if entry["verdict"] == NOT_REPRODUCED]:
        return ClaimNotMetError(f"not reproduced: {', '.join(fallen)}")
    if broken := [entry["recipe"] for entry in entries if entry["failed"]]:
        return FailedError(f"runs failed, see above: {', '.join(broken)}")
    if all(entry["verdict"] == NOT_TESTABLE and entry["lacking"] for entry in entries):
        return LackingError(
            f"no recipe can be tested here: {entries[0]['recipe']}: {entries[0]['reasons'][0]}"
        )
    return None
