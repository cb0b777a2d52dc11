"""Which layers store latents that KV heads share or rebuild, and which of them the kernels run."""

from kvprof.errors import UsageError
from kvprof.kernels.planes import LARGEST_GROUP, STEP, chunks
from kvprof.methods.plan import LayerPlan, Placement, Plan
from kvprof.methods.tokens import quantises
from kvprof.models.layout import LayerLayout

__all__ = ["rebuilds", "shared_reason", "shares"]


def rebuilds(layer: LayerPlan, facts: LayerLayout) -> bool:
    """Whether keys are stored before RoPE, in a layer that has it, and rebuilt at every use."""
    return layer.keys.placement is Placement.PRE_ROPE and facts.rotary_dim > 0


def shares(layer: LayerPlan) -> bool:
    """Whether KV heads share latents."""
    return any(group.heads > 1 for group in (*layer.keys.groups, *layer.values.groups))


def shared_reason(plan: Plan, layer: LayerPlan, facts: LayerLayout) -> str | None:
    """Return why a layer that rebuilds keys or shares latents cannot run; None where it can.

    Parameters
    ----------
    plan : Plan
    layer : LayerPlan
        One of its layers, with `rebuilds` or `shares`.
    facts : LayerLayout
        The model's layer.
    """
    what = "keys are rebuilt before RoPE" if rebuilds(layer, facts) else "heads share latents"
    if layer.sliding_window is not None:
        return f"{what} in a sliding window"
    if quantises(plan, layer):
        return f"{what} and latents are quantised"
    if plan.eviction is not None:
        return f"{what} and tokens are evicted"
    sides = (*layer.keys.groups, *layer.values.groups)
    if any(len(set(group.ranks)) > 1 for group in sides):
        return f"{what} and tokens are stored at several ranks (levels)"
    sizes = sorted({group.heads for group in sides})
    if len(sizes) > 1:
        return (
            f"latents are shared by {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} KV heads, "
            "and the kernels want the same number in all keys and values of a layer"
        )
    if sizes[0] * facts.group > LARGEST_GROUP:
        return f"{sizes[0] * facts.group} query heads share a latent, more than {LARGEST_GROUP}"
    return _widths(layer) or (_rotation(facts) if rebuilds(layer, facts) else None)


def _widths(layer: LayerPlan) -> str | None:
    for name, groups in (("keys", layer.keys.groups), ("values", layer.values.groups)):
        for group in groups:
            if not _runs(group.rank):
                return (
                    f"KV head {group.first} keeps {group.rank} columns of its {name}, and widths "
                    f"are multiples of {STEP} to 256 and of {2 * STEP} to 512"
                )
    return None


def _rotation(facts: LayerLayout) -> str | None:
    if not _runs(facts.qk_head_dim):
        return f"keys are {facts.qk_head_dim} wide, and kernels rebuild multiples of {STEP}"
    if facts.rotary_offset != 0 or facts.rotary_dim % 2:
        return (
            f"RoPE turns {facts.rotary_dim} columns from column {facts.rotary_offset} on, and the "
            "kernels an even number of a head's first ones"
        )
    return None


def _runs(width: int) -> bool:
    try:
        chunks(width)
    except UsageError:
        return False
    return True
