"""Report, CSV and figure of ``kvprof eval``: what a compressed cache costs in accuracy."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprof.methods.named import ALWAYS
from kvprof.records.figures import judging_tasks
from kvprof.views.figure import draw_reference, label_axes, new_figure, point_style, titled
from kvprof.views.numbers import MISSING, number, percent, rate_in_bytes
from kvprof.views.page import NO_INTERVAL, ends, framed, heading, paragraph, tidy_csv, weights_row
from kvprof.views.tables import DataTable, SplitTable, columns

__all__ = ["COLUMNS", "apart_note", "figure", "report", "to_csv", "unable_note"]

Evaluation = Mapping[str, Any]

_RATE = (
    "Rate: the share of the cache's bytes that is saved, scales, windows and sinks counted, "
    "against full width at 16 bits, at {context:,} tokens (the mean context of a scored token)."
)
_KEPT = (
    "Accuracy: per cent of the scored tokens that were the likeliest. Kept: that accuracy over the "
    "uncompressed model's. 95 % interval: where it would lie on other sequences of the same kind "
    "(paired bootstrap over sequences, both models on the same tokens)."
)
_KL = (
    "KL: divergence of the next token's distribution from the uncompressed model's, in nats: "
    "mean, 99.9th percentile, and that of the worst token. Row full is the uncompressed model "
    "itself, so it has none."
)
_FULL_RUN = (
    "KL: divergence of the next token's distribution from the uncompressed model's, in nats: "
    "mean, 99.9th percentile, and that of the worst token. Row full ran through the compressed "
    "cache at full width."
)
_TASKS = (
    "Tasks: questions answered right by greedy decoding through the cache; the first token comes "
    "from the prompt's own pass. Of the embedded tasks every token has to be right. Chance: what "
    "picking among the strings of the asked kind in the prompt would give."
)
_ANSWERS = (
    "Answers: tokens up to the end of text, or to the limit where it does not come, on the same "
    "prompts as the uncompressed model (paired bootstrap over prompts). A shorter step is no gain "
    "where there are more of them (arXiv 2503.24000)."
)
_PROTOCOLS = {
    "decode": "the first half of each sequence is prefilled in one pass, which reads as the plan "
    "says, by age or its own tokens uncompressed, and predicts the first token scored; "
    "the rest is decoded step by step through the compressed cache and scored",
    "one_pass": "the second half of each sequence is scored in one pass in which every query reads "
    "what decoding would read (--decode steps)",
}


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report for people."""
    data = result["data"]
    evaluations = data["evaluations"]
    parts: list[RenderableType] = []
    if evaluations:
        parts += [Text(), _main_table(evaluations)]
        by_source = _source_table(evaluations)
        if by_source is not None:
            parts += [heading("By text"), by_source]
        parts += _task_part(evaluations)
        parts += _answers_part(evaluations)
        parts += _engines_part(evaluations)
        parts += _worst_part(evaluations)
    if data["harness"] is not None and data["harness"]["rows"]:
        parts += [heading("lm-evaluation-harness"), _harness_table(data["harness"]["rows"])]
        protocol = data["harness"]["protocol"]
        parts += [paragraph(f"By its own protocol, not the one above ({protocol}).", "dim")]
    return framed(
        result,
        parts,
        answer=_answer(evaluations) if evaluations else "",
        cautions=_cautions(result),
        notes=_notes(result) if evaluations else (),
        measured_with=_provenance(result),
        width=width,
        colour=colour,
    )


