"""The report of ``kvprof frontier``: which method keeps how many bytes at the same quality."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvprof.views.evaluation import apart_note
from kvprof.views.frontier_csv import to_csv
from kvprof.views.frontier_data import (
    STOPPED,
    base_name,
    curves,
    furthest,
    lowest_drawn,
    metric_name,
    ranked,
    single,
    sure_rate,
    undecided,
)
from kvprof.views.frontier_figure import figure
from kvprof.views.frontier_tables import main_table, source_table
from kvprof.views.numbers import count
from kvprof.views.page import Fitted, bullets, heading, incomplete_note, paragraph
from kvprof.views.plot import LinePlot, Series
from kvprof.views.tables import key_values

__all__ = ["figure", "report", "to_csv"]

_RATE = (
    "Rate: the share of the cache's bytes that is saved, scales, windows and sinks counted, "
    "against {base} at {context:,} tokens. Largest rate: the largest tested one that keeps the "
    "target by its point estimate, with every lower tested rate keeping it too; the other figures "
    "are measured there. none: no tested rate does; not measured: nothing was tested."
)
_INTERVAL = (
    "95 % interval: where the share would lie on other sequences of the same kind (paired "
    "bootstrap over sequences, method against uncompressed model on the same tokens)."
)
_WITHIN = (
    "Lies within: up to its lower end the whole interval of the share keeps the target, on a "
    "sample that would have shown a loss as large; at its upper end the whole interval misses it. "
    "What is said first rests on the lower end. More --sequences narrow it, and so do more "
    "--points."
)
_HEIGHT = 14


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report for people.

    Parameters
    ----------
    result : mapping
        A result of kind ``frontier``.
    width : int or None
        Columns at most; None takes the console's.
    colour : bool
        False leaves out every escape code.
    """
    data = result["data"]
    parts: list[RenderableType] = []
    if not result["complete"]:
        parts += [incomplete_note(), Text()]
    parts.append(paragraph(_answer(result), "bold"))
    if apart := apart_note(result["inputs"].get("calibration", {})):
        parts.append(paragraph(apart, "yellow"))
    parts += [Text(), main_table(result)]
    if lines := _reasons(result):
        parts += [Text(), bullets(lines)]
    by_source = source_table(result)
    if by_source is not None:
        parts += [heading("By text, at the largest rate"), by_source]
    parts += [Text(), _plot(result)]
    notes = [_RATE.format(base=base_name(result), context=data["context"]), _INTERVAL]
    if any(method["max_rate_interval"] is not None for method in data["methods"]):
        notes.append(_WITHIN)
    parts += [heading("How to read this"), bullets([*notes, *_apart(result)])]
    parts += [heading("Measured with"), key_values(_provenance(result))]
    if result["warnings"]:
        parts += [heading("Warnings"), bullets(result["warnings"], "yellow")]
    if not result["complete"]:
        parts += [Text(), incomplete_note()]
    return Fitted(Group(*parts), width=width, colour=colour)


def _answer(result: Mapping[str, Any]) -> str:
    """Say what the result decides: only what whole intervals hold, and what was not measured."""
    data = result["data"]
    goal = f"{100 * data['target']:g} % of the baseline's {metric_name(data['metric'])}"
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
    how = "saves most for sure" if rivals else "goes furthest"
    text = (
        f"With {goal} kept, {best['label']} {how}: {100 * rate:.1f} % of the cache's bytes at "
        f"{base_name(result)} ({1 / (1 - rate):.2f} times smaller)."
    )
    if rivals:
        return f"{text} Further than that may go: {', '.join(map(_reach, rivals))}."
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


def _plot(result: Mapping[str, Any]) -> LinePlot:
    data = result["data"]
    floor = lowest_drawn(result)
    drawn = curves(result, floor)
    rates = [rate for one in drawn for rate in one.x]
    hidden = any(
        point["share"] is not None and point["share"] < floor
        for method in data["methods"]
        for point in method["points"]
    )
    if rates:
        # First, so that curves are drawn over it.
        ends = [min(rates), max(rates)]
        drawn = [Series(f"target {data['target']:g}", ends, [data["target"]] * 2), *drawn]
    title = f"Share of the baseline's {metric_name(data['metric'])} kept, by rate"
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


def _provenance(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what the figures depend on, in words; what the result does not name is left out."""
    inputs, data = result["inputs"], result["data"]
    base = data["baseline"]
    whole = [f"accuracy {base['accuracy']:.4f}", f"perplexity {base['perplexity']:.4g}"]
    whole += [
        f"{name.replace('_', ' ')} {task['accuracy']:.3f}" for name, task in base["tasks"].items()
    ]
    tested = sum(len(method["points"]) for method in data["methods"])
    shown = {
        "model": inputs["model"],
        "fingerprint": inputs["fingerprint"],
        "uncompressed": ", ".join(whole),
        "text": _text(inputs, base.get("decoded_tokens", 0)),
        "tasks": _tasks(inputs),
        "protocol": _PROTOCOLS.get(inputs.get("protocol", "")),
        "calibration": _calibration(inputs.get("calibration", {})),
        "evaluations": f"{tested}, at most {inputs.get('points', '?')} per method",
        "dtype": f"{data['dtype']} on {inputs['device']}" if inputs.get("device") else None,
        "written": result.get("created"),
    }
    return {key: str(value) for key, value in shown.items() if value}


_PROTOCOLS = {
    "decode": "half of each sequence prefilled, the rest decoded token by token and scored",
    "teacher_forced": "teacher-forced: the second half of each sequence scored in a single pass",
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
