"""Evictors, alone and on top of any plan: sink and recent tokens, H2O, Keyformer, SnapKV."""

from dataclasses import replace
from typing import Any

from kvprof.errors import UsageError
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import full_plan
from kvprof.methods.option_types import Count
from kvprof.methods.plan import Plan
from kvprof.methods.storage import Eviction

__all__ = ["EVICTORS", "evicted", "evictor_family", "snapkv"]

#: By name: what is its own of an `Eviction`.
EVICTORS: dict[str, dict[str, Any]] = {
    "sink-recent": {"kind": "recent", "recent_share": 1.0},
    "h2o": {"kind": "h2o", "recent_share": 0.5},
    "keyformer": {"kind": "keyformer", "recent_share": 0.3},
    # Neither sinks nor a share of newest tokens: the window is what never leaves.
    "snapkv": {"kind": "snapkv", "recent_share": 0.0, "sink": 0, "window": 64, "pool": 5},
}

# Less than this share kept is the sinks and hardly anything else.
_MOST = 0.99


def evictor_family(name: str, inputs: MethodInputs, *, sink: Count = 4) -> PlanFamily:
    """Return the plans of an evictor alone; the knob is the share of tokens dropped.

    Parameters
    ----------
    name : str
        One of `EVICTORS`.
    inputs : MethodInputs
        Moments are not needed.
    sink : int
        First tokens never dropped.
    """
    return _alone(name, inputs, sink=sink)


def snapkv(inputs: MethodInputs, *, window: Count = 64, pool: Count = 5) -> PlanFamily:
    """Return SnapKV's plans; the knob is the share of tokens dropped.

    Parameters
    ----------
    inputs : MethodInputs
        Moments are not needed.
    window : int
        Last queries of a pass that decide, whose own tokens stay; 64 in the authors' code.
    pool : int
        Adjacent tokens over which scores are averaged, odd; 5 in the authors' code.

    Raises
    ------
    UsageError
        For a window of no query, or an even `pool`.
    """
    return _alone("snapkv", inputs, window=window, pool=pool)


def _alone(name: str, inputs: MethodInputs, **own: int) -> PlanFamily:
    plain = full_plan(inputs, name)
    if all(layer.sliding_window is not None for layer in plain.layers):
        raise UsageError(f"{name}: every layer has a sliding window, which evicts by itself")
    found = PlanFamily(
        name,
        "evicted_share",
        lambda value: evicted(plain, name, 1.0 - value, "compress_first", **own),
        bounds=(0.0, _MOST),
    )
    found.build(0.0)  # which refuses what makes no sense before anything is searched
    return found


def evicted(plan: Plan, name: str, keep: float, order: str, **own: int) -> Plan:
    """Return a plan that keeps a share of the tokens.

    Scoring a prompt before compression needs exact Q and K: bases that were folded into W_Q and W_K
    then run online.

    Parameters
    ----------
    plan : Plan
        Evicting nothing yet.
    name : str
        One of `EVICTORS`.
    keep : float
        Share kept.
    order : str
        ``evict_first`` or ``compress_first``; see `kvprof.methods.storage.Eviction`.
    **own
        ``sink``, or ``window`` and ``pool``, in place of the evictor's own.

    Raises
    ------
    UsageError
        When the plan evicts already, or for what `own` cannot be.
    """
    if plan.eviction is not None:
        raise UsageError(f"{plan.method} already evicts tokens and cannot be combined with {name}")
    eviction = Eviction(keep=keep, order=order, **{**EVICTORS[name], **own})
    layers = plan.layers
    if order == "evict_first" and eviction.kind != "recent":
        # A prompt's tokens are scored by exact Q and K, which folding would not leave to be had.
        layers = tuple(
            replace(layer, keys=replace(layer.keys, fold_down=False, fold_up=False))
            for layer in layers
        )
    return replace(plan, layers=layers, eviction=eviction)
