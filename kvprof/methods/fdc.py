"""Methods of joint bases of Q and K and of V and W_O, one removal rate for all.

``fdc`` (FDC §5); ``zack``, the same with Q and K folded too where the model has no RoPE (ZACK §4,
§5); ``kq``, the optimal pairs for ``Q Kᵀ`` and for ``V W_O`` (KQ-SVD, arXiv 2512.05916).
"""

from kvprof.analysis.width_clusters import KINDS
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import projected
from kvprof.methods.option_types import Allocation, Count, KeyBasis, Positive, ValueBasis

__all__ = [
    "fdc",
    "kq",
    "zack",
]


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
        stored key per query head (no kernels); also ``svd-k``, ``kq``, ``none`` for full rank.
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


def kq(
    inputs: MethodInputs,
    *,
    keys: KeyBasis = "kq",
    values: ValueBasis = "vo-opt",
    allocation: Allocation = "removal",
    grid: Positive = 16,
    minimum: Positive = 16,
    kinds: Count = KINDS,
) -> PlanFamily:
    """Return plans of the optimal pair, at run time as cheap as ``fdc``.

    At every rank its pooled score error on the calibration data is the least there is; under the
    causal mask and the softmax that is no promise. In layers with neither RoPE nor QK-norm the
    pair is folded.

    Parameters
    ----------
    inputs : MethodInputs
        With moments.
    keys, values : str
        ``kq`` and ``vo-opt``, or one of ``fdc``'s; ``none`` leaves a side at full rank.
    allocation : str
        ``tail`` is KQ-SVD's own; ``removal`` counts the product's singular values, and little of
        the keys' mean (`kvprof.methods.pair_bases.kq`).
    grid, minimum, kinds : int
        As for ``fdc``.
    """
    return projected(
        "kq",
        inputs,
        keys=keys,
        values=values,
        allocation=allocation,
        grid=grid,
        minimum=minimum,
        kinds=kinds,
        fold_keys=True,
    )
