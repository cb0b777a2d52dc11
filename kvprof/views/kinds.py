"""Any result: the report that was shown when it was measured, its CSV and its figure."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvprof.views.page import Fitted, bullets, heading, incomplete_note, paragraph
from kvprof.views.tables import key_values

__all__ = ["csv_of", "figure_of", "report"]

# A kind's module is loaded when a result of it is there: the others cost time.
_MODULES = {
    "bench": "bench",
    "compare": "compare",
    "eval": "evaluation",
    "frontier": "frontier",
    "jct": "jct",
    "recipe": "recipe",
    "spectrum": "spectrum",
    "stability": "stability",
}


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report of a result, whatever its kind.

    Parameters
    ----------
    result : mapping
        That passes the schema.
    width : int or None
        Columns at most; None takes the console's.
    colour : bool
        False leaves out every escape code.
    """
    own = {"plan": _plan, "generate": _generate, "doctor": _doctor, "benchmark": _benchmark}
    kind = result["kind"]
    if kind in own:
        return Fitted(own[kind](result), width=width, colour=colour)
    made: RenderableType = _module(kind).report(result, width, colour=colour)
    return made


def csv_of(result: Mapping[str, Any]) -> Callable[[], str] | None:
    """Return what makes the CSV of a result; None for a kind without a table of figures."""
    if result["kind"] not in _MODULES:
        return None
    make = getattr(_module(result["kind"]), "to_csv", None)
    return None if make is None else lambda: str(make(result))


def figure_of(result: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Return what makes the figure of a result; None for a kind that has none."""
    if result["kind"] not in _MODULES:
        return None
    make = getattr(_module(result["kind"]), "figure", None)
    return None if make is None else lambda: make(result)


def _module(kind: str) -> Any:
    return import_module(f"kvprof.views.{_MODULES[kind]}")


def _plan(result: Mapping[str, Any]) -> RenderableType:
    from kvprof.views.plan import report as plan_report

    return plan_report(result)


def _doctor(result: Mapping[str, Any]) -> RenderableType:
    from kvprof.views.doctor import report as doctor_report

    return doctor_report(dict(result))


def _generate(result: Mapping[str, Any]) -> RenderableType:
    """Return the text that was streamed when it was written, and what was said after it."""
    from kvprof.views.generation import cache_line
    from kvprof.views.generation import report as comparison

    data = result["data"]
    parts: list[RenderableType] = [] if result["complete"] else [incomplete_note(), Text()]
    parts.append(paragraph(data["text"]))
    if data["difference"] is not None:
        parts.append(comparison(result))
    parts += [Text(), paragraph(cache_line(result), "dim")]
    if result["warnings"]:
        parts += [heading("Warnings"), bullets(result["warnings"], "yellow")]
    return Group(*parts)


def _benchmark(result: Mapping[str, Any]) -> RenderableType:
    """Return the figures of a program in ``benchmarks/``, each of which has its own."""
    from kvprof.views.loose import loose_parts

    parts: list[RenderableType] = [
        paragraph(f"benchmarks/{result['inputs']['benchmark']}.py", "bold"),
        *loose_parts(result["data"]),
        heading("Measured with"),
        key_values({key: str(value) for key, value in _machine(result).items()}),
    ]
    if result["warnings"]:
        parts += [heading("Warnings"), bullets(result["warnings"], "yellow")]
    return Group(*parts)


def _machine(result: Mapping[str, Any]) -> dict[str, Any]:
    environment = result["environment"]
    gpus = [gpu["name"] for gpu in environment["gpus"]]
    return {
        "cpu": f"{environment['cpu']['model']}, {environment['cpu']['threads']} threads",
        **({"gpus": ", ".join(gpus)} if gpus else {}),
        "written": result["created"],
    }
