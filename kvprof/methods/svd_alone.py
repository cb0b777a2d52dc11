"""``svd-k``, ``svd-v`` and ``svd-kv``: bases of K or V alone, the plain choice (ZACK §3.1)."""

from kvprof.analysis.width_clusters import KINDS
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import projected
from kvprof.methods.option_types import Allocation, Count, Positive

__all__ = ["svd_k", "svd_kv", "svd_v"]


def svd_kv(
    inputs: MethodInputs,
    *,
    allocation: Allocation = "removal",
    grid: Positive = 16,
    minimum: Positive = 16,
    kinds: Count = KINDS,
) -> PlanFamily:
    """Return plans with the SVD of K alone and of V alone (EigenAttention, Loki)."""
    return projected(
        "svd-kv",
        inputs,
        keys="svd-k",
        values="svd-v",
        allocation=allocation,
        grid=grid,
        minimum=minimum,
        kinds=kinds,
    )


def svd_k(
    inputs: MethodInputs,
    *,
    allocation: Allocation = "removal",
    grid: Positive = 16,
    minimum: Positive = 16,
    kinds: Count = KINDS,
) -> PlanFamily:
    """Return plans that compress K alone, by its own SVD; V stays as it is."""
    return projected(
        "svd-k",
        inputs,
        keys="svd-k",
        values=None,
        allocation=allocation,
        grid=grid,
        minimum=minimum,
        kinds=kinds,
    )


def svd_v(
    inputs: MethodInputs,
    *,
    allocation: Allocation = "removal",
    grid: Positive = 16,
    minimum: Positive = 16,
    kinds: Count = KINDS,
) -> PlanFamily:
    """Return plans that compress V alone, by its own SVD; K stays as it is."""
    return projected(
        "svd-v",
        inputs,
        keys=None,
        values="svd-v",
        allocation=allocation,
        grid=grid,
        minimum=minimum,
        kinds=kinds,
    )
