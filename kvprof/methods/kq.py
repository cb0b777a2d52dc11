"""``kq``: the optimal pairs of bases for ``Q Kᵀ`` and for ``V W_O`` (KQ-SVD, arXiv 2512.05916)."""

from kvprof.analysis.width_clusters import KINDS
from kvprof.methods.family import MethodInputs, PlanFamily
from kvprof.methods.low_rank import projected
from kvprof.methods.option_types import Allocation, Count, KeyBasis, Positive, ValueBasis

__all__ = ["kq"]


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
        ``kq`` and ``vo-opt``, or one of ``fdc``'s; ``none`` leaves a side at full width.
    allocation : str
        ``tail`` is KQ-SVD's own; ``removal`` (of the product's singular values) is the default so
        that it compares with ``fdc``.
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
