"""The report of ``kvprof eval``: what does a compressed cache cost in accuracy?"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from kvprof.analysis.stats import LEAST_SEQUENCES
from kvprof.methods.named import ALWAYS
from kvprof.report.blocks import (
    Block,
    Column,
    Curves,
    Heading,
    Paragraph,
    Report,
    Series,
    Table,
    framed,
)
from kvprof.results.eval import AnswerLengths, EvalResult, Evaluation, Share, Task, WorstToken
from kvprof.views.numbers import MISSING, interval, kept, number, percent, rate_in_bytes

__all__ = ["apart_note", "report", "unable_note"]

_HOLDS = 0.99  # of the uncompressed model's accuracy
_MANY = 5  # methods beyond which nobody reads a table for each
_MOSTLY = 0.5  # of the answers
_BEFORE = 24  # characters of text in front of a worst token

_PROTOCOLS = {
    "decode": "first half of each sequence prefilled, second half decoded and scored token by "
    "token",
    "one_pass": "second half of each sequence scored in one masked pass, equivalent to decoding",
}
_KL = "KL: next-token KL divergence from the uncompressed model, in nats."
_TASKS = "Tasks: right answers with greedy decoding; chance: expected from guessing."
_ANSWERS = "Answers: tokens to the end of text or the limit (arXiv 2503.24000)."


def report(result: EvalResult) -> Report:
    """Return the report."""
    every, inputs = result.data.evaluations, result.inputs
    asked = _asked(every)
    tokens = max((one.decoded_tokens for one in every), default=0)
    return framed(
        result,
        _sections(result, asked),
        verdict=_verdict(every, asked),
        subject=f"{inputs.model}, {tokens:,} scored tokens of {' and '.join(inputs.text)}",
        cautions=_cautions(result),
        notes=_notes(result) if every else (),
        measured_with=_measured_with(result, tokens),
    )


def _asked(every: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the rows that are not always there, or all but the baseline when there are none."""
    own = [one for one in every if one.method not in ALWAYS]
    return own or [one for one in every if one.method != "full"] or list(every)


def _verdict(every: Sequence[Evaluation], asked: Sequence[Evaluation]) -> str:
    if all(one.method == "full" for one in every):
        return "Only the uncompressed model was measured, so nothing can be compared."
    if len(asked) == 1:
        return (
            f"{asked[0].method} saves {percent(asked[0].rate)} of the cache's bytes and keeps "
            f"{_kept(asked[0])} of the uncompressed model's accuracy."
        )
    ends = [(one, one.relative_accuracy_interval) for one in asked]
    sure = [one for one, bounds in ends if bounds and (bounds[0] or 0.0) >= _HOLDS]
    goal = f"{_HOLDS} of the uncompressed model's accuracy"
    if not sure:
        best = max(asked, key=lambda one: one.relative_accuracy or 0.0)
        said = f"No method of {len(asked)} is known to hold {goal}"
        return f"{said}; {best.method} keeps the most, {_kept(best)}."
    best = max(sure, key=lambda one: one.rate)
    holds = "holds" if len(sure) == 1 else "hold"
    said = f"{len(sure)} of the {len(asked)} methods asked for {holds} {goal}"
    return f"{said}; {best.method} saves the most bytes of them, {percent(best.rate)}."


