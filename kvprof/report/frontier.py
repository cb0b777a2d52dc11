"""The report of ``kvprof frontier``: which method keeps the fewest bytes as good?"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

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
from kvprof.report.eval import apart_note, unable_note
from kvprof.results.eval import Kernel
from kvprof.results.frontier import STOPPED, FrontierResult, Method, Point, Target
from kvprof.views.numbers import MISSING, count, kept, number, percent, rate_in_bytes
from kvprof.views.page import NO_INTERVAL

__all__ = ["report"]

_METRICS = {
    "accuracy": "next-token accuracy",
    "perplexity": "1/perplexity",
    "tasks": "mean task accuracy",
}
_PROTOCOLS = {
    "decode": "first half of each sequence prefilled, second half decoded and scored token by "
    "token",
    "one_pass": "second half of each sequence scored in one masked pass, equivalent to decoding",
}
_TASKS_AT_ONCE = 4  # columns
_RATES_APART = 0.05  # two contexts' rates that differ by more are named

Row = tuple[Method, Point]


def report(result: FrontierResult) -> Report:
    """Return the report."""
    data, inputs = result.data, result.inputs
    methods = ranked(data.methods)
    return framed(
        result,
        _sections(result, methods),
        verdict=_verdict(result, methods),
        subject=f"{inputs.model} at {data.context:,} tokens",
        cautions=_cautions(result, methods),
        notes=_notes(result),
        measured_with=_measured_with(result),
    )


def ranked(methods: Sequence[Method]) -> list[Method]:
    """Return methods by falling rate: those that hold the targets first, those without one last."""

    def order(one: Method) -> tuple[bool, float]:
        shown = one.max_rate if one.sure is None else one.sure
        return one.sure is None, float("inf") if shown is None else -shown

    return sorted(methods, key=order)


# --- Which method, and what limits that.


def _verdict(result: FrontierResult, methods: Sequence[Method]) -> str:
    """Say what the result decides: only what whole intervals hold."""
    owners = ("the uncompressed model's", "its")
    goal = " and ".join(
        f"{one.target:g} of {owners[index > 0]} {_metric(one.metric)}"
        for index, one in enumerate(result.data.goals)
    )
    if not result.complete:
        return f"Interrupted before any method was found to hold {goal}."
    if (best := _winner(methods)) is not None and best.sure is not None:
        return (
            f"{best.label} holds {goal} and saves {percent(best.sure)} of cache bytes "
            f"({1 / (1 - best.sure):.2f}× smaller)."
        )
    near = next((one for one in methods if (one.max_rate or 0) > 0), None)
    if near is None:
        return f"No method holds {goal} at any tested rate."
    return (
        f"No method holds {goal} at any tested rate; by point estimate {near.label} does and "
        f"saves {percent(near.max_rate)}."
    )


def _metric(metric: str) -> str:
    return _METRICS.get(metric, f"accuracy on {metric.replace('_', ' ')}")


def _winner(methods: Sequence[Method]) -> Method | None:
    sure = (one for one in methods if one.points and one.label != "full" and (one.sure or 0) > 0)
    return next(sure, None)


def _cautions(result: FrontierResult, methods: Sequence[Method]) -> Iterator[str]:
    """Yield what was not measured, what may go further, and what does not tell methods apart."""
    found = [one for one in methods if one.label != "full"]
    kinds = {"Not measured": [one for one in found if not one.points]}
    if not result.complete:
        stopped = [one for one in found if one.points and one.reason == STOPPED]
        done = [one for one in found if one.points and one.reason != STOPPED]
        kinds |= {"Search stopped": stopped, "Search finished": done}
    elif (best := _winner(methods)) is not None:
        least = best.sure or 0
        rivals = [one for one in found if one is not best and (one.furthest or 0) > least]
        if rivals:
            yield f"May save more: {', '.join(map(_reach, rivals))}."
    for kind, those in kinds.items():
        if those:
            yield f"{kind}: {', '.join(one.label for one in those)}."
    if pairs := list(_undecided(methods)):
        yield f"Intervals overlap: {'; '.join(f'{one} and {other}' for one, other in pairs)}."
    unable = [name for name, task in result.data.baseline.tasks.items() if not task.judges]
    for note in (unable_note(unable), apart_note(result.inputs.calibration)):
        if note:
            yield note


def _reach(method: Method) -> str:
    low, high = 100 * (method.sure or 0), 100 * (method.furthest or 0)
    known = f"{low:.1f}–{high:.1f} %" if high < 100 else f"{low:.1f} % or more"
    return f"{method.label} ({known})"


def _undecided(methods: Sequence[Method]) -> Iterator[tuple[str, str]]:
    """Yield neighbours in rank whose largest rates may be the other way round."""
    searched = [
        (one.label, one.max_rate_interval)
        for one in methods
        if one.max_rate is not None and one.max_rate_interval and len(one.points) != 1
    ]
    for (further, (low, _)), (nearer, (_, high)) in pairwise(searched):
        if low is None or high is None or low < high:
            yield further, nearer


def _notes(result: FrontierResult) -> list[str]:
    data = result.data
    few = all(one.max_rate_interval is None for one in data.methods)
    halves = any(point.searched for one in data.methods for point in one.points)
    lead = "Rates chosen on half of the text, measured on the other. " if halves else ""
    several = ["Bound by: the targets missed at the lowest failing rate."]
    return [
        f"Rate: share of cache bytes saved vs 16 bits at {data.context:,} tokens.",
        "Holds: the 95 % interval's lower end meets the target, also at lower rates.",
        "Largest rate: the same by point estimate; other columns are at the held rate.",
        *(several if len(data.goals) > 1 else ()),
        lead + (NO_INTERVAL if few else "Intervals: paired 95 % bootstrap."),
    ]


def _measured_with(result: FrontierResult) -> dict[str, Any]:
    inputs, data = result.inputs, result.data
    base = data.baseline
    whole = [f"accuracy {base.accuracy:.4f}", f"perplexity {base.perplexity:.4g}"]
    whole += [f"{name.replace('_', ' ')} {one.accuracy:.3f}" for name, one in base.tasks.items()]
    text = (
        f"{', '.join(inputs.text)}; {inputs.sequences} sequences of {inputs.seq_len or 0:,} tokens"
    )
    tasks = f"{', '.join(inputs.tasks)}; {inputs.task_items} questions"
    by_data: dict[str, list[str]] = {}
    for label, one in inputs.calibration.items():
        length = f" in sequences of {one['seq_len']:,}" if one.get("seq_len") else ""
        known = f"{count(one['tokens'])} tokens of {one['source']}{length}"
        by_data.setdefault(known, []).append(label)
    tested = sum(len(method.points) for method in data.methods)
    return {
        "model": inputs.model,
        "uncompressed": ", ".join(whole),
        "text": f"{text}, {base.decoded_tokens or 0:,} scored" if inputs.text else None,
        "tasks": tasks if inputs.tasks else None,
        "protocol": _PROTOCOLS.get(inputs.protocol or ""),
        "calibration": "; ".join(f"{', '.join(own)}: {known}" for known, own in by_data.items()),
        "evaluations": f"{tested}, at most {inputs.points or '?'} per method",
    }


# --- What each method keeps, and what it costs there.


def _sections(result: FrontierResult, methods: Sequence[Method]) -> Iterator[Block]:
    data = result.data
    rows = [(one, point) for one in methods if (point := one.best) is not None]
    yield from (Heading("Largest rates"), _rates(result, methods))
    if reasons := [one for one in methods if one.reason and (one.points or one.label != "full")]:
        columns = [Column("label", "method", words=True), Column("reason", "why", words=True)]
        yield from (Heading("Without a rate"), Table(columns, reasons))
    for one in data.goals:
        yield _curves(methods, one)
    if rows:
        yield from (Heading("Divergence"), _divergence(rows))
    yield from _tasks(result, rows)
    if len(texts := list(dict.fromkeys(name for row in rows for name in row[1].sources))) > 1:
        columns = [_label(), *(Column(_text(name), name) for name in texts)]
        yield from (Heading("Accuracy kept, by text"), Table(columns, rows))
    yield from _running(result, rows)


def _label() -> Column:
    return Column(lambda row: row[0].label, "method", words=True)


def _rates(result: FrontierResult, methods: Sequence[Method]) -> Table:
    goals = result.data.goals

    def of(field: Any, show: Any = str) -> Any:
        return lambda row: MISSING if row.best is None else show(field(row.best))

    holds = "holds" if len(goals) > 1 else f"holds {goals[0].target:g}"
    columns = [
        Column("label", "method", words=True),
        Column(_holds, holds),
        Column(_largest, "largest rate"),
        Column(of(lambda point: point.compression_ratio, "{:.2f}×".format), "smaller", goes=2),
        Column(of(lambda point: point.bytes_per_token, _bytes), "bytes per token", goes=1),
        Column(
            of(lambda x: kept(x.relative_accuracy, x.relative_accuracy_interval)), "accuracy kept"
        ),
    ]
    if len(goals) > 1:
        columns.insert(3, Column(_bound, "bound by", words=True))
    for one in goals:
        if one.metric != "accuracy":
            title = f"{_metric(one.metric)} kept"
            columns.append(Column(of(partial(_kept_of, one.metric)), title))
    return Table(columns, methods)


def _holds(method: Method) -> str:
    if method.best is None:
        return "none" if method.points else "not measured"
    return rate_in_bytes(method.sure)


def _largest(method: Method) -> str:
    stopped = method.reason == STOPPED and method.max_rate
    return rate_in_bytes(method.max_rate) + (" so far" if stopped else "")


def _bytes(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}"


def _bound(method: Method) -> str:
    return ", ".join(name.replace("_", " ") for name in method.binding) or MISSING


def _kept_of(metric: str, point: Point) -> str:
    found = point.kept(metric)
    return kept(found.share, found.share_interval)


def _curves(methods: Sequence[Method], goal: Target) -> Curves:
    """Return the share kept by rate: down to ten times what the target gives away."""
    floor = max(0.0, 1.0 - 10.0 * max(0.001, 1.0 - goal.target))
    series, hidden = [], False
    for one in methods:
        points = [(point.rate, point.kept(goal.metric)) for point in one.points]
        shown = [(rate, found) for rate, found in points if (found.share or 0.0) >= floor]
        hidden |= len(shown) < len(points)
        if shown:
            bounds = [found.share_interval or (None, None) for _, found in shown]
            low, high = zip(*bounds, strict=True)
            rates, shares = [rate for rate, _ in shown], [found.share for _, found in shown]
            series.append(Series(one.label, rates, shares, low, high, one.method))
    every = [rate for one in series for rate in one.x]
    if every:  # first, so that curves are drawn over it; of one rate all that a rate may be
        ends = [min(every), max(every)] if min(every) < max(every) else [min(0.0, *every), 1.0]
        name = f"target {goal.target:g}"
        series.insert(0, Series(name, ends, [goal.target] * 2, reference=True))
    title = f"Share of {_metric(goal.metric)} kept, by rate"
    axis = f"share kept (from {floor:g})" if hidden else "share kept"
    return Curves(series, title, "share of cache bytes saved", axis, height=14)


def _divergence(rows: Sequence[Row]) -> Table:
    columns = [
        _label(),
        Column(lambda row: number(row[1].perplexity, 4), "perplexity"),
        Column(lambda row: row[1].kl.mean, "KL mean (nats)", number),
        Column(lambda row: row[1].kl.p999, "KL p99.9", number),
        Column(lambda row: row[1].kl.worst, "KL, worst token", number),
    ]
    return Table(columns, rows)


def _tasks(result: FrontierResult, rows: Sequence[Row]) -> Iterator[Block]:
    """Yield right answers, a few tasks at a time."""

    def of(name: str) -> Any:
        return lambda row: f"{row[1].tasks[name].accuracy:.3f}" if name in row[1].tasks else MISSING

    names = [name for name, task in result.data.baseline.tasks.items() if task.judges]
    if names and rows:
        yield Heading("Tasks")
    for at in range(0, len(names) if rows else 0, _TASKS_AT_ONCE):
        few = names[at : at + _TASKS_AT_ONCE]
        yield Table([_label(), *(Column(of(one), one.replace("_", " ")) for one in few)], rows)
    yield from (Paragraph(note, "aside") for note in result.inputs.task_notes)


def _text(name: str) -> Any:
    def cell(row: Row) -> str:
        found = row[1].sources.get(name)
        return MISSING if found is None else kept(found.relative_accuracy, found.interval)

    return cell


def _running(result: FrontierResult, rows: Sequence[Row]) -> Iterator[Block]:
    """Yield what running each method takes, and its bytes of a long context."""
    known = [(one, point, long) for one, point in rows if (long := point.long_context)]
    if not known:
        return
    columns = [
        _label(),
        Column(lambda row: ", ".join(row[1].needs) or "nothing", "needs", words=True),
        Column(lambda row: _kernel(row[1].kernel), "kernels", words=True),
        Column(lambda row: rate_in_bytes(row[2].rate), f"rate at {count(known[0][2].context)}"),
        Column(lambda row: _bytes(row[2].bytes_per_token), "bytes per token"),
    ]
    yield from (Heading("Requirements"), Table(columns, known))
    where = f"{result.data.dtype} on {result.inputs.device or 'this device'}"
    yield Paragraph(f"Kernels: whether kvprof's kernels run the plan in {where}.", "aside")
    apart = [
        f"{one.label} ({rate_in_bytes(point.rate)} and {rate_in_bytes(long.rate)})"
        for one, point, long in known
        if abs(long.rate - point.rate) > _RATES_APART
    ]
    if apart:
        here = f"{result.data.context:,} tokens"
        said = f"Accuracy was measured at {here}, where rates differ: {', '.join(apart)}."
        yield Paragraph(said, "aside")


def _kernel(kernel: Kernel | None) -> str:
    if kernel is None:
        return MISSING
    part = f"{kernel.layers} of {kernel.of} layers" if kernel.layers else "no"
    return "yes" if kernel.reason is None else part
