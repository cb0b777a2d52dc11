"""The plan that a process serves."""

from functools import cache
from pathlib import Path

from kvprof.methods.plan import Plan
from kvprof.methods.plan_files import load_plan
from kvprof.serving.refusals import check_servable

__all__ = ["served_plan"]


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