def _sections(result: EvalResult, asked: Sequence[Evaluation]) -> Iterator[Block]:
    every, harness = result.data.evaluations, result.data.harness
    if every:
        yield from (Heading("Accuracy"), _main_table(every), _curves(every))
    if len(_names(one.sources for one in every)) > 1:
        yield from (Heading("By text"), _text_table(every))
    if tasks := _names(one.tasks for one in every):
        yield from _tasks(every, tasks)
    if answers := [(one, one.answer_lengths) for one in every if one.answer_lengths]:
        yield from (Heading("Length of answers"), _answers_table(answers))
    plans = [(one.method, one.plan) for one in every if one.plan]
    if engines := [
        (name, plan.made["engine"], plan.made["flag"])
        for name, plan in plans
        if "engine" in plan.made
    ]:
        heads = enumerate(("method", "engine", "option"))
        columns = [Column(index, title, words=True) for index, title in heads]
        yield from (Heading("Formats by engine"), Table(columns, engines))
    if slow := [(name, plan.kernel) for name, plan in plans if plan.kernel and plan.kernel.reason]:
        columns = [
            Column(0, "method", words=True),
            Column(lambda row: f"{row[1].layers} of {row[1].of}", "layers on kernels"),
            Column(lambda row: row[1].reason, "because", words=True),
        ]
        yield from (Heading("Without kernels"), Table(columns, slow))
    for one in asked if len(asked) <= _MANY else ():
        if worst := [token for token in one.worst_tokens if token.kl > 0]:
            yield from (Heading(f"Tokens of largest divergence, {one.method}"), _worst_table(worst))
    if harness is not None and harness.rows:
        columns = [
            *(Column(name, name, words=True) for name in ("task", "metric", "method")),
            Column("value", "value", number),
            Column("stderr", "standard error", lambda value: number(value, 2)),
            Column("items", "questions"),
        ]
        rows = sorted(harness.rows, key=lambda row: (row.task, row.metric))
        yield from (Heading("lm-evaluation-harness"), Table(columns, rows))
        said = f"Protocol: {harness.protocol}."
        yield Paragraph(said, "aside")


def _names(held: Iterable[Iterable[str]]) -> list[str]:
    """Return the keys of mappings, each once, in order."""
    return list(dict.fromkeys(name for one in held for name in one))


# --- What is said of the whole.


def _cautions(result: EvalResult) -> Iterator[str]:
    every = result.data.evaluations
    measured = {one.method for one in every}
    left = [name for name in result.inputs.methods if name not in measured]
    if every and left and not result.complete:
        yield f"Not measured: {', '.join(left)}."
    unable = unable_note(_unable(every, _names(one.tasks for one in every)))
    yield from (note for note in (unable, apart_note(_calibrated(every))) if note)


def unable_note(tasks: Sequence[str]) -> str | None:
    """Say which tasks judge nothing; None without any."""
    named = ", ".join(tasks).replace("_", " ")
    said = "Excluded from the mean (uncompressed at chance, or too few questions)"
    return f"{said}: {named}." if tasks else None


