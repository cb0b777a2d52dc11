"""``kvprof export``: a run in the form that another program, or another person, wants."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvprof import console
from kvprof.commands.output import ForceOption, refuse_sources
from kvprof.commands.run_source import DEMO, events_of, load_run
from kvprof.errors import UsageError
from kvprof.records.events import RunStarted
from kvprof.records.files import (
    ensure_writable,
    what_was_read,
    write_bytes_atomic,
    write_text_atomic,
)
from kvprof.records.perfetto import trace_of
from kvprof.records.schema import kinds, result_schema
from kvprof.views.export import to_html, to_markdown
from kvprof.views.figure import figure_bytes
from kvprof.views.kinds import csv_of, figure_of

_STDOUT = Path("-")
#: Formats that a terminal can show, which go to stdout unless a file is named.
_READABLE = ("csv", "md")


def export(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help=f"A run's folder, a result .json, an events.jsonl, or {DEMO}; with --schema, a "
            "kind of result.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="csv, md, html (one page with plots), svg, or perfetto (a trace for "
            "ui.perfetto.dev).",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Output file; - for stdout, the default of csv and md.",
            show_default=False,
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of all results, or of one kind.")
    ] = False,
    force: ForceOption = False,
) -> None:
    """Write a run as CSV, Markdown, one HTML page, SVG or a trace for Perfetto.

    html and svg need the extra plot; perfetto needs a run with recorded events.

    Examples
    --------
    kvprof export demo --to html --output demo.html
    kvprof export jct-run --to csv
    kvprof export --schema jct
    """
    if schema:
        if to is not None:
            raise UsageError(f"--schema and --to {to} cannot be combined")
        _put(json.dumps(_schema(run), indent=1, ensure_ascii=False) + "\n", output, force)
        return
    if to is None or to not in FORMATS:
        said = "--to is missing" if to is None else f"--to {to}: no such format"
        raise UsageError(f"{said}; give one of {', '.join(FORMATS)}")
    if run is None:
        raise UsageError("give a run: a folder, a result .json, an events.jsonl, or demo")
    if output is None and to not in _READABLE:
        raise UsageError(f"--to {to} requires --output FILE")
    if output is not None and output != _STDOUT:
        refuse_sources([("--output", output)], [run])
        ensure_writable(output, force)
    with what_was_read(run):
        content = FORMATS[to](run)
    _put(content, output, force)


def _put(content: str | bytes, output: Path | None, force: bool) -> None:
    if output is None or output == _STDOUT:
        text = content if isinstance(content, str) else content.decode("utf-8")
        console.report_console().out(text, end="", highlight=False)
    elif isinstance(content, str):
        write_text_atomic(output, content, force)
    else:
        write_bytes_atomic(output, content, force)


def _schema(kind: str | None) -> dict[str, Any]:
    """Return the schema of all results, or of one kind."""
    whole = result_schema()
    if kind is None:
        return whole
    if kind not in kinds():
        raise UsageError(f"--schema {kind}: no such kind; give one of {', '.join(kinds())}")
    index = kinds().index(kind)
    defined = {
        name: part for name, part in whole["$defs"].items() if name == kind or name not in kinds()
    }
    one = {**whole, "allOf": [whole["allOf"][index]], "$defs": defined}
    one["properties"] = {**whole["properties"], "kind": {"const": kind}}
    return one


def _csv(run: str) -> str:
    result = load_run(run)
    make = csv_of(result)
    if make is None:
        raise UsageError(f"--to csv: {result['kind']} results have no CSV; use --to md or html")
    return make()


def _markdown(run: str) -> str:
    result = load_run(run)

    return to_markdown(result)


def _html(run: str) -> str:
    result = load_run(run)

    return to_html(result)


def _svg(run: str) -> bytes:

    result = load_run(run)
    make = figure_of(result)
    if make is None:
        raise UsageError(f"--to svg: {result['kind']} results have no figure; use --to html")
    return figure_bytes(make(), "svg")


def _perfetto(run: str) -> str:
    events = events_of(run)
    if isinstance(events[0], RunStarted) and events[0].kind == "load":
        raise UsageError(
            f"--to perfetto: load results have no step times, {run} is one; use --to html"
        )
    return json.dumps(trace_of(events), allow_nan=False) + "\n"


#: What ``--to`` takes, and what makes it of a run's name.
FORMATS: dict[str, Callable[[str], str | bytes]] = {
    "csv": _csv,
    "md": _markdown,
    "html": _html,
    "svg": _svg,
    "perfetto": _perfetto,
}
