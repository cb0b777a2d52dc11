"""``fdc``: joint bases of Q and K and of V and W_O, one removal rate for all (FDC §5)."""

from kvprof.analysis.width_clusters import KINDS
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import projected
from kvprof.methods.option_types import Allocation, Count, KeyBasis, Positive, ValueBasis

__all__ = ["fdc"]


def fdc(
    inputs: MethodInputs,
    *,
    keys: KeyBasis = "svd-qk",
    values: ValueBasis = "svd-vo",
    allocation: Allocation = "removal",
    grid: Positive = 16,
    minimum: Positive = 16,
    kinds: Count = KINDS,
) -> PlanFamily:
    """Return FDC's plans: Q and K projected online after RoPE, V folded (FDC §5.1, §5.2, eq. 1).

    FDC pairs each query head with its key head; with grouped queries that stores one key per query
    head. Here a KV head has one basis, from its group's queries, each with its key; the letter of
    the paper is an option. ``fdc:paper`` is the paper's own setting.

    Parameters
    ----------
    inputs : MethodInputs
        With moments.
    keys : str
        K's basis: ``svd-qk``, the sum of FDC's pairs of each query head with its key head;
        ``svd-qk-stacked``, the group's queries on its keys once; ``svd-qk-literal``, a basis and a
        stored key per query head (no kernels); also ``svd-k``, ``kq``, ``none`` for full width.
    values : str
        V's basis: ``svd-vo`` (FDC's table 4), the default because it keeps more accuracy than
        ``weight-v`` (its §5.2); also ``svd-vo-raw``, ``svd-v``, ``vo-opt``, ``none``.
    allocation : str
        ``removal`` is the paper's.
    grid, minimum : int
        Ranks are rounded up to multiples of `grid`, with real columns.
    kinds : int
        Distinct pairs of K's and V's rank that the heads of all layers may have, 0 for no limit.
        They are chosen to lose the least by the allocation's own measure at the same columns
        (`kvprof.analysis.width_clusters`); the kernels are compiled for each of them.
    """
    return projected(
        "fdc",
        inputs,
        keys=keys,
        values=values,
        allocation=allocation,
        grid=grid,
        minimum=minimum,
        kinds=kinds,
    )
