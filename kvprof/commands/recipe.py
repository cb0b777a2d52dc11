"""``kvprof recipe``: papers' tables and figures as files, run, judged and reported."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvprof import console
from kvprof.commands.options import Command, Examples
from kvprof.commands.output import ForceOption, JsonOption
from kvprof.commands.recipe_run import RunRequest, check_command, run_recipes
from kvprof.errors import KvprofError, UsageError
from kvprof.methods.named import SOURCES, papers_named
from kvprof.recipes.check import InvalidRecipeError, load_recipe
from kvprof.recipes.find import find_recipes, template
from kvprof.recipes.ledger import ledger_data, merge_entries
from kvprof.recipes.recipe import Recipe, read_text
from kvprof.records.files import (
    RESULT_NAME,
    ensure_writable,
    read_result,
    what_was_read,
    write_text_atomic,
)
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
