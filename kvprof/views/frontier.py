"""The report of ``kvprof frontier``: which method keeps how many bytes at the same quality."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvprof.views.frontier_csv import to_csv
from kvprof.views.frontier_data import (
    best_point,
    curves,
    lowest_drawn,
    metric_name,
    ranked,
    single,
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
    "against full width in {dtype} at {context:,} tokens. Largest rate: the largest tested one "
    "that keeps the target, with every lower tested rate keeping it too; the other figures are "
    "measured there."
)
_INTERVAL = (
    "95 % interval: where the share would lie on other sequences of the same kind (paired "
    "bootstrap over sequences, method against uncompressed model on the same tokens)."
)
_WITHIN = (
    "Lies within: up to its lower end the whole interval of the share keeps the target, at its "
    "upper end the whole interval misses it. More --sequences narrow it, and so do more --points."
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
    parts += [paragraph(_answer(result), "bold"), Text(), main_table(result)]
    if lines := _reasons(result):
        parts += [Text(), bullets(lines)]
    by_source = source_table(result)
    if by_source is not None:
        parts += [heading("By text, at the largest rate"), by_source]
    parts += [Text(), _plot(result)]
    notes = [_RATE.format(dtype=data["dtype"], context=data["context"]), _INTERVAL]
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
    data = result["data"]
    goal = f"{100 * data['target']:g} % of the baseline's {metric_name(data['metric'])}"
    best = [
        (method["label"], method["max_rate"], point["compression_ratio"])
        for method in ranked(result)
        if (point := best_point(method)) is not None and method["label"] != "full"
    ]
    if not best and not result["complete"]:
        return f"Interrupted before any method was seen to keep {goal}."
    if not best or best[0][1] <= 0:
        return f"No method kept {goal} at any compressed rate that was tested."
    label, rate, ratio = best[0]
    text = f"With {goal} kept, {label} goes furthest: it saves {100 * rate:.1f} % of the cache's "
    text += f"bytes ({ratio:.2f} times smaller)."
    if len(best) > 1:
        text += f" Next comes {best[1][0]} with {100 * best[1][1]:.1f} %."
    return text


def _reasons(result: Mapping[str, Any]) -> list[str]:
    return [
        f"{method['label']}: {method['reason']}"
        for method in result["data"]["methods"]
        if method["reason"] is not None
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
