"""The plan that a process serves."""

import hashlib
from functools import cache
from pathlib import Path

from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import load_plan
from kvprof.serving.refusals import check_servable

__all__ = ["plan_digest", "served_plan"]


@cache
def served_plan(path: str) -> Plan:
    """Return the plan that is served, read once in a process.

    Raises
    ------
    UsageError, FailedError
        As `load_plan`, and for a plan that cannot be served.
    """
    plan = load_plan(Path(path).expanduser())
    check_servable(plan)
    return plan


@cache
def plan_digest(path: str) -> str:
    """Return a digest of a plan's file, 32 hexadecimal digits."""
    return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()[:32]
