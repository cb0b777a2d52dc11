"""A ledger with every verdict."""

from typing import Any

from kvprof.recipes.ledger import ledger_data
from kvprof.records.result import build_result
from tests.records.sample import ENVIRONMENT

_LINE = {
    "measure": "kept", "unit": None, "published": "kept", "check": "at_least", "limit": [0.95],
    "tolerance": 0.01, "tolerance_share": None, "direction": False, "note": None, "measured": 0.97,
    "interval": [0.95, 0.99], "missing": None, "doubt": None,
    "holds": True, "uncertain": False,
}  # fmt: skip
_PUBLISHED = {
    "id": "kept", "value": 0.95, "low": None, "high": None, "unit": "share of accuracy",
    "cell": "Table 7, row FDC", "model": "Llama-3.1-8B", "data": None, "gpu": None, "note": None,
}  # fmt: skip


def recipe_entry(name: str, verdict: str, **more: Any) -> dict[str, Any]:
    """Return an entry of a ledger."""
    return {
        "recipe": name,
        "paper": "FDC",
        "item": "Table 7",
        "claim": "It keeps the accuracy.",
        "direction": "It keeps more than another.",
        "profile": "smoke",
        "stand_in": "A small model.",
        "verdict": verdict,
        "model": "smollm2",
        "gpu": None,
        "reasons": [],
        "lacking": False,
        "failed": False,
        "lines": [_LINE],
        "measures": [{"id": "kept", "value": 0.97, "interval": [0.95, 0.99], "missing": None}],
        "published": [_PUBLISHED],
        "cells": [
            {"id": "a", "command": "kvprof plan", "seconds": 2.0, "known": False, "message": None}
        ],
        "settings": {},
        "machine": "a CPU, 2 threads",
        "created": "2025-11-21T12:00:00Z",
        "kvprof_version": "0.1.0",
        **more,
    }


def recipe_result() -> dict[str, Any]:
    """Return a ledger of four recipes, one per verdict."""
    fails = {**_LINE, "measured": 0.5, "interval": None, "holds": False, "uncertain": False}
    unsure = {**_LINE, "interval": [0.9, 0.99], "holds": None, "uncertain": True}
    weaker = {
        **_LINE,
        "measure": "order",
        "published": None,
        "check": "between",
        "limit": [1.0, 2.0],
        "tolerance": None,
        "direction": True,
    }
    prose = {**_PUBLISHED, "value": None, "low": 0.93, "high": 0.97}
    entries = [
        recipe_entry("fdc-table-7", "reproduced"),
        recipe_entry("fdc-table-8", "trend only", lines=[unsure, weaker], published=[prose]),
        recipe_entry("fdc-table-9", "not reproduced", lines=[fails]),
        recipe_entry(
            "fdc-table-10",
            "not testable here",
            lines=[],
            cells=[],
            lacking=True,
            reasons=["it needs a GPU, and this machine has none"],
        ),
    ]
    return build_result(
        "recipe",
        environment=ENVIRONMENT,
        data=ledger_data(entries),
        inputs={"recipes": [], "profile": "smoke", "set": {}, "model": None},
    )
