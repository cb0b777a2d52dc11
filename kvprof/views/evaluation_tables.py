"""The tables of ``kvprof eval``: what each method keeps, by text, by task, token by token."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvprof.views.numbers import MISSING, number, percent
from kvprof.views.tables import Column, DataTable

__all__ = [
    "SplitTable",
    "depth_table",
    "harness_table",
    "interval_text",
    "main_table",
    "source_table",
    "task_columns",
    "worst_table",
]

_GAP = 2  # columns between two columns of a DataTable
_BEFORE = 24  # characters of text in front of a worst token
_SHOWN = 5  # worst tokens of a method

Evaluation = Mapping[str, Any]


class SplitTable:
    """One table where it fits; else as many as it takes, each with the names of the rows.

    Parameters
    ----------
    columns : sequence of Column
        The first one names the row.
    rows : sequence of sequence of str
    groups : sequence of int
        How many columns after the first, and after each group, belong together.
    """

    def __init__(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str]], groups: Sequence[int]
    ) -> None:
        self._columns = columns
        self._rows = rows
        self._groups = groups

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for place, part in enumerate(self._parts(options.max_width)):
            if place:
                yield Text()
            yield DataTable(
                [self._columns[index] for index in part],
                [[row[index] for index in part] for row in self._rows],
            )

    def _parts(self, room: int) -> list[list[int]]:
        """Put groups of columns next to each other as long as they fit."""
        least = [
            column.least_width([row[index] for row in self._rows])
            for index, column in enumerate(self._columns)
        ]
        parts: list[list[int]] = [[0]]
        start = 1
        for size in self._groups:
            group = list(range(start, start + size))
            start += size
            wider = [*parts[-1], *group]
            fits = sum(least[index] + _GAP for index in wider) - _GAP <= room
            if fits or len(parts[-1]) == 1:
                parts[-1] = wider
            else:
                parts.append([0, *group])
        return parts


def interval_text(bounds: Sequence[float | None] | None, decimals: int = 1) -> str:
    """Write an interval of a share in per cent: ``95.4–99.9``."""
    if bounds is None or bounds[0] is None or bounds[1] is None:
        return MISSING
    return f"{100 * bounds[0]:.{decimals}f}–{100 * bounds[1]:.{decimals}f}"


def task_columns(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the tasks that any of the evaluations has, in order."""
    return list(dict.fromkeys(task for one in evaluations for task in one["tasks"]))


def main_table(evaluations: Sequence[Evaluation], dtype: str) -> SplitTable:
    """Return one row per method with every average; rates are of full width in `dtype`."""
    tasks = task_columns(evaluations)
    columns = [
        Column("method", words=True),
        Column(f"rate of {dtype}"),
        Column("bytes per token"),
        Column("accuracy"),
        Column("kept (%)"),
        Column("95 % interval"),
        Column("perplexity"),
        Column("KL mean"),
        Column("KL worst"),
        *(Column(task.replace("_", " ")) for task in tasks),
    ]
    rows = [
        (
            one["method"],
            _rate(one["rate"]),
            f"{one['bytes_per_token']:,.0f}",
            percent(one["accuracy"]).removesuffix(" %"),
            percent(one["relative_accuracy"]).removesuffix(" %"),
            interval_text(one["relative_accuracy_interval"]),
            number(one["perplexity"], 4),
            number(one["kl"]["mean"]),
            number(one["kl"]["worst"]),
            *(_task(one, task) for task in tasks),
        )
        for one in evaluations
    ]
    return SplitTable(columns, rows, (2, 3, 3, len(tasks)) if tasks else (2, 3, 3))


