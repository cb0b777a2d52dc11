"""What ``kvprof plan`` tells about a plan: its account, where its matrices went, its rounding."""

from typing import Any

from kvprof.methods.accounting import bytes_at, rate
from kvprof.methods.description import compare_plans, describe
from kvprof.methods.plan import HeadGroup, Placement, Plan
from kvprof.methods.running_weights import running_weights
from kvprof.models.layout import ModelLayout

__all__ = ["comparison", "least_ranks", "plan_report"]


def least_ranks(plan: Plan) -> dict[str, list[list[int]]]:
    """Return the ranks of the lowest token level, ``{"keys": [layer][group], "values": …}``.

    Without token levels these are the ranks of all tokens.
    """
    return {
        "keys": [[group.ranks[0] for group in layer.keys.groups] for layer in plan.layers],
        "values": [[group.ranks[0] for group in layer.values.groups] for layer in plan.layers],
    }


def plan_report(
    plan: Plan,
    tokens: int,
    *,
    itemsize: int,
    layout: ModelLayout | None = None,
    fine: Plan | None = None,
    knob: str | None = None,
) -> dict[str, Any]:
    """Return everything that is told about a plan, as JSON values.

    Parameters
    ----------
    plan : Plan
    tokens : int
        Context at which bytes are counted.
    itemsize : int
        Bytes of a value in the run's dtype.
    layout : ModelLayout, optional
        Of the model; without it the weights are not told.
    fine : Plan, optional
        The same setting of the method with ranks of any size: what was requested before ranks were
        rounded up to the grid.
    knob : str, optional
        Name of the method's own knob, whose value is in ``plan.made``.

    Returns
    -------
    dict
        What `describe` returns (``weights`` with ``running``, what lies in memory), and ``levels``
        (shares and least ranks, None without token levels),
        ``folded`` and ``online`` (matrix or step to the number of layers), and ``rounding`` (None
        without `fine`).
    """
    told = describe(plan, tokens, itemsize=itemsize, layout=layout)
    if layout is not None:
        told["weights"]["running"] = running_weights(plan, layout, itemsize=itemsize).added
    folded, online = _places(plan)
    levels = None
    if len(plan.levels.shares) > 1:
        levels = {
            "shares": list(plan.levels.shares),
            "sink": plan.levels.sink,
            "least_ranks": least_ranks(plan),
        }
    rounding = None
    if fine is not None:
        lost = bytes_at(plan, tokens, itemsize=itemsize).total
        lost -= bytes_at(fine, tokens, itemsize=itemsize).total
        options = plan.made.get("options", {})
        rounding = {
            "knob": knob,
            "value": plan.made.get(knob) if knob is not None else None,
            "grid": options.get("grid"),
            "minimum": options.get("minimum"),
            "requested": least_ranks(fine),
            "stored": least_ranks(plan),
            "requested_rate": rate(fine, tokens, itemsize=itemsize),
            "bytes_lost": lost,
        }
    return {
        **told,
        "fingerprint": plan.fingerprint,
        "levels": levels,
        "folded": folded,
        "online": online,
        "rounding": rounding,
    }


def comparison(plan: Plan, other: Plan, tokens: int, *, itemsize: int) -> dict[str, Any]:
    """Return what another plan has different, as JSON values.

    Parameters
    ----------
    plan, other : Plan
        For the same model.
    tokens : int
        Context at which bytes are counted.
    itemsize : int
        Bytes of a value in the run's dtype.

    Returns
    -------
    dict
        Of the other plan ``method``, ``rate`` and ``bytes``; ``differences``, one entry per place.
    """
    told = describe(other, tokens, itemsize=itemsize)
    found = compare_plans(plan, other)
    return {
        **{key: told[key] for key in ("method", "rate", "bytes")},
        "differences": [
            {"path": path, "this": this, "other": that} for path, (this, that) in found.items()
        ],
    }


def _places(plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """Count the layers in which each matrix was folded, and each step runs online."""
    folded: dict[str, int] = {}
    online: dict[str, int] = {}

    def count(where: dict[str, int], name: str, holds: bool) -> None:
        if holds:
            where[name] = where.get(name, 0) + 1

    for layer in plan.layers:
        keys, values = layer.keys, layer.values
        if _based(keys.groups):
            count(folded, "W_K", keys.fold_down)
            count(folded, "W_Q", keys.fold_up)
            count(online, "K into its latent", not keys.fold_down)
            pre = keys.placement is Placement.PRE_ROPE
            count(online, "K rebuilt from its latent at every use", pre)
            count(online, "Q into the latent", not pre and not keys.fold_up)
        if _based(values.groups):
            count(folded, "W_V", values.fold_down)
            count(folded, "W_O", values.fold_up)
            count(online, "V into its latent", not values.fold_down)
            count(online, "outputs out of the latent", not values.fold_up)
        if plan.online_bases:
            lossy = not all(group.identity for group in (*keys.groups, *values.groups))
            count(online, "SVD of each sequence, K and V rebuilt at every step", lossy)
    return folded, online


def _based(groups: tuple[HeadGroup, ...]) -> bool:
    return any(group.down is not None for group in groups)
