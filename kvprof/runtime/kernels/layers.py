"""Which way a layer of a plan runs on the kernels."""

from kvprof.methods.plan import LayerPlan, Plan
from kvprof.models.layout import LayerLayout
from kvprof.runtime.kernels.layer import KernelLayer
from kvprof.runtime.kernels.levels import LevelsKernelLayer
from kvprof.runtime.kernels.levels_support import levelled
from kvprof.runtime.kernels.ragged import RaggedKernelLayer
from kvprof.runtime.kernels.rebuilt import RebuiltKernelLayer
from kvprof.runtime.kernels.rebuilt_folded import FoldedKernelLayer
from kvprof.runtime.kernels.rebuilt_support import rebuilds, shares

__all__ = ["kernel_layer_of"]


def kernel_layer_of(plan: Plan, layer: LayerPlan, facts: LayerLayout) -> KernelLayer:
    """Return what runs a layer that `kvprof.runtime.kernels.support` finds fit.

    Parameters
    ----------
    plan : Plan
    layer : LayerPlan
        One of its layers.
    facts : LayerLayout
        The model's layer.
    """
    if rebuilds(layer, facts):
        return RebuiltKernelLayer(layer, facts)
    if shares(layer):
        return FoldedKernelLayer(layer, facts)
    if levelled(plan, layer):
        return LevelsKernelLayer(plan, layer, facts)
    return RaggedKernelLayer(layer, facts)
