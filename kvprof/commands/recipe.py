"""``kvprof recipe``: papers' tables and figures as files, run, judged and reported."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from platformdirs import user_cache_path
from typer.core import TyperGroup

from kvprof import console
from kvprof.commands.bench_load import baseline_first, check_offered
from kvprof.commands.bench_load_servers import served_method
from kvprof.commands.options import Command, Examples
from kvprof.commands.output import ForceOption, JsonOption, Outputs, check_folder
from kvprof.errors import (
    ClaimNotMetError,
    FailedError,
    KvprofError,
    LackingError,
    UsageError,
    usage_message,
)
from kvprof.interrupt import graceful_interrupt
from kvprof.methods.named import SOURCES, method_entries, papers_named
from kvprof.recipes.allowed import REMOTE_CODE
from kvprof.recipes.check import InvalidRecipeError, load_recipe
from kvprof.recipes.find import find_recipes, template
from kvprof.recipes.ledger import NOT_REPRODUCED, NOT_TESTABLE, ledger_data, merge_entries
from kvprof.recipes.machine import Machine, this_machine
from kvprof.recipes.on_ray import ray_runner
from kvprof.recipes.recipe import Recipe, read_text
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
    ensure_writable,
    read_result,
    render_result,
    what_was_read,
    write_beside,
    write_result,
    write_text_atomic,
)
from kvprof.scratch import alone_in
from kvprof.views.export import page_html, page_markdown
from kvprof.views.ledger import ledger, table
from kvprof.views.recipe import lines, listing


class _Recipes(Examples, TyperGroup):
    """``kvprof recipe`` without a command of its own."""

    examples = (
        'kvprof recipe list "fdc-table-*"',
        "kvprof recipe run fdc-table-3 --out recipe-run",
        "kvprof recipe run --help",
    )


recipe = typer.Typer(
    cls=_Recipes,
    add_completion=False,
    rich_markup_mode=None,
    help="Check whether a paper's table or figure holds here.\n\nA recipe is a file with a "
    "claim, its published numbers, what to run, and when the claim holds.\n\nThree papers "
    "have recipes for all their tables and figures, one of them in two versions:\n\n"
    + "\n\n".join(SOURCES.values()),
)


NamesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...",
        help="Recipe name, pattern (fdc-*), all, or your own .yaml file.",
    ),
]


@recipe.command("list", cls=Command)
def list_recipes(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME...",
            help="Names or patterns of recipes.  [default: all]",
            show_default=False,
        ),
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="Show complete claims.")] = False,
) -> None:
    """List recipes and their profiles.

    Examples
    --------
    kvprof recipe list
    kvprof recipe list "palu-*" --long
    """
    found = []
    for path in find_recipes(names or ["*"]):
        try:
            found.append(load_recipe(path))
        except KvprofError as problem:
            console.warn(str(problem))
    terminal = console.report_console()
    rows = [_listed(one) for one in found]
    terminal.print(listing(rows) if long else lines(rows, terminal.width))
    if not long and rows:
        console.note("kvprof recipe list --long NAME shows the complete claim")
    for paper in dict.fromkeys(one.paper for one in found):
        if paper in SOURCES:
            console.note(f"{paper}: {SOURCES[paper]}")


def _listed(one: Recipe) -> dict[str, object]:
    return {
        "name": one.name,
        "paper": one.paper,
        "item": one.item,
        "claim": one.claim,
        "judged": one.judged,
        "profiles": [name for name, own in one.profiles.items() if own.excluded is None],
    }


@recipe.command(cls=Command)
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Recipe name or file.")],
) -> None:
    """Print a recipe's file.

    Examples
    --------
    kvprof recipe show fdc-fig-1
    """
    paths = find_recipes([name])
    if len(paths) != 1:
        raise UsageError(f"{name} matches {len(paths)} recipes; name one")
    text = read_text(paths[0])
    console.note(str(paths[0]))
    console.report_console().out(text, end="" if text.endswith("\n") else "\n", highlight=False)
    paper = load_recipe(paths[0]).paper
    if paper in SOURCES:
        console.note(SOURCES[paper])
    for setting, differs in papers_named([text]).items():
        console.note(f"{setting}: {' '.join(differs)}")


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
            if (
                values.get("load")
                and served_method(label)[2] is not None
                and values.get("simulate")
            ):
                raise UsageError(
                    f"--methods {label}: --simulate has recorded rates only; leave out its rate"
                )
            (parse_variant if values.get("jct") else parse_method)(label)
        return
    from kvprof.methods.registry import calibration_needs

    for _, method, _ in method_entries(text):
        calibration_needs(method)


@recipe.command(cls=Command)
def validate(names: NamesArgument) -> None:
    """Check recipes without running them.

    Examples
    --------
    kvprof recipe validate all
    kvprof recipe validate my-claim.yaml
    """
    wrong = 0
    paths = find_recipes(names)
    terminal = console.report_console()
    for path in paths:
        try:
            load_recipe(path, check_command)
        except InvalidRecipeError as problem:
            wrong += 1
            for line in problem.lines:
                terminal.print(line, soft_wrap=True)
        except UsageError as problem:
            wrong += 1
            terminal.print(str(problem), soft_wrap=True)
    if wrong:
        raise UsageError(f"{wrong} of {len(paths)} recipes are invalid")
    terminal.print(f"{len(paths)} {'recipe is' if len(paths) == 1 else 'recipes are'} valid.")


# --- `recipe run`.


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


@recipe.command(cls=Command)
def run(
    names: NamesArgument,
    profile: Annotated[
        str,
        typer.Option(
            "--profile",
            help="smoke (CPU, seconds), small (one GPU) or paper.",
        ),
    ] = "smoke",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Run this model instead of the recipe's.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Value of a placeholder; repeatable.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder for results and the ledger; running again resumes.  [default: a folder "
            "in your cache directory]",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore cached results.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Run as Ray tasks: HOST:PORT, ray://HOST:PORT, auto (finds a cluster) or local. "
            "Needs the extra ray.",
            show_default=False,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Run code from models' repositories where a recipe asks for it.",
        ),
    ] = False,
    json: JsonOption = None,
    force: ForceOption = False,
) -> None:
    """Run recipes and judge their claims.

    Exits 4 when a claim was not reproduced, 1 when a run failed, 3 when this machine can run
    nothing that was asked for. An interrupted run resumes.

    Examples
    --------
    kvprof recipe run palu-table-3 --out ledger-run
    kvprof recipe run all --profile smoke
    kvprof recipe run "fdc-*" --profile small
    """
    run_recipes(
        RunRequest(
            tuple(names),
            profile,
            model,
            _settings(settings or []),
            out,
            fresh,
            json,
            force,
            ray,
            trust_remote_code,
        )
    )


def _settings(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in given:
        key, equals, value = entry.partition("=")
        if not (key and equals and value):
            raise UsageError(f"--set {entry}: give KEY=VALUE, such as rate=0.3")
        if key in found:
            raise UsageError(f"--set {key} is given twice")
        if key == "model":
            raise UsageError(f"--set {entry}: use --model {value}")
        found[key] = value
    return found


@recipe.command(cls=Command)
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="Folders of recipe run --out, or ledgers; several are merged."
        ),
    ],
    markdown: Annotated[
        Path | None,
        typer.Option(
            "--md", metavar="FILE", help="Write a table of the claims.", show_default=False
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write the whole ledger, with plots.", show_default=False
        ),
    ] = None,
    force: ForceOption = False,
) -> None:
    """Print the ledger of runs, or write it as a table or a page.

    Examples
    --------
    kvprof recipe report ledger-run
    kvprof recipe report ledger-run --html ledger.html
    """
    for path in filter(None, (markdown, html)):
        ensure_writable(path, force)
    title = "Reproduction ledger"
    with what_was_read(" or ".join(map(str, folders))):
        result = _joined([_read_ledger(path) for path in folders])
        pages: dict[Path, str] = {}
        if markdown:
            sources = "".join(f"- {paper}: {said}\n" for paper, said in SOURCES.items())
            pages[markdown] = f"{page_markdown(title, table(result))}\n{sources}"
        if html:
            written = f"{result['created']}, kvprof {result['kvprof_version']}"
            pages[html] = page_html(title, title, ledger(result), written)
    for path, text in pages.items():
        write_text_atomic(path, text, force)
        console.note(f"wrote {path}")
    if not pages:
        console.report_console().print(table(result))


def _read_ledger(path: Path) -> dict[str, object]:
    file = path / RESULT_NAME if path.is_dir() else path
    if not file.exists():
        raise UsageError(
            f"{path} has no {RESULT_NAME}; give the --out folder of a kvprof recipe run"
        )
    result = read_result(file)
    if result["kind"] != "recipe":
        raise UsageError(f"{file} is a {result['kind']} result, not one of recipe run")
    return result


def _joined(results: list[dict[str, object]]) -> dict[str, object]:
    """Return the results as one, in whose entries each keeps the machine that it was had on."""
    whole: Any = results[0]
    entries: list[Any] = []
    warnings: list[str] = []
    for one in results:
        each: Any = one
        entries = merge_entries(entries, each["data"]["entries"])
        warnings += [text for text in each["warnings"] if text not in warnings]
    return {**whole, "warnings": warnings, "data": ledger_data(entries)}


@recipe.command(cls=Command)
def new(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="File to write, such as my-sweep.yaml, which names the recipe."
        ),
    ],
    force: ForceOption = False,
) -> None:
    """Write an example recipe to start from.

    Examples
    --------
    kvprof recipe new my-claim.yaml
    """
    if file.suffix != ".yaml":
        raise UsageError(f"{file} does not end in .yaml; give such a name")
    if not file.parent.is_dir():
        raise UsageError(f"{file}: folder {file.parent} does not exist")
    write_text_atomic(file, template(file.stem), force)
    console.report_console().print(
        f"Wrote {file}. Next: kvprof recipe validate {file}, then kvprof recipe run {file}",
    )
