"""Any result: the report that was shown when it was measured, its CSV and its figure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprof.report import report_of
from kvprof.report.figure import drawn
from kvprof.report.terminal import renderable
from kvprof.results import KINDS, class_of
from kvprof.sizes import format_bytes
from kvprof.views.numbers import MISSING, duration, number, percent
from kvprof.views.page import framed
from kvprof.views.tables import Column, DataTable, key_values

__all__ = ["csv_of", "figure_of", "flat_tables", "loose_parts", "report"]

# --- Data without a fixed form, as tables: its rows, and what stands beside them.


_SHARES = ("share", "overhead", "difference", "rate")


def flat_tables(value: Any, name: str = "") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield every list of rows inside a value with the name it stands under.

    Entries of a row that are mappings themselves become columns ``outer.inner``.
    """
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from flat_tables(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        rows = [_flat(row) for row in value if isinstance(row, Mapping)]
        if rows:
            yield name, rows


def loose_parts(value: Any) -> Iterator[RenderableType]:
    """Yield what shows a value: its scalars, then each of its lists of rows as a table.

    Lists of numbers are left out; CSV and JSON have them.
    """
    if isinstance(value, Mapping):
        plain = {
            key.replace("_", " "): _cell(key, entry)
            for key, entry in _flat(value).items()
            if not isinstance(entry, list)
        }
        if plain:
            yield key_values(plain)
    for name, rows in flat_tables(value):
        yield Text()
        keys = [
            key
            for key in dict.fromkeys(key for row in rows for key in row)
            if not any(isinstance(row.get(key), list) for row in rows)
        ]
        cells = [[_cell(key, row.get(key)) for key in keys] for row in rows]
        columns = [
            Column(
                key.removesuffix("_seconds").removesuffix("_bytes").replace("_", " "),
                words=any(isinstance(row.get(key), str) for row in rows),
            )
            for key in keys
        ]
        yield DataTable(columns, cells, title=name.replace("_", " ").replace(".", ", "))


def _flat(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, entry in row.items():
        if isinstance(entry, Mapping):
            found |= _flat(entry, f"{before}{key}.")
        else:
            found[before + key] = entry
    return found


def _cell(key: str, value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if any(part.endswith("_seconds") or part == "seconds" for part in key.split(".")):
        return duration(value)
    if any(part.endswith("bytes") for part in key.split(".")):
        return format_bytes(value)
    if any(part.endswith(_SHARES) for part in key.split(".")):
        return percent(value).replace("-", "−")
    return f"{value:,}" if isinstance(value, int) else number(value)


# A kind's module is loaded when a result of it is there: the others cost time.
_MODULES = {
    "bench": "bench",
    "compare": "compare",
    "doctor": "doctor",
    "jct": "jct",
    "load": "load",
    "recipe": "recipe",
}


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report of a result, whatever its kind."""
    if result["kind"] in KINDS:
        return renderable(report_of(result), width, colour)
    if result["kind"] == "benchmark":
        return _benchmark(result, width, colour)
    made: RenderableType = _module(result["kind"]).report(result, width, colour=colour)
    return made


def csv_of(result: Mapping[str, Any]) -> Callable[[], str] | None:
    """Return what makes the CSV of a result; None for a kind without a table of figures."""
    if result["kind"] in KINDS:
        made = class_of(result["kind"])
        return made.of(result).to_csv if made.columns else None
    if result["kind"] not in _MODULES:
        return None
    make = getattr(_module(result["kind"]), "to_csv", None)
    return None if make is None else lambda: str(make(result))


def figure_of(result: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return what makes the figure of a result; None for a kind that has none."""
    if result["kind"] in KINDS:
        shown = report_of(result)
        chart = shown.figure
        return None if chart is None else lambda: drawn(chart, f"{chart.title}\n{shown.subject}")
    if result["kind"] not in _MODULES:
        return None
    make = getattr(_module(result["kind"]), "figure", None)
    return None if make is None else lambda: make(result)


def _module(kind: str) -> Any:
    return import_module(f"kvprof.views.{_MODULES[kind]}")


def _benchmark(result: Mapping[str, Any], width: int | None, colour: bool) -> RenderableType:
    """Return the figures of a program in ``benchmarks/``, each of which has its own."""
    environment = result["environment"]
    return framed(
        result,
        loose_parts(result["data"]),
        answer=f"{result['inputs']['benchmark']}, measured by a program in benchmarks/",
        measured_with={
            "cpu": f"{environment['cpu']['model']}, {environment['cpu']['threads']} threads",
            "gpus": ", ".join(gpu["name"] for gpu in environment["gpus"]) or None,
        },
        width=width,
        colour=colour,
    )
