"""Evictors, alone and on top of any plan: sink and recent tokens, H2O, Keyformer."""

from dataclasses import replace

from kvprof.errors import UsageError
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.full import full_plan
from kvprof.methods.option_types import Count
from kvprof.methods.plan import Plan
from kvprof.methods.storage import Eviction

__all__ = ["EVICTORS", "evicted", "evictor_family"]

#: By name: the share of the kept tokens that are simply the newest.
EVICTORS = {"sink-recent": 1.0, "h2o": 0.5, "keyformer": 0.3}

_KINDS = {"sink-recent": "recent"}
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
    plain = full_plan(inputs, name)
    if all(layer.sliding_window is not None for layer in plain.layers):
        raise UsageError(f"{name}: every layer has a sliding window, which evicts by itself")
    return PlanFamily(
        name,
        "evicted_share",
        lambda value: evicted(plain, name, 1.0 - value, "compress_first", sink=sink),
        bounds=(0.0, _MOST),
    )


def evicted(plan: Plan, name: str, keep: float, order: str, *, sink: int = 4) -> Plan:
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
    sink : int
        First tokens never dropped.

    Raises
    ------
    UsageError
        When the plan evicts already.
    """
    if plan.eviction is not None:
        raise UsageError(f"{plan.method} evicts already; {name} cannot come on top")
    eviction = Eviction(
        _KINDS.get(name, name), keep, sink=sink, recent_share=EVICTORS[name], order=order
    )
    layers = plan.layers
    if order == "evict_first" and eviction.kind != "recent":
        # A prompt's tokens are scored by exact Q and K, which folding would not leave to be had.
        layers = tuple(
            replace(layer, keys=replace(layer.keys, fold_down=False, fold_up=False))
            for layer in layers
        )
    return replace(plan, layers=layers, eviction=eviction)
