"""Report, CSV and figure of ``kvprof frontier``: which method keeps the fewest bytes as good?"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from kvprof.report.eval import apart_note, unable_note
from kvprof.views.figure import (
    draw_curves,
    draw_reference,
    outer_legend,
    panel_figure,
    titled,
)
from kvprof.views.frontier_data import (
    STOPPED,
    base_name,
    best_point,
    curves,
    furthest,
    interval_text,
    lowest_drawn,
    metric_name,
    ranked,
    share_at,
    share_text,
    single,
    sure_rate,
    targets_of,
    tasks_of,
    unable_tasks,
    uncompressed,
    undecided,
)
from kvprof.views.numbers import MISSING, count, number, rate_in_bytes
from kvprof.views.page import NO_INTERVAL, bullets, ends, framed, heading, tidy_csv, weights_row
from kvprof.views.plot import LinePlot, Series
from kvprof.views.tables import DataTable, SplitTable, columns

__all__ = ["figure", "report", "running_table", "to_csv"]

_RATE = (
    "Rate: the share of the cache's bytes that is saved, scales, windows and sinks counted, "
    "against {base} at {context:,} tokens. The other figures are measured at the rate that holds, "
    "or without one at the largest. none: no tested rate does; not measured: nothing was tested."
)
_HOLDS = (
    "Holds: the lower end of the 95 % interval keeps the target, at every lower tested rate too. "
    "Largest rate: the same of the point estimate. KL: of the next token from the uncompressed "
    "model, in nats; worst is a single token's."
)
_HALVES = (
    "One half of the text chose the rates; every figure is of the other half. 95 % interval: "
    "paired bootstrap over its sequences. More --sequences and --points narrow it."
)
_TOGETHER = (
    "Targets hold together: a rate keeps them where each of them is kept. Bound by: the targets "
    "that are missed at the smallest tested rate where any is."
)
_HEIGHT = 14


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report for people."""
    data = result["data"]
    parts: list[RenderableType] = [Text(), _main_table(result)]
    if lines := _reasons(result):
        parts += [Text(), bullets(lines)]
    by_source = _source_table(result)
    if by_source is not None:
        parts += [heading("By text, at that rate"), by_source]
    running = running_table(result)
    if running is not None:
        parts += [heading("What running it takes, at that rate"), running]
        parts += [Text(), bullets(_running_notes(result), "dim")]
    for target in targets_of(result):
        parts += [Text(), _plot(result, target)]
    notes = [_RATE.format(base=base_name(result), context=data["context"]), _HOLDS]
    if len(targets_of(result)) > 1:
        notes.append(_TOGETHER)
    if any("searched" in point for method in data["methods"] for point in method["points"]):
        notes.append(_HALVES)
    if all(method["max_rate_interval"] is None for method in data["methods"]):
        notes.append(NO_INTERVAL)
    if running is not None:
        notes.append(_NEEDS.format(dtype=data["dtype"], device=result["inputs"].get("device")))
    cautions = (
        unable_note(unable_tasks(result)),
        apart_note(result["inputs"].get("calibration", {})),
    )
    return framed(
        result,
        parts,
        answer=_answer(result),
        cautions=filter(None, cautions),
        notes=[*notes, *result["inputs"].get("task_notes", ()), *_apart(result)],
        measured_with=_provenance(result),
        width=width,
        colour=colour,
    )


_OWNERS = ("the baseline's", "its")


def _answer(result: Mapping[str, Any]) -> str:
    """Say what the result decides: only what whole intervals hold, and what was not measured."""
    data = result["data"]
    goal = " and ".join(
        f"{one['target']:g} of {_OWNERS[index > 0]} {metric_name(one['metric'])}"
        for index, one in enumerate(targets_of(result))
    )
    methods = [method for method in ranked(result) if method["label"] != "full"]
    if not result["complete"]:
        return (
            f"Interrupted, so there is no verdict on which method keeps {goal}. {_state(methods)}"
        )
    sure = sorted(
        [
            (rate, method)
            for method in methods
            if method["points"] and (rate := sure_rate(method)) and rate > 0
        ],
        key=lambda entry: -entry[0],
    )
    unknown = _named("Not measured", [one for one in methods if not one["points"]])
    if sure:
        return " ".join(filter(None, [_furthest(result, goal, sure, methods), unknown]))
    near = [method for method in methods if (method["max_rate"] or 0) > 0]
    if near:
        scored = data["baseline"].get("decoded_tokens")
        sample = "this sample" if scored is None else f"this sample of {scored:,} tokens"
        for one in targets_of(result):
            asked = data["baseline"]["tasks"].get(one["metric"])
            sample += "" if asked is None else f" and {asked['items']} questions of {one['metric']}"
        text = (
            f"No verdict: {sample} is too small to be sure that any method keeps {goal} at a "
            f"compressed rate. By point estimates alone {near[0]['label']} goes to "
            f"{100 * near[0]['max_rate']:.1f} %."
        )
    else:
        text = f"No method kept {goal} at any compressed rate that was tested."
    return " ".join(filter(None, [text, unknown]))


