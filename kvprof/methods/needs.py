"""What a plan asks of whoever runs it: online projections, folded weights, keys rebuilt."""

from kvprof.methods.plan import HeadGroup, Placement, Plan

__all__ = ["NEEDS", "runtime_needs"]

#: In the order in which they are told. No plan fetches from another memory what it stores.
NEEDS = ("online", "folded", "rebuilt", "restored")


def runtime_needs(plan: Plan) -> list[str]:
    """Return which of `NEEDS` a plan has in some layer; empty where it stores heads as they are.

    ``online``: a projection runs beside the model's own at every token (K, Q or V into a latent,
    outputs out of it, or a basis is found per sequence). ``folded``: a basis has been multiplied
    into a weight. ``rebuilt``: keys, or keys and values, come back out of their latents at every
    use. ``restored``: what is stored is not decoded from; it is rebuilt in all columns before.

    Parameters
    ----------
    plan : Plan
    """
    found = set()
    if plan.across is not None:
        found = {"restored"} if plan.across.at_rest else {"online", "rebuilt"}
    for layer in plan.layers:
        keys, values = layer.keys, layer.values
        if _based(keys.groups):
            before = keys.placement is Placement.PRE_ROPE
            found |= {"rebuilt"} if before else set()
            found |= {"folded"} if keys.fold_down or keys.fold_up else set()
            # Keys that are rebuilt leave the queries as they are.
            found |= {"online"} if not keys.fold_down or not (before or keys.fold_up) else set()
        if _based(values.groups):
            found |= {"folded"} if values.fold_down or values.fold_up else set()
            found |= {"online"} if not (values.fold_down and values.fold_up) else set()
        groups = (*keys.groups, *values.groups)
        if plan.online_bases and not all(group.identity for group in groups):
            found |= {"online", "rebuilt"}
    return [need for need in NEEDS if need in found]


def _based(groups: tuple[HeadGroup, ...]) -> bool:
    return any(group.down is not None for group in groups)
