"""The plan that a process serves, and whether it is of the model."""

import hashlib
from functools import cache
from pathlib import Path

from kvprof.methods.plan import Placement, Plan
from kvprof.methods.plan_files import load_plan
from kvprof.methods.soundness import check_fits
from kvprof.models.load import load_model
from kvprof.serving.refusals import check_servable
from kvprof.serving.settings import LONG_GRAPH, SHORT_GRAPH

__all__ = ["check_identity", "longest_graph", "plan_digest", "served_plan"]


@cache
def served_plan(path: str) -> Plan:
    """Return the plan that is served, read once in a process."""
    plan = load_plan(Path(path).expanduser())
    check_servable(plan)
    return plan


def longest_graph(plan: Plan) -> int:
    """Return the tokens of the longest step captured as a CUDA graph by default."""
    if any(layer.keys.placement is Placement.PRE_ROPE for layer in plan.layers):
        return SHORT_GRAPH
    return LONG_GRAPH


@cache
def plan_digest(path: str) -> str:
    """Return a digest of a plan's file, 32 hexadecimal digits."""
    return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()[:32]


def check_identity(
    plan: Plan, spec: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> None:
    """Refuse another model's plan before the engine loads weights."""
    loaded = load_model(spec, device="cpu", revision=revision, trust_remote_code=trust_remote_code)
    check_fits(plan, loaded.layout, loaded.fingerprint)