def source_table(evaluations: Sequence[Evaluation]) -> DataTable | None:
    """Return a row per method and text; None with one text, which the main table has."""
    names = list(dict.fromkeys(name for one in evaluations for name in one["sources"]))
    if len(names) < 2:
        return None
    rows = [
        (
            f"{one['method']}, {name}",
            percent(found["accuracy"]).removesuffix(" %"),
            percent(found["relative_accuracy"]).removesuffix(" %"),
            interval_text(found["interval"]),
            number(found["perplexity"], 4),
            number(found["kl_mean"]),
            f"{found['tokens']:,}",
        )
        for one in evaluations
        for name in names
        if (found := one["sources"].get(name)) is not None
    ]
    columns = (
        Column("method and text", words=True),
        Column("accuracy"),
        Column("kept (%)"),
        Column("95 % interval"),
        Column("perplexity"),
        Column("KL mean"),
        Column("tokens"),
    )
    return DataTable(columns, rows)


def depth_table(evaluations: Sequence[Evaluation], by: str) -> DataTable | None:
    """Return right answers of all tasks together, by depth or by length.

    Parameters
    ----------
    evaluations : sequence of mapping
    by : str
        ``by_depth`` or ``by_length``.
    """
    values = sorted(
        {value for one in evaluations for task in one["tasks"].values() for value in task[by]},
        key=float,
    )
    if len(values) < 2:
        return None
    rows = []
    for one in evaluations:
        cells = []
        for value in values:
            found = [task[by][value] for task in one["tasks"].values() if value in task[by]]
            items = sum(share["items"] for share in found)
            right = sum(share["accuracy"] * share["items"] for share in found)
            cells.append(f"{right:.0f}/{items}" if items else MISSING)
        rows.append((one["method"], *cells))
    title = {"by_depth": "right answers, by depth", "by_length": "by length in tokens"}[by]
    return DataTable([Column(title, words=True), *map(Column, values)], rows)


def worst_table(evaluation: Evaluation) -> DataTable | None:
    """Return the tokens of largest divergence, with the text before them; None without any."""
    rows = [
        (
            _text_of(token),
            f"{token['source']} {token['sequence']}:{token['position']}",
            number(token["kl"]),
            percent(token["baseline_probability"]),
            percent(token["probability"]),
        )
        for token in evaluation["worst_tokens"][:_SHOWN]
        if token["kl"] > 0
    ]
    if not rows:
        return None
    columns = (
        Column("text, then the token", words=True),
        Column("where", words=True),
        Column("KL"),
        Column("p uncompressed"),
        Column("p compressed"),
    )
    return DataTable(columns, rows, title=f"{evaluation['method']}: tokens that diverge most")


def harness_table(rows: Sequence[Mapping[str, Any]]) -> DataTable:
    """Return the harness's figures, a row per task and metric and a column per method."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    found = {(row["task"], row["metric"], row["method"]): row for row in rows}
    names = list(dict.fromkeys((row["task"], row["metric"]) for row in rows))
    cells = [
        (f"{task}, {metric}", *(_harness(found.get((task, metric, name))) for name in methods))
        for task, metric in names
    ]
    return DataTable([Column("task and metric", words=True), *map(Column, methods)], cells)


def _harness(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return MISSING
    return number(row["value"]) + (f" ±{number(row['stderr'], 2)}" if row["stderr"] else "")


def _rate(value: float) -> str:
    # A rate that is 0 in bytes must not print as -0.000.
    return f"{value:.3f}" if abs(value) >= 5e-4 else "0"


def _task(evaluation: Evaluation, task: str) -> str:
    found = evaluation["tasks"].get(task)
    if found is None:
        return MISSING
    return f"{found['accuracy'] * found['items']:.0f}/{found['items']}"


def _text_of(token: Mapping[str, Any]) -> str:
    if token["text"] is None:
        return f"id {token['token']}"
    before = _visible(token["before"] or "")
    return f"{'…' if len(before) > _BEFORE else ''}{before[-_BEFORE:]}[{_visible(token['text'])}]"


def _visible(text: str) -> str:
    """Write line ends, and whatever does not print, as escapes."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )
