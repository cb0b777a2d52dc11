"""The report of ``kvprof eval``: what a compressed cache costs in accuracy."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvprof.views.evaluation_csv import to_csv
from kvprof.views.evaluation_figure import figure
from kvprof.views.evaluation_tables import (
    depth_table,
    harness_table,
    interval_text,
    main_table,
    source_table,
    task_columns,
    worst_table,
)
from kvprof.views.numbers import percent
from kvprof.views.page import Fitted, bullets, heading, incomplete_note, paragraph
from kvprof.views.tables import key_values

__all__ = ["apart_note", "figure", "report", "to_csv"]

_RATE = (
    "Rate: the share of the cache's bytes that is saved, scales, windows and sinks counted, "
    "against full width in {dtype} at {context:,} tokens (the mean context of a scored token)."
)
_KEPT = (
    "Accuracy: per cent of the scored tokens that were the likeliest. Kept: that accuracy over the "
    "uncompressed model's. 95 % interval: where it would lie on other sequences of the same kind "
    "(paired bootstrap over sequences, both models on the same tokens)."
)
_KL = (
    "KL: divergence of the next token's distribution from the uncompressed model's, in nats; the "
    "worst is that of a single token. Row full is the uncompressed model itself, so it has none."
)
_FULL_RUN = (
    "KL: divergence of the next token's distribution from the uncompressed model's, in nats; the "
    "worst is that of a single token. Row full ran through the compressed cache at full width."
)
_TASKS = (
    "Tasks: questions answered right, every token of the answer, by greedy decoding through the "
    "cache; the first token comes from the prompt's own pass."
)
_PROTOCOLS = {
    "decode": "the first half of each sequence is prefilled in one pass, which as in use attends "
    "to its own tokens before they are quantised or evicted and predicts the first token scored; "
    "the rest is decoded step by step through the compressed cache and scored",
    "teacher_forced": "TEACHER-FORCED: a single pass over each sequence, its second half scored; "
    "methods of which a single pass does not show all (quantisers, eviction, token levels) have no "
    "figures so",
}


def report(
    result: Mapping[str, Any], width: int | None = None, colour: bool = True
) -> RenderableType:
    """Return the report for people.

    Parameters
    ----------
    result : mapping
        A result of kind ``eval``.
    width : int or None
        Columns at most; None takes the console's.
    colour : bool
        False leaves out every escape code.
    """
    data = result["data"]
    evaluations = data["evaluations"]
    parts: list[RenderableType] = []
    if not result["complete"]:
        parts += [incomplete_note(), Text()]
    if evaluations:
        parts += [paragraph(_answer(evaluations, data["dtype"]), "bold")]
        if not result["complete"] and (left := _unmeasured(result["inputs"], evaluations)):
            parts.append(paragraph(f"Not measured: {', '.join(left)}.", "yellow"))
        if apart := _apart(evaluations):
            parts.append(paragraph(apart, "yellow"))
        parts += [Text(), main_table(evaluations, data["dtype"])]
        by_source = source_table(evaluations)
        if by_source is not None:
            parts += [heading("By text"), by_source]
        parts += _task_part(evaluations)
        parts += _worst_part(evaluations)
    if data["harness"] is not None and data["harness"]["rows"]:
        parts += [heading("lm-evaluation-harness"), harness_table(data["harness"]["rows"])]
        protocol = data["harness"]["protocol"]
        parts += [paragraph(f"By its own protocol, not the one above ({protocol}).", "dim")]
    if evaluations:
        parts += [heading("How to read this"), bullets(_notes(result))]
    parts += [heading("Measured with"), key_values(_provenance(result))]
    if result["warnings"]:
        parts += [heading("Warnings"), bullets(result["warnings"], "yellow")]
    if not result["complete"]:
        parts += [Text(), incomplete_note()]
    return Fitted(Group(*parts), width=width, colour=colour)


def _asked(evaluations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows that are not always there, or all but the baseline when there are none."""
    own = [one for one in evaluations if one["method"] not in ("full", "fp8")]
    return own or [one for one in evaluations if one["method"] != "full"] or list(evaluations)


