"""``zack``: as ``fdc``, and Q and K folded too where the model has no RoPE (ZACK §4, §5)."""

from kvprof.analysis.width_clusters import KINDS
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import projected
from kvprof.methods.option_types import Allocation, Count, KeyBasis, Positive, ValueBasis

__all__ = ["zack"]


def zack(
    inputs: MethodInputs,
    *,
    keys: KeyBasis = "svd-qk",
    values: ValueBasis = "svd-vo",
    allocation: Allocation = "removal",
    grid: Positive = 16,
    minimum: Positive = 16,
    kinds: Count = KINDS,
) -> PlanFamily:
    """Return ZACK's plans (ZACK §4.1, §4.3, eq. 6).

    In layers without RoPE the basis of Q and K is folded into W_Q and W_K, so that compressing
    costs nothing; with RoPE or QK-norm in between it runs online. ``zack:paper`` is the paper's own
    setting: coherent tokens, as many as it used, and V stacked on W_O unweighed (``svd-vo-raw``).

    Parameters
    ----------
    inputs : MethodInputs
        With moments.
    keys, values, allocation, grid, minimum, kinds
        As for ``fdc``.
    """
    return projected(
        "zack",
        inputs,
        keys=keys,
        values=values,
        allocation=allocation,
        grid=grid,
        minimum=minimum,
        kinds=kinds,
        fold_keys=True,
    )
