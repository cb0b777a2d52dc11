"""What a run of recipes leaves: an entry per recipe, its verdict and all that led to it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kvprof.errors import ExitCode
from kvprof.recipes.machine import on_cpu
from kvprof.recipes.measures import Measured, measure_all
from kvprof.recipes.recipe import Line, Recipe
from kvprof.recipes.resolve import filled_measures
from kvprof.version import __version__

if TYPE_CHECKING:
    from kvprof.recipes.machine import Machine
    from kvprof.recipes.resolve import Cell, Planned
    from kvprof.recipes.runs import CellRun

__all__ = [
    "NOT_REPRODUCED",
    "NOT_TESTABLE",
    "REPRODUCED",
    "TREND",
    "VERDICTS",
    "JudgedLine",
    "entry_of",
    "judge_line",
    "ledger_data",
    "merge_entries",
    "model_of",
    "open_because",
    "verdict_of",
    "why_untestable",
]

# --- Whether a claim holds of what was measured.


REPRODUCED = "reproduced"
TREND = "trend only"
NOT_REPRODUCED = "not reproduced"
NOT_TESTABLE = "not testable here"
VERDICTS = (REPRODUCED, TREND, NOT_REPRODUCED, NOT_TESTABLE)

#: The model that ships: 20M parameters, trained for kvprof, and no witness of large models.
_REFERENCE = "reference"


@dataclass(frozen=True)
class JudgedLine:
    """A line of a verdict and what became of it."""

    line: Line
    measured: Measured
    #: None where that cannot be told: nothing was measured, what was is doubtful, or `uncertain`.
    holds: bool | None
    uncertain: bool  # whether the limit, with its tolerance, lies inside the measure's interval


def judge_line(line: Line, measured: Measured) -> JudgedLine:
    """Hold a measure against its line; a limit inside the interval is neither met nor missed."""
    if measured.value is None:
        return JudgedLine(line, measured, None, False)
    uncertain = measured.interval is not None and any(
        measured.interval[0] <= limit <= measured.interval[1] for limit in _limits(line)
    )
    open_ = uncertain or measured.doubt is not None
    return JudgedLine(line, measured, None if open_ else _holds(line, measured.value), uncertain)


def open_because(judged: JudgedLine) -> str | None:
    """Return why a line is open though something was measured; None where it is not."""
    if judged.measured.value is None or judged.holds is not None:
        return None
    if judged.measured.doubt is not None:
        return judged.measured.doubt
    assert judged.measured.interval is not None
    low, high = judged.measured.interval
    limits = " or ".join(
        f"{x:.4g}" for x in dict.fromkeys(_limits(judged.line)) if low <= x <= high
    )
    name = judged.line.measure
    return f"{name}: {limits} is inside its interval, {low:.4g} to {high:.4g}"


def _slack(line: Line, limit: float) -> float:
    if line.tolerance_share is not None:
        return line.tolerance_share * abs(limit)
    return line.tolerance or 0.0


def _limits(line: Line) -> tuple[float, ...]:
    """Return the limits with their tolerance: one, or a lower and an upper one."""
    low, high = line.limit[0], line.limit[-1]
    lower, upper = low - _slack(line, low), high + _slack(line, high)
    if line.check in ("at_least", "above"):
        return (lower,)
    if line.check in ("at_most", "below"):
        return (upper,)
    return (lower, upper)


def _holds(line: Line, value: float) -> bool:
    limits = _limits(line)
    match line.check:
        case "at_least":
            return value >= limits[0]
        case "above":
            return value > limits[0]
        case "at_most":
            return value <= limits[0]
        case "below":
            return value < limits[0]
    return limits[0] <= value <= limits[1]


def verdict_of(lines: Sequence[JudgedLine]) -> str:
    """Return the verdict: all lines hold, only the paper's direction does, or neither.

    A line of the direction that fails decides against the claim, as any line does where no
    direction is stated. What was not measured leaves it open, and so does a line that is open where
    the direction does not hold without it.
    """
    direction = [line for line in lines if line.line.direction]
    if any(line.holds is False for line in direction or lines):
        return NOT_REPRODUCED
    if not lines or any(line.measured.value is None for line in lines):
        return NOT_TESTABLE
    if all(line.holds for line in lines) and len(direction) < len(lines):
        return REPRODUCED
    if direction and all(line.holds for line in direction):
        return TREND
    return NOT_TESTABLE


def model_of(commands: Sequence[Sequence[str]]) -> str | None:
    """Return which model a verdict rests on, as its commands name it: ``smollm2``, ``reference``.

    A command that times a layer's shape with random data needs no weights: ``shape of reference``.
    """
    found: dict[str, None] = {}
    for command, *words in commands:
        # Every other command that a cell may run takes its model first.
        if command != "bench" and words and not words[0].startswith("-"):
            found[words[0]] = None
        elif "--model" in words[:-1] or "--real" in words:
            named = words[words.index("--model") + 1] if "--model" in words else _REFERENCE
            found[named if "--real" in words else f"shape of {named}"] = None
    return ", ".join(found) or None


def entry_of(
    planned: "Planned",
    cells: Sequence[tuple["Cell", "CellRun"]],
    *,
    machine: "Machine",
    settings: Mapping[str, str],
) -> dict[str, Any]:
    """Return a recipe's entry."""
    recipe, profile = planned.recipe, planned.profile
    results = {cell.id: run.outcome.result for cell, run in cells if run.outcome.result is not None}
    failures = {
        cell.id: f"{cell.id}: {run.outcome.message}"
        for cell, run in cells
        if run.outcome.result is None
    }
    # Without a run there is nothing to measure: the entry says why, and that is all.
    ran = profile is not None and planned.open is None
    measures = filled_measures(profile, settings) if ran and profile else []
    measured = measure_all(measures, results, failures)
    units = {one.id: one.unit for one in profile.measures} if profile else {}
    judged = (
        [judge_line(line, measured[line.measure]) for line in profile.verdict]
        if ran and profile
        else []
    )
    model = model_of([cell.words for cell, _ in cells])
    untestable = recipe.judged or why_untestable(recipe, model)
    verdict = NOT_TESTABLE if not ran or untestable else verdict_of(judged)
    reasons = list(dict.fromkeys(one for one in (planned.open, untestable) if one))
    reasons += failures.values()
    reasons += [
        one.measured.missing
        for one in judged
        if one.measured.missing is not None and one.measured.missing not in reasons
    ]
    reasons += [why for one in judged if (why := open_because(one)) is not None]
    reasons += [
        f"{cell}: incomplete: {result['incomplete_reason']}"
        for cell, result in results.items()
        if not result["complete"]
    ]
    about = {one.line.published for one in judged}
    gpu, cpu = _machine(machine, cells)
    return {
        "recipe": recipe.name,
        "paper": recipe.paper,
        "item": recipe.item,
        "claim": recipe.claim,
        "direction": recipe.direction,
        "profile": profile.name if profile is not None else None,
        "stand_in": profile.stand_in if profile is not None else None,
        "verdict": verdict,
        "model": model,
        "gpu": gpu,
        "reasons": list(dict.fromkeys(reasons)),
        "lacking": planned.lacking or any(run.outcome.lacking for _, run in cells),
        "failed": any(
            run.outcome.result is None
            and run.outcome.code not in (ExitCode.LACKING, ExitCode.INTERRUPTED)
            for _, run in cells
        ),
        "lines": [_line(one, units) for one in judged],
        "measures": [
            {"id": name, "value": one.value, "interval": one.interval, "missing": one.missing}
            for name, one in measured.items()
        ],
        "published": [asdict(one) for one in recipe.published.values() if one.id in about],
        "cells": [
            {
                "id": cell.id,
                "command": " ".join(["kvprof", *cell.words]),
                "seconds": run.seconds,
                "known": run.outcome.result is not None and run.seconds is None,
                "message": run.outcome.message or None,
            }
            for cell, run in cells
        ],
        "settings": dict(settings),
        "machine": cpu,
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "kvprof_version": __version__,
    }