def _answer(evaluations: Sequence[Mapping[str, Any]], dtype: str) -> str:
    if all(one["method"] == "full" for one in evaluations):
        return "Only the uncompressed model was measured: there is nothing to compare it with."
    sentences = []
    for one in _asked(evaluations):
        kept = f"{percent(one['relative_accuracy'])} of the uncompressed model's accuracy"
        if one["relative_accuracy"] is None:
            kept = "an accuracy that the uncompressed model, which has none, gives no measure for"
        bounds = one["relative_accuracy_interval"]
        spread = "" if bounds is None else f" (95 % interval {interval_text(bounds)} %)"
        saved = f"saves {percent(one['rate'])} of the cache's bytes at full width in {dtype}"
        sentences.append(f"{one['method']} {saved} and keeps {kept}{spread}.")
    return " ".join(sentences)


def _unmeasured(inputs: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the methods that were asked for and have no row, as far as the record names them."""
    asked = inputs.get("methods")
    measured = {one["method"] for one in evaluations}
    names = asked if isinstance(asked, list) else []
    return [name for name in names if isinstance(name, str) and name not in measured]


def apart_note(calibrated: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Say that methods were calibrated on different tokens; None where that is not so.

    Parameters
    ----------
    calibrated : mapping
        By method: ``source``, ``tokens`` and ``seq_len`` of its calibration.
    """
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


def _apart(evaluations: Sequence[Mapping[str, Any]]) -> str | None:
    return apart_note(_calibrated(evaluations))


def _calibrated(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {
        one["method"]: found
        for one in evaluations
        if one["plan"] is not None and (found := one["plan"]["made"].get("calibration")) is not None
    }


def _task_part(evaluations: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    tables = [depth_table(evaluations, by) for by in ("by_depth", "by_length")]
    shown = [table for table in tables if table is not None]
    if not shown:
        return []
    parts: list[RenderableType] = [heading("Tasks by depth and length")]
    for place, table in enumerate(shown):
        parts += [Text(), table] if place else [table]
    return parts


def _worst_part(evaluations: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    tables = [worst_table(one) for one in _asked(evaluations)]
    shown = [table for table in tables if table is not None]
    parts: list[RenderableType] = [heading("Worst tokens")] if shown else []
    for place, table in enumerate(shown):
        parts += [Text(), table] if place else [table]
    return parts


def _notes(result: Mapping[str, Any]) -> list[str]:
    data = result["data"]
    evaluations = data["evaluations"]
    ran = any(one["method"] == "full" and one["plan"] is not None for one in evaluations)
    notes = [
        _RATE.format(dtype=data["dtype"], context=data["context"]),
        _KEPT,
        _FULL_RUN if ran else _KL,
    ]
    if task_columns(evaluations):
        notes.append(_TASKS)
    return notes


def _provenance(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what the figures depend on, in words; what the result does not name is left out."""
    inputs, evaluations = result["inputs"], result["data"]["evaluations"]
    calibrated = _calibrated(evaluations)
    tokens = max((one["decoded_tokens"] for one in evaluations), default=0)
    shown = {
        "model": inputs["model"],
        "fingerprint": inputs["fingerprint"],
        "protocol": _PROTOCOLS[inputs["protocol"]],
        "text": f"{', '.join(inputs['text'])}: {inputs['sequences']} sequences of "
        f"{inputs['seq_len']:,} tokens, {tokens:,} scored",
        "tasks": f"{', '.join(inputs['tasks']).replace('_', ' ')}: {inputs['task_items']} questions"
        if inputs["tasks"]
        else None,
        "calibration": "; ".join(_calibration(name, of) for name, of in calibrated.items()) or None,
        "plan": inputs["plan"],
        "dtype": f"{inputs['dtype']} on {inputs['device']}",
        "seconds": ", ".join(f"{one['method']} {one['seconds']:.0f}" for one in evaluations),
        "written": result.get("created"),
    }
    return {key: str(value) for key, value in shown.items() if value is not None}


def _calibration(method: str, found: Mapping[str, Any]) -> str:
    return f"{method} on {_calibration_data(found)}"


def _calibration_data(found: Mapping[str, Any]) -> str:
    # The embedded samples have a split of their own for it.
    split = " (calibration split)" if found["source"] in ("prose", "code", "tasks") else ""
    length = f" in sequences of {found['seq_len']:,}" if found.get("seq_len") else ""
    return f"{found['tokens']:,} tokens of {found['source']}{split}{length}"