def _asked(evaluations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows that are not always there, or all but the baseline when there are none."""
    own = [one for one in evaluations if one["method"] not in ALWAYS]
    return own or [one for one in evaluations if one["method"] != "full"] or list(evaluations)


def _answer(evaluations: Sequence[Mapping[str, Any]]) -> str:
    if all(one["method"] == "full" for one in evaluations):
        return "Only the uncompressed model was measured: there is nothing to compare it with."
    if len(_asked(evaluations)) > _MANY:
        return _best(_asked(evaluations))
    sentences = []
    for one in _asked(evaluations):
        kept = f"{percent(one['relative_accuracy'])} of the uncompressed model's accuracy"
        if one["relative_accuracy"] is None:
            kept = "an accuracy that the uncompressed model, which has none, gives no measure for"
        bounds = one["relative_accuracy_interval"]
        spread = "" if bounds is None else f" (95 % interval {_interval_text(bounds)} %)"
        saved = f"saves {percent(one['rate'])} of the cache's bytes"
        kl = f"KL {number(one['kl']['mean'])}, worst token {number(one['kl']['worst'])}"
        sentences.append(f"{one['method']} {saved} and keeps {kept}{spread}; {kl}.")
    return " ".join(sentences)


# Methods from which on a sentence and a table for each are more than one reads.
_MANY = 5
_KEEPS = 0.99


def _best(asked: Sequence[Mapping[str, Any]]) -> str:
    """Name the method that saves most among many of those that surely keep enough."""
    ends = [(one, one["relative_accuracy_interval"]) for one in asked]
    sure = [one for one, bounds in ends if bounds and (bounds[0] or 0) >= _KEEPS]
    said = (
        f"{len(sure)} of {len(asked)} methods keep {percent(_KEEPS)} of the uncompressed model's "
        "accuracy by the lower end of the 95 % interval"
    )
    if not sure:
        return f"{said}."
    best = max(sure, key=lambda one: one["rate"])
    return f"{said}; of these {best['method']} saves most, {percent(best['rate'])} of the bytes."


def _cautions(result: Mapping[str, Any]) -> list[str]:
    evaluations = result["data"]["evaluations"]
    if not evaluations:
        return []
    left = [] if result["complete"] else _unmeasured(result["inputs"], evaluations)
    notes = (
        f"Not measured: {', '.join(left)}." if left else None,
        unable_note(_unable_tasks(evaluations)),
        apart_note(_calibrated(evaluations)),
    )
    return [note for note in notes if note]


def unable_note(tasks: Sequence[str]) -> str | None:
    """Say which tasks judge nothing; None without any."""
    if not tasks:
        return None
    judge = (
        "it judges no method and enters" if len(tasks) == 1 else "they judge no method and enter"
    )
    return (
        "Without compression no better than chance, or too few questions to tell: "
        f"{', '.join(tasks).replace('_', ' ')}; {judge} no mean."
    )


def _unmeasured(inputs: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the methods that were asked for and have no row, as far as the record names them."""
    asked = inputs.get("methods")
    measured = {one["method"] for one in evaluations}
    names = asked if isinstance(asked, list) else []
    return [name for name in names if isinstance(name, str) and name not in measured]


def apart_note(calibrated: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Say that methods were calibrated on different tokens; None where that is not so."""
    same: dict[tuple[Any, ...], list[str]] = {}
    for name, found in calibrated.items():
        same.setdefault(
            tuple(found.get(key) for key in ("source", "tokens", "seq_len")), []
        ).append(name)
    if len(same) < 2:
        return None
    parts = [
        f"{', '.join(names)} on {_calibration_data(calibrated[names[0]])}"
        for names in same.values()
    ]
    return (
        f"Not calibrated on the same tokens: {'; '.join(parts)}. A difference between them may be "
        "the tokens'; --calibrate gives all the same."
    )


def _calibrated(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {
        one["method"]: found
        for one in evaluations
        if one["plan"] is not None and (found := one["plan"]["made"].get("calibration")) is not None
    }


def _task_part(evaluations: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    own = _task_table(evaluations)
    if own is None:
        return []
    parts: list[RenderableType] = [heading("Tasks"), own]
    for by in ("by_depth", "by_length"):
        if (table := _depth_table(evaluations, by)) is not None:
            parts += [Text(), table]
    return parts


def _answers_part(evaluations: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    table = _answer_lengths_table(evaluations)
    if table is None:
        return []
    longer = [text for one in _asked(evaluations) if (text := _longer(one)) is not None]
    return [
        heading("Length of answers"),
        table,
        *([Text(), paragraph(" ".join(longer))] * bool(longer)),
    ]


def _engines_part(evaluations: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """Say which option of an engine asks for what was measured, where one does."""
    made = [(one["method"], one["plan"]["made"]) for one in evaluations if one["plan"]]
    rows = [(name, of["engine"], of["flag"]) for name, of in made if "engine" in of]
    if not rows:
        return []
    return [heading("Asked for in engines"), DataTable(columns("method", "engine", "option"), rows)]


_MOSTLY = 0.5  # of the answers


def _longer(one: Mapping[str, Any]) -> str | None:
    """Say whether a method's answers are longer than the uncompressed model's, where that is sure.

    Nothing is, where most are cut at their limit by both.
    """
    found = one.get("answer_lengths")
    if not found or one["plan"] is None:
        return None
    bounds = found["ratio_interval"]
    if min(found["never_ended"], found["baseline_never_ended"]) >= _MOSTLY:
        return (
            f"{one['method']}: most answers are cut at their limit, so their length is not known."
        )
    if bounds is None or None in bounds:
        return None
    if bounds[0] <= 1 <= bounds[1]:
        return f"{one['method']}: no difference that {found['prompts']} prompts could show."
    if bounds[1] < 1:
        return f"{one['method']} shortens answers ({found['ratio']:.3f} times as long)."
    return (
        f"{one['method']} lengthens answers {found['ratio']:.3f} times: a step has to take at "
        f"least {percent(1 - 1 / found['ratio'])} less time before anything is gained."
    )


def _worst_part(evaluations: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    asked = _asked(evaluations)
    tables = [_worst_table(one) for one in (asked if len(asked) <= _MANY else ())]
    shown = [table for table in tables if table is not None]
    parts: list[RenderableType] = [heading("Worst tokens")] if shown else []
    for index, table in enumerate(shown):
        parts += [Text(), table] if index else [table]
    return parts


def _notes(result: Mapping[str, Any]) -> list[str]:
    data = result["data"]
    evaluations = data["evaluations"]
    ran = any(one["method"] == "full" and one["plan"] is not None for one in evaluations)
    notes = [
        _RATE.format(context=data["context"]),
        _KEPT,
        _FULL_RUN if ran else _KL,
    ]
    if all(one["relative_accuracy_interval"] is None for one in evaluations):
        notes.append(NO_INTERVAL)
    if _task_names(evaluations):
        notes.append(_TASKS)
    notes += result["inputs"].get("task_notes", ())
    if _answer_lengths_table(evaluations) is not None:
        notes.append(_ANSWERS)
    notes += _without_kernels(evaluations)
    return notes


def _without_kernels(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which plans decode in plain PyTorch wherever they run, and why."""
    alike: dict[tuple[str, str], list[str]] = {}
    for one in evaluations:
        kernel = (one["plan"] or {}).get("kernel")
        if kernel is None or kernel["reason"] is None:
            continue
        runs = f"Kernels run {kernel['layers']} of {kernel['of']} layers of"
        who = runs if kernel["layers"] else "No kernel runs"
        alike.setdefault((who, kernel["reason"]), []).append(one["method"])
    return [f"{who} {', '.join(names)}: {why}." for (who, why), names in alike.items()]


def _provenance(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the figures depend on, in words; None for what the result does not name."""
    inputs, evaluations = result["inputs"], result["data"]["evaluations"]
    calibrated = _calibrated(evaluations)
    tokens = max((one["decoded_tokens"] for one in evaluations), default=0)
    return {
        "model": inputs["model"],
        **weights_row(inputs),
        "fingerprint": inputs["fingerprint"],
        "protocol": _PROTOCOLS[inputs["protocol"]],
        "text": f"{', '.join(inputs['text'])}: {inputs['sequences']} sequences of "
        f"{inputs['seq_len']:,} tokens, {tokens:,} scored",
        "tasks": _tasks_asked(inputs),
        "calibration": "; ".join(_calibration(name, of) for name, of in calibrated.items()) or None,
        "plan": inputs["plan"],
        "dtype": f"{inputs['dtype']} on {inputs['device']}",
        "seconds": ", ".join(f"{one['method']} {one['seconds']:.0f}" for one in evaluations),
    }


def _tasks_asked(inputs: Mapping[str, Any]) -> str | None:
    if not inputs["tasks"]:
        return None
    text = f"{', '.join(inputs['tasks']).replace('_', ' ')}: {inputs['task_items']} questions"
    lengths = inputs.get("task_lengths") or ()
    if not lengths:
        return text
    return f"{text}, generated ones of up to {', '.join(f'{one:,}' for one in lengths)} tokens"


def _calibration(method: str, found: Mapping[str, Any]) -> str:
    return f"{method} on {_calibration_data(found)}"


def _calibration_data(found: Mapping[str, Any]) -> str:
    # The embedded samples have a split of their own for it.
    split = " (calibration split)" if found["source"] in ("prose", "code", "tasks") else ""
    length = f" in sequences of {found['seq_len']:,}" if found.get("seq_len") else ""
    return f"{found['tokens']:,} tokens of {found['source']}{split}{length}"


# --- The tables of the report: what each method keeps, by text, by task, token by token.

_BEFORE = 24  # characters of text in front of a worst token
_SHOWN = 5  # worst tokens of a method
_UNABLE = "no verdict"  # of a task at which the uncompressed model is at chance


def _interval_text(bounds: Sequence[float | None] | None) -> str:
    """Write an interval of a share in per cent: ``95.4–99.9``."""
    if bounds is None or bounds[0] is None or bounds[1] is None:
        return MISSING
    return f"{100 * bounds[0]:.1f}–{100 * bounds[1]:.1f}"


def _task_names(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the tasks that any of the evaluations has, in order."""
    return list(dict.fromkeys(task for one in evaluations for task in one["tasks"]))


def _unable_tasks(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the tasks at which the uncompressed model is at chance, in order."""
    judging = {task for one in evaluations for task in judging_tasks(one)}
    return [task for task in _task_names(evaluations) if task not in judging]


def _main_table(evaluations: Sequence[Evaluation]) -> SplitTable:
    """Return one row per method with every average."""
    figures = (
        *("rate", "bytes per token"),
        *("accuracy", "kept (%)", "95 % interval"),
        *("perplexity", "KL mean", "KL p99.9", "KL worst"),
    )
    rows = [
        (
            one["method"],
            rate_in_bytes(one["rate"]),
            f"{one['bytes_per_token']:,.0f}",
            percent(one["accuracy"]).removesuffix(" %"),
            percent(one["relative_accuracy"]).removesuffix(" %"),
            _interval_text(one["relative_accuracy_interval"]),
            number(one["perplexity"], 4),
            *(number(one["kl"][part]) for part in ("mean", "p999", "worst")),
        )
        for one in evaluations
    ]
    return SplitTable(columns("method", figures=figures), rows, (2, 3, 4))


def _task_table(evaluations: Sequence[Evaluation]) -> SplitTable | None:
    """Return a row per task, the uncompressed model's right answers first; None without tasks.

    Of a task at which that model is at chance no method has a figure, and a mean leaves it out.
    """
    names = _task_names(evaluations)
    if not names:
        return None
    unable = _unable_tasks(evaluations)
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


def _answer_lengths_table(evaluations: Sequence[Evaluation]) -> DataTable | None:
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


def _source_table(evaluations: Sequence[Evaluation]) -> DataTable | None:
    """Return a row per method and text; None with one text, which the main table has."""
    names = list(dict.fromkeys(name for one in evaluations for name in one["sources"]))
    if len(names) < 2:
        return None
    rows = [
        (
            f"{one['method']}, {name}",
            percent(found["accuracy"]).removesuffix(" %"),
            percent(found["relative_accuracy"]).removesuffix(" %"),
            _interval_text(found["interval"]),
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


def _depth_table(evaluations: Sequence[Evaluation], by: str) -> DataTable | None:
    """Return right answers of all tasks that judge together, by depth or by length."""
    judging = [task for task in _task_names(evaluations) if task not in _unable_tasks(evaluations)]
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


def _worst_table(evaluation: Evaluation) -> DataTable | None:
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


def _harness_table(rows: Sequence[Mapping[str, Any]]) -> DataTable:
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


# --- An evaluation as one tidy table: a row per method and figure.

COLUMNS = (
    "method",
    "rate",
    "bytes_per_token",
    "context",
    "protocol",
    "scope",
    "name",
    "metric",
    "value",
    "baseline",
    "low",
    "high",
    "count",
    "dtype",
)


def to_csv(result: Mapping[str, Any]) -> str:
    """Return every figure of a result of ``kvprof eval``, one to a row.

    ``scope`` is ``all`` (every text together), ``text``, ``task``, ``task_depth``, ``task_length``,
    ``answers`` (the length of those that were written, of all tasks or one) or ``harness``;
    ``name`` says which. ``baseline`` is the uncompressed model's figure,
    ``low`` and ``high`` the ends of the 95 % interval where there is one, ``count`` the tokens or
    questions behind a figure, ``dtype`` that of the run.
    """
    return tidy_csv(COLUMNS, _rows(result["data"]))


def _rows(data: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for one in data["evaluations"]:
        known = {key: one[key] for key in COLUMNS[:5]}
        for row in (*_text_rows(one), *_task_rows(one), *_answer_rows(one)):
            yield known | row | {"dtype": data["dtype"]}
    if data["harness"] is not None:
        for row in data["harness"]["rows"]:
            yield {
                "method": row["method"],
                "protocol": "harness",
                "scope": "harness",
                "name": row["task"],
                "metric": row["metric"],
                "value": row["value"],
                "count": row["items"],
            }


def _text_rows(one: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    every = {"scope": "all", "name": "", "count": one["decoded_tokens"]}
    yield from _text_measures(every, one, one["relative_accuracy_interval"])
    yield {
        **every,
        "metric": "perplexity_ratio",
        "value": one["perplexity_ratio"],
        **ends("", one["perplexity_ratio_interval"]),
    }
    for name, value in one["kl"].items():
        yield {**every, "metric": f"kl_{name}", "value": value}
    for name, found in one["sources"].items():
        own = {"scope": "text", "name": name, "count": found["tokens"]}
        yield from _text_measures(own, found, found["interval"])
        yield {**own, "metric": "kl_mean", "value": found["kl_mean"]}


def _text_measures(
    own: Mapping[str, Any], found: Mapping[str, Any], interval: Sequence[float] | None
) -> Iterator[dict[str, Any]]:
    """Return what all texts and each of them have alike."""
    accuracy = {"value": found["accuracy"], "baseline": found["baseline_accuracy"]}
    yield {**own, "metric": "accuracy", **accuracy}
    kept = {"value": found["relative_accuracy"], **ends("", interval)}
    yield {**own, "metric": "relative_accuracy", **kept}
    perplexity = {"value": found["perplexity"], "baseline": found["baseline_perplexity"]}
    yield {**own, "metric": "perplexity", **perplexity}


def _task_rows(one: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for task, found in one["tasks"].items():
        yield {"scope": "task", "name": task, **_share(found)}
        difference = found["accuracy"] - found["baseline"]
        yield {
            "scope": "task",
            "name": task,
            "metric": "difference",
            "value": difference,
            "count": found["items"],
            **ends("", found["difference_interval"]),
        }
        own = {"scope": "task", "name": task, "count": found["items"]}
        if "judges" in found:
            exact, base = found["exact_match"], found["baseline_exact_match"]
            yield {**own, "metric": "exact_match", "value": exact, "baseline": base}
            yield {**own, "metric": "chance", "value": found["chance"]}
            yield {**own, "metric": "judges", "value": int(found["judges"])}
        for by in ("depth", "length"):
            for value, share in found[f"by_{by}"].items():
                yield {"scope": f"task_{by}", "name": f"{task} {value}", **_share(share)}


def _answer_rows(one: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    every = one.get("answer_lengths")
    if every is None:
        return
    for name, found in {"": every, **every["by_task"]}.items():
        own = {"scope": "answers", "name": name, "count": found["prompts"]}
        bounds = ends("", found["ratio_interval"])
        tokens, base = found["tokens"], found["baseline_tokens"]
        yield {**own, "metric": "tokens", "value": tokens, "baseline": base}
        yield {**own, "metric": "ratio", "value": found["ratio"], **bounds}
        never, base = found["never_ended"], found["baseline_never_ended"]
        yield {**own, "metric": "never_ended", "value": never, "baseline": base}
        bounds = ends("", found["never_ended_interval"])
        yield {**own, "metric": "never_ended_difference", "value": never - base, **bounds}


def _share(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "metric": "accuracy",
        "value": found["accuracy"],
        "baseline": found["baseline"],
        "count": found["items"],
    }


# --- The figure: the share of its accuracy that each method keeps, by its rate.


def figure(result: Mapping[str, Any]) -> Any:
    """Return a point per method and rate, with its interval; what has no figure is left out."""
    methods: dict[str, list[tuple[float, float, list[float]]]] = {}
    for row in result["data"]["evaluations"]:
        kept = row["relative_accuracy"]
        if kept is not None:
            ends = row["relative_accuracy_interval"] or [kept, kept]
            methods.setdefault(row["method"], []).append((row["rate"], kept, ends))
    drawing = new_figure(6.4, 4.0)
    axes = drawing.subplots()
    for index, (method, points) in enumerate(methods.items()):
        rates, kept, intervals = zip(*sorted(points), strict=True)
        # An interval's end may lie on the figure itself, and rounding puts it beyond.
        below = [max(0.0, one - low) for one, (low, _) in zip(kept, intervals, strict=True)]
        above = [max(0.0, high - one) for one, (_, high) in zip(kept, intervals, strict=True)]
        axes.errorbar(
            rates,
            kept,
            yerr=[below, above],
            capsize=3,
            linestyle="none",
            label=method,
            **point_style(index),
        )
    draw_reference(axes, 1.0)
    label_axes(
        axes,
        titled(result, str(result["inputs"].get("model", ""))),
        "KV compression rate (bytes, everything counted)",
        "kept of the uncompressed model's accuracy",
        legend=bool(methods),
    )
    return drawing
