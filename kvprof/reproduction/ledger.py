"""What a run of recipes leaves: one entry per recipe, with its verdict and all that led to it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kvprof.errors import ExitCode
from kvprof.methods.papers import papers_named
from kvprof.reproduction.measures import measure_all
from kvprof.reproduction.resolve import filled_measures
from kvprof.reproduction.verdicts import (
    NOT_JUDGED,
    VERDICTS,
    JudgedLine,
    judge_line,
    open_because,
    verdict_of,
)
from kvprof.version import __version__

if TYPE_CHECKING:
    from kvprof.reproduction.machine import Machine
    from kvprof.reproduction.resolve import Cell
    from kvprof.reproduction.run import CellRun, Planned

__all__ = ["entry_of", "ledger_data", "merge_entries"]


def entry_of(
    planned: "Planned",
    cells: Sequence[tuple["Cell", str, "CellRun"]],
    *,
    machine: "Machine",
    settings: Mapping[str, str],
) -> dict[str, Any]:
    """Return a recipe's entry.

    Parameters
    ----------
    planned : Planned
    cells : sequence of (Cell, digest, CellRun)
        Empty where nothing was run.
    machine : Machine
    settings : mapping
        What the user set.
    """
    recipe, profile = planned.recipe, planned.profile
    results = {
        cell.id: run.outcome.result for cell, _, run in cells if run.outcome.result is not None
    }
    failures = {
        cell.id: f"{cell.id}: {run.outcome.message}"
        for cell, _, run in cells
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
    verdict = NOT_JUDGED if not ran or recipe.judged is not None else verdict_of(judged)
    reasons = [one for one in (planned.open, recipe.judged) if one]
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
    return {
        "recipe": recipe.name,
        "paper": recipe.paper,
        "item": recipe.item,
        "claim": recipe.claim,
        "profile": profile.name if profile is not None else None,
        "stand_in": profile.stand_in if profile is not None else None,
        "papers": [
            {"name": name, "differs": differs}
            for name, differs in papers_named(
                word for template in (profile.cells if profile else ()) for word in template.words
            ).items()
        ],
        "verdict": verdict,
        "reasons": list(dict.fromkeys(reasons)),
        "lacking": planned.lacking or any(run.outcome.lacking for _, _, run in cells),
        "failed": any(
            run.outcome.result is None
            and run.outcome.code not in (ExitCode.LACKING, ExitCode.INTERRUPTED)
            for _, _, run in cells
        ),
        "lines": [_line(one, recipe.published, units) for one in judged],
        "measures": [
            {"id": name, "value": one.value, "interval": one.interval, "missing": one.missing}
            for name, one in measured.items()
        ],
        "published": [asdict(one) for one in recipe.published.values()],
        "cells": [
            {
                "id": cell.id,
                "command": " ".join(["kvprof", *cell.words]),
                "digest": digest,
                "seconds": run.seconds,
                "known": run.outcome.result is not None and run.seconds is None,
                "message": run.outcome.message or None,
            }
            for cell, digest, run in cells
        ],
        "settings": dict(settings),
        "machine": _machine(machine, [cell for cell, _, _ in cells]),
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "kvprof_version": __version__,
    }


def _machine(machine: "Machine", cells: Sequence["Cell"]) -> str:
    return "; ".join(dict.fromkeys(machine.device(cell.words) for cell in cells)) or machine.cpu


def _line(
    one: JudgedLine, published: Mapping[str, Any], units: Mapping[str, str | None]
) -> dict[str, Any]:
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
        "by_construction": line.by_construction,
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
        return (entry["recipe"], entry["profile"], settings, entry["machine"])

    found = {key(entry): dict(entry) for entry in older}
    for entry in newer:
        known = found.get(key(entry))
        if known is None or not _knows_less(entry) or known["verdict"] == NOT_JUDGED:
            found[key(entry)] = dict(entry)
    return list(found.values())


def _knows_less(entry: Mapping[str, Any]) -> bool:
    stopped = any(cell["message"] for cell in entry["cells"])
    return entry["verdict"] == NOT_JUDGED and not entry["failed"] and (entry["lacking"] or stopped)


def ledger_data(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the ``data`` of a ``recipe`` result."""
    return {
        "entries": list(entries),
        "counts": {one: sum(e["verdict"] == one for e in entries) for one in VERDICTS},
    }