def _furthest(
    result: Mapping[str, Any],
    goal: str,
    sure: Sequence[tuple[float, Mapping[str, Any]]],
    methods: Sequence[Mapping[str, Any]],
) -> str:
    rate, best = sure[0]
    rivals = [one for one in methods if one is not best and (furthest(one) or 0) > rate]
    text = (
        f"{best['label']} holds {goal} with {100 * rate:.1f} % of the cache's bytes saved "
        f"({1 / (1 - rate):.2f} times smaller than {base_name(result)}): lower end of the 95 % "
        "interval."
    )
    if rivals:
        return f"{text} Whether these go further is open: {', '.join(map(_reach, rivals))}."
    if len(sure) > 1:
        text += f" Next comes {sure[1][1]['label']} with {100 * sure[1][0]:.1f} %."
    return text


def _reach(method: Mapping[str, Any]) -> str:
    low, high = sure_rate(method), furthest(method)
    assert high is not None
    text = f"{method['label']} ({100 * (low or 0):.1f}"
    return f"{text} % or more)" if high >= 1 else f"{text}–{100 * high:.1f} %)"


def _state(methods: Sequence[Mapping[str, Any]]) -> str:
    """Say how far each search of an interrupted frontier came."""
    kinds = {
        "Searched to the end": [m for m in methods if m["points"] and m["reason"] != STOPPED],
        "Stopped on the way": [m for m in methods if m["points"] and m["reason"] == STOPPED],
        "Not measured": [m for m in methods if not m["points"]],
    }
    return " ".join(text for kind, found in kinds.items() if (text := _named(kind, found)))


def _named(kind: str, methods: Sequence[Mapping[str, Any]]) -> str:
    names = ", ".join(method["label"] for method in methods)
    return f"{kind}: {names}." if names else ""


def _reasons(result: Mapping[str, Any]) -> list[str]:
    return [
        f"{method['label']}: {'' if method['points'] else 'not measured: '}{method['reason']}"
        for method in result["data"]["methods"]
        if method["reason"] is not None and not (method["label"] == "full" and not method["points"])
    ]


def _plot(result: Mapping[str, Any], target: Mapping[str, Any]) -> LinePlot:
    metric, least = target["metric"], float(target["target"])
    floor = lowest_drawn(least)
    drawn = curves(result, floor, metric)
    rates = [rate for one in drawn for rate in one.x]
    shares = [
        share_at(point, metric)["share"]
        for method in result["data"]["methods"]
        for point in method["points"]
    ]
    hidden = any(share is not None and share < floor for share in shares)
    if rates:
        # First, so that curves are drawn over it. Of one rate alone all that a rate may be.
        ends = [min(rates), max(rates)] if min(rates) < max(rates) else [min(0.0, *rates), 1.0]
        drawn = [Series(f"target {least:g}", ends, [least] * 2), *drawn]
    title = f"Share of the baseline's {metric_name(metric)} kept, by rate"
    if hidden:
        title += f" (points below {floor:g} are left out)"
    return LinePlot(drawn, title, "KV compression rate (bytes)", "share kept", height=_HEIGHT)


def _apart(result: Mapping[str, Any]) -> list[str]:
    """Say which neighbours in the ranking the sample does not tell apart."""
    lines = []
    pairs = undecided(result)
    if pairs:
        named = "; ".join(f"{one} and {other}" for one, other in pairs)
        lines.append(
            f"Cannot be told apart on this sample, because where they lie overlaps: {named}."
        )
    if any(single(method) for method in result["data"]["methods"]):
        names = [method["label"] for method in result["data"]["methods"] if single(method)]
        lines.append(f"Nothing to turn, so one point each: {', '.join(names)}.")
    return lines


