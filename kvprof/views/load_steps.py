"""Where the time of an engine's steps goes, as a part of the report of a load and of its screen."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprof.records.parts import UNATTRIBUTED, ordered_parts
from kvprof.views.bars import Bar, Ink, StackedBars
from kvprof.views.numbers import MISSING, duration, number, percent, unit_of
from kvprof.views.tables import SplitTable, columns

__all__ = ["NO_GRAPH", "step_bars", "steps_section"]

Row = Mapping[str, Any]

#: Called so in a table: what no mark names, the model's products above all.
_REST = "rest"
NO_GRAPH = (
    "inside steps: sequences that decode and prompt tokens that were read are means; steps in "
    "parts ran without their CUDA graph, where there are any: on a GPU they take longer than those "
    "that are served, which stand beside them as a whole, and shares hold of them alone"
)


def steps_section(data: Mapping[str, Any], method: str) -> list[RenderableType]:
    """Return the section of a method; nothing where none of its steps was sampled.

    Parameters
    ----------
    data : mapping
        Of a result of kind ``load``.
    method : str
    """
    rows = [row for row in data.get("steps", ()) if row["method"] == method]
    if not rows:
        return []
    parts = ordered_parts(one["part"] for row in rows for one in row["parts"])
    seconds = [row["whole_seconds"] or row["seconds"] for row in rows]
    factor, unit = unit_of(seconds)
    titles = [
        *(_REST if part == UNATTRIBUTED else part for part in parts),
        f"all {unit}", "steps", "served", "steps", "decoding", "read",
    ]  # fmt: skip
    cells = []
    for row in rows:
        own = {one["part"]: one["seconds"] * factor for one in row["parts"]}
        cells.append(
            [
                _called(row),
                *(number(own.get(part)) for part in parts),
                _scaled(row["seconds"], factor),
                f"{row['sampled']:,}",
                _scaled(row["whole_seconds"], factor),
                f"{row['whole']:,}",
                number(row["decodes"]),
                number(row["prefill"]),
            ]
        )
    groups = (len(parts) + 2, 2, 2)
    table = SplitTable(columns("step", figures=titles), cells, groups)
    found: list[RenderableType] = [Text(), Text(f"Inside its steps, {unit}", style="bold"), table]
    if any(row["parts"] for row in rows):
        found += [Text(), step_bars(rows)]
    return found


def step_bars(rows: Sequence[Row], ink: Ink | None = None) -> StackedBars:
    """Return a bar of shares for each row of ``data.steps`` that is in parts.

    Parameters
    ----------
    rows : sequence of mapping
    ink : Ink, optional
    """
    bars = []
    for row in rows:
        if not row["parts"]:
            continue
        said = duration(row["seconds"])
        if waited := row["waited_share"]:
            said += f", {percent(waited, 0)} may wait"
        parts = {one["part"]: one["seconds"] for one in row["parts"]}
        bars.append(Bar(_called(row), parts, Text(said)))
    return StackedBars(bars, "", shares=True, ink=ink)


def _called(row: Row) -> str:
    return f"{row['rate']:g}/s {row['phase']}"


def _scaled(seconds: float | None, factor: float) -> str:
    return MISSING if seconds is None else number(seconds * factor)
