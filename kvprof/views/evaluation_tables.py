"""The tables of ``kvprof eval``: what each method keeps, by text, by task, token by token."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvprof.records.figures import judging_tasks
from kvprof.views.numbers import MISSING, number, percent, rate_in_bytes
from kvprof.views.tables import DataTable, SplitTable, columns

__all__ = [
    "answer_lengths_table",
    "depth_table",
    "harness_table",
    "interval_text",
    "main_table",
    "source_table",
    "task_names",
    "task_table",
    "unable_tasks",
    "worst_table",
]

_BEFORE = 24  # characters of text in front of a worst token
_SHOWN = 5  # worst tokens of a method
_UNABLE = "no verdict"  # of a task at which the uncompressed model is at chance

Evaluation = Mapping[str, Any]


def interval_text(bounds: Sequence[float | None] | None) -> str:
    """Write an interval of a share in per cent: ``95.4–99.9``."""
    if bounds is None or bounds[0] is None or bounds[1] is None:
        return MISSING
    return f"{100 * bounds[0]:.1f}–{100 * bounds[1]:.1f}"


def task_names(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the tasks that any of the evaluations has, in order."""
    return list(dict.fromkeys(task for one in evaluations for task in one["tasks"]))


def unable_tasks(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the tasks at which the uncompressed model is at chance, in order."""
    judging = {task for one in evaluations for task in judging_tasks(one)}
    return [task for task in task_names(evaluations) if task not in judging]


def main_table(evaluations: Sequence[Evaluation], dtype: str) -> SplitTable:
    """Return one row per method with every average; rates are of full width in `dtype`."""
    figures = (
        *(f"rate of {dtype}", "bytes per token"),
        *("accuracy", "kept (%)", "95 % interval"),
        *("perplexity", "KL mean", "KL worst"),
    )
    rows = [
        (
            one["method"],
            rate_in_bytes(one["rate"]),
            f"{one['bytes_per_token']:,.0f}",
            percent(one["accuracy"]).removesuffix(" %"),
            percent(one["relative_accuracy"]).removesuffix(" %"),
            interval_text(one["relative_accuracy_interval"]),
            number(one["perplexity"], 4),
            number(one["kl"]["mean"]),
            number(one["kl"]["worst"]),
        )
        for one in evaluations
    ]
    return SplitTable(columns("method", figures=figures), rows, (2, 3, 3))


def task_table(evaluations: Sequence[Evaluation]) -> SplitTable | None:
    """Return a row per task, the uncompressed model's right answers first; None without tasks.

    Of a task at which that model is at chance no method has a figure, and a mean leaves it out.
    """
    names = task_names(evaluations)
    if not names:
        return None
    unable = unable_tasks(evaluations)
    known = {task: one["tasks"][task] for one in evaluations for task in one["tasks"]}
    others = [one for one in evaluations if one["plan"] is not None]
    rows = []
    for task in names:
        chance = known[task].get("chance")
        base = _right(known[task]["baseline"], known[task]["items"])
        cells = [_UNABLE if task in unable else _task(one, task) for one in others]
        rows.append(
            (task.replace("_", " "), *([number(chance, 2)] if chance else ["0"]), base, *cells)
        )
    judging = [task for task in names if task not in unable]
    if len(judging) > 1:
        cells = [_mean([one["tasks"].get(task) for task in judging], "accuracy") for one in others]
        base = _mean([known[task] for task in judging], "baseline")
        rows.append((f"mean of {len(judging)} (%)", MISSING, base, *cells))
    figures = ("chance", "uncompressed", *(one["method"] for one in others))
    return SplitTable(columns("right answers", figures=figures), rows, (2, *[1] * len(others)))


def answer_lengths_table(evaluations: Sequence[Evaluation]) -> DataTable | None:
    """Return how long each method's answers are; None where none were written to their end."""
    known = [(one, found) for one in evaluations if (found := one.get("answer_lengths"))]
    if not known:
        return None
    rows = []
    for one, found in known:
        own = one["plan"] is None
        bounds = found["ratio_interval"]
        rows.append(
            (
                one["method"],
                f"{found['prompts']}",
                f"{found['tokens']:.1f}",
                MISSING if own else f"{found['ratio']:.3f}",
                MISSING if bounds is None else f"{bounds[0]:.3f}–{bounds[1]:.3f}",
                percent(found["never_ended"]).removesuffix(" %"),
            )
        )
    figures = ("prompts", "tokens", "times as long", "95 % interval", "never end (%)")
    return DataTable(columns("answers", figures=figures), rows)


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
    figures = ("accuracy", "kept (%)", "95 % interval", "perplexity", "KL mean", "tokens")
    return DataTable(columns("method and text", figures=figures), rows)


def depth_table(evaluations: Sequence[Evaluation], by: str) -> DataTable | None:
    """Return right answers of all tasks that judge together, by depth or by length.

    Parameters
    ----------
    evaluations : sequence of mapping
    by : str
        ``by_depth`` or ``by_length``.
    """
    judging = [task for task in task_names(evaluations) if task not in unable_tasks(evaluations)]
    values = sorted(
        {
            value
            for one in evaluations
            for name, task in one["tasks"].items()
            if name in judging
            for value in task[by]
        },
        key=float,
    )
    if len(values) < 2:
        return None
    rows = []
    for one in evaluations:
        cells = []
        for value in values:
            tasks = [one["tasks"][task] for task in judging if task in one["tasks"]]
            found = [task[by][value] for task in tasks if value in task[by]]
            items = sum(share["items"] for share in found)
            right = sum(share["accuracy"] * share["items"] for share in found)
            cells.append(_right(right / items, items) if items else MISSING)
        rows.append((one["method"], *cells))
    title = {"by_depth": "right answers, by depth", "by_length": "by length in tokens"}[by]
    return DataTable(columns(title, figures=values), rows)


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
    figures = ("KL", "p uncompressed", "p compressed")
    heads = columns("text, then the token", "where", figures=figures)
    return DataTable(heads, rows, title=f"{evaluation['method']}: tokens that diverge most")


def harness_table(rows: Sequence[Mapping[str, Any]]) -> DataTable:
    """Return the harness's figures, a row per task and metric and a column per method."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    found = {(row["task"], row["metric"], row["method"]): row for row in rows}
    names = list(dict.fromkeys((row["task"], row["metric"]) for row in rows))
    cells = [
        (f"{task}, {metric}", *(_harness(found.get((task, metric, name))) for name in methods))
        for task, metric in names
    ]
    return DataTable(columns("task and metric", figures=methods), cells)


def _harness(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return MISSING
    return number(row["value"]) + (f" ±{number(row['stderr'], 2)}" if row["stderr"] else "")


def _task(evaluation: Evaluation, task: str) -> str:
    found = evaluation["tasks"].get(task)
    if found is None:
        return MISSING
    return _right(found["accuracy"], found["items"])


def _right(share: float, items: int) -> str:
    """Write how many answers were right; of some that are right in part, with hundredths."""
    right = share * items
    whole = abs(right - round(right)) < 1e-6
    return f"{right:.0f}/{items}" if whole else f"{right:.2f}/{items}"


def _mean(tasks: Sequence[Mapping[str, Any] | None], figure: str) -> str:
    """Return the mean of tasks in per cent; nothing where one of them was not measured."""
    found = [task[figure] for task in tasks if task is not None]
    return f"{100 * sum(found) / len(found):.1f}" if len(found) == len(tasks) else MISSING


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