def apart_note(calibrated: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Say that methods were calibrated on different tokens; None where that is not so."""
    same: dict[str, list[str]] = {}
    for name, found in calibrated.items():
        same.setdefault(_calibration(found), []).append(name)
    parts = [f"{', '.join(names)} on {data}" for data, names in same.items()]
    said = "Calibrated on different tokens (--calibrate sets the same for all)"
    return f"{said}: {'; '.join(parts)}." if len(same) > 1 else None


def _calibrated(every: Sequence[Evaluation]) -> dict[str, Mapping[str, Any]]:
    made = {one.method: one.plan.made.get("calibration") for one in every if one.plan}
    return {method: found for method, found in made.items() if found is not None}


def _calibration(found: Mapping[str, Any]) -> str:
    # The embedded samples have a split of their own for it.
    split = " (calibration split)" if found["source"] in ("prose", "code", "tasks") else ""
    length = f" in sequences of {found['seq_len']:,}" if found.get("seq_len") else ""
    return f"{found['tokens']:,} tokens of {found['source']}{split}{length}"


def _notes(result: EvalResult) -> list[str]:
    every = result.data.evaluations
    few = all(one.relative_accuracy_interval is None for one in every)
    how = f"; {LEAST_SEQUENCES} sequences or more give an interval" if few else " [95 % bootstrap]"
    return [
        f"Rate: share of the cache's bytes saved at {result.data.context:,} tokens, scales "
        "included.",
        f"Kept: accuracy over the uncompressed model's, same tokens{how}.",
        _KL,
        *([_TASKS] if any(one.tasks for one in every) else []),
        *([_ANSWERS] if any(one.answer_lengths for one in every) else []),
    ]


def _measured_with(result: EvalResult, tokens: int) -> dict[str, Any]:
    inputs, every = result.inputs, result.data.evaluations
    tasks = f"{', '.join(inputs.tasks).replace('_', ' ')}: {inputs.task_items} questions"
    if inputs.task_lengths:
        lengths = ", ".join(f"{one:,}" for one in inputs.task_lengths)
        tasks += f", generated ones of up to {lengths} tokens"
    ran = any(one.method == "full" and one.plan is not None for one in every)
    calibrated = _calibrated(every).items()
    return {
        "model": inputs.model,
        "protocol": _PROTOCOLS.get(inputs.protocol, inputs.protocol),
        "text": f"{', '.join(inputs.text)}: {inputs.sequences} sequences of {inputs.seq_len:,} "
        f"tokens, {tokens:,} scored",
        "tasks": tasks if inputs.tasks else None,
        "questions": " ".join(inputs.task_notes),
        "row full": "uncompressed, through kvprof's cache" if ran else None,
        "calibration": "; ".join(f"{name} on {_calibration(of)}" for name, of in calibrated),
        "plan": inputs.plan,
        "seconds": ", ".join(f"{one.method} {one.seconds:.0f}" for one in every),
    }


# --- Text.


def _main_table(every: Sequence[Evaluation]) -> Table:
    columns = [
        Column("method", "method", words=True),
        Column("rate", "rate", rate_in_bytes),
        Column("bits", "bits", "{:.2f}".format, goes=1),
        Column("bytes_per_token", "bytes per token", "{:,.0f}".format, goes=2),
        Column("accuracy", "accuracy", percent, goes=3),
        Column(_kept, "kept"),
        Column("perplexity", "perplexity", lambda value: number(value, 4)),
        Column(lambda row: row.kl.mean, "KL mean", number),
        Column(lambda row: row.kl.p999, "KL p99.9", number, goes=2),
        Column(lambda row: row.kl.worst, "KL worst", number),
    ]
    return Table(columns, every)


def _text_table(every: Sequence[Evaluation]) -> Table:
    columns = [
        Column(0, "method and text", words=True),
        Column(lambda row: percent(row[1].accuracy), "accuracy", goes=2),
        Column(lambda row: kept(row[1].relative_accuracy, row[1].interval), "kept"),
        Column(lambda row: number(row[1].perplexity, 4), "perplexity"),
        Column(lambda row: number(row[1].kl_mean), "KL mean"),
        Column(lambda row: f"{row[1].tokens:,}", "tokens", goes=1),
    ]
    rows = [(f"{one.method}, {name}", of) for one in every for name, of in one.sources.items()]
    return Table(columns, rows)


def _curves(every: Sequence[Evaluation]) -> Curves:
    series = []
    for one in every:
        if (kept := one.relative_accuracy) is not None:
            low, high = one.relative_accuracy_interval or (kept, kept)
            series.append(Series(one.method, [one.rate], [kept], [low], [high], one.method))
    x, y = "compression rate (bytes)", "accuracy kept"
    return Curves(series, "Accuracy kept by compression rate", x, y, height=12)


def _worst_table(tokens: Sequence[WorstToken]) -> Table:
    columns = [
        Column(_text_of, "text and token", words=True),
        Column(lambda row: f"{row.source} {row.sequence}:{row.position}", "where", words=True),
        Column("kl", "KL", number),
        Column("baseline_probability", "p uncompressed", percent),
        Column("probability", "p compressed", percent),
    ]
    return Table(columns, tokens)


def _text_of(token: WorstToken) -> str:
    """Return a token behind what is before it, with escapes for what does not print."""
    if token.text is None:
        return f"id {token.token}"
    before, text = (repr(one)[1:-1] for one in (token.before or "", token.text))
    return f"{'…' if len(before) > _BEFORE else ''}{before[-_BEFORE:]}[{text}]"


# --- Tasks and answers.


def _unable(every: Sequence[Evaluation], tasks: Sequence[str]) -> list[str]:
    """Return the tasks at which the uncompressed model is at chance, in order."""
    judging = {name for one in every for name, task in one.tasks.items() if task.judges}
    return [name for name in tasks if name not in judging]


def _tasks(every: Sequence[Evaluation], tasks: Sequence[str]) -> Iterator[Block]:
    """Yield right answers by task, and of all that judge by depth and by length."""
    known = {name: task for one in every for name, task in one.tasks.items()}
    judging = [name for name in tasks if name not in _unable(every, tasks)]
    mean = f"mean of {len(judging)}"

    def right(method: str, held: Mapping[str, Task], figure: str) -> dict[str, str]:
        shares = {name: getattr(task, figure) for name, task in held.items()}
        cells = {name: _right(share, held[name].items) for name, share in shares.items()}
        found = [shares[name] for name in judging if name in shares]
        whole = found and len(found) == len(judging)
        return {"": method, **cells, mean: percent(fmean(found)) if whole else MISSING}

    rows = [
        {"": "chance", **{name: number(task.chance, 2) for name, task in known.items()}},
        right("uncompressed", known, "baseline"),
    ]
    for one in every:
        if one.plan is not None:
            held = {name: one.tasks[name] for name in judging if name in one.tasks}
            rows.append(right(one.method, held, "accuracy"))
    yield from (Heading("Tasks"), _answers([*tasks, *([mean] if len(judging) > 1 else [])], rows))
    for by, title in (("by_depth", "Tasks by depth"), ("by_length", "Tasks by length in tokens")):
        rows = [{"": one.method, **_together(one, judging, by)} for one in every]
        values = sorted({value for row in rows for value in row if value}, key=float)
        if len(values) > 1:
            yield from (Heading(title), _answers(values, rows))


def _together(one: Evaluation, tasks: Sequence[str], by: str) -> dict[str, str]:
    """Return the right answers of several tasks by depth or length."""
    held: dict[str, list[Share]] = {}
    for task in [one.tasks[name] for name in tasks if name in one.tasks]:
        for value, share in getattr(task, by).items():
            held.setdefault(value, []).append(share)
    whole = {value: sum(share.items for share in found) for value, found in held.items()}
    right = {v: sum(share.accuracy * share.items for share in held[v]) for v in held}
    return {v: _right(right[v] / items, items) for v, items in whole.items() if items}


def _answers(names: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Table:
    def cell(name: str) -> Any:
        return lambda row: row.get(name, MISSING)

    columns = [Column(cell(name), name.replace("_", " ")) for name in names]
    return Table([Column("", "right answers", words=True), *columns], rows)


def _answers_table(answers: Sequence[tuple[Evaluation, AnswerLengths]]) -> Table:
    columns = [
        Column(lambda row: row[0].method, "method", words=True),
        Column(lambda row: row[1].prompts, "prompts"),
        Column(lambda row: row[1].tokens, "tokens", "{:.1f}".format),
        Column(lambda row: interval(row[1].ratio, row[1].ratio_interval, 4), "length ratio"),
        Column(lambda row: row[1].never_ended, "reach limit", percent),
        Column(lambda row: _longer(row[1]), "verdict", words=True),
    ]
    return Table(columns, answers)


def _longer(found: AnswerLengths) -> str:
    """Say whether a method's answers are longer than the uncompressed model's."""
    low, high = found.ratio_interval or (None, None)
    if min(found.never_ended, found.baseline_never_ended) >= _MOSTLY:
        return "mostly truncated"
    if low is None or high is None:
        return MISSING
    if high < 1:
        return "shorter"
    least = percent(1 - 1 / found.ratio)
    return "not significantly longer" if low <= 1 else f"longer; steps must take {least} less time"


# --- How figures are written.


def _kept(row: Evaluation) -> str:
    """Write the share of accuracy that a plan keeps."""
    return kept(row.relative_accuracy, row.relative_accuracy_interval)


def _right(share: float, items: int) -> str:
    """Write how many answers were right; of some that are right in part, with hundredths."""
    right = share * items
    whole = abs(right - round(right)) < 1e-6
    return f"{right:.0f}/{items}" if whole else f"{right:.2f}/{items}"