def why_untestable(recipe: Recipe, model: str | None) -> str | None:
    """Return why a model cannot test a recipe's claim, whatever was measured; None where it can."""
    named = (model or "").split(", ")
    if recipe.accuracy and (
        _REFERENCE in named or any(one.startswith("shape of") for one in named)
    ):
        return (
            "a claim about the accuracy of large models is not testable on a model of 20M "
            "parameters or on random weights"
        )
    return None


def _machine(
    machine: "Machine", cells: Sequence[tuple["Cell", "CellRun"]]
) -> tuple[str | None, str]:
    """Return the GPU and the CPU that the cells' results name; this machine's without a result."""
    results = [(cell, run.outcome.result) for cell, run in cells]
    known = [(cell, result["environment"]) for cell, result in results if result is not None]
    cpus = [f"{one['cpu']['model']}, {one['cpu']['threads']} threads" for _, one in known]
    gpus = [one["gpus"][0]["name"] for cell, one in known if one["gpus"] and not on_cpu(cell.words)]
    if not known:
        gpus = [machine.gpus[0] for cell, _ in cells if machine.gpus and not on_cpu(cell.words)]
    return " or ".join(dict.fromkeys(gpus)) or None, " or ".join(dict.fromkeys(cpus)) or machine.cpu


def _line(one: JudgedLine, units: Mapping[str, str | None]) -> dict[str, Any]:
    line = one.line
    return {
        "measure": line.measure,
        "unit": units.get(line.measure),
        "published": line.published,
        "check": line.check,
        "limit": list(line.limit),
        "tolerance": line.tolerance,
        "tolerance_share": line.tolerance_share,
        "direction": line.direction,
        "note": line.note,
        "measured": one.measured.value,
        "interval": one.measured.interval,
        "missing": one.measured.missing,
        "doubt": one.measured.doubt,
        "holds": one.holds,
        "uncertain": one.uncertain,
    }


def merge_entries(
    older: Sequence[Mapping[str, Any]], newer: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the entries of two runs; of the same recipe, profile, settings and machine the newer.

    One that was interrupted, or for which something was missing, replaces none that was judged; one
    whose lines are open does: what it says is newer.
    """

    def key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
        settings = tuple(sorted(entry["settings"].items()))
        return (entry["recipe"], entry["profile"], settings, entry["gpu"], entry["machine"])

    found = {key(entry): dict(entry) for entry in older}
    for entry in newer:
        known = found.get(key(entry))
        if known is None or not _knows_less(entry) or known["verdict"] == NOT_TESTABLE:
            found[key(entry)] = dict(entry)
    return list(found.values())


def _knows_less(entry: Mapping[str, Any]) -> bool:
    stopped = any(cell["message"] for cell in entry["cells"])
    return (
        entry["verdict"] == NOT_TESTABLE and not entry["failed"] and (entry["lacking"] or stopped)
    )


def ledger_data(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ``data`` of a ``recipe`` result."""
    return {
        "entries": list(entries),
        "counts": {one: sum(e["verdict"] == one for e in entries) for one in VERDICTS},
    }
