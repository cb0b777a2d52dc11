"""``fdc``: joint bases of Q and K and of V and W_O, one removal rate for all (FDC §5)."""

from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.projected import projected

__all__ = ["fdc"]


def fdc(
    inputs: MethodInputs,
    *,
    keys: str = "svd-qk",
    values: str = "svd-vo",
    allocation: str = "removal",
    grid: int = 16,
    minimum: int = 16,
) -> PlanFamily:
    """Return FDC's plans: Q and K projected online after RoPE, V folded (FDC §5.1, §5.2, eq. 1).

    FDC pairs each query head with its key head; with grouped queries that would store one key per
    query head. Here a KV head has one basis, from its group's stacked queries.

    Parameters
    ----------
    inputs : MethodInputs
        With moments.
    keys : str
        K's basis: ``svd-qk``, or ``svd-qk-paired``, which weighs K as the sum of FDC's pairs of
        each query head with its key head does; also ``svd-k``, ``kq``, and ``none`` for full width.
    values : str
        V's basis: ``svd-vo`` (FDC's table 4) or ``weight-v`` (its §5.2); also ``svd-vo-raw``,
        ``svd-v``, ``vo-opt``, and ``none`` for full width.
    allocation : str
        ``removal`` is the paper's.
    grid, minimum : int
        Ranks are rounded up to multiples of `grid`, with real columns.
    """
    return projected(
        "fdc", inputs, keys=keys, values=values, allocation=allocation, grid=grid,
        minimum=minimum,
    )  # fmt: skip