def _provenance(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the figures depend on, in words; None for what the result does not name."""
    inputs, data = result["inputs"], result["data"]
    base = data["baseline"]
    whole = [f"accuracy {base['accuracy']:.4f}", f"perplexity {base['perplexity']:.4g}"]
    whole += [
        f"{name.replace('_', ' ')} {task['accuracy']:.3f}" for name, task in base["tasks"].items()
    ]
    tested = sum(len(method["points"]) for method in data["methods"])
    return {
        "model": inputs["model"],
        **weights_row(inputs),
        "fingerprint": inputs["fingerprint"],
        "uncompressed": ", ".join(whole),
        "text": _text(inputs, base.get("decoded_tokens", 0)),
        "tasks": _tasks(inputs),
        "protocol": _PROTOCOLS.get(inputs.get("protocol", "")),
        "calibration": _calibration(inputs.get("calibration", {})) or None,
        "evaluations": f"{tested}, at most {inputs.get('points', '?')} per method",
        "dtype": f"{data['dtype']} on {inputs['device']}" if inputs.get("device") else None,
    }


_PROTOCOLS = {
    "decode": "half of each sequence prefilled, the rest decoded token by token and scored",
    "one_pass": "the second half of each sequence scored in one pass that reads as decoding does",
}


def _text(inputs: Mapping[str, Any], scored: int) -> str | None:
    names: Sequence[str] = inputs.get("text", ())
    if not names:
        return None
    return (
        f"{', '.join(names)}; {inputs['sequences']} sequences of {inputs['seq_len']:,} tokens in "
        f"all, {scored:,} tokens scored"
    )


def _calibration(known: Mapping[str, Mapping[str, Any]]) -> str:
    """Say what methods were calibrated on, those on the same data together."""
    by_data: dict[str, list[str]] = {}
    for label, data in known.items():
        text = f"{count(data['tokens'])} tokens of {data['source']}"
        if data.get("seq_len"):
            text += f" in sequences of {data['seq_len']:,}"
        by_data.setdefault(text, []).append(label)
    return "; ".join(f"{', '.join(labels)}: {text}" for text, labels in by_data.items())


def _tasks(inputs: Mapping[str, Any]) -> str | None:
    names: Sequence[str] = inputs.get("tasks", ())
    if not names:
        return None
    return f"{', '.join(names)}; {inputs['task_items']} questions in all"


# --- The tables: what each method keeps, and what it costs there.

_TASKS_AT_ONCE = 4  # columns


def _main_table(result: Mapping[str, Any]) -> SplitTable:
    """Return one row per method by falling rate, with every figure at its largest rate."""
    tasks = [task for task in tasks_of(result) if task not in unable_tasks(result)]
    targets = targets_of(result)
    several = len(targets) > 1
    # The accuracy has columns anyway; of one target, a task's score says what its share would.
    own = [
        one["metric"]
        for one in targets
        if one["metric"] != "accuracy" and (several or one["metric"] not in ("perplexity", *tasks))
    ]
    holds = "holds" if several else f"holds {targets[0]['target']:g}"
    saved = (
        holds,
        "largest rate",
        *(["bound by"] if several else []),
        "times smaller",
        "bytes per token",
    )
    kept = (
        "share of accuracy",
        "95 % interval",
        *(f"share of {metric_name(metric)}" for metric in own),
        "perplexity",
    )
    divergence = ("KL mean", "KL p99.9", "KL worst")
    answers = [task.replace("_", " ") for task in tasks]
    heads = columns("method", figures=(*saved, *kept, *divergence, *answers))
    rows = []
    for method in ranked(result):
        point = best_point(method)
        sure, rate = sure_rate(method), method["max_rate"]
        if method["label"] == "full" and not method["points"]:
            point, sure, rate = uncompressed(result), 0.0, 0.0
        if point is None:
            known = "none" if method["points"] else "not measured"
            row = [method["label"], known, *[MISSING] * (len(heads) - 2)]
            if several:
                row[3] = _bound(method)
            rows.append(row)
            continue
        rows.append(
            [
                method["label"],
                MISSING if sure is None else rate_in_bytes(sure),
                rate_in_bytes(rate) + (" so far" if method["reason"] == STOPPED and rate else ""),
                *([_bound(method)] if several else []),
                f"{point['compression_ratio']:.2f}",
                MISSING if point["bytes_per_token"] is None else f"{point['bytes_per_token']:,.0f}",
                share_text(point["relative_accuracy"]),
                interval_text(point.get("relative_accuracy_interval")),
                *(
                    share_text(share_at(point, metric if several else None)["share"])
                    for metric in own
                ),
                number(point["perplexity"], 4),
                *(number(point["kl"].get(part)) for part in _KL),
                *(_task(point, task) for task in tasks),
            ]
        )
    # Few columns at a time, so that any number of tasks breaks into tables that fit.
    few = [min(_TASKS_AT_ONCE, len(tasks) - at) for at in range(0, len(tasks), _TASKS_AT_ONCE)]
    return SplitTable(heads, rows, (len(saved), len(kept), len(divergence), *few))


def _source_table(result: Mapping[str, Any]) -> DataTable | None:
    """Return the share of accuracy kept on each text at the largest rate; None for one text."""
    best = [(method["label"], best_point(method)) for method in ranked(result)]
    known = [(label, point) for label, point in best if point is not None and "sources" in point]
    names = list(dict.fromkeys(name for _, point in known for name in point["sources"]))
    if len(names) < 2:
        return None
    rows = []
    for label, point in known:
        cells = [label]
        for name in names:
            found = point["sources"].get(name)
            share = MISSING if found is None else share_text(found["relative_accuracy"])
            bounds = None if found is None else found.get("interval")
            cells.append(f"{share} {interval_text(bounds)}" if bounds else share)
        rows.append(cells)
    return DataTable(columns("share of accuracy", figures=names), rows)


def _bound(method: Mapping[str, Any]) -> str:
    return ", ".join(name.replace("_", " ") for name in method.get("binding", ())) or MISSING


def _task(point: Mapping[str, Any], task: str) -> str:
    found = point["tasks"].get(task)
    return MISSING if found is None else f"{found['accuracy']:.3f}"


# --- What each method takes to run.

_NEEDS = (
    "Needs: online, projections beside the model's own; folded, weights that a basis is multiplied "
    "into; rebuilt, keys made anew from their latents at every use; restored, a stored prompt "
    "brought back to full width, from which decoding goes on: bytes and rate are those at rest. No "
    "plan fetches from another memory what it stores. Kernel: whether kvprof's kernels run it in "
    "{dtype} on {device}."
)


def running_table(result: Mapping[str, Any]) -> SplitTable | None:
    """Return what running each method takes, and its bytes of a long context."""
    known = [
        (method, point)
        for method in ranked(result)
        if (point := best_point(method)) is not None and "kernel" in point
    ]
    if not known:
        return None
    long = known[0][1]["long_context"]["context"]
    heads = [
        *columns("method", "needs", "kernel"),
        *columns(figures=(f"rate at {count(long)}", "bytes per token", "share kept")),
    ]
    rows = [
        [
            method["label"],
            ", ".join(point["needs"]) or "nothing",
            _kernel(point["kernel"]),
            rate_in_bytes(point["long_context"]["rate"]),
            f"{point['long_context']['bytes_per_token']:,.0f}",
            share_text(share_at(point)["share"]),
        ]
        for method, point in known
    ]
    return SplitTable(heads, rows, (2, 3))


def _kernel(kernel: Mapping[str, Any]) -> str:
    if kernel["reason"] is None:
        return "yes"
    return f"{kernel['layers']} of {kernel['of']} layers" if kernel["layers"] else "no"


# Of the bytes: rates at two contexts further apart than this are said to be.
_RATES_APART = 0.05


def _running_notes(result: Mapping[str, Any]) -> list[str]:
    """Say which shares were measured at another rate than the long context's."""
    # Windows and sinks that stay exact are most of a short context and nothing of a long one.
    apart = [
        f"{method['label']} ({rate_in_bytes(point['rate'])} and "
        f"{rate_in_bytes(point['long_context']['rate'])})"
        for method in ranked(result)
        if (point := best_point(method)) is not None
        and "long_context" in point
        and abs(point["long_context"]["rate"] - point["rate"]) > _RATES_APART
    ]
    if not apart:
        return []
    return [
        f"The share kept was measured at {result['data']['context']:,} tokens, where these "
        f"save another rate than over the long context: {', '.join(apart)}. What they keep "
        "there was not measured."
    ]


# --- A frontier result as one tidy table.

_FIGURES = ("compression_ratio", "bytes_per_token", "share")
_QUALITY = ("accuracy", "relative_accuracy")
_KL = ("mean", "p999", "worst")


def to_csv(result: Mapping[str, Any]) -> str:
    """Return a frontier with one row per tested rate, which pandas reads as it is.

    ``sure_rate`` and ``max_rate`` say which row of a method is that rate. Columns of tasks are
    ``task_<name>`` and ``task_<name>_baseline``. Floats are written in full (`repr`).
    """
    tasks = tasks_of(result)
    others = [one["metric"] for one in targets_of(result)[1:]]
    columns = (
        "label",
        "method",
        "options",
        "target",
        "metric",
        "targets",
        "context",
        "dtype",
        "rate",
        "rate_asked",
        "sure_rate",
        "max_rate",
        "binding",
        *_FIGURES,
        "needs",
        "kernel",
        "long_context",
        "long_rate",
        "long_bytes_per_token",
        "share_low",
        "share_high",
        *(f"share_{metric}{end}" for metric in others for end in ("", "_low", "_high")),
        *_QUALITY,
        "relative_accuracy_low",
        "relative_accuracy_high",
        "perplexity",
        "baseline_perplexity",
        *(f"kl_{part}" for part in _KL),
        *(f"task_{task}{end}" for task in tasks for end in ("", "_baseline")),
    )
    return tidy_csv(columns, _rows(result, tasks, others))


def _rows(
    result: Mapping[str, Any], tasks: list[str], others: list[str]
) -> Iterator[dict[str, Any]]:
    data = result["data"]
    common = {key: data[key] for key in ("target", "metric", "context", "dtype")}
    common["targets"] = ";".join(f"{one['metric']}={one['target']}" for one in targets_of(result))
    for method in data["methods"]:
        for point in method["points"]:
            row = {
                "label": method["label"],
                "method": method["method"],
                "options": json.dumps(method["options"], sort_keys=True),
                **common,
                "rate": point["rate"],
                "rate_asked": point.get("rate_asked"),
                "sure_rate": point["rate"] == sure_rate(method),
                "max_rate": point["rate"] == method["max_rate"],
                "binding": ";".join(method.get("binding", ())),
                **_running_cells(point),
                **{key: point.get(key) for key in (*_FIGURES, *_QUALITY)},
                **ends("share", point["share_interval"]),
                **ends("relative_accuracy", point.get("relative_accuracy_interval")),
                "perplexity": point["perplexity"],
                "baseline_perplexity": data["baseline"]["perplexity"],
                **{f"kl_{part}": point.get("kl", {}).get(part) for part in _KL},
            }
            for metric in others:
                kept = share_at(point, metric)
                row[f"share_{metric}"] = kept["share"]
                row |= ends(f"share_{metric}", kept["share_interval"])
            for task in tasks:
                found = point["tasks"].get(task, {})
                row[f"task_{task}"] = found.get("accuracy")
                row[f"task_{task}_baseline"] = found.get("baseline")
            yield row


def _running_cells(point: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a CSV row says of running a point."""
    if "kernel" not in point:
        return {}
    long = point["long_context"]
    return {
        "needs": ";".join(point["needs"]),
        "kernel": point["kernel"]["reason"] is None,
        "long_context": long["context"],
        "long_rate": long["rate"],
        "long_bytes_per_token": long["bytes_per_token"],
    }


# --- The figure: the share of the baseline that each method keeps, against its rate.


def figure(result: Mapping[str, Any]) -> Any:
    """Return the curves with their intervals as bands, the target as a line: a panel per target.

    The axis ends where ten times what the target gives away is lost; curves run out of it.
    """
    title = titled(result, f"{result['inputs']['model']} at {result['data']['context']:,} tokens")
    targets = targets_of(result)
    draws: list[Callable[[Any], None]] = [
        partial(_draw_target, result, target) for target in targets
    ]
    names = len(curves(result))
    lines = -(-names // _NAMES_BESIDE) if names > _NAMES_INSIDE else 0
    drawing = panel_figure(
        draws,
        (6.4, 4.2),
        columns=2,
        margin=(0.0, 0.2 * lines),
        title=title if len(draws) > 1 else "",
    )
    if len(draws) == 1:
        drawing.axes[0].set_title(title, fontsize="medium")
    if lines:  # as many names would hide the curves
        handles: dict[str, Any] = {}
        for axes in drawing.axes[: len(targets)]:
            handles |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
            axes.get_legend().remove()
        outer_legend(drawing, handles, _NAMES_BESIDE if len(draws) > 1 else _NAMES_BESIDE // 2)
    return drawing


# Curves that a panel has room to name, and names side by side under two panels.
_NAMES_INSIDE, _NAMES_BESIDE = 9, 4


def _draw_target(result: Mapping[str, Any], target: Mapping[str, Any], axes: Any) -> None:
    draw_curves(
        axes,
        curves(result, metric=target["metric"]),
        title="",
        x_label="KV compression rate (bytes, everything counted)",
        y_label=f"share of the baseline's {metric_name(target['metric'])}",
    )
    draw_reference(axes, target["target"], f"{target['target']:g}")
    floor = lowest_drawn(float(target["target"]))
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, floor), min(high, max(1.0 + (1.0 - floor) / 4, target["target"])))
    axes.set_xlim(right=min(1.0, axes.get_xlim()[1]))  # what is saved is less than all
